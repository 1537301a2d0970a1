"""Letters about event types and their logs: advertising, confirming what is on disk, reading on from a position."""

from tops.filters import Filter
from tops.ids import TxId
from tops.messages.values import Definitions, LogEntry, Message, Origin, TxSpec, Wire


class TypeAdvertised(Message, frozen=True):
    """A site is going to publish this type; travels to the rendezvous.

    `plans`, of a replica set's log: transactions of sites that are no replicas of the set must have one of these
    specifications, so that nobody logs a write without the votes that the set's policy asks for. None says nothing."""

    definitions: Definitions
    plans: tuple[TxSpec, ...] | None = None


class TypeAnswered(Message, frozen=True):
    """The rendezvous takes the type, or says why not: it may know another definition under that name."""

    event_type: str
    refusal: str | None = None


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


class AskReached(Message, frozen=True):
    """The coordinator's journal may have lost what was behind `end`: how far has this replica come? Once the log has
    gone on, what was decided in that life of the coordinator or a later one was not lost, and is not meant."""

    name: str  # of the durable subscription
    event_type: str
    incarnation: int
    end: int
    went_on_in: int | None = None  # a life of the coordinator; None: the log waits


class ReachedTold(Message, frozen=True):
    """What a replica has applied, or heard to be decided, of a log; and the transactions that it remembers to have
    committed behind the end that it was asked about."""

    event_type: str
    incarnation: int  # of the coordinator that asked
    reached: int
    transactions: tuple[TxId, ...]


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
