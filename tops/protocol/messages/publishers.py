"""Letters between a publisher of a transaction and its coordinator."""

from tops.model.ids import NodeId, Pseudonym, TxId
from tops.model.rejections import Rejection, sentence
from tops.model.transactions import Outcome, TxState, TxType
from tops.protocol.messages.logs import StaleJournal
from tops.protocol.messages.values import Event, Message, TxSpec, Wire


class BeginTx(Message, frozen=True):
    """Open a transaction. `own` is the initiator's own vote for resources that it enlisted."""

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
    """Several transactions of one kind, each with a fate of its own: what `RunOneShot` is for one."""

    spec: TxSpec
    transactions: tuple[OneShot, ...]


class BeginPublic(Message, frozen=True):
    """Open a transaction whose events are numbered at the rendezvous; it allots the id."""

    request: int
    spec: TxSpec


class TxOpened(Message, frozen=True):
    """How the census ended. `request` is set for transactions whose id the initiator learns here.

    `life` is the coordinator's: the initiator names it when it asks for commitment.
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
    """`sequence` None: the transaction takes no more events or, if it says why, only not this one."""

    tx: TxId
    request: int
    sequence: int | None
    state: TxState
    rejection: Rejection | None = None


class PublisherDone(Message, frozen=True):
    """A public publisher has said all it wants: its death no longer matters."""

    tx: TxId


class CommitTx(Message, frozen=True):
    """A publisher asks for commitment. `last_sequence` None: the coordinator numbered the events itself.

    Asking again while votes are missing means: wait once more. `life` of the coordinator that opened it, 0 where the
    id tells: what a former life opened and aborted must not be committed because its begin came twice.
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
    operator: bool = False  # not a publisher: its broker has seen to it that it may end any transaction


class VotesMissing(Message, frozen=True):
    """Some participants have not voted in time; the publisher may wait again or abort."""

    tx: TxId
    missing: int


class TxOutcome(Message, frozen=True):
    """How a transaction ended, for its publishers. `pending` of the committing set have not confirmed yet.

    `locals_wait`: the distributed part ended by itself; local subscribers still wait for the publisher's word.
    """

    tx: TxId
    outcome: Outcome
    rejection: Rejection | None = None
    log_number: int | None = None
    pending: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    locals_wait: bool = False
    result: bytes = b""
    stale: StaleJournal | None = None  # aborted, because the coordinator gives out no index

    @property
    def reason(self) -> str:
        """Why it did not commit, for people; programs decide by `rejection`."""
        return sentence(self.rejection)


class TxOutcomes(Message, frozen=True):
    """Several transactions of one publisher ended at the same time."""

    outcomes: tuple[TxOutcome, ...]


class GetOutcome(Message, frozen=True):
    """After any break: what became of it? An unknown id is refused for good before it is answered."""

    tx: TxId
    tx_type: TxType
    event_type: str


class PublisherLost(Message, frozen=True):
    """A broker saw this site go for good; its undecided transactions abort."""

    site: NodeId
    incarnation: int
