"""Ordinary events on their way through the rendezvous, and the logs of durable types as their readers see them."""

import msgspec

from tops.core.epochs import QUESTION
from tops.core.event_log import EventLog, Feed, Repetition, is_start
from tops.core.known_types import KnownTypes
from tops.core.log_opening import LogOpenings
from tops.digests import LogPoint
from tops.effects import Alarm, Disseminate, Effect, Note, Persist, Post
from tops.errors import InvariantBroken
from tops.messages import (
    Address,
    AskLog,
    EndLog,
    Event,
    EventConfirmed,
    EventsPublished,
    EventsRefused,
    Follower,
    LogEnded,
    LogEntry,
    LogTold,
    LogWanted,
    Published,
    TypeAdvertised,
    decode_body,
)
from tops.records import LogAppended, SubscriptionKept


class LogKeeper:
    """Numbers and keeps what is published to durable types, and feeds whoever reads on from a position."""

    def __init__(self, known: KnownTypes, openings: LogOpenings) -> None:
        self._known, self._openings = known, openings

    # -------------------------------------------------------------------------------------------------- publishing

    def on_published(self, published: Published, publisher: Address) -> list[Effect]:
        log = self._known.logs_of.get(published.event.type)
        if log is None:
            return [Disseminate(published)]
        if log.opening is not None:
            return _not_open(log, published.event.type, publisher)
        seen = log.recognise(published.origin)
        if seen is Repetition.REPEATED:
            return [Post(publisher, EventConfirmed(origin=published.origin))]
        if seen is Repetition.OUT_OF_TURN:
            return []
        entry = LogEntry(number=log.reserve(), event=published.event, origin=published.origin)
        log.fill(entry)
        return [
            Persist(LogAppended(event_type=log.event_type, entry=entry)),
            Post(publisher, _confirmed(log, entry)),
            Disseminate(published),
            *log.pump_all(),
        ]

    def on_published_together(self, published: EventsPublished, publisher: Address) -> list[Effect]:
        """Each event gets its own number and record; all of them are confirmed at once."""
        log = self._known.logs_of.get(published.event_type)
        if log is None:
            return [Disseminate(published)]
        if log.opening is not None:
            return _not_open(log, published.event_type, publisher)
        last = published.origin
        bodies = [body for encoded in published.bodies if (body := decode_body(encoded)) is not None]
        if not bodies or len(bodies) < len(published.bodies) or last.number < len(bodies):
            return []
        origins = [msgspec.structs.replace(last, number=last.number - n) for n in range(len(bodies) - 1, -1, -1)]
        if log.recognise(origins[0]) is not Repetition.NEW:
            single = [
                Published(event=Event(published.event_type, body), origin=origin)
                for body, origin in zip(bodies, origins, strict=True)
            ]
            return [effect for each in single for effect in self.on_published(each, publisher)]
        effects: list[Effect] = []
        for body, origin in zip(bodies, origins, strict=True):
            entry = LogEntry(number=log.reserve(), event=Event(published.event_type, body), origin=origin)
            log.fill(entry)
            effects.append(Persist(LogAppended(event_type=log.event_type, entry=entry)))
        confirmed = EventConfirmed(origin=last, log_number=log.last_number, count=len(bodies))
        return [*effects, Post(publisher, confirmed), Disseminate(published), *log.pump_all()]

    # ----------------------------------------------------------------------------------------------------- reading

    def on_wanted(self, m: LogWanted, sender: Address, incarnation: int, now: float) -> list[Effect]:
        wanted = m.definitions[-1]
        if wanted.name not in self._known.types:
            effects = self._known.on_advertised(TypeAdvertised(definitions=m.definitions), sender, incarnation, now)
        else:
            effects = []
        log = self._known.logs_of.get(wanted.name)
        if log is None:
            return effects
        if m.passing:
            return effects + self._read_in_passing(log, m, sender)
        replica = sender.handle if m.digest is not None else ""
        told = LogPoint(m.history, m.position, m.digest) if m.digest is not None and m.position is not None else None
        known = log.feeds.get(m.name)
        position = m.position
        if position is None:
            position = known.position if known is not None else _start(m.start, log)
        kept = position + 1 >= log.oldest  # else it is refused, and no record must keep the log for it
        noted: list[Effect] = []
        if kept and (known is None or known.position != position):
            record = SubscriptionKept(event_type=log.event_type, name=m.name, position=position, replica=replica)
            noted = [Note(record)]
        feed = Feed(m.name, wanted.name, sender, m.filter, position, position, m.credit, m.voter, replica, told=told)
        if told is not None:
            return effects + self._feed_replica(log, feed, told, noted)
        if position > log.last_number and known is None:
            text = f"{m.name} has taken {position}, and the log of {log.event_type} ends at {log.last_number}"
            effects.append(Alarm("ahead-of-log", text))
        return effects + noted + log.want(feed)

    def _feed_replica(self, log: EventLog, feed: Feed, told: LogPoint, noted: list[Effect]) -> list[Effect]:
        if self._openings.must_tell(log, feed.replica):
            self._openings.hold(log, feed)
            return self._openings.ask(log, feed.name, feed.address)
        if log.opening is not None:
            self._openings.hold(log, feed)
            return []
        fits, problem = self._openings.judge(log, feed.replica, told)
        return noted + log.want(feed) if fits else problem + self._openings.reject(log, feed, told)

    @staticmethod
    def _read_in_passing(log: EventLog, m: LogWanted, sender: Address) -> list[Effect]:
        """Somebody looks at what is in the log. No record is made of it: it is not there after a restart."""
        if m.position is None or m.position < 0:
            log.end(m.name)
            return []
        feed = Feed(m.name, m.definitions[-1].name, sender, m.filter, m.position, m.position, m.credit, passing=True)
        return log.want(feed)

    def on_end(self, m: EndLog, sender: Address, incarnation: int, now: float) -> list[Effect]:
        """Somebody who may read the log ends a durable subscription; one that is not there has ended."""
        log = self._known.logs_of.get(m.event_type)
        told: Effect = Post(sender, LogEnded(request=m.request))
        if log is None or (m.name not in log.feeds and not self._openings.knows(log, m.name)):
            return [told]
        known = log.feeds.get(m.name)
        replica = known.replica or m.name if known is not None else m.name
        log.end(m.name)
        kept = Persist(SubscriptionKept(event_type=log.event_type, name=m.name, position=-1))
        return [kept, told, *self._openings.on_ended(log, replica)]

    def on_asked(self, m: AskLog, sender: Address, incarnation: int, now: float) -> list[Effect]:
        log = self._known.logs_of.get(m.event_type)
        if log is None:
            return []  # the asker repeats itself: the type may be on its way
        standing = self._known.epochs[self._known.families[m.event_type]].standing
        in_sync = standing.in_sync if log.opening is None else frozenset()
        present = {s.identity for s in standing.answers.values()}
        followers = tuple(
            Follower(f.name, f.position, f.name in present, f.name in in_sync)
            for f in sorted(log.subscribers, key=lambda f: f.name)
        )
        told = LogTold(
            request=m.request,
            event_type=m.event_type,
            decided=log.decided_upto,
            oldest=log.oldest,
            in_sync=tuple(sorted(in_sync)),
            followers=followers,
            history=log.chain.history,
            stale=log.stale,
            is_open=log.opening is None,
        )
        return [Post(sender, told)]

    def on_read(self, event_type: str, feed: str, entries: tuple[LogEntry, ...]) -> list[Effect]:
        """What a `ReadLog` brought."""
        if feed == QUESTION:
            return self._known.epochs[event_type].on_read(entries)
        return self._known.logs[event_type].on_read(feed, entries)


def _start(start: str, log: EventLog) -> int:
    if start == "now" or not is_start(start):
        return log.decided_upto
    oldest = log.oldest - 1
    return oldest if start == "oldest" else min(max(int(start) - 1, oldest), log.decided_upto)


def _not_open(log: EventLog, event_type: str, publisher: Address) -> list[Effect]:
    """No index can be given out: the publisher says it again, unless only an operator can change that."""
    if log.stale is None:
        return []
    return [Post(publisher, EventsRefused(event_type=event_type, reason=str(log.stale)))]


def _confirmed(log: EventLog, entry: LogEntry) -> EventConfirmed:
    if entry.origin is None:
        raise InvariantBroken(f"{log.event_type}#{entry.number} has no origin to confirm to")
    return EventConfirmed(origin=entry.origin, log_number=entry.number)
