"""A broker's machine with its disk, its links and the clock: carries out effects, and decides nothing of the protocol.

What it does decide is about resources: which messages of a site pass, which reader is too slow to be kept, and when
publishers must wait because this broker has more queued than it likes.
"""

import asyncio
import logging
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping

from tops.core.broker.broker import BrokerCore
from tops.core.log.event_log import Feed, identity_of_feed
from tops.model.errors import InvariantBroken, ProtocolError
from tops.model.ids import NodeId
from tops.model.sizes import UNMEASURED_BYTES_MAX
from tops.protocol.effects import Alarm, CancelTimer, Effect, ReadLog, Reject, Send, SetTimer
from tops.protocol.messages import (
    Dissemination,
    Envelope,
    EventConfirmed,
    EventsPublished,
    EventsRefused,
    LinkMessage,
    Published,
    type_of,
)
from tops.protocol.records import EpochCommitted, LogAppended
from tops.runtime.config import Limits
from tops.runtime.edge.guard import Guard
from tops.runtime.links.link import Link
from tops.runtime.links.wire import AnyWord, Meet, Pressed, Refused, encode_message, meeting
from tops.runtime.outbox import Outbox
from tops.runtime.record_store import RecordStore
from tops.runtime.timers import Timers
from tops.security import AuditLog, KeyedBuckets, Kind, Peer

JOURNAL_QUEUE_MAX = 50_000
OUTBOX_MAX = 200_000
ALARMS_KEPT = 100
RATE_LOOK = 64  # messages of a site between two looks at its rate
WATCHED_AGAIN_S = 1.0  # what counts at most as time between two looks: a broker that stood still blames no site
TURN_S = 0.02  # for the messages of one link, before others have their turn

log = logging.getLogger("tops.broker")


class BrokerNode:
    """One life of one broker."""

    def __init__(
        self,
        core: BrokerCore,
        store: RecordStore,
        limits: Limits,
        audit: AuditLog | None,
        cluster: str,
        addresses: Mapping[NodeId, str],
    ) -> None:
        self.core, self.store, self.limits, self.audit = core, store, limits, audit
        self.cluster, self.addresses = cluster, addresses
        self.name = core.name
        self.refusing = False  # no room is left for more durable events
        self.links: dict[NodeId, Link] = {}
        self.guards: dict[NodeId, Guard] = {}  # of the links that are sites'
        self.alarms: list[tuple[float, str, str]] = []
        self.counters = {
            "refused": 0,
            "over_quota": 0,
            "sender_mismatches": 0,
            "dropped": 0,
            "slow_readers": 0,
            "followers_dropped": 0,
            "alarms": 0,
            "decisions": 0,
            "resets": 0,
        }
        self.timers = Timers(lambda key: self.act(core.timer(key, _now())))
        self.outbox = Outbox(self._perform, _Recording(store, self._recorded))
        self._encoded: tuple[LinkMessage | None, bytes] = (None, b"")
        self._rates = KeyedBuckets(limits.messages_per_s, max(limits.messages_per_s, 1024))
        self._reads: set[asyncio.Task[None]] = set()
        self._untaken: OrderedDict[Link, deque[tuple[LinkMessage, int]]] = OrderedDict()  # with the size of the frame
        self._watched_at = _now()
        self._pressed = False
        self._pressed_changes = 0
        self._pressed_elsewhere: dict[str, Pressed] = {}

    def act(self, effects: list[Effect]) -> None:
        self.outbox.put(effects)

    # -------------------------------------------------------------------------------------------------- what arrives

    def take(self, link: Link, messages: tuple[LinkMessage, ...], size: int) -> float:
        """Messages of one frame of `size` bytes, from a neighbour. When they take long, the rest is taken later."""
        now = _now()
        guard = self.guards.get(link.name)
        waiting = self._untaken.get(link)
        if waiting is not None:
            waiting.extend((message, size) for message in messages)
        else:
            for taken, message in enumerate(messages):
                if taken and _now() - now > TURN_S:
                    self._take_later(link, deque((left, size) for left in messages[taken:]))
                    break
                self._act_on(link, guard, message, size, now)
        pause_s = self.pause(link)
        if guard is None:
            return pause_s
        guard.unreckoned += len(messages)
        return max(pause_s, self._pause(guard, now)) if guard.unreckoned >= RATE_LOOK else pause_s

    def _take_later(self, link: Link, waiting: deque[tuple[LinkMessage, int]]) -> None:
        if not self._untaken:
            asyncio.get_running_loop().call_soon(self._take_more)
        self._untaken[link] = waiting

    def _take_more(self) -> None:
        """One turn of the link that has waited longest; the loop does other work between two turns."""
        link, waiting = next(iter(self._untaken.items()))
        now = _now()
        try:
            while waiting and _now() - now <= TURN_S:
                if self.links.get(link.name) is not link:
                    waiting.clear()  # its session is over, and what came with it is void
                    break
                message, size = waiting.popleft()
                self._act_on(link, self.guards.get(link.name), message, size, now)
        except Exception as error:  # of what arrived: the link's reader raises it
            waiting.clear()
            link.fail(error)
        del self._untaken[link]
        if waiting:
            self._untaken[link] = waiting
        if self._untaken:
            asyncio.get_running_loop().call_soon(self._take_more)

    def _act_on(self, link: Link, guard: Guard | None, message: LinkMessage, size: int, now: float) -> None:
        refusal = guard.refusal(message, size) if guard is not None else None
        if refusal is None and guard is not None and size > UNMEASURED_BYTES_MAX:
            refusal = guard.too_large(message)
        if refusal is None:
            if not (self.refusing and self._turned_away(link, message)):
                self.outbox.put(self.core.receive(link.name, message, now))
        else:
            error = refusal.error
            for subject in refusal.subjects:
                self._refuse(link, subject, error.verb, error.event_type, str(error), refusal.code)

    def pause(self, link: Link) -> float:
        """A site's rate is reckoned when its messages arrive, not while it waits; what arrived is taken first."""
        return TURN_S if link in self._untaken else 0.0

    def _turned_away(self, link: Link, message: LinkMessage) -> bool:
        """There is no room for more durable events: their publisher hears it, and may try again later."""
        if type(message) is not Dissemination or message.rendezvous != self.name:
            return False
        event_type = type_of(message.publication)
        durable = event_type in self.core.rendezvous.logs_of
        if not durable or not isinstance(message.publication, Published | EventsPublished):
            return False
        reason = f"the journal of {self.name} is full, and durable subscribers have not taken what is in it"
        letter = EventsRefused(event_type=event_type, reason=reason)
        site = self.core.edge.sites.get(link.name)
        self.act(self.core.post(message.reply_to if site is None else site.address, letter, _now()))
        return True

    def _pause(self, guard: Guard, now: float) -> float:
        """A site over its rate is read more slowly; nothing of it is dropped."""
        bucket = self._rates
        taken = min(guard.unreckoned, bucket.burst)
        guard.unreckoned = 0
        if bucket.take(guard.accountable, taken, now):
            return 0.0
        return min(taken / bucket.rate, self.limits.heartbeat_s / 4)

    def _count_rejection(self, code: str) -> None:
        self.counters["refused"] += 1
        self.counters["over_quota"] += code == "quota"
        self.counters["sender_mismatches"] += code == "not-yours"

    def _refuse(self, link: Link, subject: str, verb: str, event_type: str, text: str, code: str = "denied") -> None:
        self._count_rejection(code)
        link.say(Refused(subject, verb, event_type, text, code))
        guard = self.guards.get(link.name)
        principal = guard.principal if guard is not None else None
        who, through = (link.name, "") if principal is None else (principal.name, f" through {link.name}")
        self._audit_denied(who, f"{verb} {event_type}", f"{code}: {subject}{through}")

    def follower_dropped(self, feed: Feed, last_number: int, most: int) -> None:
        """A durable subscription was dropped because of what was kept for it."""
        self.counters["followers_dropped"] += 1
        text = (
            f"the durable subscription {feed.key} was dropped at {feed.position} of {last_number} in "
            f"{feed.event_type}: over {most} bytes of the journal were kept for it (follower_size)"
        )
        self.alarm("follower-dropped", text)
        self._audit_denied(identity_of_feed(feed.key), f"follow {feed.event_type}", text)

    def _audit_denied(self, who: str, act: str, detail: str) -> None:
        if self.audit is not None:
            self.audit.denied(time.time(), who=who, act=act, detail=detail)

    def _reject(self, rejected: Reject) -> None:
        """The machine did not act on a message of a site, which may be connected elsewhere."""
        link = self.links.get(rejected.sender.node)
        if link is not None:
            self._refuse(link, rejected.subject, rejected.verb, rejected.event_type, rejected.reason, rejected.code)
            return
        self._count_rejection(rejected.code)
        sender = rejected.sender
        who = sender.node if sender.on_behalf_of is None else sender.accountable
        self._audit_denied(who, f"{rejected.verb} {rejected.event_type}", rejected.reason)

    def hear(self, link: Link, word: AnyWord) -> None:
        if isinstance(word, Pressed) and link.name not in self.guards:
            self._neighbour_pressed(link, word)
            return
        raise ProtocolError(f"{link.name} said {type(word).__name__}, which is not for it to say")

    # ------------------------------------------------------------------------------------------------ what is wanted

    def _perform(self, effect: Effect) -> None:
        kind = type(effect)
        if kind is Send:
            self._send(effect.link, effect.message)  # type: ignore[attr-defined]
            return
        match effect:
            case SetTimer(key=key, after_s=after_s):
                self.timers.set(key, after_s)
            case CancelTimer(key=key):
                self.timers.cancel(key)
            case ReadLog():
                task = asyncio.ensure_future(self._read_log(effect))
                self._reads.add(task)
                task.add_done_callback(self._reads.discard)
            case Alarm(kind=what, text=text):
                self.alarm(what, text)
            case Reject():
                self._reject(effect)
            case _:
                # Persist and Note went to the journal before this point, and the core routes Post itself.
                raise InvariantBroken(f"a broker can't perform the effect {effect!r}")

    def _send(self, name: NodeId, message: LinkMessage) -> None:
        link = self.links.get(name)
        if link is None:
            self.counters["dropped"] += 1  # the neighbour is gone: whoever cares asks again
            return
        guard = self.guards.get(name)
        if guard is not None:
            passed = guard.deliverable(message)
            if passed is None:
                return
            message = passed
        known, encoded = self._encoded
        if known is not message:
            try:
                encoded = encode_message(message)
            except ProtocolError as error:
                self.alarm("too-large", str(error))
                return
            self._encoded = (message, encoded)
        link.post(encoded)
        if type(message) is Envelope and type(message.body) is EventConfirmed:
            link.send_now()  # its publisher waits; subscribers get the event after it
        if guard is not None and link.pending_bytes > self.limits.queue_bytes_max:
            self._too_slow(link, "`queue_bytes_max`")

    async def _read_log(self, wanted: ReadLog) -> None:
        entries = await self.store.entries(wanted.event_type, wanted.first, wanted.last)
        self.act(self.core.log_read(wanted.event_type, wanted.feed, entries, _now()))

    def _recorded(self, record: object) -> None:
        match record:
            case EpochCommitted(epoch=epoch, transactions=transactions):
                self.counters["decisions"] += 1
                log.info("committed", extra={"node": self.name, "epoch": str(epoch), "tx": transactions})
            case LogAppended(entry=entry) if entry.transactions:
                self.counters["decisions"] += 1
                if log.isEnabledFor(logging.INFO):
                    ids = [t.tx for t in entry.transactions]
                    log.info("committed", extra={"node": self.name, "number": entry.number, "tx": ids})

    def alarm(self, kind: str, text: str) -> None:
        """Something an operator must see."""
        self.counters["alarms"] += 1
        self.alarms = [*self.alarms[1 - ALARMS_KEPT :], (time.time(), kind, text)]
        log.warning(text, extra={"node": self.name, "alarm": kind})

    # ---------------------------------------------------------------------------------------------- links come and go

    def our_meet(self, peer: Peer) -> Meet:
        """What we say first on a connection with this peer."""
        known = self.links.get(peer.node)
        brokers, urls = tuple(self.addresses), tuple(self.addresses.values())
        proposal, domains = secrets.token_hex(8), self.core.topology.domains
        if known is not None and known.incarnation == peer.incarnation:
            return meeting(known.session_name, known.session.received, proposal, brokers, urls, domains)
        return meeting("", 0, proposal, brokers, urls, domains)

    def link_for(self, peer: Peer, guard: Guard | None, ours: Meet, theirs: Meet, proposal: str) -> Link:
        """The link that this connection carries: the one that both ends remember, or a new one."""
        name = peer.node
        known = self.links.get(name)
        if guard is not None:
            self.guards[name] = guard
        if known is not None and ours.session and ours.session == theirs.session:
            return known
        link = self.links[name] = Link(name, peer.incarnation, proposal)
        if peer.identity.kind is not Kind.BROKER:
            link.hold(self.pressed)
            self.act(self.core.site_up(peer.sender, _now()))
        else:
            self.act(self.core.broker_up(name, peer.incarnation, _now()))
        log.info("linked", extra={"node": self.name, "peer": str(peer.identity), "incarnation": peer.incarnation})
        return link

    def disconnected(self, link: Link) -> None:
        """The connection of a link broke; a site is given some time to come back, unless it took its leave."""
        if link.name not in self.guards or self.links.get(link.name) is not link:
            return
        if link.parted is not None:
            self._lose(link)
        else:
            asyncio.get_running_loop().call_later(self.limits.site_grace_s, self._give_up_on, link)

    def _give_up_on(self, link: Link) -> None:
        if self.links.get(link.name) is link and not link.connected:
            self._lose(link)

    def reset(self, link: Link, reason: str) -> None:
        """Forget the session with a broker that has sent something undecodable: it would send the same again with
        every connection, for ever. Both ends begin a new session, as after a long absence, and exchange their routes;
        what was under way is lost, and whoever waits for it asks again. To skip the one message would not be safe: a
        session that goes on must not lose a route."""
        self.counters["resets"] += 1
        self.alarm("undecodable", f"the link to broker {link.name} begins anew: {reason}")
        if self.links.get(link.name) is link:
            del self.links[link.name]

    def _too_slow(self, link: Link, why: str) -> None:
        self.counters["slow_readers"] += 1
        waiting = link.pending_bytes
        fields = {"node": self.name, "site": link.name, "bytes": waiting, "reason": why}
        log.warning("slow reader cut off", extra=fields)
        link.close(f"you read too slowly: {waiting} bytes wait for you ({why}); connect again, or subscribe durably")
        self._lose(link)

    def _cut_off_slow_readers(self, passed_s: float) -> None:
        """What waits for sites is bounded in time, and in bytes for each identity and in all. Of an identity that has
        too much, the session that has most is disconnected first."""
        limits = self.limits
        waiting: dict[str, list[Link]] = {}
        for name, guard in list(self.guards.items()):
            link = self.links[name]
            if link.unacknowledged_s(passed_s) > limits.acknowledge_s and link.connected:
                self._too_slow(link, f"you acknowledged nothing for {limits.acknowledge_s:g} s, `acknowledge_s`")
            elif link.pending_bytes:
                waiting.setdefault(guard.accountable, []).append(link)
        held = {who: sum(link.pending_bytes for link in links) for who, links in waiting.items()}
        for links in waiting.values():
            links.sort(key=lambda link: link.pending_bytes)
        for who, links in waiting.items():
            while held[who] > limits.identity_bytes_max:
                held[who] -= links[-1].pending_bytes
                self._too_slow(links.pop(), f"{who} has over `identity_bytes_max` waiting in all its sessions")
        while sum(held.values()) > limits.sites_bytes_max:
            who = max(held, key=held.__getitem__)
            held[who] -= waiting[who][-1].pending_bytes
            self._too_slow(waiting[who].pop(), "over `sites_bytes_max` wait for all sites of this broker")

    def _lose(self, link: Link) -> None:
        del self.links[link.name]
        del self.guards[link.name]
        log.info("site lost", extra={"node": self.name, "site": link.name})
        self.act(self.core.site_lost(link.name, _now()))

    # ----------------------------------------------------------------------------------------------------- pressure

    @property
    def pressed(self) -> bool:
        """Whether publishers anywhere in the cluster must wait."""
        return self._pressed or any(p.pressed for p in self._pressed_elsewhere.values())

    def broker_links(self) -> Iterator[Link]:
        return (link for name, link in self.links.items() if name not in self.guards)

    def watch(self) -> None:
        """Look at the queues; to be called several times a second."""
        now = _now()
        self._cut_off_slow_readers(min(now - self._watched_at, WATCHED_AGAIN_S))
        self._watched_at = now
        limit = self.limits.link_bytes_max // (2 if self._pressed else 1)
        for link in list(self.broker_links()):
            if not link.connected and link.pending_bytes > self.limits.link_bytes_max:
                # Nobody knows when it comes back: it begins anew then, and everyone else goes on meanwhile.
                self.counters["resets"] += 1
                self.alarm("link-reset", f"{link.name} is away and {link.pending_bytes} bytes for it were dropped")
                del self.links[link.name]
        pressed = (
            any(link.connected and link.queued_bytes > limit for link in self.broker_links())
            or self.store.journal.queued > JOURNAL_QUEUE_MAX
            or len(self.outbox) > OUTBOX_MAX
        )
        if pressed != self._pressed:
            self._pressed = pressed
            self._pressed_changes += 1
            self._spread(Pressed(self.name, self.core.incarnation, self._pressed_changes, pressed), None)
            self._hold_sites()

    def _neighbour_pressed(self, link: Link, word: Pressed) -> None:
        known = self._pressed_elsewhere.get(word.broker)
        newer = known is None or (known.incarnation, known.change) < (word.incarnation, word.change)
        if word.broker == self.name or word.broker not in self.core.topology.brokers or not newer:
            return
        self._pressed_elsewhere[word.broker] = word
        self._spread(word, link)
        self._hold_sites()

    def _spread(self, word: Pressed, source: Link | None) -> None:
        for link in self.broker_links():
            if link is not source:
                link.say(word)

    def _hold_sites(self) -> None:
        pressed = self.pressed
        for name in self.guards:
            self.links[name].hold(pressed)

    def stop(self) -> None:
        self.timers.clear()
        for task in self._reads:
            task.cancel()


class _Recording:
    """The record store, with a look at what is recorded for logs and counters."""

    def __init__(self, store: RecordStore, recorded: Callable[[object], None]) -> None:
        self._store, self._recorded = store, recorded
        self.is_durable, self.when_durable = store.is_durable, store.when_durable

    def append(self, record: object, *, soon: bool = True) -> int:
        self._recorded(record)
        return self._store.append(record, soon=soon)  # type: ignore[arg-type]


def _now() -> float:
    return time.monotonic()  # the loop's clock
