"""What a broker writes to its journal, one class per fact; a broker's durable state is the sum of these."""

import msgspec

from tops.event_types import EventType
from tops.ids import NodeId, TxId
from tops.messages import EpochId, LogEntry, TxSpec


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
    event_type: EventType


class PlansDeclared(Record, frozen=True):
    """Which transactions a replica set's log takes from sites that are no replicas of the set; the latest counts."""

    event_type: str
    plans: tuple[TxSpec, ...]


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


class TailLost(Record, frozen=True):
    """The journal's end was cut off after a crash: this log is known up to `end`, and may have gone on. Until a
    `TailFound` follows, nothing newer is presumed to be aborted and no number is given out."""

    event_type: str
    end: int


class TailFound(Record, frozen=True):
    """Who was in sync and could be heard has told how far it is. What lies between `end` and `reached` is at replicas
    alone."""

    event_type: str
    end: int
    reached: int


class TailUnheard(Record, frozen=True):
    """Who was in sync when a log lost its end and was not heard in time, and where that end was: the log has gone on
    since, so they take no part before they have told that they were not behind it."""

    event_type: str
    ends: dict[str, int]
    lives: dict[str, int] = {}  # in which life of the broker the log went on without them


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


class PublishersKept(Record, frozen=True):
    """Old parts of a log were dropped: the latest life and the last publication of those who published to it."""

    event_type: str
    published: dict[NodeId, tuple[int, int]]


class SubscriptionKept(Record, frozen=True):
    """How far a durable subscription has safely taken the log; -1 ends it."""

    event_type: str
    name: str
    position: int


AnyRecord = (
    Started
    | TypeDefined
    | PlansDeclared
    | LogAppended
    | InSyncChanged
    | TailLost
    | TailFound
    | TailUnheard
    | EpochCommitted
    | FinishesNoted
    | TxRefused
    | OutcomesForgotten
    | LogDecided
    | PublishersKept
    | SubscriptionKept
)
