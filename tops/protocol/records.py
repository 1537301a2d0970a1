"""What a broker writes to its journal, one class per fact; a broker's durable state is the sum of these."""

import msgspec

from tops.model.event_types import EventType
from tops.model.ids import NodeId, TxId
from tops.model.log_points import LogPoint
from tops.protocol.messages import EpochId, LogEntry, TxSpec


class Record(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True, gc=False):
    """A fact that survives a crash."""


class Started(Record, frozen=True):
    """A new life of the broker; everything said by an earlier one is late."""

    incarnation: int
    protocol: int = 1  # the version that wrote what follows


class Publisher(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Whose publication an entry is, and which one of its incarnation; entries themselves do not tell."""

    node: NodeId
    incarnation: int
    number: int


class TypeDefined(Record, frozen=True):
    """An event type; `history` is that of the log, with the first type of a durable family."""

    event_type: EventType
    history: str = ""


class PlansDeclared(Record, frozen=True):
    """Which transactions a replica set's log takes from sites that are no replicas of the set; the latest counts."""

    event_type: str
    plans: tuple[TxSpec, ...]


class MembersDeclared(Record, frozen=True):
    """Which replicas a replica set has, by identity; the latest counts."""

    event_type: str
    members: frozenset[str]


class LogAppended(Record, frozen=True):
    """A number of a durable type's log. For an epoch this is also the decision to commit it, and who is in sync
    from here on (None: unchanged): one record, so that no crash can separate them."""

    event_type: str
    entry: LogEntry
    in_sync: frozenset[str] | None = None
    publisher: Publisher | None = None  # of a single event


class InSyncChanged(Record, frozen=True):
    event_type: str
    in_sync: frozenset[str]


class LogStale(Record, frozen=True):
    """A replica is ahead of this journal, or holds another log: no index is given out until a `HistoryBegun` follows,
    or the replica's durable subscription is ended."""

    event_type: str
    replica: str
    point: LogPoint


class HistoryBegun(Record, frozen=True):
    """An operator let the log go on in a new history, behind what the most advanced replicas hold. What lies between
    `end`, where this journal ended, and `point` is at replicas alone."""

    event_type: str
    point: LogPoint
    end: int
    incarnation: int


class ReplicasUnheard(Record, frozen=True):
    """Which replicas had not responded when a log went on after a start of the broker, and where it ended then: they
    take no part before they have told that they were not ahead of it."""

    event_type: str
    ends: dict[str, int]
    incarnations: dict[str, int] = {}  # of the broker, in which the log went on without them


class EpochCommitted(Record, frozen=True):
    """The decision on an epoch of a type that keeps no log."""

    epoch: EpochId
    digest: str
    transactions: tuple[TxId, ...]
    committing: frozenset[str]


class FinishesNoted(Record, frozen=True):
    """These voters have carried out these commits and are not going to ask any more."""

    event_type: str
    finished: tuple[tuple[EpochId, str], ...]


class TxRefused(Record, frozen=True):
    """Asked about before it arrived: a late arrival must not apply."""

    tx: TxId


class OutcomesForgotten(Record, frozen=True):
    """Old parts of a log were dropped: of these lives, commits up to that transaction may not be remembered here, and
    having no record of one no longer means that it aborted."""

    lives: dict[str, int]


class LogDecided(Record, frozen=True):
    """Old parts of a log were dropped: every number up to this one is decided, also those that are not kept."""

    event_type: str
    upto: int


class LogCut(Record, frozen=True):
    """Old parts of a log were dropped: the digest at the last index that is not kept."""

    event_type: str
    point: LogPoint


class PublishersKept(Record, frozen=True):
    """Old parts of a log were dropped: the latest life and the last publication of those who published to it."""

    event_type: str
    published: dict[NodeId, tuple[int, int]]


class SubscriptionKept(Record, frozen=True):
    """How far a durable subscription has safely taken the log; -1 ends it."""

    event_type: str
    name: str
    position: int
    replica: str = ""  # the site of the replica that follows under that name, if it is one's
    dropped: bool = False  # it held too much of the journal: nothing is kept for it, and it hears so when it returns


class RoutingTxCommitted(Record, frozen=True):
    """The decision to commit a routing transaction; `number` is that of an isolated one, 0 for the other kinds."""

    tx: TxId
    number: int
    participants: tuple[str, ...]


class RoutingTxRefused(Record, frozen=True):
    """A routing transaction that was asked about before it arrived: it must not begin any more."""

    tx: TxId


AnyRecord = (
    Started
    | TypeDefined
    | PlansDeclared
    | MembersDeclared
    | LogAppended
    | InSyncChanged
    | LogStale
    | HistoryBegun
    | ReplicasUnheard
    | EpochCommitted
    | FinishesNoted
    | TxRefused
    | OutcomesForgotten
    | LogDecided
    | LogCut
    | PublishersKept
    | SubscriptionKept
    | RoutingTxCommitted
    | RoutingTxRefused
)
