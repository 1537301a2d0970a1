"""How questions and answers travel between clients and replicas: as ordinary events through the brokers.

What is said to one party in one turn of the loop is one event: clients that write together are answered together, and
write together again. What is said can be lost with a link: a read of one replica is asked for again, and whoever asks
gives a time bound and asks elsewhere. What may not be done twice carries the transaction's id or an idempotency key.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec

from adapters.fair_share import FairShare
from replication.model.events import request_type, response_type
from replication.rpc import calls
from replication.rpc.calls import (
    AnyRequest,
    AnyResponse,
    Denied,
    Failed,
    R,
    ReplicaFailed,
    ReplicaRequest,
    ReplicaResponse,
    RequestId,
)
from replication.rpc.rights import ADMINISTRATIVE, RequestGuard
from tops.client.site import Site
from tops.model.errors import LimitExceeded, NotReachable, PermissionDenied, ProtocolError, Retry, TopsError, code_of
from tops.model.ids import NodeId
from tops.protocol.messages import Sender
from tops.protocol.set_types import requests_filter, responses_filter
from tops.runtime.participants import Participant, Received

PARALLEL_MAX, PARALLEL_SHARE = 1024, 256  # requests that an agent works at: in all, and of one identity
ADMINISTRATIVE_MAX, ADMINISTRATIVE_SHARE = 64, 16  # the same for requests that must get through under load
UNDER_WAY_MAX = 10_000  # requests of one identity that wait, or are worked at; more are rejected
UNDER_WAY_BYTES_MAX = 128 * 2**20  # the same for their sizes together
LONG_BYTES = UNDER_WAY_BYTES_MAX // UNDER_WAY_MAX  # so many requests that are shorter stay within both
BUNDLE_BYTES_MAX = 2**20  # unless one alone is longer
AGAIN_S = 2.0  # until a question that may be answered twice is asked again

BundleItem = tuple[RequestId, ReplicaRequest[Any] | ReplicaResponse]
Respond = Callable[..., None]  # each argument is what is said to the sender of a request
REQUEST_ID_BYTES = 16
ALL = "*"  # in place of a replica's name: every replica of the set

log = logging.getLogger("tops.replication")


class Bundles:
    """Gathers what is said to each party until the loop's turn is over, and publishes it in order."""

    def __init__(
        self,
        publish: Callable[[str, bytes], Awaitable[object]],
        failed: Callable[[str, Sequence[BundleItem], TopsError], None],
    ) -> None:
        self._publish, self._failed = publish, failed
        self._waiting: dict[str, list[BundleItem]] = {}
        self._sender: asyncio.Task[None] | None = None

    def put(self, to: str, *items: BundleItem) -> None:
        self._waiting.setdefault(to, []).extend(items)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.ensure_future(self._send_all())

    async def _send_all(self) -> None:
        while self._waiting:
            to = next(iter(self._waiting))
            await self._send(to, self._waiting.pop(to))

    async def _send(self, to: str, bundle: Sequence[BundleItem]) -> None:
        """In one piece; in halves if that would be too long, or if something in it can't be said at all."""
        half = len(bundle) // 2
        try:
            encoded = calls.encode_bundle(bundle)
            if len(encoded) <= BUNDLE_BYTES_MAX or not half:
                await self._publish(to, encoded)
                return
        except TopsError as error:
            if not (half and isinstance(error, ProtocolError)):
                self._failed(to, bundle, error)
                return
        await self._send(to, bundle[:half])
        await self._send(to, bundle[half:])


class Pending(NamedTuple):
    """A request that a response is awaited to; `hear` gets the name of the responder, which is empty for an error."""

    to: str
    on_response: Callable[[str, ReplicaResponse | TopsError], None]


class Connection(Protocol):
    """A connection to one replica that needs no broker; what is put there arrives, or `Caller.fail` tells that it may
    not have."""

    def put(self, request_id: RequestId, request: ReplicaRequest[Any]) -> None: ...

    def forget(self, request_id: RequestId) -> None:
        """Nobody waits for the response any more."""


class Repeated(NamedTuple):
    """A question that is asked again when it is due, until it is answered."""

    due: float
    to: str
    request: ReplicaRequest[Any]


class Caller(Participant):
    """A client's end: asks replicas of one set, and matches responses to requests.

    A response counts only if the broker stamped it with the replica that was asked, and if it has the request's id,
    which only that replica and this client know."""

    def __init__(self, site: Site, replica_set: str, brokers: tuple[str, ...]) -> None:
        super().__init__()
        self._site, self._set = site, replica_set
        self._request_type = request_type(replica_set, brokers)
        self._response_type = response_type(replica_set, brokers)
        self._waiting: dict[RequestId, Pending] = {}
        self._bundles = Bundles(self._publish, self._unpublished)
        self._repeated: dict[RequestId, Repeated] = {}  # the one that is due next comes first
        self._repeating = False

    async def start(self) -> None:
        """Be ready to ask."""
        await self._site.advertise(self._request_type)
        await self._site.subscribe(self._response_type, responses_filter(NodeId(self._site.name)), participant=self)
        await self._site.flush()

    async def _publish(self, to: str, body: bytes) -> None:
        await self._site.publish(self._request_type, {"to": to, "body": body})

    def _unpublished(self, to: str, requests: Sequence[BundleItem], error: TopsError) -> None:
        self.fail([request_id for request_id, _ in requests], error)

    def on_notify(self, event: Received) -> None:
        sender = event.sender
        if sender is None or sender.replica_set != self._set:
            log.warning("a response that no replica of the set sent is ignored", extra={"sender": str(sender)})
            return
        self.on_response(sender.identity, event.body["body"])

    def on_response(self, responder: str, bundle: bytes) -> None:
        """Responses of an authenticated replica."""
        for request_id, response in calls.decode_responses(bundle):
            pending = self._waiting.get(request_id)
            if pending is not None and pending.to in (ALL, responder) and _is_own(responder, response):
                pending.on_response(responder, response)

    def fail(self, request_ids: Iterable[RequestId], error: TopsError) -> None:
        """No response will come to these."""
        for request_id in request_ids:
            if request_id in self._waiting:
                self._waiting[request_id].on_response("", error)

    async def request(
        self, to: str, request: ReplicaRequest[R], timeout_s: float, over: "Connection | None" = None
    ) -> R:
        """Ask one replica's agent (or, with `*`, all: the first answer counts), `over` a connection to it if given.

        Raises ReplicaFailed for an error of the replica, and for a response of another kind than the request's."""
        loop = asyncio.get_running_loop()
        received: asyncio.Future[ReplicaResponse | TopsError | None] = loop.create_future()
        timer = loop.call_later(timeout_s, _receive, received, "", None)
        number = os.urandom(REQUEST_ID_BYTES)
        self._waiting[number] = Pending(to, partial(_receive, received))
        try:
            if over is not None:
                over.put(number, request)
            else:
                self._bundles.put(to, (number, request))
                if isinstance(request, calls.Read):
                    self._repeat(number, to, request)
            response = await received
        finally:
            timer.cancel()
            self._repeated.pop(number, None)
            if over is not None:
                over.forget(number)
            del self._waiting[number]
        if response is None:
            whom = f"replica agent {to}" if to != ALL else "no replica's agent"
            raise NotReachable(f"{whom} {'did not answer' if to != ALL else 'answered'} within {timeout_s:g} s")
        if isinstance(response, TopsError):
            raise response
        if isinstance(response, Denied):
            raise response.error()
        if isinstance(response, Failed):
            raise ReplicaFailed(to, response)
        if isinstance(response, calls.response_to(request)):
            return response
        raise ReplicaFailed(to, calls.unexpected(request, response))

    def _repeat(self, number: RequestId, to: str, request: ReplicaRequest[Any]) -> None:
        loop = asyncio.get_running_loop()
        self._repeated[number] = Repeated(loop.time() + AGAIN_S, to, request)
        if not self._repeating:
            self._repeating = True
            loop.call_later(AGAIN_S, self._send_again)

    def _send_again(self) -> None:
        """Whatever is due; one timer serves all questions."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for number, (due, to, request) in list(self._repeated.items()):
            if due > now:
                break
            self._bundles.put(to, (number, request))
            del self._repeated[number]
            self._repeated[number] = Repeated(now + AGAIN_S, to, request)
        self._repeating = bool(self._repeated)
        if self._repeated:
            loop.call_at(next(iter(self._repeated.values())).due, self._send_again)

    async def request_all(
        self,
        request: ReplicaRequest[R],
        timeout_s: float,
        enough: int,
        counts: Callable[[R | Failed | Denied], bool] = bool,
    ) -> list[R | Failed | Denied]:
        """Ask every replica; returns with `enough` answers that count, or with those that came in time.

        Each replica counts once; a response of another kind than the request's is a failure of the replica. Raises
        PermissionDenied if no replica does it for this client."""
        number, received = os.urandom(REQUEST_ID_BYTES), asyncio.Queue[tuple[str, ReplicaResponse | TopsError]]()
        self._waiting[number] = Pending(ALL, lambda responder, response: received.put_nowait((responder, response)))
        responses: dict[str, R | Failed | Denied] = {}
        wanted = calls.response_to(request)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    self._bundles.put(ALL, (number, request))
                    while enough > 0 or not received.empty():
                        responder, response = await received.get()
                        if isinstance(response, TopsError):
                            raise response
                        if responder not in responses:
                            if not isinstance(response, (wanted, Failed, Denied)):
                                response = calls.unexpected(request, response)
                            responses[responder] = response
                            enough -= counts(response)
        finally:
            del self._waiting[number]
        denied = [response for response in responses.values() if isinstance(response, Denied)]
        if denied and len(denied) == len(responses):
            raise denied[0].error()
        return list(responses.values())


def _receive(
    received: asyncio.Future[ReplicaResponse | TopsError | None], _: str, response: ReplicaResponse | TopsError | None
) -> None:
    if not received.done():
        received.set_result(response)


def _is_own(responder: str, response: ReplicaResponse) -> bool:
    """Whether a replica responds under its own name."""
    claimed = getattr(response, "replica", None)
    return claimed is None or responder.partition("/")[2] == claimed


class Responder(Participant):
    """An agent's end: works at requests, each in its own task and writes that came together in one, and publishes the
    responses.

    Identities share what an agent can do at a time, so that the requests of one do not hold up those of the others. A
    request that waits for a position takes nothing of that before the position is reached."""

    def __init__(
        self,
        site: Site,
        replica_set: str,
        brokers: tuple[str, ...],
        ready: Callable[[AnyRequest], Awaitable[None]],
        response: Callable[[AnyRequest, str], Awaitable[AnyResponse]],
        write: Callable[[Sequence[calls.Write]], Awaitable[Sequence[AnyResponse]]],
        guard: RequestGuard,
    ) -> None:
        """`ready` returns when a request can be worked at; `answer` gets the identity that is accountable for it."""
        super().__init__()
        self._site, self._ready, self._answer, self._write, self._guard = site, ready, response, write, guard
        self._request_type = request_type(replica_set, brokers)
        self._response_type = response_type(replica_set, brokers)
        self._slots = FairShare(PARALLEL_MAX, PARALLEL_SHARE)
        self._administrative = FairShare(ADMINISTRATIVE_MAX, ADMINISTRATIVE_SHARE)
        self._under_way: dict[str, dict[tuple[str, RequestId], int]] = {}  # by identity: whose, which, and its size
        self._tasks: set[asyncio.Task[None]] = set()
        self._bundles = Bundles(self._publish, self._unpublished)

    async def start(self) -> None:
        await self._site.advertise(self._response_type)
        await self._site.subscribe(self._request_type, requests_filter(NodeId(self._site.name)), participant=self)
        await self._site.flush()

    async def _publish(self, to: str, body: bytes) -> None:
        await self._site.publish(self._response_type, {"to": to, "body": body})

    def _unpublished(self, to: str, responses: Sequence[BundleItem], error: TopsError) -> None:
        """Whoever asked asks again, unless the answer is one that can never be sent: then that is the answer."""
        log.info("answers could not be sent", extra={"answers": len(responses), "reason": str(error)})
        if isinstance(error, ProtocolError):
            self._bundles.put(to, *[(number, _unsendable(error)) for number, _ in responses])

    def on_notify(self, event: Received) -> None:
        sender = event.sender
        if sender is None:
            log.warning("a request without a stamped sender is ignored")
            return
        self.receive(sender, event.body["body"], partial(self._bundles.put, sender.node))

    def receive(self, sender: Sender, bundle: bytes, respond: Respond) -> None:
        """Requests of an authenticated sender, and where their responses go."""
        client, ids, writes = sender.node, [], []
        requests = self._understood(bundle, respond)
        for request_id, request in requests:
            if (client, request_id) in self._under_way.get(sender.accountable, ()):
                continue  # it was sent again before it had its response
            try:
                self._guard.check(sender, request)
                self._count(sender, request_id, request, len(bundle) // len(requests))
            except PermissionDenied as error:
                respond((request_id, Denied.because(error)))
            except LimitExceeded as error:
                respond((request_id, Failed.because(error)))
            else:
                if isinstance(request, calls.Write):
                    ids.append(request_id)
                    writes.append(request)
                else:
                    self._begin(self._work(sender, request_id, request, respond), sender, [request_id])
        if writes:
            self._begin(self._work_together(sender, ids, writes, respond), sender, ids)

    def _count(self, sender: Sender, request_id: RequestId, request: AnyRequest, size: int) -> None:
        under_way = self._under_way.get(sender.accountable, {})
        count, size_of_all = len(under_way), sum(under_way.values()) if size > LONG_BYTES else 0
        if count >= UNDER_WAY_MAX or size_of_all + size > UNDER_WAY_BYTES_MAX:
            error = LimitExceeded(
                f"{sender.accountable} has {count} requests under way at {self._site.name}; the quota is "
                f"{UNDER_WAY_MAX} requests and {UNDER_WAY_BYTES_MAX} bytes: wait for responses first"
            )
            self._guard.note_over_quota(sender, request, error)
            raise error
        self._under_way.setdefault(sender.accountable, under_way)[sender.node, request_id] = size

    def _understood(self, bundle: bytes, respond: Respond) -> Sequence[tuple[RequestId, AnyRequest]]:
        """One that can't be read is answered so; it does not keep the others from being answered."""
        try:
            return calls.decode_requests(bundle)
        except msgspec.DecodeError:
            understood = []
        for number, encoded in calls.undecoded(bundle):
            try:
                understood.append((number, calls.decode_request(encoded)))
            except msgspec.DecodeError as error:
                respond((number, _failure(error)))
        return understood

    def _begin(self, work: Awaitable[None], sender: Sender, ids: Sequence[RequestId]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._end, sender, ids))

    def _end(self, sender: Sender, ids: Sequence[RequestId], task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        under_way = self._under_way[sender.accountable]
        for request_id in ids:
            under_way.pop((sender.node, request_id), None)
        if not under_way:
            del self._under_way[sender.accountable]

    async def _work(self, sender: Sender, request_id: RequestId, request: AnyRequest, respond: Respond) -> None:
        slots = self._administrative if type(request) in ADMINISTRATIVE else self._slots
        try:
            await self._ready(request)
            async with slots.slot(sender.accountable):
                response = await self._answer(request, sender.accountable)
        except Exception as error:
            if isinstance(error, LimitExceeded):
                self._guard.note_over_quota(sender, request, error)
            response = _failure(error)
        respond((request_id, response))

    async def _work_together(
        self, sender: Sender, ids: Sequence[RequestId], writes: Sequence[calls.Write], respond: Respond
    ) -> None:
        async with self._slots.slot(sender.accountable):
            try:
                responses = await self._write(writes)
            except Exception as error:
                responses = [_failure(error)] * len(writes)
        respond(*zip(ids, responses, strict=True))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _unsendable(error: ProtocolError) -> Failed:
    # What was asked for may be done: only the answer did not fit.
    return Failed(code=code_of(error), text=f"the answer can't be sent: {error}", retry=Retry.ASK_FIRST.value)


def _failure(error: Exception) -> Failed:
    if isinstance(error, TopsError):
        return Failed.because(error)
    log.error("a question could not be answered", exc_info=error)
    # Nobody knows how far it got: a write may have been committed before this.
    return Failed(code=calls.INTERNAL_ERROR, text=f"{type(error).__name__}: {error}", retry=Retry.ASK_FIRST.value)
