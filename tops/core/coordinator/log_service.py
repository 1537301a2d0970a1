"""Ordinary events on their way through the rendezvous, and the logs of durable types towards their followers."""

import msgspec

from tops.core.commit.epochs import QUERY_FEED
from tops.core.coordinator.known_types import NOT_LISTED, KnownTypes
from tops.core.coordinator.log_opening import LogOpenings
from tops.core.coordinator.open_transactions import Quotas
from tops.core.log.event_log import EventLog, Feed, Repetition, feed_key, identity_of_feed, is_start, reader_key
from tops.core.ordering.broker import OrderingBroker
from tops.model.ids import voter_key
from tops.model.log_points import LogPoint
from tops.model.sizes import bundles, encoded_bytes
from tops.protocol.effects import Alarm, Disseminate, Effect, Note, Persist, Reject, SendTo
from tops.protocol.messages import (
    Address,
    EndLog,
    Event,
    EventConfirmed,
    EventsPublished,
    EventsRejected,
    Follower,
    FollowLog,
    FollowRejected,
    GetLogState,
    LogEnded,
    LogEntry,
    LogStateReported,
    Published,
    Sender,
    TypeAdvertised,
    decode_body,
)
from tops.protocol.records import LogAppended, Publisher, SubscriptionAdvanced


class LogService:
    """Appends what is published to durable types to their logs, and serves the followers of these logs."""

    def __init__(self, known: KnownTypes, openings: LogOpenings, quotas: Quotas) -> None:
        self._known, self._openings, self._quotas = known, openings, quotas
        self.ordering: OrderingBroker | None = None

    # -------------------------------------------------------------------------------------------------- publishing

    def on_published(self, published: Published, sender: Sender, at: Address) -> list[Effect]:
        log = self._known.logs_of.get(published.event.type)
        misfit = self._known.misfit(published.event, sender, f"events {published.event.type}")
        if misfit is not None:
            return [misfit] if log is None else _rejection_sent(misfit, at)
        if log is None:
            ordered = self._ordered(published, sender, at)
            return [Disseminate(published)] if ordered is None else ordered
        if (rejection := self._rejection(log, published.event.type, sender)) is not None:
            return _rejection_sent(rejection, at)
        if log.opening is not None:
            return _not_open(log, published.event.type, at)
        if (ordered := self._ordered(published, sender, at)) is not None:
            return ordered
        seen = log.recognise(sender, published.origin.number)
        if seen is Repetition.REPEATED:
            return [SendTo(at, EventConfirmed(origin=published.origin))]
        if seen is Repetition.OUT_OF_TURN:
            return []
        publisher = Publisher(sender.node, sender.incarnation, published.origin.number)
        appended = self._append(log, published.event, publisher)
        confirmed = EventConfirmed(origin=published.origin, log_number=log.last_number)
        return [appended, SendTo(at, confirmed), Disseminate(published), *log.pump_all()]

    def _ordered(self, published: Published, sender: Sender, at: Address) -> list[Effect] | None:
        """What its topic manager does with an event of an ordering domain; None for other types."""
        family = self._known.families.get(published.event.type, published.event.type)
        if self.ordering is None or family not in self.ordering.topics:
            return None
        return self.ordering.on_published(published, family, sender, at)

    def _is_ordered(self, event_type: str) -> bool:
        family = self._known.families.get(event_type, event_type)
        return self.ordering is not None and family in self.ordering.topics

    def _rejection(self, log: EventLog, event_type: str, sender: Sender) -> Reject | None:
        """Why the log does not accept single events from this sender, or None. To the log of a replica set only its
        members publish single events: clients write in the way that the set's policy prescribes."""
        if (reason := self._known.unlisted(log.event_type, sender)) is not None:
            return Reject(sender, "originate", event_type, reason, f"events {event_type}", code=NOT_LISTED)
        if (reason := self._known.no_member(log.event_type, sender)) is None:
            return None
        reason = f"{reason}: only its replicas publish single events of {event_type!r}"
        return Reject(sender, "originate", event_type, reason, f"events {event_type}")

    @staticmethod
    def _append(log: EventLog, event: Event, publisher: Publisher) -> Effect:
        entry = LogEntry(number=log.reserve(), event=event)
        log.fill(entry, publisher)
        return Persist(LogAppended(event_type=log.event_type, entry=entry, publisher=publisher))

    def on_published_together(self, published: EventsPublished, sender: Sender, at: Address) -> list[Effect]:
        """Each event gets its own index and record; all of them are confirmed at once."""
        log = self._known.logs_of.get(published.event_type)
        if self._is_ordered(published.event_type):
            return [effect for each in _one_by_one(published) for effect in self.on_published(each, sender, at)]
        if log is None:
            return [Disseminate(published)]
        if (rejection := self._rejection(log, published.event_type, sender)) is not None:
            return _rejection_sent(rejection, at)
        if log.opening is not None:
            return _not_open(log, published.event_type, at)
        last = published.origin
        bodies = [body for encoded in published.bodies if (body := decode_body(encoded)) is not None]
        if not bodies or len(bodies) < len(published.bodies) or last.number < len(bodies):
            return []
        misfit = self._known.misfit_among(published.event_type, bodies, sender, f"events {published.event_type}")
        if misfit is not None:
            return _rejection_sent(misfit, at)
        events = [Event(published.event_type, body) for body in bodies]
        first = last.number - len(events) + 1
        if log.recognise(sender, first) is not Repetition.NEW:
            return [effect for each in _one_by_one(published) for effect in self.on_published(each, sender, at)]
        node, incarnation = sender.node, sender.incarnation
        effects: list[Effect] = [
            self._append(log, event, Publisher(node, incarnation, number))
            for number, event in enumerate(events, start=first)
        ]
        confirmed = EventConfirmed(origin=last, log_number=log.last_number, count=len(bodies))
        return [*effects, SendTo(at, confirmed), Disseminate(published), *log.pump_all()]

    # ----------------------------------------------------------------------------------------------------- reading

    def on_follow(self, m: FollowLog, sender: Sender, at: Address, now: float) -> list[Effect]:
        wanted = m.definitions[-1]
        if wanted.name not in self._known.types:
            if not m.defines:
                return [_undefined(wanted.name, m, sender)]
            effects = self._known.on_advertised(TypeAdvertised(definitions=m.definitions), sender, at, now)
        else:
            effects = []
        log = self._known.logs_of.get(wanted.name)
        if log is None:
            return effects
        if (rejection := self._beyond_quota(log, m, sender)) is not None:
            return [*effects, rejection]
        if m.ephemeral:
            return effects + self._read_ephemeral(log, m, sender, at)
        reported = None
        if m.digest is not None and m.position is not None and self._known.no_member(log.event_type, sender) is None:
            reported = LogPoint(m.history, m.position, m.digest)
        replica = sender.identity if reported is not None else ""
        key = feed_key(sender, m.name)
        if key in log.dropped and not self._known.is_replica(log.event_type, replica):
            return [*effects, SendTo(at, _dropped(log, m.name, log.dropped[key]))]
        known = log.feeds.get(key)
        position = m.position
        if position is None:
            position = known.position if known is not None else _start(m.start, log)
        kept = position + 1 >= log.oldest  # else it is rejected, and no record must retain the log for it
        noted: list[Effect] = []
        if kept and (known is None or known.position != position):
            record = SubscriptionAdvanced(event_type=log.event_type, name=key, position=position, replica=replica)
            noted = [Note(record)]
        voter = None if m.voter is None else voter_key(sender.identity, m.voter)
        feed = Feed(
            key, m.name, wanted.name, at, m.filter, position, position, m.credit, voter, replica, reported=reported
        )
        if reported is not None:
            return effects + self._feed_replica(log, feed, reported, noted)
        if position > log.last_number and known is None:
            text = f"{key} has acknowledged {position}, and the log of {log.event_type} ends at {log.last_number}"
            effects.append(Alarm("ahead-of-log", text))
        return effects + noted + log.want(feed)

    def _feed_replica(self, log: EventLog, feed: Feed, reported: LogPoint, noted: list[Effect]) -> list[Effect]:
        if self._openings.must_report(log, feed.replica):
            self._openings.hold(log, feed)
            return self._openings.request_index(log, feed)
        if log.opening is not None:
            self._openings.hold(log, feed)
            return []
        fits, problem = self._openings.judge(log, feed.replica, reported)
        return noted + log.want(feed) if fits else problem + self._openings.reject(log, feed, reported)

    def _beyond_quota(self, log: EventLog, m: FollowLog, sender: Sender) -> Reject | None:
        key = reader_key(sender, m.name) if m.ephemeral else feed_key(sender, m.name)
        known, most = log.feeds.get(key), self._quotas.followers
        reason = None
        if known is None and len(log.feeds) >= most:
            own = [k for k in log.feeds if identity_of_feed(k) == sender.identity]
            if len(own) >= most:
                reason = (
                    f"{sender.identity} has {len(own)} durable subscriptions of {log.event_type!r}, which is the "
                    "quota: end some first"
                )
        if reason is None and (known is None or known.filter != m.filter):
            reason = self._beyond_bytes(log, key, m, sender)
        if reason is None:
            return None
        return Reject(sender, "follow", log.event_type, reason, f"log {m.name}", code="quota")

    def _beyond_bytes(self, log: EventLog, key: str, m: FollowLog, sender: Sender) -> str | None:
        size, most = m.filter.encoded_bytes(), self._quotas.filter_bytes
        if size * self._quotas.followers <= most:
            return None  # even the greatest number of such filters is within the quota
        own = [feed.filter for k, feed in log.feeds.items() if k != key and identity_of_feed(k) == sender.identity]
        if size + sum(f.encoded_bytes() for f in own) <= most:
            return None
        return (
            f"the filters by which {sender.identity} follows {log.event_type!r} take over {most} bytes with this one, "
            "which is the quota: use shorter ones, or end some first"
        )

    @staticmethod
    def _read_ephemeral(log: EventLog, m: FollowLog, sender: Sender, at: Address) -> list[Effect]:
        """Serve a reader without a durable subscription. It leaves no record, so a restart removes its feed."""
        key, wanted = reader_key(sender, m.name), m.definitions[-1].name
        if m.position is None or m.position < 0:
            log.end(key)
            return []
        feed = Feed(key, m.name, wanted, at, m.filter, m.position, m.position, m.credit, ephemeral=True)
        return log.want(feed)

    def on_end(self, m: EndLog, sender: Sender, at: Address, now: float) -> list[Effect]:
        """End a durable subscription: its owner ends its own, an operator any. An unknown one counts as ended."""
        log = self._known.logs_of.get(m.event_type)
        key = m.name if m.operator else feed_key(sender, m.name)
        response: Effect = SendTo(at, LogEnded(request=m.request))
        if log is None or (key not in log.feeds and key not in log.dropped and not self._openings.knows(log, key)):
            return [response]
        known = log.feeds.get(key)
        log.end(key)
        ended = Persist(SubscriptionAdvanced(event_type=log.event_type, name=key, position=-1))
        replica = known.replica if known is not None and known.replica else key
        # Persist before the response: after a crash the subscription must not exist again.
        return [ended, response, *self._openings.on_ended(log, replica)]

    def drop_followers(self, log: EventLog, before: int) -> tuple[list[Feed], list[Effect]]:
        """Drop the durable subscriptions that need an index before this one, except those of replicas of the set.
        Returns them as well."""
        behind = [feed for feed in log.subscribers if feed.position + 1 < before]
        dropped = [feed for feed in behind if not self._known.is_replica(log.event_type, feed.replica)]
        effects: list[Effect] = []
        for feed in dropped:
            log.drop(feed.key, feed.position)
            record = SubscriptionAdvanced(
                event_type=log.event_type, name=feed.key, position=feed.position, dropped=True
            )
            effects += [Persist(record), SendTo(feed.address, _dropped(log, feed.name, feed.position))]
        return dropped, effects

    def on_get_log_state(self, m: GetLogState, sender: Sender, at: Address, now: float) -> list[Effect]:
        log = self._known.logs_of.get(m.event_type)
        if log is None:
            return []  # the requester repeats the request: the type may be about to be advertised
        standing = self._known.epochs[self._known.families[m.event_type]].standing
        in_sync = standing.in_sync if log.opening is None else frozenset()
        present = {s.identity for s in standing.registrations.values()}
        replicas_first = sorted(log.subscribers, key=lambda f: (not f.replica, f.key))
        followers = [Follower(f.key, f.position, f.key in present, f.key in in_sync) for f in replicas_first]
        reported = LogStateReported(
            request=m.request,
            event_type=m.event_type,
            decided=log.decided_upto,
            oldest=log.oldest,
            in_sync=tuple(sorted(in_sync)),
            followers=tuple(next(bundles(followers, encoded_bytes), [])),  # as many as fit into one message
            history=log.chain.history,
            stale=log.stale,
            is_open=log.opening is None,
        )
        return [SendTo(at, reported)]

    def on_read(self, event_type: str, feed: str, entries: tuple[LogEntry, ...]) -> list[Effect]:
        """The result of a `ReadLog`."""
        if feed == QUERY_FEED:
            return self._known.epochs[event_type].on_read(entries)
        return self._known.logs[event_type].on_read(feed, entries)


def _one_by_one(together: EventsPublished) -> list[Published]:
    bodies = [body for encoded in together.bodies if (body := decode_body(encoded)) is not None]
    last, event_type = together.origin, together.event_type
    first = last.number - len(bodies) + 1
    if len(bodies) < len(together.bodies) or first < 1:
        return []
    return [
        Published(event=Event(event_type, body), origin=msgspec.structs.replace(last, number=number))
        for number, body in enumerate(bodies, start=first)
    ]


def _start(start: str, log: EventLog) -> int:
    if start == "now" or not is_start(start):
        return log.decided_upto
    oldest = log.oldest - 1
    return oldest if start == "oldest" else min(max(int(start) - 1, oldest), log.decided_upto)


def _dropped(log: EventLog, name: str, position: int) -> FollowRejected:
    reason = (
        f"it was dropped: it acknowledged nothing after {position} until the broker retained more than `follower_size` "
        "of its journal for it. End it permanently (`unsubscribe(forget=True)`) and subscribe again; the log has what "
        "it missed only as far as the log is retained"
    )
    return FollowRejected(name=name, event_type=log.event_type, oldest=log.oldest, reason=reason)


def _rejection_sent(rejection: Reject, at: Address) -> list[Effect]:
    """Durable events were rejected: audit that, and end the publisher's wait for their confirmation."""
    return [rejection, SendTo(at, EventsRejected(event_type=rejection.event_type, reason=rejection.reason))]


def _undefined(name: str, m: FollowLog, sender: Sender) -> Reject:
    """A follower without the right to publish a type must not define a child of it: events of the child would reach
    the subscribers of the parent."""
    reason = f"event type {name!r} is not known at this broker: a publisher of its parent has to advertise it first"
    return Reject(sender, "follow", name, reason, f"log {m.name}", code="unknown-type")


def _not_open(log: EventLog, event_type: str, publisher: Address) -> list[Effect]:
    """No index can be assigned: the publisher repeats the events, unless only an operator can change that."""
    if log.stale is None:
        return []
    return [SendTo(publisher, EventsRejected(event_type=event_type, reason=str(log.stale)))]
