"""Messages about event types and their logs: advertising, confirming what is on disk, following a log."""

from tops.model.filters import Filter
from tops.model.ids import TxId
from tops.model.log_points import LogPoint
from tops.protocol.messages.values import Definitions, LogEntry, Message, Origin, TxSpec, Wire


class TypeAdvertised(Message, frozen=True):
    """A site is going to publish this type; goes to the rendezvous.

    `plans`, of a replica set's log: transactions of sites that are no replicas of the set must have one of these
    specifications, so that no client logs a write without the votes that the set's policy requires. None: no change.

    `members`, of a replica set's log: the identities of the set's replicas. Only these publish to the log, take part
    in it and declare plans, whatever other replicas of the set have a certificate. None: no change."""

    definitions: Definitions
    plans: tuple[TxSpec, ...] | None = None
    members: frozenset[str] | None = None


class AdvertisementHandled(Message, frozen=True):
    """The rendezvous has accepted the type, or rejected it (`rejection`): it may have another definition of that
    name."""

    event_type: str
    rejection: str | None = None


class EventConfirmed(Message, frozen=True):
    """The publication is on disk; `log_number` is None for a repeated one.

    `count`: how many publications are confirmed, which end with this one and have consecutive numbers.
    """

    origin: Origin
    log_number: int | None = None
    count: int = 1


class EventsRejected(Message, frozen=True):
    """The rendezvous accepts no events of this durable type for now; nothing that is not confirmed was stored."""

    event_type: str
    reason: str


class ConfirmRoute(Message, frozen=True):
    """Sent behind a new subscription, on the same path: when the response arrives, events reach the subscriber."""

    subscription: int


class RouteConfirmed(Message, frozen=True):
    subscription: int


class GetLogState(Message, frozen=True):
    """Request how far the log of a durable type is decided, and its followers. Reads that must be current need it."""

    request: int
    event_type: str


class Follower(Wire, frozen=True):
    """A durable subscription of the log; `in_sync` has a meaning only for replicas that vote."""

    name: str
    position: int
    present: bool
    in_sync: bool


class StaleJournal(Wire, frozen=True):
    """The coordinator's journal is older than what a replica has: it was restored from a backup, or its disk lost what
    it had confirmed. No index is assigned until an operator has restored a newer journal, or begins a new history."""

    event_type: str
    index: int  # where the journal ends
    replica: str
    replica_index: int

    def __str__(self) -> str:
        return (
            f"the coordinator's journal of {self.event_type} ends at index {self.index} and replica {self.replica!r} "
            f"is at {self.replica_index}: the journal is older than what was acknowledged; restore the newer journal, "
            f"or run 'tops journal recover'"
        )


class LogStateReported(Message, frozen=True):
    """Everything up to `decided` is committed or a no-op entry, and nothing that was acknowledged lies beyond it."""

    request: int
    event_type: str
    decided: int
    oldest: int
    in_sync: tuple[str, ...]
    followers: tuple[Follower, ...]
    history: str = ""
    stale: StaleJournal | None = None  # why no index is assigned
    is_open: bool = True  # False: the coordinator has started and waits for the reports of its replicas


class FollowLog(Message, frozen=True):
    """A durable subscription requests what follows `position`; this also acknowledges everything up to there."""

    name: str
    definitions: Definitions
    filter: Filter
    position: int | None  # None: begin at `start`, if the name is new
    start: str
    credit: int
    voter: str | None  # its voter name, if it votes: entries that it committed as a voter are not sent
    ephemeral: bool = False  # a reader without durable state: one delivery per request; position -1 ends it
    history: str = ""
    digest: str | None = None  # a replica's, at `position`; it gets the digests of what is delivered, too
    defines: bool = True  # may define the type; its broker sets False for a sender without that right


class GetAppliedIndex(Message, frozen=True):
    """A coordinator has started, and its journal ends at `end`: request the applied index of this replica.

    Only decisions of incarnations from `since` on, and before `resumed_in`, count: earlier ones belong to another
    history, later ones are in the journal. `resumed_in` None: the log waits for the response.
    """

    name: str  # of the durable subscription
    event_type: str
    incarnation: int
    end: int
    resumed_in: int | None = None
    since: int = 0


class AppliedIndexReported(Message, frozen=True):
    """The point that a replica has applied, the highest index that it knows to be decided, and the transactions that it
    knows to have committed behind the requested end."""

    event_type: str
    incarnation: int  # of the requesting coordinator
    point: LogPoint
    decided: int
    transactions: tuple[TxId, ...]


class HistoryRejected(Message, frozen=True):
    """A replica's database holds another history than the coordinator's log: it takes no part and gets no entries."""

    name: str  # of the durable subscription
    event_type: str
    point: LogPoint  # the coordinator's, at the replica's index or at the log's end


class HistoryDiffers(Message, frozen=True):
    """A replica found another digest in a prepare, a decision or a delivery than in its database. It did not vote."""

    name: str  # of the durable subscription
    event_type: str
    point: LogPoint  # the replica's


class RecoverLog(Message, frozen=True):
    """An operator's request: continue in a new history behind the most advanced of these replicas.

    `needed`: how many of them must have reported, so that one of them has everything that was acknowledged.
    """

    request: int
    event_type: str
    replicas: tuple[str, ...]
    needed: int
    accept_loss: bool


class LogRecovered(Message, frozen=True):
    """The log continues at `point`, or why it does not (`problem`)."""

    request: int
    problem: str
    point: LogPoint
    following: tuple[str, ...] = ()  # replicas that are at `point`
    behind: tuple[str, ...] = ()  # replicas that must be copied from one of them
    silent: tuple[str, ...] = ()  # replicas that have not reported


class LogDelivered(Message, frozen=True):
    """Consecutive entries; `upto` may be beyond the last one if the entries between did not match the filter."""

    name: str
    event_type: str
    acknowledged: int  # the subscriber's position, as far as the broker knows
    after: int
    upto: int
    entries: tuple[LogEntry, ...]
    incarnation: int
    history: str = ""
    digests: bytes = b""  # for a replica: packed, at `after` and at every index up to `upto`


class FollowRejected(Message, frozen=True):
    """The entries after the requested position are truncated: the subscriber needs a new copy of the data.

    `reason`: set if the subscription was dropped; then it stays dropped until it is ended."""

    name: str
    event_type: str
    oldest: int
    reason: str = ""


class EndLog(Message, frozen=True):
    """End a durable subscription permanently: nothing is retained for that name any more.

    `operator`: `name` is the name within the log, of a subscription of any identity; the broker has checked that the
    sender may operate."""

    request: int
    event_type: str
    name: str
    operator: bool = False


class LogEnded(Message, frozen=True):
    """The subscription has ended, and that is on disk."""

    request: int
