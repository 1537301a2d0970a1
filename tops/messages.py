"""Everything one node says to another, one class each.

Orders are imperative (`PrepareEpoch`), facts are past tense (`EpochVoted`). Structs are array-like on the wire: fields
are only ever added at the end, with a default, so that neighbouring versions understand each other; `PROTOCOL` grows
when that is not enough, and is compared when two nodes meet.
"""

from typing import Any

import msgspec

from tops.constraints import AnyConstraint
from tops.event_types import EventType
from tops.filters import Filter
from tops.ids import NodeId, Pseudonym, TxId
from tops.transactions import Access, LocalOutcome, Outcome, Scope, ScopeLimit, TxState, TxType

PROTOCOL = 1


class Wire(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A value inside messages."""


class Message(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True, gc=False):
    """Something one node says to another."""


Definitions = tuple[EventType, ...]  # a type's ancestors, the oldest first, then the type itself

# ---------------------------------------------------------------------------------------------------------- values


class Address(Wire, frozen=True):
    """A broker, or whoever that broker knows by `handle`: a site's name, or a participant's pseudonym.

    With the incarnation of the site: what is meant for an earlier life never reaches a later one.
    """

    broker: NodeId
    handle: str = ""
    incarnation: int = 0


class Event(Wire, frozen=True):
    type: str
    body: dict[str, Any]


class Origin(Wire, frozen=True):
    """Which publication to the type's family, by which life of which site; makes a repeated one recognisable."""

    family: str
    site: NodeId
    incarnation: int
    number: int


class CensusPolicy(Wire, frozen=True):
    """When the census closes: after `timeout_s` at the latest, earlier with `replies` answers or as soon as
    the constraints are met."""

    timeout_s: float = 1.0
    replies: int | None = None
    when_met: bool = False


class TxSpec(Wire, frozen=True):
    """What the initiator asked for at `begin`.

    `census` is None when only standing answers count. `attributes` are what subscriptions are matched against, once.
    """

    event_type: str
    tx_type: TxType
    access: Access = Access.PRIVATE
    limit: ScopeLimit = ScopeLimit.NONE
    constraints: tuple[AnyConstraint, ...] = ()
    attributes: dict[str, Any] = {}
    local_outcome: LocalOutcome = LocalOutcome.INDEPENDENT
    census: CensusPolicy | None = CensusPolicy()
    vote_timeout_s: float = 5.0
    decide_within_s: float = 60.0


class EpochId(Wire, frozen=True):
    """One attempt at one number; a vote or decision for another attempt or incarnation says nothing about this one."""

    event_type: str
    number: int
    attempt: int
    coordinator: NodeId
    incarnation: int

    def __str__(self) -> str:
        return f"{self.event_type}#{self.number}.{self.attempt}@{self.coordinator}.{self.incarnation}"

    def newer_than(self, other: "EpochId") -> bool:
        """Whether the coordinator sent this one out after the other."""
        return (self.incarnation, self.number, self.attempt) > (other.incarnation, other.number, other.attempt)


class EpochMember(Wire, frozen=True):
    """One transaction of an epoch. `events` is None where the participants have received them already."""

    tx: TxId
    last_sequence: int
    events: tuple[Event, ...] | None


class LogEntry(Wire, frozen=True):
    """What stands under one number of a durable type's log. No transactions and no event: the number is void."""

    number: int
    transactions: tuple["LoggedTx", ...] = ()
    event: Event | None = None
    epoch: EpochId | None = None
    committing: frozenset[str] = frozenset()
    origin: Origin | None = None


class LoggedTx(Wire, frozen=True):
    tx: TxId
    event_type: str
    events: tuple[Event, ...]
    attributes: dict[str, Any]
    limit: ScopeLimit
    tx_type: TxType


# ----------------------------------------------------------------------------------------------------- carried by hop


class Envelope(Message, frozen=True):
    """Point to point, over as many hops as it takes. The sender's broker fills in where the sender is."""

    to: Address
    sender: Address
    incarnation: int
    body: "Letter"


class Dissemination(Message, frozen=True):
    """Up to the rendezvous of the event type's family, then down the reverse paths of the subscriptions.

    `early`: brokers on the way up already pass it to their own subtree (single-publisher, non-durable types).
    `lineage`: the event type and its ancestors; who knows a parent only finds its children by it.
    """

    rendezvous: NodeId
    upward: bool
    early: bool
    sender: Address
    incarnation: int
    publication: "Publication"
    lineage: tuple[str, ...] = ()


class RouteAdded(Message, frozen=True):
    """Somebody behind this link wants events of that type that match the filter."""

    definitions: Definitions
    filter: Filter


class RouteRemoved(Message, frozen=True):
    event_type: str
    filter: Filter


class RoutesReset(Message, frozen=True):
    """The link's whole interest, replacing what was known; sent when two nodes meet."""

    routes: tuple[RouteAdded, ...]


class TypeAdvertised(Message, frozen=True):
    """A site is going to publish this type; travels to the rendezvous."""

    definitions: Definitions


class TypeAnswered(Message, frozen=True):
    """The rendezvous takes the type, or says why not: it may know another definition under that name."""

    event_type: str
    refusal: str | None = None


class SubscriptionChanged(Message, frozen=True):
    """A site's subscription, as its own broker keeps it; `filter` None ends it."""

    subscription: int
    definitions: Definitions
    filter: Filter | None
    scope: Scope | None  # a standing answer to every census, or None: ask each time
    durable: bool


class ScopeChosen(Message, frozen=True):
    """What a site takes of a transaction, told to its own broker, which withholds the rest."""

    tx: TxId
    scope: Scope  # the highest one below distributed
    distributed: bool


# ---------------------------------------------------------------------------- publications, down the multicast tree


class Published(Message, frozen=True):
    """An ordinary event. `confirm` asks the rendezvous to say when a durable type's event is on disk."""

    event: Event
    origin: Origin


class EventsPublished(Message, frozen=True):
    """Ordinary events of one type, published together; they are what `Published` is for one.

    Bodies stay encoded until somebody has to look into them: most brokers on the way need not. `origin` is the last
    one's, also where a filter has left some out on the way.
    """

    event_type: str
    bodies: tuple[msgspec.Raw, ...]
    origin: Origin


class CensusOpened(Message, frozen=True):
    """A transaction is announced; subscribers answer with a scope."""

    tx: TxId
    spec: TxSpec
    coordinator: NodeId
    incarnation: int
    initiator: Address


class TxBegan(Message, frozen=True):
    """The census closed; only those whose hashed pseudonym is listed act as distributed participants."""

    tx: TxId
    event_type: str
    members: frozenset[str]


class TxPublished(Message, frozen=True):
    """The `sequence`-th event of a transaction, under the transaction's type whatever its own."""

    tx: TxId
    event_type: str
    sequence: int
    event: Event


class LocalCommitOrdered(Message, frozen=True):
    """Local subscribers commit if they have all events up to `last_sequence`."""

    tx: TxId
    event_type: str
    last_sequence: int


class TxAbandoned(Message, frozen=True):
    """A publisher aborted, died, or the census failed: whoever has not voted yet forgets the transaction.

    `distributed_only`: the distributed part failed by itself; local subscribers are unaffected.
    """

    tx: TxId
    event_type: str
    reason: str
    distributed_only: bool = False


Publication = Published | EventsPublished | CensusOpened | TxBegan | TxPublished | LocalCommitOrdered | TxAbandoned


_bodies: msgspec.msgpack.Decoder[dict[str, Any]] = msgspec.msgpack.Decoder(dict[str, Any])
encode_body = msgspec.msgpack.Encoder().encode


def decode_body(encoded: msgspec.Raw) -> dict[str, Any] | None:
    """The body of an event, or None if the bytes are not one: whoever sent them is ignored, not obeyed."""
    try:
        return _bodies.decode(encoded)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def type_of(publication: Publication) -> str:
    """The event type that a publication travels under."""
    match publication:
        case Published(event=event):
            return event.type
        case CensusOpened(spec=spec):
            return spec.event_type
        case TxPublished(event_type=event_type):
            return event_type
    return publication.event_type


# ---------------------------------------------------------------------------------------------- letters, point to point


class EventConfirmed(Message, frozen=True):
    """The publication is on disk; the number is not known any more for one that was repeated.

    `count`: so are the ones before it, of the same publisher and under the numbers before it.
    """

    origin: Origin
    log_number: int | None = None
    count: int = 1


class EventsRefused(Message, frozen=True):
    """The rendezvous takes no more events of this durable type for now; nothing of what is not confirmed was kept."""

    event_type: str
    reason: str


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


class BeginPublic(Message, frozen=True):
    """Open a transaction whose events are numbered at the rendezvous; it allots the id."""

    request: int
    spec: TxSpec


class TxOpened(Message, frozen=True):
    """How the census ended. `request` is set for transactions whose id the initiator learns here."""

    tx: TxId
    state: TxState
    reason: str = ""
    request: int | None = None


class PublishInTx(Message, frozen=True):
    """An event for a public transaction, to be numbered by the event coordinator at the rendezvous."""

    tx: TxId
    request: int
    event: Event


class PublishInTxAnswered(Message, frozen=True):
    """`sequence` None: the transaction took no more events."""

    tx: TxId
    request: int
    sequence: int | None
    state: TxState


class PublisherDone(Message, frozen=True):
    """A public publisher has said all it wants: its death no longer matters."""

    tx: TxId


class CommitTx(Message, frozen=True):
    """A publisher asks for commitment. `last_sequence` None: the coordinator numbered the events itself.

    Asking again while votes are missing means: wait once more.
    """

    tx: TxId
    tx_type: TxType
    event_type: str
    last_sequence: int | None


class AbortTx(Message, frozen=True):
    tx: TxId
    tx_type: TxType
    event_type: str
    reason: str


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
    reason: str = ""
    log_number: int | None = None
    pending: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    locals_wait: bool = False
    result: bytes = b""


class AskOutcome(Message, frozen=True):
    """After any break: what became of it? An unknown id is refused for good before it is answered."""

    tx: TxId
    tx_type: TxType
    event_type: str


class PublisherLost(Message, frozen=True):
    """A broker saw this site go for good; its undecided transactions abort."""

    site: NodeId
    incarnation: int


class ParticipantLost(Message, frozen=True):
    """A broker saw the site behind these handles go; who has not voted counts as a NO."""

    handles: tuple[str, ...]


class CensusReplied(Message, frozen=True):
    """A subscriber asks for the distributed scope; `identity` only where a constraint needs it."""

    tx: TxId
    pseudonym: Pseudonym
    identity: str | None


class StandingAnswered(Message, frozen=True):
    """A subscriber's answer to every census of that type, renewed while its link lives.

    Pseudonyms are derived from `secret`. `position` is what a replica has applied of the log; None: it keeps none.
    A newer answer for the same `subscription` of the same identity replaces the former one.
    """

    voter: str
    event_type: str
    filter: Filter
    scope: Scope
    secret: bytes
    identity: str | None
    position: int | None
    subscription: int = 0


class StandingAccepted(Message, frozen=True):
    """From here on the answer counts; `incarnation` is the coordinator's, `in_sync` whether its votes count."""

    voter: str
    incarnation: int
    in_sync: bool


class StandingWithdrawn(Message, frozen=True):
    voter: str
    event_type: str


class ParticipantAborted(Message, frozen=True):
    """A participant gives up before the vote."""

    tx: TxId
    voter: str
    reason: str


class PrepareEpoch(Message, frozen=True):
    """Apply these transactions in this order and promise to commit them; other attempts of the number are void."""

    epoch: EpochId
    digest: str
    voter: str
    members: tuple[EpochMember, ...]


class EpochVoted(Message, frozen=True):
    """A promise that survives a crash, for all members but `excluded`.

    `rows` has, per member in order, the rows that each of its changes affected: voters that differ have diverged.
    `results` is what the members return to their publishers, opaque; the first voter's is passed on.
    """

    epoch: EpochId
    digest: str
    voter: str
    excluded: dict[TxId, str]
    rows: tuple[tuple[int, ...], ...] = ()
    results: tuple[bytes, ...] = ()


class EpochDecided(Message, frozen=True):
    """The end of an attempt. Who is not in the committing set rolls back whatever is prepared or running.

    The set holds hashed keys: a voter finds itself, can pass the decision on to a peer in doubt, and learns no name.
    """

    epoch: EpochId
    digest: str
    voter: str
    committing: frozenset[str]


class EpochFinished(Message, frozen=True):
    """The commit is carried out, durably. `note`: said again until the coordinator has noted it."""

    epoch: EpochId
    voter: str
    note: bool


class FinishNoted(Message, frozen=True):
    """The coordinator is not going to be asked by this voter any more, and the voter may forget its promise."""

    epoch: EpochId
    voter: str


class AskEpoch(Message, frozen=True):
    """A voter has promised and waits for the decision."""

    epoch: EpochId
    digest: str
    voter: str


class AskMembership(Message, frozen=True):
    """A participant in the census or active state has heard nothing for long."""

    tx: TxId
    event_type: str
    voter: str


class MembershipAnswered(Message, frozen=True):
    tx: TxId
    voter: str
    state: TxState
    members: frozenset[str] = frozenset()


class PeersAsked(Message, frozen=True):
    """In doubt and the coordinator is silent: brokers pass this to their own subscribers of the type."""

    epoch: EpochId
    digest: str
    voter: str


class PeerKnows(Message, frozen=True):
    """A peer passes on the decision that it heard; who does not know stays silent, nobody guesses."""

    epoch: EpochId
    digest: str
    committing: frozenset[str]


class RouteAsked(Message, frozen=True):
    """Sent behind a new subscription, on the same path: when it is answered, events reach the subscriber."""

    subscription: int


class RouteStands(Message, frozen=True):
    subscription: int


class AskLog(Message, frozen=True):
    """How far is the log of a durable type decided, and who follows it? For reads that must be current."""

    request: int
    event_type: str


class Follower(Wire, frozen=True):
    """A durable subscription, as the log sees it; `in_sync` only says something about replicas that vote."""

    name: str
    position: int
    present: bool
    in_sync: bool


class LogTold(Message, frozen=True):
    """Everything up to `decided` is committed or void, and nothing that was acknowledged lies beyond it."""

    request: int
    event_type: str
    decided: int
    oldest: int
    in_sync: tuple[str, ...]
    followers: tuple[Follower, ...]


class LogWanted(Message, frozen=True):
    """A durable subscription asks for what follows `position`; also says that everything up to there is safe."""

    name: str
    definitions: Definitions
    filter: Filter
    position: int | None  # None: start as `start` says, if the name is new
    start: str
    credit: int
    voter: str | None  # what it votes under, if it votes: what it committed itself is not sent to it again
    passing: bool = False  # a reader of what is there: one delivery, nothing is kept for it; position -1: it is done


class LogDelivered(Message, frozen=True):
    """Entries that follow each other; `upto` may be beyond the last one when what lies between did not match."""

    name: str
    event_type: str
    acknowledged: int  # what the subscriber has safely taken, as far as the broker knows
    after: int
    upto: int
    entries: tuple[LogEntry, ...]
    incarnation: int


class LogRefused(Message, frozen=True):
    """The position asked for is no longer kept: the subscriber needs a new copy of the data."""

    name: str
    event_type: str
    oldest: int


Letter = (
    EventConfirmed
    | EventsRefused
    | BeginTx
    | RunOneShot
    | BeginPublic
    | TxOpened
    | PublishInTx
    | PublishInTxAnswered
    | PublisherDone
    | CommitTx
    | AbortTx
    | VotesMissing
    | TxOutcome
    | AskOutcome
    | PublisherLost
    | ParticipantLost
    | CensusReplied
    | StandingAnswered
    | StandingAccepted
    | StandingWithdrawn
    | ParticipantAborted
    | PrepareEpoch
    | EpochVoted
    | EpochDecided
    | EpochFinished
    | FinishNoted
    | AskEpoch
    | AskMembership
    | AskLog
    | LogTold
    | MembershipAnswered
    | PeersAsked
    | PeerKnows
    | RouteAsked
    | RouteStands
    | LogWanted
    | LogDelivered
    | LogRefused
    | TypeAdvertised
    | TypeAnswered
)

LinkMessage = Envelope | Dissemination | RouteAdded | RouteRemoved | RoutesReset | SubscriptionChanged | ScopeChosen
