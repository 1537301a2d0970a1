"""The log of one durable event type, at its rendezvous broker: gap-free indexes, and the position of each follower.

An index is reserved when the prepares of an epoch are sent, and filled when the epoch is decided; the log is served up
to the lowest index that is still undecided, so a follower never sees a gap. The newest entries are kept in memory;
older ones are on disk, and reading them is an effect like any other.
"""

from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

import msgspec

from tops.core.log.chain import LogChain
from tops.model.filters import Filter
from tops.model.ids import NodeId, hashed_voter
from tops.model.log_points import LogPoint
from tops.model.sizes import BUNDLE_BYTES, encoded_bytes
from tops.protocol.effects import Effect, ReadLog, SendTo
from tops.protocol.messages import (
    Address,
    AppliedIndexReported,
    FollowRejected,
    LogDelivered,
    LogEntry,
    Sender,
    StaleJournal,
)
from tops.protocol.records import Publisher

ENTRIES_PER_DELIVERY = 256
TAIL_BYTES_MAX = 64 * 2**20  # of the newest entries, which are kept in memory
DROPPED_MAX = 1_000  # dropped feeds that a log remembers
DELIVERIES_MAX = 2  # under way: one in progress, one that follows at once; later entries share the next delivery


class Relation(Enum):
    """How a replica's point compares with a log."""

    PREFIX = "prefix"  # the replica holds a prefix of the log, or a point that is truncated
    AHEAD = "ahead"  # of the log, in the log's history: the log lost something
    OTHER = "other"  # another history


class Unconfirmed(NamedTuple):
    """Where a log ended, and the coordinator's incarnation in which it continued without a replica's report."""

    end: int
    incarnation: int


class Feed(msgspec.Struct):
    """A durable subscription as the log sees it."""

    key: str  # its name within the log: see `feed_key`
    name: str  # the subscriber's name for it
    event_type: str  # it and its descendants are delivered
    address: Address
    filter: Filter
    position: int  # everything up to here is acknowledged
    sent: int  # everything up to here is sent
    credit: int  # how many entries may be sent and not acknowledged
    voter: str | None = None  # its key as a voter; entries that it committed as a voter are not sent
    replica: str = ""  # the identity of the replica behind it, which gets the digests, too
    reading: bool = False
    under_way: tuple[int, ...] = ()  # the last index of each delivery that is not acknowledged
    ephemeral: bool = False  # gets one delivery per request, and retains nothing
    reported: LogPoint | None = None  # the point of the replica behind it, as of its last request
    hashed_voter: str | None = None  # the form in which entries name their committing set

    def __post_init__(self) -> None:
        self.hashed_voter = None if self.voter is None else hashed_voter(self.voter)

    def may_wait(self, count: int) -> bool:
        """Whether so few entries should wait for more: the subscriber's next acknowledgement sends them."""
        self.under_way = tuple(end for end in self.under_way if end > self.position)
        return len(self.under_way) >= DELIVERIES_MAX and count < ENTRIES_PER_DELIVERY


class Opening(msgspec.Struct):
    """The state of a log after a start of its broker, until its replicas have reported: no index is assigned.

    It remains if the journal turns out to be stale; then an operator ends it.
    """

    end: int
    awaited: frozenset[str]  # replicas that have to report
    reported: dict[str, AppliedIndexReported]
    feeds: dict[str, Feed]  # of replicas, to be served when the log is open
    waiting: list[Callable[[], list[Effect]]]  # run when the log opens or turns out to be stale

    @property
    def silent(self) -> frozenset[str]:
        return self.awaited - self.reported.keys()


def feed_key(sender: Sender, name: str) -> str:
    """A durable subscription's name within a log. It begins with the owner's identity, so that identities can't take
    each other's subscriptions. For a replica it is the identity alone."""
    return sender.identity if name == sender.identity else f"{sender.identity}.{name}"


def identity_of_feed(key: str) -> str:
    """The owner of a durable subscription; no identity contains a dot."""
    return key.partition(".")[0]


def reader_key(sender: Sender, name: str) -> str:
    """The same for an ephemeral reader, which belongs to one session."""
    return f"{sender.identity}.{sender.instance}~{name}"


def is_start(start: str) -> bool:
    """Whether a durable subscription can start there: now, at the oldest retained entry, or at a number."""
    return start in ("now", "oldest") or (start.isascii() and start.isdigit() and 0 < len(start) < 20)


class Repetition(Enum):
    """How a publication compares with those that the log has."""

    NEW = "new"
    REPEATED = "repeated"  # it is in the log
    OUT_OF_TURN = (
        "out of turn"  # an earlier one is missing, or it is from an earlier incarnation: its publisher repeats it
    )


class EventLog:
    """Numbers, entries and feeds of one durable event type."""

    def __init__(
        self,
        event_type: str,
        incarnation: int,
        lineage: Callable[[str], tuple[str, ...]],
        tail_max: int,
        history: str = "",
    ) -> None:
        self.event_type, self.incarnation, self.tail_max = event_type, incarnation, tail_max
        self.lineage = lineage
        self.chain = LogChain(history)
        self.last_number = 0  # the highest number that is assigned
        self.oldest = 1  # the first number that is retained on disk
        self.tail: OrderedDict[int, LogEntry] = OrderedDict()  # the newest decided entries
        self.undecided: set[int] = set()
        self.numbered: set[int] = set()  # of these: events that wait for their timestamps
        self.feeds: dict[str, Feed] = {}
        self.dropped: OrderedDict[str, int] = OrderedDict()  # feeds that retained too much, and their positions
        self.published: dict[NodeId, tuple[int, int]] = {}  # publisher -> its latest incarnation, last publication
        self.opening: Opening | None = None  # after a start, until the replicas have reported
        self.stale: StaleJournal | None = None  # why no index is assigned
        self.unconfirmed: dict[str, Unconfirmed] = {}  # replicas that have not reported whether they were ahead
        self.differing: set[str] = set()  # replicas that hold another history
        self.held_back: dict[str, int] = {}  # voters that may be about to commit this number by themselves
        self.missing = range(0)  # numbers that only replicas have: no abort is presumed for them
        self.began_in = 0  # the broker's incarnation in which the history began; 0: the first one
        self._tail_sizes: dict[int, int] = {}  # of the entries in memory, in bytes
        self._tail_bytes = 0

    def reserve(self) -> int:
        """The next number, undecided until it is filled."""
        self.last_number += 1
        self.undecided.add(self.last_number)
        return self.last_number

    def fill(self, entry: LogEntry, publisher: Publisher | None = None) -> None:
        """A number is decided (also in recovery): it gets its entry, which may be a no-op entry."""
        if entry.number > self.last_number:
            # Only in recovery: the numbers between were assigned, and a later record decides them, or none does.
            self.undecided.update(range(max(self.last_number + 1, self.oldest), entry.number))
            self.last_number = entry.number
        self.undecided.discard(entry.number)
        self.numbered.discard(entry.number)
        self.tail[entry.number] = entry
        self.chain.fill(entry, publisher)
        if publisher is not None:
            self.published_by(publisher)
        size = encoded_bytes(entry)
        self._tail_bytes += size - self._tail_sizes.get(entry.number, 0)  # recovery may repeat an entry
        self._tail_sizes[entry.number] = size
        while len(self.tail) > self.tail_max or (self._tail_bytes > TAIL_BYTES_MAX and self._is_past(entry.number)):
            number, _ = self.tail.popitem(last=False)
            self._tail_bytes -= self._tail_sizes.pop(number)

    def _is_past(self, newest: int) -> bool:
        """Whether the oldest entry in memory may be evicted: it lies before the last decided one, which stays."""
        return next(iter(self.tail)) < min(newest, self.decided_upto)

    def published_by(self, publisher: Publisher) -> None:
        """Record the last publication of this publisher that has become an entry."""
        last = publisher.incarnation, publisher.number
        if last > self.published.get(publisher.node, (0, 0)):  # recovery may repeat an old entry
            self.published[publisher.node] = last

    def begin_history(self, point: LogPoint, end: int, incarnation: int) -> None:
        """The journal ended at `end`, replicas are at `point`: continue behind that point, in its history."""
        if self.chain.history != point.history:  # else a checkpoint has repeated it
            self.chain.begin(point)
        self.opening, self.stale, self.unconfirmed, self.began_in = None, None, {}, incarnation
        self.missing = range(end + 1, point.index + 1)
        self.undecided = {number for number in self.undecided if number > point.index}
        self.last_number, self.oldest = max(self.last_number, point.index), max(self.oldest, point.index + 1)

    def relation(self, point: LogPoint) -> Relation:
        """How a replica's point compares with this log."""
        end = self.chain.end
        if point.index > end.index:
            # An empty log can't decide which history is the right one: its journal may have been deleted.
            own = point.history == self.chain.history or end.index == 0
            return Relation.AHEAD if own else Relation.OTHER
        digest = self.chain.at(point.index)
        return Relation.PREFIX if digest in (point.digest, None) else Relation.OTHER

    def keep_from(self, oldest: int) -> None:
        """Truncate everything before `oldest`."""
        self.oldest = max(self.oldest, oldest, self.chain.base + 1)
        self.chain.cut(self.oldest - 1)

    def recognise(self, sender: Sender, number: int) -> Repetition:
        """How a publication compares with those in the log: a publisher numbers its publications to a family without
        gaps, and repeats what is not confirmed."""
        incarnation, last = self.published.get(sender.node, (0, 0))
        if sender.incarnation < incarnation:
            return Repetition.OUT_OF_TURN
        if sender.incarnation > incarnation:
            last = 0
        if number <= last:
            return Repetition.REPEATED
        return Repetition.NEW if number == last + 1 else Repetition.OUT_OF_TURN

    @property
    def decided_upto(self) -> int:
        """Every number up to here is decided. The log serves up to here, and a replica in sync has applied up to
        here."""
        return min(self.undecided) - 1 if self.undecided else self.last_number

    def missing_numbers(self) -> list[int]:
        """After recovery: numbers that an earlier incarnation assigned and never decided."""
        return sorted(self.undecided - self.numbered)

    def number(self, index: int, publisher: Publisher) -> None:
        """An event of an ordering domain has this index, and is decided once its timestamp is complete."""
        self.undecided.update(range(max(self.last_number + 1, self.oldest), index + 1))
        self.last_number = max(self.last_number, index)
        self.numbered.add(index)
        self.published_by(publisher)

    # ----------------------------------------------------------------------------------------------------- feeds

    def want(self, feed: Feed) -> list[Effect]:
        """A follower requests, or requests again, what follows its position."""
        if feed.position + 1 < self.oldest:
            rejection = FollowRejected(name=feed.name, event_type=self.event_type, oldest=self.oldest)
            return [SendTo(feed.address, rejection)]
        known = self.feeds.get(feed.key)
        renewed = known is not None and known.address == feed.address and known.sent >= feed.position
        if known is not None and renewed and not feed.ephemeral:
            # A renewal: what is under way is not sent again, unless the position has not moved since the last renewal.
            stalled = known.position == feed.position and known.sent > feed.position
            feed.sent = feed.position if stalled else known.sent
            feed.under_way = () if stalled else known.under_way
            feed.reading = known.reading
        self.feeds[feed.key] = feed
        return self.pump(feed)

    @property
    def subscribers(self) -> list[Feed]:
        """The durable subscriptions, without ephemeral readers."""
        return [feed for feed in self.feeds.values() if not feed.ephemeral]

    def end(self, key: str) -> None:
        self.feeds.pop(key, None)
        self.dropped.pop(key, None)

    def drop(self, key: str, position: int) -> None:
        """Retain nothing for a feed any more; its next request is rejected."""
        self.feeds.pop(key, None)
        self.dropped[key] = position
        if len(self.dropped) > DROPPED_MAX:
            self.dropped.popitem(last=False)

    def pump_all(self) -> list[Effect]:
        """Something was decided: send it to every follower that has credit."""
        effects: list[Effect] = []
        newest = self.tail.get(self.decided_upto)
        for feed in self.feeds.values():
            if newest is not None and feed.sent == newest.number - 1 and feed.hashed_voter in newest.committing:
                feed.sent = newest.number  # the common case: the follower committed the entry itself as a voter
            else:
                effects += self.pump(feed)
        return effects

    def release(self, voter: str, holds: int | None) -> list[Effect]:
        """Continue a voter's feed; `holds` is the number up to which it has committed everything itself."""
        self.held_back.pop(voter, None)
        effects: list[Effect] = []
        for feed in self.feeds.values():
            if feed.voter == voter:
                feed.sent = max(feed.sent, holds or 0)
                effects += self.pump(feed)
        return effects

    def pump(self, feed: Feed) -> list[Effect]:
        effects: list[Effect] = []
        while not feed.reading:
            upto = min(self.decided_upto, feed.position + feed.credit, feed.sent + ENTRIES_PER_DELIVERY)
            if feed.voter in self.held_back:
                upto = min(upto, self.held_back[feed.voter] - 1)
            if upto <= feed.sent or feed.may_wait(upto - feed.sent):
                break
            entries = []
            for number in range(feed.sent + 1, upto + 1):
                if number not in self.tail:
                    break
                entries.append(self.tail[number])
            if entries:
                effects += self._deliver(feed, entries)
            else:
                feed.reading = True
                effects.append(ReadLog(self.event_type, feed.key, feed.sent + 1, upto))
        return effects

    def on_read(self, key: str, entries: tuple[LogEntry, ...]) -> list[Effect]:
        """The result of a `ReadLog`."""
        feed = self.feeds.get(key)
        if feed is None or not feed.reading:
            return []
        feed.reading = False
        fresh = [e for e in entries if e.number > feed.sent]
        if not fresh or fresh[0].number != feed.sent + 1:
            return []
        return self._deliver(feed, fresh) + self.pump(feed)

    def _deliver(self, feed: Feed, entries: list[LogEntry]) -> list[Effect]:
        """Send entries that follow each other, or as many of them as one message may hold."""
        after = feed.sent
        voter = feed.hashed_voter
        if voter is not None and all(voter in e.committing for e in entries):
            feed.sent = entries[-1].number
            return []  # the follower committed these itself as a voter
        wanted: list[LogEntry] = []
        size = 0
        for entry in entries:
            if self._wants(feed, entry):
                size += self._tail_sizes.get(entry.number) or encoded_bytes(entry)
                if wanted and size > BUNDLE_BYTES:
                    break
                wanted.append(entry)
            feed.sent = entry.number
        feed.under_way = (*feed.under_way, feed.sent)
        if feed.ephemeral:
            feed.credit = feed.sent - feed.position
        delivered = LogDelivered(
            name=feed.name,
            event_type=self.event_type,
            acknowledged=feed.position,
            after=after,
            upto=feed.sent,
            entries=tuple(wanted),
            incarnation=self.incarnation,
            history=self.chain.history,
            digests=self.chain.between(after, feed.sent) if feed.replica else b"",
        )
        return [SendTo(feed.address, delivered)]

    def retain_from(self) -> int:
        """The first number that a durable subscription still needs."""
        return min((f.position + 1 for f in self.subscribers), default=self.last_number + 1)

    def _wants(self, feed: Feed, entry: LogEntry) -> bool:
        if entry.event is not None:
            return feed.event_type in self.lineage(entry.event.type) and feed.filter.matches(entry.event.body)
        if feed.hashed_voter in entry.committing:
            return False
        return any(
            feed.event_type in self.lineage(t.event_type) and feed.filter.matches(t.attributes)
            for t in entry.transactions
        )
