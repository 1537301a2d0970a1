"""What a broker writes to its journal, one class per fact; a broker's durable state is the sum of these."""

import msgspec

from tops.model.event_types import EventType
from tops.model.ids import NodeId, TxId
from tops.model.log_points import LogPoint
from tops.protocol.messages import EpochId, LogEntry, PartialTimestamp, TimestampCompleted, TxSpec, Waiting


class Record(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True, gc=False):
    """A fact that survives a crash."""


class Started(Record, frozen=True):
    """A new incarnation of the broker; messages of earlier ones no longer count."""

    incarnation: int
    protocol: int = 1  # the version that wrote the following records


class Publisher(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The publisher of an entry, its incarnation and the number of the publication; the entry itself does not name
    it."""

    node: NodeId
    incarnation: int
    number: int


class TypeDefined(Record, frozen=True):
    """An event type; `history` is the id of the log's history, for the first type of a durable family."""

    event_type: EventType
    history: str = ""


class PlansDeclared(Record, frozen=True):
    """The transactions that a replica set's log accepts from sites that are no replicas of the set; the latest record
    counts."""

    event_type: str
    plans: tuple[TxSpec, ...]


class MembersDeclared(Record, frozen=True):
    """The identities of a replica set's replicas; the latest record counts."""

    event_type: str
    members: frozenset[str]


class LogAppended(Record, frozen=True):
    """An entry of a durable type's log. For an epoch it is also the decision to commit, and it names the replicas that
    are in sync from here on (None: unchanged). All of it is one record, so that a crash can't separate it."""

    event_type: str
    entry: LogEntry
    in_sync: frozenset[str] | None = None
    publisher: Publisher | None = None  # of a single event


class InSyncChanged(Record, frozen=True):
    event_type: str
    in_sync: frozenset[str]


class LogStale(Record, frozen=True):
    """A replica is ahead of this journal, or holds another log: no index is assigned until a `HistoryBegun` follows, or
    the replica's durable subscription is ended."""

    event_type: str
    replica: str
    point: LogPoint


class HistoryBegun(Record, frozen=True):
    """An operator continued the log in a new history, behind what the most advanced replicas hold. Only replicas have
    what lies between `end`, where this journal ended, and `point`."""

    event_type: str
    point: LogPoint
    end: int
    incarnation: int


class ReplicasUnconfirmed(Record, frozen=True):
    """Replicas that had not reported when a log continued after a start of the broker, and where the log ended then.
    They take no part until they have reported that they were not ahead of it."""

    event_type: str
    ends: dict[str, int]
    incarnations: dict[str, int] = {}  # of the broker, in which the log continued without them


class EpochCommitted(Record, frozen=True):
    """The decision to commit an epoch of a type that keeps no log."""

    epoch: EpochId
    digest: str
    transactions: tuple[TxId, ...]
    committing: frozenset[str]


class FinishesNoted(Record, frozen=True):
    """These voters have carried out these commits and will not request the decisions again."""

    event_type: str
    finished: tuple[tuple[EpochId, str], ...]


class TxRejected(Record, frozen=True):
    """Its outcome was requested before the transaction arrived, and the response was "aborted": if it arrives later, it
    must not commit."""

    tx: TxId


class OutcomesTruncated(Record, frozen=True):
    """Old parts of a log were truncated: commits of these incarnations up to that transaction may have no record here,
    so the absence of a record no longer means abort."""

    incarnations: dict[str, int]


class LogDecided(Record, frozen=True):
    """Old parts of a log were truncated: every number up to this one is decided, also truncated ones."""

    event_type: str
    upto: int


class LogCut(Record, frozen=True):
    """Old parts of a log were truncated: the digest at the last truncated index."""

    event_type: str
    point: LogPoint


class PublishersRetained(Record, frozen=True):
    """Old parts of a log were truncated: the latest incarnation and the last publication of its publishers."""

    event_type: str
    published: dict[NodeId, tuple[int, int]]


class SubscriptionAdvanced(Record, frozen=True):
    """The acknowledged position of a durable subscription; -1 ends it."""

    event_type: str
    name: str
    position: int
    replica: str = ""  # the site of the replica that follows under that name, if it is a replica
    dropped: bool = False  # it retained too much of the journal: nothing is retained for it, its requests are rejected


class EventNumbered(Record, frozen=True):
    """An event of an ordering domain has its index in its log; its timestamp lacks the entries of higher stages."""

    domain: str
    waiting: Waiting
    timestamp: PartialTimestamp
    place: int  # in the order of what is passed to the next stage


class TimestampPassed(Record, frozen=True):
    """A stage has taken a partial timestamp and written its entries: it goes on to the next stage, or is complete and
    goes back. One record, so that no crash can make the stage write other entries when it gets it again."""

    domain: str
    sender: NodeId
    taken: int  # its place in the order of what the sender passes
    to: NodeId
    item: PartialTimestamp | TimestampCompleted
    place: int  # in the order of what is passed there


class TimestampKept(Record, frozen=True):
    """The complete timestamp of an event has come back to the manager of its topic."""

    domain: str
    sender: NodeId
    taken: int
    timestamp: TimestampCompleted


class PassedTaken(Record, frozen=True):
    """The managers at another broker have taken everything up to this place. Losing the record costs a repetition."""

    domain: str
    to: NodeId
    upto: int


class ManagersKept(Record, frozen=True):
    """Old parts of a log were dropped: what the topic managers of a domain at this broker must not forget."""

    domain: str
    numbered: dict[int, int]  # per topic that is managed here
    lower: dict[int, int]  # per topic of lower stages
    taken: dict[NodeId, int]  # per broker that passes something here


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
    | ReplicasUnconfirmed
    | EpochCommitted
    | FinishesNoted
    | TxRejected
    | OutcomesTruncated
    | LogDecided
    | LogCut
    | PublishersRetained
    | SubscriptionAdvanced
    | EventNumbered
    | TimestampPassed
    | TimestampKept
    | PassedTaken
    | ManagersKept
    | RoutingTxCommitted
    | RoutingTxRefused
)
