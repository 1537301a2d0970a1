"""A broker's machine with its disk, its links and the clock: carries out effects, and decides nothing of the protocol.

It decides about resources: which messages of a site pass, which slow reader is disconnected, and when publishers must
wait because too much is queued at this broker.
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
from tops.protocol.effects import Alarm, CancelTimer, Effect, ReadLog, Reject, SendOnLink, SetTimer
from tops.protocol.messages import (
    Dissemination,
    Envelope,
    EventConfirmed,
    EventsPublished,
    EventsRejected,
    LinkMessage,
    Published,
    type_of,
)
from tops.protocol.records import EpochCommitted, LogAppended
from tops.runtime.config import Limits
from tops.runtime.edge.guard import Guard
from tops.runtime.links.link import Link, Traffic
from tops.runtime.links.wire import (
    AnyControl,
    Backpressure,
    LinkHello,
    MessageRejected,
    encode_message,
    make_link_hello,
)
from tops.runtime.outbox import Outbox
from tops.runtime.record_store import RecordStore
from tops.runtime.timers import Timers
from tops.runtime.tx_meter import OUTCOMES, REQUESTS, TxMeter
from tops.security import AuditLog, KeyedBuckets, Kind, Peer

JOURNAL_QUEUE_MAX = 50_000
OUTBOX_MAX = 200_000
ALARMS_KEPT = 100
RATE_CHECK = 64  # messages of a site between two checks of its rate
WATCH_INTERVAL_MAX_S = 1.0  # the most that counts as time between two checks: a paused broker must not blame sites
ITERATION_S = 0.02  # for the messages of one link in one event-loop iteration

log = logging.getLogger("tops.broker")


class BrokerNode:
    """One incarnation of one broker."""

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
        self.rejecting = False  # the journal is full: durable events are rejected
        self.links: dict[NodeId, Link] = {}
        self.guards: dict[NodeId, Guard] = {}  # of links to sites
        self.former_traffic = Traffic()  # of links that are no more
        self.meter = TxMeter(core.rendezvous.logs_of)
        self.alarms: list[tuple[float, str, str]] = []
        self.counters = {
            "rejected": 0,
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
        self._checked_at = _now()
        self._backpressure = False
        self._backpressure_changes = 0
        self._remote_backpressure: dict[str, Backpressure] = {}

    def act(self, effects: list[Effect]) -> None:
        self.outbox.put(effects)

    # ----------------------------------------------------------------------------------------------------- receiving

    def take(self, link: Link, messages: tuple[LinkMessage, ...], size: int) -> float:
        """Process the messages of one frame of `size` bytes from a neighbour. If that takes long, the rest is processed
        in later event-loop iterations."""
        now = _now()
        guard = self.guards.get(link.name)
        waiting = self._untaken.get(link)
        if waiting is not None:
            waiting.extend((message, size) for message in messages)
        else:
            for taken, message in enumerate(messages):
                if taken and _now() - now > ITERATION_S:
                    self._take_later(link, deque((left, size) for left in messages[taken:]))
                    break
                self._act_on(link, guard, message, size, now)
        pause_s = self.pause(link)
        if guard is None:
            return pause_s
        guard.uncounted += len(messages)
        return max(pause_s, self._pause(guard, now)) if guard.uncounted >= RATE_CHECK else pause_s

    def _take_later(self, link: Link, waiting: deque[tuple[LinkMessage, int]]) -> None:
        if not self._untaken:
            asyncio.get_running_loop().call_soon(self._take_more)
        self._untaken[link] = waiting

    def _take_more(self) -> None:
        """Process messages of the link that has waited longest, for one event-loop iteration."""
        link, waiting = next(iter(self._untaken.items()))
        now = _now()
        try:
            while waiting and _now() - now <= ITERATION_S:
                if self.links.get(link.name) is not link:
                    waiting.clear()  # its session has ended: its messages no longer count
                    break
                message, size = waiting.popleft()
                self._act_on(link, self.guards.get(link.name), message, size, now)
        except Exception as error:  # caused by a message: the link's reader raises it
            waiting.clear()
            link.fail(error)
        del self._untaken[link]
        if waiting:
            self._untaken[link] = waiting
        if self._untaken:
            asyncio.get_running_loop().call_soon(self._take_more)

    def _act_on(self, link: Link, guard: Guard | None, message: LinkMessage, size: int, now: float) -> None:
        rejection = guard.rejection(message, size) if guard is not None else None
        if rejection is None and guard is not None and size > UNMEASURED_BYTES_MAX:
            rejection = guard.too_large(message)
        if rejection is None:
            if type(message) is Envelope and type(message.body) in REQUESTS and message.to.broker == self.name:
                self.meter.request(message.body, now)
            if not (self.rejecting and self._rejected_when_full(link, message)):
                self.outbox.put(self.core.receive(link.name, message, now))
        else:
            error = rejection.error
            for subject in rejection.subjects:
                self._send_rejection(link, subject, error.verb, error.event_type, str(error), rejection.code)

    def pause(self, link: Link) -> float:
        """For how long the link must not be read: messages that have arrived are processed first. A site's rate counts
        when its messages arrive, not while they wait."""
        return ITERATION_S if link in self._untaken else 0.0

    def _rejected_when_full(self, link: Link, message: LinkMessage) -> bool:
        """Reject durable events because the journal is full; their publisher may try again later."""
        if type(message) is not Dissemination or message.rendezvous != self.name:
            return False
        event_type = type_of(message.publication)
        durable = event_type in self.core.rendezvous.logs_of
        if not durable or not isinstance(message.publication, Published | EventsPublished):
            return False
        reason = f"the journal of {self.name} is full, and durable subscribers have not acknowledged its entries"
        rejection = EventsRejected(event_type=event_type, reason=reason)
        site = self.core.edge.sites.get(link.name)
        self.act(self.core.send_to(message.reply_to if site is None else site.address, rejection, _now()))
        return True

    def _pause(self, guard: Guard, now: float) -> float:
        """For how long a site over its rate is not read; none of its messages is dropped."""
        bucket = self._rates
        taken = min(guard.uncounted, bucket.burst)
        guard.uncounted = 0
        if bucket.take(guard.accountable, taken, now):
            return 0.0
        return min(taken / bucket.rate, self.limits.heartbeat_s / 4)

    def _count_rejection(self, code: str) -> None:
        self.counters["rejected"] += 1
        self.counters["over_quota"] += code == "quota"
        self.counters["sender_mismatches"] += code == "not-yours"

    def _send_rejection(
        self, link: Link, subject: str, verb: str, event_type: str, text: str, code: str = "denied"
    ) -> None:
        self._count_rejection(code)
        link.send_control(MessageRejected(subject, verb, event_type, text, code))
        guard = self.guards.get(link.name)
        principal = guard.principal if guard is not None else None
        # By identity: records are limited per party, and an identity can open any number of sessions.
        who = link.name if guard is None else guard.accountable
        how = "" if who == link.name else f" by {link.name}" if principal is None else f" through {link.name}"
        self._audit_denied(who, f"{verb} {event_type}", f"{code}: {subject}{how}")

    def follower_dropped(self, feed: Feed, last_number: int, most: int) -> None:
        """A durable subscription was dropped because too much of the journal was retained for it."""
        self.counters["followers_dropped"] += 1
        text = (
            f"the durable subscription {feed.key} was dropped at {feed.position} of {last_number} in "
            f"{feed.event_type}: over {most} bytes of the journal were retained for it (follower_size)"
        )
        self.alarm("follower-dropped", text)
        self._audit_denied(identity_of_feed(feed.key), f"follow {feed.event_type}", text)

    def _audit_denied(self, identity: str, act: str, detail: str) -> None:
        if self.audit is not None:
            self.audit.denied(time.time(), who=identity, act=act, detail=detail)

    def _reject(self, rejected: Reject) -> None:
        """The machine did not act on a message of a site, which may be connected to another broker."""
        link = self.links.get(rejected.sender.node)
        if link is not None:
            self._send_rejection(
                link, rejected.subject, rejected.verb, rejected.event_type, rejected.reason, rejected.code
            )
            return
        self._count_rejection(rejected.code)
        sender = rejected.sender
        self._audit_denied(sender.accountable, f"{rejected.verb} {rejected.event_type}", rejected.reason)

    def on_control(self, link: Link, control: AnyControl) -> None:
        if isinstance(control, Backpressure) and link.name not in self.guards:
            self._on_neighbour_backpressure(link, control)
            return
        raise ProtocolError(f"{link.name} sent a {type(control).__name__}, which it must not send")

    # ------------------------------------------------------------------------------------------------------- effects

    def _perform(self, effect: Effect) -> None:
        kind = type(effect)
        if kind is SendOnLink:
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
                # Persist and Note went to the journal before this point, and the core routes `SendTo` itself.
                raise InvariantBroken(f"a broker can't perform the effect {effect!r}")

    def _send(self, name: NodeId, message: LinkMessage) -> None:
        if type(message) is Envelope and type(message.body) in OUTCOMES:
            self.meter.outcome(message.body, _now())
        link = self.links.get(name)
        if link is None:
            self.counters["dropped"] += 1  # the neighbour is disconnected: requests are repeated on a new link
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
        link.enqueue(encoded)
        if type(message) is Envelope and type(message.body) is EventConfirmed:
            link.send_now()  # its publisher waits; subscribers get the event afterwards
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

    # --------------------------------------------------------------------------------------------------------- links

    def own_link_hello(self, peer: Peer) -> LinkHello:
        """The first control frame on a connection with this peer."""
        known = self.links.get(peer.node)
        brokers, urls = tuple(self.addresses), tuple(self.addresses.values())
        proposal, domains = secrets.token_hex(8), self.core.topology.domains
        if known is not None and known.incarnation == peer.incarnation:
            return make_link_hello(known.session_name, known.session.received, proposal, brokers, urls, domains)
        return make_link_hello("", 0, proposal, brokers, urls, domains)

    def link_for(self, peer: Peer, guard: Guard | None, ours: LinkHello, theirs: LinkHello, proposal: str) -> Link:
        """The link that this connection carries: the one whose session both ends still have, or a new one."""
        name = peer.node
        known = self.links.get(name)
        if guard is not None:
            self.guards[name] = guard
        if known is not None and ours.session and ours.session == theirs.session:
            log.info("link resumed", extra={"node": self.name, "peer": str(peer.identity)})
            return known
        self._remove(name)
        link = self.links[name] = Link(name, peer.incarnation, proposal)
        if peer.identity.kind is not Kind.BROKER:
            link.hold(self.backpressure)
            self.act(self.core.site_up(peer.sender, _now()))
        else:
            self.act(self.core.broker_up(name, peer.incarnation, _now()))
        log.info("linked", extra={"node": self.name, "peer": str(peer.identity), "incarnation": peer.incarnation})
        return link

    def disconnected(self, link: Link) -> None:
        """The connection of a link broke. A site may reconnect within the grace period, unless it has closed the
        link itself."""
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
        """End the session with a broker that has sent something undecodable: it would repeat that with every
        connection. Both ends begin a new session, as after a long absence, and exchange their routes; messages under
        way are lost, and requests are repeated. To skip only that message would not be safe: a session that continues
        must not lose a route."""
        self.counters["resets"] += 1
        self.alarm("undecodable", f"the link to broker {link.name} begins a new session: {reason}")
        if self.links.get(link.name) is link:
            self._remove(link.name)

    def _remove(self, name: NodeId) -> None:
        link = self.links.pop(name, None)
        if link is not None:
            self.former_traffic.add(link.traffic)

    def traffic(self) -> Traffic:
        """What has passed all links since the start."""
        passed = Traffic()
        for traffic in (self.former_traffic, *(link.traffic for link in self.links.values())):
            passed.add(traffic)
        return passed

    def _too_slow(self, link: Link, why: str) -> None:
        self.counters["slow_readers"] += 1
        waiting = link.pending_bytes
        fields = {"node": self.name, "site": link.name, "bytes": waiting, "reason": why}
        log.warning("slow reader disconnected", extra=fields)
        link.close(
            f"this site reads too slowly: {waiting} bytes wait for it ({why}); connect again, or subscribe durably"
        )
        self._lose(link)

    def _cut_off_slow_readers(self, passed_s: float) -> None:
        """Disconnect sites that read too slowly. The data that waits for sites is limited in time, and in bytes for
        each identity and in total; the session of an identity with the most data is disconnected first."""
        limits = self.limits
        waiting: dict[str, list[Link]] = {}
        for name, guard in list(self.guards.items()):
            link = self.links[name]
            if link.flow.stalled_s(passed_s) > limits.acknowledge_s and link.connected:
                self._too_slow(link, f"it acknowledged nothing for {limits.acknowledge_s:g} s, `acknowledge_s`")
            elif link.pending_bytes:
                waiting.setdefault(guard.accountable, []).append(link)
        held = {identity: sum(link.pending_bytes for link in links) for identity, links in waiting.items()}
        for links in waiting.values():
            links.sort(key=lambda link: link.pending_bytes)
        for identity, links in waiting.items():
            while held[identity] > limits.identity_bytes_max:
                held[identity] -= links[-1].pending_bytes
                self._too_slow(links.pop(), f"over `identity_bytes_max` wait for all sessions of {identity}")
        while sum(held.values()) > limits.sites_bytes_max:
            identity = max(held, key=held.__getitem__)
            held[identity] -= waiting[identity][-1].pending_bytes
            self._too_slow(waiting[identity].pop(), "over `sites_bytes_max` wait for all sites of this broker")

    def _lose(self, link: Link) -> None:
        self._remove(link.name)
        del self.guards[link.name]
        log.info("site lost", extra={"node": self.name, "site": link.name})
        self.act(self.core.site_lost(link.name, _now()))

    # -------------------------------------------------------------------------------------------------- backpressure

    @property
    def backpressure(self) -> bool:
        """Whether publishers anywhere in the cluster must wait."""
        return self._backpressure or any(p.backpressure for p in self._remote_backpressure.values())

    def broker_links(self) -> Iterator[Link]:
        return (link for name, link in self.links.items() if name not in self.guards)

    def watch(self) -> None:
        """Check the queues; to be called several times a second."""
        now = _now()
        self._cut_off_slow_readers(min(now - self._checked_at, WATCH_INTERVAL_MAX_S))
        self._checked_at = now
        limit = self.limits.link_bytes_max // (2 if self._backpressure else 1)
        for link in list(self.broker_links()):
            if not link.connected and link.pending_bytes > self.limits.link_bytes_max:
                # It is not known when it comes back: it begins a new session then, and does not block the others.
                self.counters["resets"] += 1
                self.alarm(
                    "link-reset", f"{link.name} is unreachable and {link.pending_bytes} bytes for it were dropped"
                )
                self._remove(link.name)
        backpressure = (
            any(link.connected and link.queued_bytes > limit for link in self.broker_links())
            or self.store.journal.queued > JOURNAL_QUEUE_MAX
            or len(self.outbox) > OUTBOX_MAX
        )
        if backpressure != self._backpressure:
            self._backpressure = backpressure
            self._backpressure_changes += 1
            self._spread(Backpressure(self.name, self.core.incarnation, self._backpressure_changes, backpressure), None)
            self._hold_sites()

    def _on_neighbour_backpressure(self, link: Link, control: Backpressure) -> None:
        known = self._remote_backpressure.get(control.broker)
        newer = known is None or (known.incarnation, known.change) < (control.incarnation, control.change)
        if control.broker == self.name or control.broker not in self.core.topology.brokers or not newer:
            return
        self._remote_backpressure[control.broker] = control
        self._spread(control, link)
        self._hold_sites()

    def _spread(self, control: Backpressure, source: Link | None) -> None:
        for link in self.broker_links():
            if link is not source:
                link.send_control(control)

    def _hold_sites(self) -> None:
        backpressure = self.backpressure
        for name in self.guards:
            self.links[name].hold(backpressure)

    def stop(self) -> None:
        self.timers.clear()
        for task in self._reads:
            task.cancel()


class _Recording:
    """The record store, which also reports records to the log and the counters."""

    def __init__(self, store: RecordStore, recorded: Callable[[object], None]) -> None:
        self._store, self._recorded = store, recorded
        self.is_durable, self.when_durable = store.is_durable, store.when_durable

    def append(self, record: object, *, soon: bool = True) -> int:
        self._recorded(record)
        return self._store.append(record, soon=soon)  # type: ignore[arg-type]


def _now() -> float:
    return time.monotonic()  # the loop's clock
