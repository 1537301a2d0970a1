"""A site's machine with its link, timers and participants; connects to a broker, and to another one on failure."""

import asyncio
import logging
import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from tops.core.client.site import SiteCore
from tops.core.participant.participation import SiteOptions
from tops.model.errors import (
    ConfigError,
    InvariantBroken,
    NotAuthenticated,
    NotReachable,
    PermissionDenied,
    ProtocolError,
    TopsError,
)
from tops.model.ids import NodeId, TxId
from tops.model.ordering import OrderingDomain
from tops.protocol.effects import (
    Alarm,
    Call,
    CancelTimer,
    CompleteRequest,
    Deliver,
    DeliverAll,
    DropMemo,
    Effect,
    HistoryJudged,
    PlannedSubscription,
    SendOnLink,
    SetTimer,
    TakeTcm,
    TxEnded,
)
from tops.protocol.messages import Event, LinkMessage, TxOutcome, TxSpec
from tops.runtime.links.dialling import client_session, open_socket
from tops.runtime.links.identity import HANDSHAKE_TIMEOUT_S, Self
from tops.runtime.links.link import Link, exchange_link_hello
from tops.runtime.links.sockets import Socket
from tops.runtime.links.wire import AnyControl, LinkHello, MessageRejected, encode_message, make_link_hello
from tops.runtime.outbox import Outbox
from tops.runtime.participant_driver import ParticipantDriver
from tops.runtime.timers import Timers
from tops.security import Peer

REDIAL_FIRST_S, REDIAL_MAX_S = 0.05, 1.0
BACKLOG_MAX = 100_000  # ordinary events that participants have not processed; beyond it nothing more is read
BACKLOG_BYTES_MAX = 64 * 2**20  # received since participants had processed everything; beyond it the same
BACKLOG_PAUSE_S = 0.01
BACKLOG_CHECK, BACKLOG_CHECK_BYTES = 64, 2**20  # messages, or bytes, between two checks of it

log = logging.getLogger("tops.site")

Ended = Callable[[TxId, bool, str], None]


class SiteNode:
    """One incarnation of one site."""

    def __init__(self, name: str, own: Self, urls: Sequence[str], options: SiteOptions, heartbeat_s: float) -> None:
        self.name, self.own, self.options, self.heartbeat_s = NodeId(name), own, options, heartbeat_s
        self.urls = list(urls)
        self._loop = asyncio.get_running_loop()  # cached: to look it up costs a system call each time
        self._domains: tuple[OrderingDomain, ...] = ()  # as the first broker named them
        self._core: SiteCore | None = None  # made when the first broker has named the brokers of the cluster
        self.link: Link | None = None
        self.broker = ""
        self.drivers: dict[int, ParticipantDriver] = {}
        self.rejected: dict[tuple[str, str], str] = {}  # verb and type -> why
        self.on_ended: Ended | None = None
        self.on_routed: Callable[[TakeTcm | PlannedSubscription], None] | None = None  # what participants act on
        self.timers = Timers(lambda key: self.act(self.core.timer(key, _now())))
        self.outbox = Outbox(self._perform)
        self._responses: dict[int, asyncio.Future[Any]] = {}
        self._subjects: dict[str, int] = {}  # the subject of a request -> the request, for rejections
        self._requests = 0
        self._connecting: asyncio.Task[None] | None = None
        self._session: aiohttp.ClientSession | None = None
        self._first: asyncio.Future[None] | None = None
        self._up_since: float | None = None  # when the current or last connection was made
        self._closing = False
        self._problem = ""  # why the last attempt to connect failed
        self._gathered = False  # whether something waits for the end of this event-loop iteration
        self._taken = 0  # messages since the last check of the backlog
        self._checked_bytes = 0  # what the link had received at that check
        self._backlog_bytes = 0  # an upper bound of what was received and is not processed

    @property
    def core(self) -> SiteCore:
        """The site's machine; a site is used only after `connect` has returned."""
        assert self._core is not None, "a site has a machine once it has connected"
        return self._core

    # ------------------------------------------------------------------------------------------------------ requests

    def act(self, effects: list[Effect]) -> None:
        """Carry out what the machine wants, behind what the application handed over before."""
        if self._gathered:
            self._send_gathered()
        self.outbox.put(effects)

    def publish_soon(self, event_type: str, body: dict[str, Any], request: int) -> None:
        """An ordinary event, with the request that waits for its confirmation (0: none does). Those of one event-loop
        iteration travel together."""
        self._gather(self.core.gathering.add_event(request, event_type, body))

    def _gather(self, effects: list[Effect]) -> None:
        """Something was added to what travels together; the effects are for what was added before it."""
        if not self._gathered:
            self._gathered = True
            self._loop.call_soon(self._send_gathered)
        if effects:
            self.outbox.put(effects)

    def _send_gathered(self) -> None:
        if not self._gathered:
            return
        self._gathered = False
        self.outbox.put(self.core.gathering.send())
        if self.link is not None:
            self.link.send_now()  # it need not wait for the end of the next iteration as well

    async def publish_confirmed(self, event_type: str, body: dict[str, Any]) -> int | None:
        """Publish an event of a durable type; returns its index when it is on disk."""
        request = self.next_request()
        response = self._responses[request] = self._loop.create_future()
        try:
            self.publish_soon(event_type, body, request)
            number: int | None = await response
            return number
        finally:
            self._responses.pop(request, None)

    def execute(self, spec: TxSpec, events: tuple[Event, ...], size: int) -> "asyncio.Future[TxOutcome]":
        """A one-shot with so many bytes of events; those of one kind and one event-loop iteration travel together.

        A caller that stops waiting does not stop the transaction."""
        request = self.next_request()
        response: asyncio.Future[TxOutcome] = self._loop.create_future()
        self._responses[request] = response
        self._gather(self.core.gathering.add_one_shot(request, spec, events, size))
        return response

    def next_request(self) -> int:
        self._requests += 1
        return self._requests

    async def request(self, make: Callable[[int], list[Effect]], subject: str = "") -> Any:
        """Make a request to the machine and wait for its result. `subject` identifies it in rejections of the
        broker."""
        number = self.next_request()
        response = self._responses[number] = self._loop.create_future()
        try:
            self.act(make(number))
            if subject and not response.done():
                self._subjects[subject] = number
            return await response
        finally:
            self._responses.pop(number, None)
            self._subjects.pop(subject, None)

    @property
    def is_full(self) -> bool:
        """Whether more is queued for the broker than the window allows: publishers should call `wait_writable`."""
        return self.link is not None and self.link.is_full

    async def wait_writable(self) -> None:
        """Wait while more is queued for the broker than the window allows: backpressure on the application."""
        if self.link is not None:
            await self.link.wait_writable()

    def _perform(self, effect: Effect) -> None:
        if type(effect) is CompleteRequest:
            self._complete(effect)
            return
        if type(effect) is TxEnded:
            if self.on_ended is not None:
                self.on_ended(effect.tx, effect.committed, effect.reason)
            return
        if type(effect) is SendOnLink:
            if self.link is not None and self.link.name == effect.link:
                self.link.enqueue(encode_message(effect.message))
            return
        match effect:
            case TakeTcm() | PlannedSubscription():
                if self.on_routed is not None:
                    self.on_routed(effect)
            case Call(subscription=subscription):
                driver = self.drivers.get(subscription)
                if driver is not None:
                    driver.call(effect)
            case DeliverAll(subscription=subscription, event_type=event_type, bodies=bodies, sender=sender):
                driver = self.drivers.get(subscription)
                if driver is not None:
                    driver.deliver_all(event_type, bodies, sender)
            case Deliver(subscription=subscription, event=event, tx=tx, sender=sender, out_of_order=out_of_order):
                driver = self.drivers.get(subscription)
                if driver is not None:
                    driver.deliver(event, tx, sender, out_of_order)
            case SetTimer(key=key, after_s=after_s):
                self.timers.set(key, after_s)
            case CancelTimer(key=key):
                self.timers.cancel(key)
            case DropMemo(subscription=subscription, memo=memo):
                driver = self.drivers.get(subscription)
                if driver is not None:
                    driver.forget(memo)
            case HistoryJudged(subscription=subscription, problem=problem):
                driver = self.drivers.get(subscription)
                if driver is not None:
                    driver.judged(problem)
            case Alarm(kind=kind, text=text):
                log.warning(text, extra={"node": self.name, "alarm": kind})
            case _:  # including Persist and Note: the machine of a site has no journal
                raise InvariantBroken(f"a site can't perform the effect {effect!r}")

    def _complete(self, given: CompleteRequest) -> None:
        response = self._responses.pop(given.request, None)
        if response is None or response.done():
            return
        if given.error is not None:
            response.set_exception(given.error)
        else:
            response.set_result(given.value)

    def call_done(self, call: int, result: Any) -> None:
        self.act(self.core.call_done(call, result))

    # ------------------------------------------------------------------------------------------------- what arrives

    def take(self, link: Link, messages: tuple[LinkMessage, ...], size: int) -> float:
        core, now, put = self.core, _now(), self.outbox.put
        for message in messages:
            put(core.receive(message, now))
        self._taken += len(messages)
        if self._taken >= BACKLOG_CHECK or link.traffic.received_bytes - self._checked_bytes >= BACKLOG_CHECK_BYTES:
            return self.pause(link)
        return 0.0

    def pause(self, link: Link) -> float:
        """For how long nothing more should be read, because the participants' backlog is too large."""
        self._taken = 0
        self._backlog_bytes += link.traffic.received_bytes - self._checked_bytes
        self._checked_bytes = link.traffic.received_bytes
        backlog = max([driver.backlog for driver in self.drivers.values()], default=0)
        if not backlog:
            self._backlog_bytes = 0
        return BACKLOG_PAUSE_S if backlog > BACKLOG_MAX or self._backlog_bytes > BACKLOG_BYTES_MAX else 0.0

    def on_control(self, link: Link, control: AnyControl) -> None:
        if not isinstance(control, MessageRejected):
            raise ProtocolError(f"{link.name} sent a {type(control).__name__}, which brokers send only to each other")
        error = PermissionDenied(control.text, who=self.name, verb=control.verb, event_type=control.event_type)
        log.warning(control.text, extra={"node": self.name, "subject": control.subject})
        if control.code == "denied":  # permanent: other rejections may be transient
            self.rejected[control.verb, control.event_type] = control.text
        if control.subject.startswith("events "):
            self.act(self.core.reject_events(control.event_type, error))
            return
        for request in self._waiting_for(control.subject):
            response = self._responses.pop(request, None)
            if response is not None and not response.done():
                response.set_exception(error)

    def _waiting_for(self, subject: str) -> set[int]:
        """The requests behind a message on which a broker did not act."""
        known = {self._subjects[subject]} if subject in self._subjects else set()
        return known.union(self.core.stop_repeating(subject))

    def check_rejected(self, verb: str, event_type: str) -> None:
        """Raise at once if a broker has rejected this before, instead of sending it again."""
        if self.rejected and (text := self.rejected.get((verb, event_type))) is not None:
            raise PermissionDenied(text, who=self.name, verb=verb, event_type=event_type)

    # ---------------------------------------------------------------------------------------------------- connection

    async def connect(self, timeout_s: float) -> None:
        """Returns when a broker has accepted this site; NotReachable if none does in time."""
        self._session = client_session()
        self._first = self._loop.create_future()
        self._connecting = asyncio.ensure_future(self._keep_connected())
        try:
            async with asyncio.timeout(timeout_s):
                await self._first
        except TimeoutError:
            await self.close()
            why = f": {self._problem}" if self._problem else ""
            raise NotReachable(f"no broker responds at {', '.join(self.urls)}{why}") from None
        except BaseException:
            await self.close()
            raise

    async def _keep_connected(self) -> None:
        """Keep one connection. The last broker is tried first, then the others."""
        pause_s, turn = REDIAL_FIRST_S, 0
        while not self._closing:
            url = self.urls[turn % len(self.urls)]
            self._up_since = None
            try:
                await self._connect_once(url)
            except (NotAuthenticated, ConfigError) as error:
                self._report(url, error)
            except (TopsError, aiohttp.ClientError, ConnectionError, OSError, RuntimeError, TimeoutError) as error:
                self._problem = str(error) or type(error).__name__  # a time-out has no text
                log.info("no link", extra={"node": self.name, "url": url, "reason": self._problem})
            if self._up_since is not None and time.monotonic() - self._up_since > REDIAL_MAX_S:
                pause_s = REDIAL_FIRST_S  # the connection was up: try the same broker first
            else:
                turn += 1
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(pause_s * 2, REDIAL_MAX_S)

    def _report(self, url: str, error: TopsError) -> None:
        log.warning("rejected by a broker", extra={"node": self.name, "url": url, "reason": str(error)})
        if self._first is not None and not self._first.done():
            self._first.set_exception(error)

    async def _connect_once(self, url: str) -> None:
        assert self._session is not None
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):  # a frozen broker accepts connections and sends nothing
            opened = await open_socket(self._session, url, self.own, self.heartbeat_s)
        async with opened as socket:
            peer = await self.own.introduce(socket, urlsplit(url).hostname or "")
            async with self.own.watching(socket):
                await self._serve(socket, peer)

    async def _serve(self, socket: Socket, peer: Peer) -> None:
        link = self.link
        same_incarnation = link is not None and link.name == peer.identity.name and link.incarnation == peer.incarnation
        ours = make_link_hello("", 0, "", (), ())
        if link is not None and same_incarnation:
            ours = make_link_hello(link.session_name, link.session.received, "", (), ())
        theirs = await exchange_link_hello(socket, ours, HANDSHAKE_TIMEOUT_S)
        self._learn(theirs)
        received = theirs.received
        if link is None or not ours.session or ours.session != theirs.session:
            link, received = self._new_link(peer, theirs), 0
        self.broker = link.name
        if self._first is not None and not self._first.done():
            self._first.set_result(None)
        self._up_since = time.monotonic()
        log.info("linked", extra={"node": self.name, "broker": link.name, "former_problem": self._problem})
        await link.serve(socket, received, self)
        if link.parted:
            log.warning("the broker closed the link", extra={"node": self.name, "reason": link.parted})

    def _learn(self, theirs: LinkHello) -> None:
        if not theirs.brokers:
            raise ProtocolError("the broker did not name the brokers of the cluster")
        if self._core is None:
            self._domains = theirs.domains
            brokers = [NodeId(b) for b in theirs.brokers]
            self._core = SiteCore(
                self.name,
                self.own.party.incarnation,
                brokers,
                os.urandom,
                self.options,
                self.own.decision_checker(),
                theirs.domains,
            )
        elif self._domains != theirs.domains:
            raise ProtocolError("the broker names other ordering domains than before: start this site again")
        elif tuple(sorted(theirs.brokers)) != self._core.brokers:
            raise ProtocolError("the broker names other members of the cluster than before: start this site again")
        self.urls += [url for url in theirs.urls if url not in self.urls]

    def _new_link(self, peer: Peer, theirs: LinkHello) -> Link:
        old = self.link
        link = self.link = Link(NodeId(peer.identity.name), peer.incarnation, theirs.proposal)
        self._checked_bytes = 0
        if old is not None:
            # The machine repeats what matters of the old link; nothing must wait for its window any more.
            old.abandon()
        self.act(self.core.link_up(link.name, _now()))
        return link

    async def close(self) -> None:
        """Close the link, so that the broker does not wait for this site, and end every open request."""
        self._closing = True
        if self.link is not None and self.link.connected:
            self.link.close("the site was closed")
            await self.link.released()
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        self.timers.clear()
        for driver in self.drivers.values():
            driver.close()
        error = NotReachable("the site was closed")
        for response in self._responses.values():
            if not response.done():
                response.set_exception(error)
        if self.link is not None:
            self.link.end(error)
        if self._session is not None:
            await self._session.close()

    async def drain(self, timeout_s: float) -> None:
        """Wait for what is queued to arrive, before the connection is closed."""
        if self.link is not None and self.link.connected:
            with suppress(TimeoutError, NotReachable):
                async with asyncio.timeout(timeout_s):
                    await self.link.flushed()


def _now() -> float:
    return time.monotonic()  # the loop's clock
