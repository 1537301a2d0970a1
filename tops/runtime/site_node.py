"""A site's machine with its link, timers and participants; finds a broker, and another when that one is gone."""

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
import msgspec

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
from tops.model.sizes import MESSAGE_BYTES_MAX
from tops.protocol.effects import (
    Alarm,
    Answer,
    Call,
    CancelTimer,
    Deliver,
    DeliverAll,
    Effect,
    ForgetPromise,
    HistoryJudged,
    PlannedSubscription,
    Send,
    SetTimer,
    TakeTcm,
    TxEnded,
)
from tops.protocol.messages import Event, LinkMessage, TxOutcome, TxSpec, encode_body
from tops.runtime.links.dialling import client_session, open_socket
from tops.runtime.links.identity import HANDSHAKE_TIMEOUT_S, Self
from tops.runtime.links.link import Link, exchange_meet
from tops.runtime.links.sockets import Socket
from tops.runtime.links.wire import AnyWord, Meet, Refused, encode_message, meeting
from tops.runtime.outbox import Outbox
from tops.runtime.participant_driver import ParticipantDriver
from tops.runtime.timers import Timers
from tops.security import Peer

REDIAL_FIRST_S, REDIAL_MAX_S = 0.05, 1.0
BACKLOG_MAX = 100_000  # ordinary events that participants have not got to; beyond it nothing more is read
BACKLOG_BYTES_MAX = 64 * 2**20  # that arrived since participants had last got to everything; the same
BACKLOG_PAUSE_S = 0.01
BACKLOG_LOOK, BACKLOG_LOOK_BYTES = 64, 2**20  # messages, or bytes, between two looks at it
TOGETHER_MAX = 1024  # events in one message
ONE_SHOTS_MAX = 64  # one-shots in one message: as many as an epoch takes
TOGETHER_BYTES_MAX = MESSAGE_BYTES_MAX // 2

log = logging.getLogger("tops.site")

Ended = Callable[[TxId, bool, str], None]


class SiteNode:
    """One life of one site."""

    def __init__(self, name: str, own: Self, urls: Sequence[str], options: SiteOptions, heartbeat_s: float) -> None:
        self.name, self.own, self.options, self.heartbeat_s = NodeId(name), own, options, heartbeat_s
        self.urls = list(urls)
        self._loop = asyncio.get_running_loop()  # kept: to ask for it costs a system call each time
        self._core: SiteCore | None = None  # made when the first broker has said who the brokers are
        self.link: Link | None = None
        self.broker = ""
        self.drivers: dict[int, ParticipantDriver] = {}
        self.refused: dict[tuple[str, str], str] = {}  # verb and type -> why
        self.on_ended: Ended | None = None
        self.on_routed: Callable[[TakeTcm | PlannedSubscription], None] | None = None  # what participants act on
        self.timers = Timers(lambda key: self.act(self.core.timer(key, _now())))
        self.outbox = Outbox(self._perform)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._subjects: dict[str, int] = {}  # what a request is about -> the request, for refusals
        self._requests = 0
        self._connecting: asyncio.Task[None] | None = None
        self._session: aiohttp.ClientSession | None = None
        self._first: asyncio.Future[None] | None = None
        self._up_since: float | None = None  # when the connection was made that we have, or had last
        self._closing = False
        self._problem = ""  # why the last attempt to connect failed
        self._together: list[tuple[int, dict[str, Any], msgspec.Raw]] = []  # published in this turn of the loop
        self._together_type = ""
        self._together_bytes = 0
        self._one_shots: list[tuple[int, tuple[Event, ...]]] = []  # asked for in this turn of the loop
        self._one_shots_spec: TxSpec | None = None
        self._one_shots_bytes = 0
        self._taken = 0  # messages since the last look at the backlog
        self._looked_bytes = 0  # what the link had received at that look
        self._backlog_bytes = 0  # at most so much of what was received has not been got to

    @property
    def core(self) -> SiteCore:
        """The site's machine; a site is used only after `connect` has returned."""
        assert self._core is not None, "a site has a machine once it has connected"
        return self._core

    # ------------------------------------------------------------------------------------------------------ requests

    def act(self, effects: list[Effect]) -> None:
        """Carry out what the machine wants, behind the events that were published before."""
        if self._together:
            self._publish_together()
        if self._one_shots:
            self._execute_together()
        self.outbox.put(effects)

    def publish_soon(self, event_type: str, body: dict[str, Any], request: int) -> None:
        """An ordinary event, with the request that waits for its confirmation (0: none does). Those of one turn of the
        loop travel together."""
        encoded = encode_body(body)
        if len(encoded) > TOGETHER_BYTES_MAX:
            raise ProtocolError(f"an event of {len(encoded)} bytes is over the limit of {TOGETHER_BYTES_MAX}: split it")
        together = self._together
        if not together:
            self._loop.call_soon(self._publish_together)
        elif (
            event_type != self._together_type
            or len(together) >= TOGETHER_MAX
            or self._together_bytes + len(encoded) > TOGETHER_BYTES_MAX
        ):
            self._publish_together()
        self._together_type = event_type
        self._together.append((request, body, msgspec.Raw(encoded)))
        self._together_bytes += len(encoded)

    def _publish_together(self) -> None:
        if not self._together:
            return
        together, self._together, self._together_bytes = self._together, [], 0
        if together[0][0]:
            self.outbox.put(self.core.publish_confirmed(self._together_type, together))
        else:
            bodies = tuple(encoded for _, _, encoded in together)
            self.outbox.put(self.core.publish_all(self._together_type, bodies))
        self._send_now()

    async def publish_confirmed(self, event_type: str, body: dict[str, Any]) -> int | None:
        """An event of a durable type; returns its number when it is on disk."""
        request = self.next_request()
        answer = self._answers[request] = self._loop.create_future()
        try:
            self.publish_soon(event_type, body, request)
            number: int | None = await answer
            return number
        finally:
            self._answers.pop(request, None)

    def execute(self, spec: TxSpec, events: tuple[Event, ...], size: int) -> "asyncio.Future[TxOutcome]":
        """A one-shot with so many bytes of events; those of one kind and one turn of the loop travel together.

        Whoever stops waiting leaves it as it is: it goes on, and its answer is thrown away."""
        together = self._one_shots
        if not together:
            self._loop.call_soon(self._execute_together)
        elif (
            (spec is not self._one_shots_spec and spec != self._one_shots_spec)
            or len(together) >= ONE_SHOTS_MAX
            or self._one_shots_bytes + size > TOGETHER_BYTES_MAX
        ):
            self._execute_together()
        request = self.next_request()
        answer: asyncio.Future[TxOutcome] = self._loop.create_future()
        self._answers[request] = answer
        self._one_shots_spec = spec
        self._one_shots.append((request, events))
        self._one_shots_bytes += size
        return answer

    def _execute_together(self) -> None:
        together, spec = self._one_shots, self._one_shots_spec
        if together and spec is not None:
            self._one_shots, self._one_shots_bytes = [], 0
            self.outbox.put(self.core.execute_all(spec, together))
            self._send_now()

    def _send_now(self) -> None:
        """What was gathered for a turn of the loop need not wait for the end of the next one."""
        if self.link is not None:
            self.link.send_now()

    def next_request(self) -> int:
        self._requests += 1
        return self._requests

    async def request(self, ask: Callable[[int], list[Effect]], subject: str = "") -> Any:
        """Ask the machine something and wait for its answer. `subject` names it for refusals by the broker."""
        number = self.next_request()
        answer = self._answers[number] = self._loop.create_future()
        try:
            self.act(ask(number))
            if subject and not answer.done():
                self._subjects[subject] = number
            return await answer
        finally:
            self._answers.pop(number, None)
            self._subjects.pop(subject, None)

    @property
    def is_crowded(self) -> bool:
        """Whether more is queued for the broker than is sensible: the application should wait for `room`."""
        return self.link is not None and self.link.is_crowded

    async def room(self) -> None:
        """Wait while more is queued for the broker than is sensible; the application is slowed down here."""
        if self.link is not None:
            await self.link.room()

    def _perform(self, effect: Effect) -> None:
        if type(effect) is Answer:
            self._answer(effect)
            return
        if type(effect) is TxEnded:
            if self.on_ended is not None:
                self.on_ended(effect.tx, effect.committed, effect.reason)
            return
        if type(effect) is Send:
            if self.link is not None and self.link.name == effect.link:
                self.link.post(encode_message(effect.message))
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
            case Deliver(subscription=subscription, event=event, tx=tx, sender=sender):
                driver = self.drivers.get(subscription)
                if driver is not None:
                    driver.deliver(event, tx, sender)
            case SetTimer(key=key, after_s=after_s):
                self.timers.set(key, after_s)
            case CancelTimer(key=key):
                self.timers.cancel(key)
            case ForgetPromise(subscription=subscription, memo=memo):
                driver = self.drivers.get(subscription)
                if driver is not None:
                    driver.forget(memo)
            case HistoryJudged(subscription=subscription, problem=problem):
                driver = self.drivers.get(subscription)
                if driver is not None:
                    driver.judged(problem)
            case Alarm(kind=kind, text=text):
                log.warning(text, extra={"node": self.name, "alarm": kind})
            case _:  # Persist and Note among them: the machine of a site has no journal
                raise InvariantBroken(f"a site can't perform the effect {effect!r}")

    def _answer(self, given: Answer) -> None:
        answer = self._answers.pop(given.request, None)
        if answer is None or answer.done():
            return
        if given.error is not None:
            answer.set_exception(given.error)
        else:
            answer.set_result(given.value)

    def call_done(self, call: int, result: Any) -> None:
        self.act(self.core.call_done(call, result))

    # ------------------------------------------------------------------------------------------------- what arrives

    def take(self, link: Link, messages: tuple[LinkMessage, ...], size: int) -> float:
        core, now, put = self.core, _now(), self.outbox.put
        for message in messages:
            put(core.receive(message, now))
        self._taken += len(messages)
        if self._taken >= BACKLOG_LOOK or link.received_bytes - self._looked_bytes >= BACKLOG_LOOK_BYTES:
            return self.pause(link)
        return 0.0

    def pause(self, link: Link) -> float:
        """For how long nothing more should be read, because participants are too far behind."""
        self._taken = 0
        self._backlog_bytes += link.received_bytes - self._looked_bytes
        self._looked_bytes = link.received_bytes
        backlog = max([driver.backlog for driver in self.drivers.values()], default=0)
        if not backlog:
            self._backlog_bytes = 0
        return BACKLOG_PAUSE_S if backlog > BACKLOG_MAX or self._backlog_bytes > BACKLOG_BYTES_MAX else 0.0

    def hear(self, link: Link, word: AnyWord) -> None:
        if not isinstance(word, Refused):
            raise ProtocolError(f"{link.name} said {type(word).__name__}, which brokers say to each other")
        error = PermissionDenied(word.text, who=self.name, verb=word.verb, event_type=word.event_type)
        log.warning(word.text, extra={"node": self.name, "subject": word.subject})
        if word.code == "denied":  # for good: other rejections may pass
            self.refused[word.verb, word.event_type] = word.text
        if word.subject.startswith("events "):
            self.act(self.core.refuse_events(word.event_type, error))
            return
        for request in self._waiting_for(word.subject):
            answer = self._answers.pop(request, None)
            if answer is not None and not answer.done():
                answer.set_exception(error)

    def _waiting_for(self, subject: str) -> set[int]:
        """The requests that a message of ours belonged to, on which a broker did not act."""
        known = {self._subjects[subject]} if subject in self._subjects else set()
        return known.union(self.core.stop_repeating(subject))

    def check_refused(self, verb: str, event_type: str) -> None:
        """A broker refused this before: raise at once instead of sending it again."""
        if self.refused and (text := self.refused.get((verb, event_type))) is not None:
            raise PermissionDenied(text, who=self.name, verb=verb, event_type=event_type)

    # ---------------------------------------------------------------------------------------------------- connection

    async def connect(self, timeout_s: float) -> None:
        """Returns when the first broker has taken us in; NotReachable if none does in time."""
        self._session = client_session()
        self._first = self._loop.create_future()
        self._connecting = asyncio.ensure_future(self._keep_connected())
        try:
            async with asyncio.timeout(timeout_s):
                await self._first
        except TimeoutError:
            await self.close()
            why = f": {self._problem}" if self._problem else ""
            raise NotReachable(f"no broker answers at {', '.join(self.urls)}{why}") from None
        except BaseException:
            await self.close()
            raise

    async def _keep_connected(self) -> None:
        """One connection at a time. The broker we know is tried first; then whoever is there."""
        pause_s, turn = REDIAL_FIRST_S, 0
        while not self._closing:
            url = self.urls[turn % len(self.urls)]
            self._up_since = None
            try:
                await self._connect_once(url)
            except (NotAuthenticated, ConfigError) as error:
                self._report(url, error)
            except (TopsError, aiohttp.ClientError, ConnectionError, OSError, RuntimeError, TimeoutError) as error:
                self._problem = str(error)
                log.info("no link", extra={"node": self.name, "url": url, "reason": self._problem})
            if self._up_since is not None and time.monotonic() - self._up_since > REDIAL_MAX_S:
                pause_s = REDIAL_FIRST_S  # it was up: the same broker first
            else:
                turn += 1
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(pause_s * 2, REDIAL_MAX_S)

    def _report(self, url: str, error: TopsError) -> None:
        log.warning("refused by a broker", extra={"node": self.name, "url": url, "reason": str(error)})
        if self._first is not None and not self._first.done():
            self._first.set_exception(error)

    async def _connect_once(self, url: str) -> None:
        assert self._session is not None
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):  # a broker that is frozen takes connections and says nothing
            opened = await open_socket(self._session, url, self.own, self.heartbeat_s)
        async with opened as socket:
            peer = await self.own.introduce(socket, urlsplit(url).hostname or "")
            async with self.own.watching(socket):
                await self._serve(socket, peer)

    async def _serve(self, socket: Socket, peer: Peer) -> None:
        link = self.link
        same_life = link is not None and link.name == peer.identity.name and link.incarnation == peer.incarnation
        ours = meeting("", 0, "", (), ())
        if link is not None and same_life:
            ours = meeting(link.session_name, link.session.received, "", (), ())
        theirs = await exchange_meet(socket, ours, HANDSHAKE_TIMEOUT_S)
        self._learn(theirs)
        received = theirs.received
        if link is None or not ours.session or ours.session != theirs.session:
            link, received = self._new_link(peer, theirs), 0
        self.broker = link.name
        if self._first is not None and not self._first.done():
            self._first.set_result(None)
        self._up_since = time.monotonic()
        await link.serve(socket, received, self)
        if link.parted:
            log.warning("the broker closed the link", extra={"node": self.name, "reason": link.parted})

    def _learn(self, met: Meet) -> None:
        if not met.brokers:
            raise ProtocolError("the broker did not say who the brokers of the cluster are")
        if self._core is None:
            brokers = [NodeId(b) for b in met.brokers]
            self._core = SiteCore(
                self.name,
                self.own.party.incarnation,
                brokers,
                os.urandom,
                self.options,
                self.own.decision_checker(),
            )
        elif tuple(sorted(met.brokers)) != self._core.brokers:
            raise ProtocolError("the broker names other members of the cluster than before: start this site again")
        self.urls += [url for url in met.urls if url not in self.urls]

    def _new_link(self, peer: Peer, met: Meet) -> Link:
        old = self.link
        link = self.link = Link(NodeId(peer.identity.name), peer.incarnation, met.proposal)
        self._looked_bytes = 0
        if old is not None:
            # What the old link held is said again where it matters; nobody must wait for room in it any more.
            old.abandon()
        self.act(self.core.link_up(link.name, _now()))
        return link

    async def close(self) -> None:
        """Take leave of the broker, so that nobody waits for this site, and end every request that is open."""
        self._closing = True
        if self.link is not None and self.link.connected:
            self.link.close("the site is done")
            await self.link.released()
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        self.timers.clear()
        for driver in self.drivers.values():
            driver.close()
        error = NotReachable("the site was closed")
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)
        if self.link is not None:
            self.link.end(error)
        if self._session is not None:
            await self._session.close()

    async def drain(self, timeout_s: float) -> None:
        """Give what is queued a chance to arrive before the connection is closed."""
        if self.link is not None and self.link.connected:
            with suppress(TimeoutError, NotReachable):
                async with asyncio.timeout(timeout_s):
                    await self.link.flushed()


def _now() -> float:
    return time.monotonic()  # the loop's clock
