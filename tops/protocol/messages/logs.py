"""Letters about event types and their logs: advertising, confirming what is on disk, reading on from a position."""

from tops.model.filters import Filter
from tops.model.ids import TxId
from tops.model.log_points import LogPoint
from tops.protocol.messages.values import Definitions, LogEntry, Message, Origin, TxSpec, Wire


class TypeAdvertised(Message, frozen=True):
    """A site is going to publish this type; travels to the rendezvous.

    `plans`, of a replica set's log: transactions of sites that are no replicas of the set must have one of these
    specifications, so that nobody logs a write without the votes that the set's policy asks for. None says nothing.

    `members`, of a replica set's log: the identities of the set's replicas. Only these publish to the log, take part
    in it and declare plans, whatever other replicas of the set have a certificate. None says nothing."""

    definitions: Definitions
    plans: tuple[TxSpec, ...] | None = None
    members: frozenset[str] | None = None


class AdvertisementHandled(Message, frozen=True):
    """The rendezvous takes the type, or says why not: it may know another definition under that name."""

    event_type: str
    rejection: str | None = None


class EventConfirmed(Message, frozen=True):
    """The publication is on disk; the number is not known any more for one that was repeated.

    `count`: so are the ones before it, of the same publisher and under the numbers before it.
    """

    origin: Origin
    log_number: int | None = None
    count: int = 1


class EventsRejected(Message, frozen=True):
    """The rendezvous takes no more events of this durable type for now; nothing of what is not confirmed was kept."""

    event_type: str
    reason: str


class ConfirmRoute(Message, frozen=True):
    """Sent behind a new subscription, on the same path: when it is answered, events reach the subscriber."""

    subscription: int


class RouteConfirmed(Message, frozen=True):
    subscription: int


class GetLogState(Message, frozen=True):
    """How far is the log of a durable type decided, and who follows it? For reads that must be current."""

    request: int
    event_type: str


class Follower(Wire, frozen=True):
    """A durable subscription, as the log sees it; `in_sync` only says something about replicas that vote."""

    name: str
    position: int
    present: bool
    in_sync: bool


class StaleJournal(Wire, frozen=True):
    """The coordinator's journal is older than what a replica has: it was restored from a backup, or its disk lost what
    it had confirmed. No index is given out until an operator has put back a newer one, or begins a new history."""

    event_type: str
    index: int  # where the journal ends
    replica: str
    replica_index: int

    def __str__(self) -> str:
        return (
            f"the coordinator's journal of {self.event_type} ends at index {self.index} and replica {self.replica!r} "
            f"is at {self.replica_index}: the journal is older than what was acknowledged; put back the newer journal, "
            f"or run 'tops journal recover'"
        )


class LogStateReported(Message, frozen=True):
    """Everything up to `decided` is committed or void, and nothing that was acknowledged lies beyond it."""

    request: int
    event_type: str
    decided: int
    oldest: int
    in_sync: tuple[str, ...]
    followers: tuple[Follower, ...]
    history: str = ""
    stale: StaleJournal | None = None  # why no index is given out
    is_open: bool = True  # False: since the coordinator's start its replicas are asked where they are


class FollowLog(Message, frozen=True):
    """A durable subscription asks for what follows `position`; also says that everything up to there is safe."""

    name: str
    definitions: Definitions
    filter: Filter
    position: int | None  # None: start as `start` says, if the name is new
    start: str
    credit: int
    voter: str | None  # what it votes under, if it votes: what it committed itself is not sent to it again
    ephemeral: bool = False  # a reader of what is there: one delivery, nothing is kept for it; position -1: it is done
    history: str = ""
    digest: str | None = None  # a replica's, at `position`; it gets the digests of what is delivered, too
    defines: bool = True  # the type, if nobody has yet; its broker takes that back from who may not


class GetAppliedIndex(Message, frozen=True):
    """A coordinator has started, and its journal ends at `end`: how far has this replica come?

    Only what was decided in incarnations from `since` on, and before `resumed_in`, is meant: earlier ones belong to
    another history, later ones are in the journal. None: the log waits for the response.
    """

    name: str  # of the durable subscription
    event_type: str
    incarnation: int
    end: int
    resumed_in: int | None = None
    since: int = 0


class AppliedIndexReported(Message, frozen=True):
    """Where a replica is in a log, the highest index that it knows to be decided, and the transactions that it
    remembers to have committed behind the end that it was asked about."""

    event_type: str
    incarnation: int  # of the coordinator that asked
    point: LogPoint
    decided: int
    transactions: tuple[TxId, ...]


class HistoryRejected(Message, frozen=True):
    """A replica's database holds another history than the coordinator's log: it takes no part and gets nothing."""

    name: str  # of the durable subscription
    event_type: str
    point: LogPoint  # the coordinator's, at the replica's index or at the log's end


class HistoryDiffers(Message, frozen=True):
    """A replica found another digest in a prepare, a decision or a delivery than in its database. It did not vote."""

    name: str  # of the durable subscription
    event_type: str
    point: LogPoint  # the replica's


class RecoverLog(Message, frozen=True):
    """An operator's request: go on in a new history behind the most advanced of these replicas.

    `needed`: how many of them must have responded, so that one of them has everything that was acknowledged.
    """

    request: int
    event_type: str
    replicas: tuple[str, ...]
    needed: int
    accept_loss: bool


class LogRecovered(Message, frozen=True):
    """The log goes on at `point`, or why it does not (`problem`)."""

    request: int
    problem: str
    point: LogPoint
    following: tuple[str, ...] = ()  # replicas that are at `point`
    behind: tuple[str, ...] = ()  # replicas that must be copied from one of them
    silent: tuple[str, ...] = ()  # replicas that have not responded


class LogDelivered(Message, frozen=True):
    """Entries that follow each other; `upto` may be beyond the last one when what lies between did not match."""

    name: str
    event_type: str
    acknowledged: int  # what the subscriber has safely taken, as far as the broker knows
    after: int
    upto: int
    entries: tuple[LogEntry, ...]
    incarnation: int
    history: str = ""
    digests: bytes = b""  # for a replica: packed, at `after` and at every index up to `upto`


class FollowRejected(Message, frozen=True):
    """The position asked for is no longer kept: the subscriber needs a new copy of the data.

    `reason`: why not, if the subscription was dropped; it stays so until it is ended."""

    name: str
    event_type: str
    oldest: int
    reason: str = ""


class EndLog(Message, frozen=True):
    """A durable subscription ends for good: nothing is kept for that name any more.

    `operator`: `name` is what the log knows it by, and may be anybody's; the broker has seen to it that the sender may
    operate."""

    request: int
    event_type: str
    name: str
    operator: bool = False


class LogEnded(Message, frozen=True):
    """It has ended, and that is on disk."""

    request: int
