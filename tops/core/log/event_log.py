"""The log of one durable event type, at its rendezvous broker: gap-free numbers, and who has taken how much.

A number is reserved when an epoch is sent out to be prepared and filled when it is decided; the log is served up to
the lowest number that is still undecided, so a subscriber never sees a gap. The newest entries are kept in memory;
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
from tops.protocol.effects import Effect, Post, ReadLog
from tops.protocol.messages import Address, LogDelivered, LogEntry, LogRefused, ReachedTold, Sender, StaleJournal
from tops.protocol.records import Publisher

ENTRIES_PER_DELIVERY = 256
TAIL_BYTES_MAX = 64 * 2**20  # of the newest entries, which are kept in memory
DROPPED_MAX = 1_000  # feeds that a log remembers to have dropped
DELIVERIES_MAX = 2  # on their way: one to work at, one to go on with; what is decided meanwhile shares the next


class Relation(Enum):
    """How a replica's point compares with a log."""

    PREFIX = "prefix"  # what it holds is a prefix of the log, or so old that it is not kept any more
    AHEAD = "ahead"  # of the log, in the log's history: the log lost something
    OTHER = "other"  # another history


class Unheard(NamedTuple):
    """Where a log ended, and the coordinator's incarnation in which it went on without a replica's response."""

    end: int
    incarnation: int


class Feed(msgspec.Struct):
    """A durable subscription as the log sees it."""

    key: str  # what the log knows it by: see `feed_key`
    name: str  # what its subscriber calls it
    event_type: str  # itself and its descendants are wanted
    address: Address
    filter: Filter
    position: int  # everything up to here is safe at the subscriber
    sent: int  # everything up to here is on its way
    credit: int  # how many entries may be on their way
    voter: str | None = None  # its key as a voter; entries that it committed itself are not sent again
    replica: str = ""  # the identity of the replica behind it, which gets the digests, too
    reading: bool = False
    under_way: tuple[int, ...] = ()  # where each delivery ends that is not acknowledged
    passing: bool = False  # gets one delivery each time it asks, and holds nothing back
    told: LogPoint | None = None  # where the replica behind it was when it asked last
    hashed_voter: str | None = None  # as the entries name who committed them

    def __post_init__(self) -> None:
        self.hashed_voter = None if self.voter is None else hashed_voter(self.voter)

    def may_wait(self, count: int) -> bool:
        """Whether so few entries are better sent with those that follow: a subscriber tells when it is done."""
        self.under_way = tuple(end for end in self.under_way if end > self.position)
        return len(self.under_way) >= DELIVERIES_MAX and count < ENTRIES_PER_DELIVERY


class Opening(msgspec.Struct):
    """A log after a start of its broker, until its replicas have told where they are: no index is given out.

    It stays when the journal turns out to be stale; then an operator ends it.
    """

    end: int
    asked: frozenset[str]  # replicas that are waited for
    told: dict[str, ReachedTold]
    feeds: dict[str, Feed]  # of replicas, to be served when the log is open
    waiting: list[Callable[[], list[Effect]]]  # what is done once it is known whether the log opens

    @property
    def silent(self) -> frozenset[str]:
        return self.asked - self.told.keys()


def feed_key(sender: Sender, name: str) -> str:
    """What a log knows a durable subscription by: it belongs to an identity, under which names are its own business.
    A replica's goes by its identity alone."""
    return sender.identity if name == sender.identity else f"{sender.identity}.{name}"


def identity_of_feed(key: str) -> str:
    """Whose durable subscription it is; no identity contains a dot."""
    return key.partition(".")[0]


def reader_key(sender: Sender, name: str) -> str:
    """The same for one who only looks in passing, which is a matter of one session."""
    return f"{sender.identity}.{sender.instance}~{name}"


def is_start(start: str) -> bool:
    """Whether a durable subscription can start there: now, at the oldest entry that is kept, or at a number."""
    return start in ("now", "oldest") or (start.isascii() and start.isdigit() and 0 < len(start) < 20)


class Repetition(Enum):
    """What a publication is to a log that may have seen it."""

    NEW = "new"
    REPEATED = "repeated"  # it is in the log
    OUT_OF_TURN = "out of turn"  # one before it was lost, or it is an earlier life's: its publisher says it again


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
        self.last_number = 0  # the highest number given out
        self.oldest = 1  # the first number that is still kept on disk
        self.tail: OrderedDict[int, LogEntry] = OrderedDict()  # the newest decided entries
        self.undecided: set[int] = set()
        self.numbered: set[int] = set()  # of these: events that wait for their timestamps
        self.feeds: dict[str, Feed] = {}
        self.dropped: OrderedDict[str, int] = OrderedDict()  # feeds that held too much, and how far they had come
        self.published: dict[NodeId, tuple[int, int]] = {}  # publisher -> its latest life, its last publication
        self.opening: Opening | None = None  # since the start its replicas are asked where they are
        self.stale: StaleJournal | None = None  # why no index is given out
        self.unheard: dict[str, Unheard] = {}  # replicas that have not told yet whether they were ahead
        self.differing: set[str] = set()  # replicas that hold another history
        self.held_back: dict[str, int] = {}  # voters that may be about to commit this number by themselves
        self.missing = range(0)  # numbers that replicas alone know: no abort is presumed of them
        self.began_in = 0  # the broker's incarnation in which the history began; 0: the first one
        self._tail_sizes: dict[int, int] = {}  # of the entries in memory, in bytes
        self._tail_bytes = 0

    def reserve(self) -> int:
        """The next number, undecided until it is filled."""
        self.last_number += 1
        self.undecided.add(self.last_number)
        return self.last_number

    def fill(self, entry: LogEntry, publisher: Publisher | None = None) -> None:
        """A number is decided (also by recovery): committed, or void if the entry is empty."""
        if entry.number > self.last_number:
            # Only in recovery: what lies between was given out, and is decided further on or not at all.
            self.undecided.update(range(max(self.last_number + 1, self.oldest), entry.number))
            self.last_number = entry.number
        self.undecided.discard(entry.number)
        self.numbered.discard(entry.number)
        self.tail[entry.number] = entry
        self.chain.fill(entry, publisher)
        if publisher is not None:
            self.published_by(publisher)
        size = encoded_bytes(entry)
        self._tail_bytes += size - self._tail_sizes.get(entry.number, 0)  # recovery may come to it once more
        self._tail_sizes[entry.number] = size
        while len(self.tail) > self.tail_max or (self._tail_bytes > TAIL_BYTES_MAX and self._is_past(entry.number)):
            number, _ = self.tail.popitem(last=False)
            self._tail_bytes -= self._tail_sizes.pop(number)

    def _is_past(self, newest: int) -> bool:
        """Whether the oldest entry in memory lies before the end of what is decided, which stays."""
        return next(iter(self.tail)) < min(newest, self.decided_upto)

    def published_by(self, publisher: Publisher) -> None:
        """The last publication of this publisher that has become an entry."""
        last = publisher.incarnation, publisher.number
        if last > self.published.get(publisher.node, (0, 0)):  # recovery may come to an old entry once more
            self.published[publisher.node] = last

    def begin_history(self, point: LogPoint, end: int, incarnation: int) -> None:
        """The journal ended at `end`, replicas are at `point`: go on behind that, in its history."""
        if self.chain.history != point.history:  # else a checkpoint has repeated it
            self.chain.begin(point)
        self.opening, self.stale, self.unheard, self.began_in = None, None, {}, incarnation
        self.missing = range(end + 1, point.index + 1)
        self.undecided = {number for number in self.undecided if number > point.index}
        self.last_number, self.oldest = max(self.last_number, point.index), max(self.oldest, point.index + 1)

    def relation(self, point: LogPoint) -> Relation:
        """How a replica's point compares with this log."""
        end = self.chain.end
        if point.index > end.index:
            # In an empty log nothing says whose history is the right one: it may be a journal that was emptied.
            own = point.history == self.chain.history or end.index == 0
            return Relation.AHEAD if own else Relation.OTHER
        digest = self.chain.at(point.index)
        return Relation.PREFIX if digest in (point.digest, None) else Relation.OTHER

    def keep_from(self, oldest: int) -> None:
        """What is before `oldest` is not kept any more."""
        self.oldest = max(self.oldest, oldest, self.chain.base + 1)
        self.chain.cut(self.oldest - 1)

    def recognise(self, sender: Sender, number: int) -> Repetition:
        """A publisher numbers what it publishes to a family without gaps, and repeats what is not confirmed."""
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
        """Every number up to here is decided: what is served, and what a replica must have to be in sync."""
        return min(self.undecided) - 1 if self.undecided else self.last_number

    def missing_numbers(self) -> list[int]:
        """After recovery: numbers that an earlier life gave out and never decided."""
        return sorted(self.undecided - self.numbered)

    def number(self, index: int, publisher: Publisher) -> None:
        """An event of an ordering domain has this index, and is decided once its timestamp is complete."""
        self.undecided.update(range(max(self.last_number + 1, self.oldest), index + 1))
        self.last_number = max(self.last_number, index)
        self.numbered.add(index)
        self.published_by(publisher)

    # ----------------------------------------------------------------------------------------------------- feeds

    def want(self, feed: Feed) -> list[Effect]:
        """A durable subscription (again) asks for what follows its position."""
        if feed.position + 1 < self.oldest:
            refusal = LogRefused(name=feed.name, event_type=self.event_type, oldest=self.oldest)
            return [Post(feed.address, refusal)]
        known = self.feeds.get(feed.key)
        renewed = known is not None and known.address == feed.address and known.sent >= feed.position
        if known is not None and renewed and not feed.passing:
            # A renewal: what is on its way stays on its way, unless nothing has arrived since the last one.
            stalled = known.position == feed.position and known.sent > feed.position
            feed.sent = feed.position if stalled else known.sent
            feed.under_way = () if stalled else known.under_way
            feed.reading = known.reading
        self.feeds[feed.key] = feed
        return self.pump(feed)

    @property
    def subscribers(self) -> list[Feed]:
        """The durable subscriptions, without who only looks in passing."""
        return [feed for feed in self.feeds.values() if not feed.passing]

    def end(self, key: str) -> None:
        self.feeds.pop(key, None)
        self.dropped.pop(key, None)

    def drop(self, key: str, position: int) -> None:
        """Nothing is kept for a feed any more; it hears so when it asks again."""
        self.feeds.pop(key, None)
        self.dropped[key] = position
        if len(self.dropped) > DROPPED_MAX:
            self.dropped.popitem(last=False)

    def pump_all(self) -> list[Effect]:
        """Something was decided: send it to whoever has room."""
        effects: list[Effect] = []
        newest = self.tail.get(self.decided_upto)
        for feed in self.feeds.values():
            if newest is not None and feed.sent == newest.number - 1 and feed.hashed_voter in newest.committing:
                feed.sent = newest.number  # the common case: it committed the next one itself, and counts it by itself
            else:
                effects += self.pump(feed)
        return effects

    def release(self, voter: str, holds: int | None) -> list[Effect]:
        """A voter's feed goes on; `holds` is the number up to which it has everything by itself."""
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
        """What `ReadLog` brought from the disk."""
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
            return []  # it committed these itself, and counts them by itself
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
        if feed.passing:
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
        return [Post(feed.address, delivered)]

    def retain_from(self) -> int:
        """The first number that some durable subscription still needs."""
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
