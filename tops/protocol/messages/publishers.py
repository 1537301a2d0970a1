"""Messages between a publisher of a transaction and its coordinator."""

from tops.model.ids import NodeId, Pseudonym, TxId
from tops.model.rejections import Rejection, sentence
from tops.model.transactions import Outcome, TxState, TxType
from tops.protocol.messages.logs import StaleJournal
from tops.protocol.messages.values import Event, Message, TxSpec, Wire


class BeginTx(Message, frozen=True):
    """Open a transaction. `own` is the name under which the initiator's own resources vote."""

    tx: TxId
    spec: TxSpec
    own: Pseudonym | None = None


class RunOneShot(Message, frozen=True):
    """Begin, all events and commit in one message."""

    tx: TxId
    spec: TxSpec
    events: tuple[Event, ...]


class OneShot(Wire, frozen=True):
    """One of the transactions that a publisher runs together."""

    tx: TxId
    events: tuple[Event, ...]


class RunOneShots(Message, frozen=True):
    """Several transactions of one kind, each with an outcome of its own: the same as several `RunOneShot`."""

    spec: TxSpec
    transactions: tuple[OneShot, ...]


class BeginPublic(Message, frozen=True):
    """Open a transaction whose events are numbered at the rendezvous, which assigns the id."""

    request: int
    spec: TxSpec


class TxOpened(Message, frozen=True):
    """The result of the census. `request` is set for transactions whose id the initiator gets here.

    `incarnation` is the coordinator's: the initiator names it when it requests commit.
    """

    tx: TxId
    state: TxState
    rejection: Rejection | None = None
    request: int | None = None
    incarnation: int = 0


class PublishInTx(Message, frozen=True):
    """An event for a public transaction, to be numbered by the event coordinator at the rendezvous."""

    tx: TxId
    request: int
    event: Event


class PublishInTxHandled(Message, frozen=True):
    """The response to `PublishInTx`. `sequence` None: the transaction accepts no more events or, with a `rejection`,
    only not this one."""

    tx: TxId
    request: int
    sequence: int | None
    state: TxState
    rejection: Rejection | None = None


class PublisherDone(Message, frozen=True):
    """A publisher of a public transaction publishes no more: its loss no longer aborts the transaction."""

    tx: TxId


class CommitTx(Message, frozen=True):
    """A publisher requests commit. `last_sequence` None: the coordinator numbered the events itself.

    A repetition while votes are missing means: wait once more. `incarnation` is that of the coordinator that opened the
    transaction, 0 where the id names it: a transaction that a former incarnation opened and aborted must not commit
    because its begin message arrived twice.
    """

    tx: TxId
    tx_type: TxType
    event_type: str
    last_sequence: int | None
    incarnation: int = 0


class AbortTx(Message, frozen=True):
    tx: TxId
    tx_type: TxType
    event_type: str
    reason: str
    operator: bool = False  # not a publisher: its broker has checked that it may end any transaction


class VotesMissing(Message, frozen=True):
    """Some participants have not voted in time; the publisher may wait again or abort."""

    tx: TxId
    missing: int


class TxOutcome(Message, frozen=True):
    """The outcome of a transaction, for its publishers. `pending`: voters of the committing set that have not finished.

    `locals_wait`: the distributed part ended by itself; local subscribers still wait for the publisher's commit or
    abort.
    """

    tx: TxId
    outcome: Outcome
    rejection: Rejection | None = None
    log_number: int | None = None
    pending: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    locals_wait: bool = False
    result: bytes = b""
    stale: StaleJournal | None = None  # aborted, because the coordinator assigns no index

    @property
    def reason(self) -> str:
        """Why it did not commit, as a text; programs decide by `rejection`."""
        return sentence(self.rejection)


class TxOutcomes(Message, frozen=True):
    """Several transactions of one publisher ended at the same time."""

    outcomes: tuple[TxOutcome, ...]


class GetOutcome(Message, frozen=True):
    """Request the outcome of a transaction. An unknown id is rejected permanently before the response is sent."""

    tx: TxId
    tx_type: TxType
    event_type: str


class PublisherLost(Message, frozen=True):
    """A broker has lost this site; its undecided transactions abort."""

    site: NodeId
    incarnation: int
