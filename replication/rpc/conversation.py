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
from replication.model.events import answer_type, question_type
from replication.rpc import calls
from replication.rpc.calls import (
    Answered,
    AnyAnswer,
    AnyQuestion,
    Denied,
    Failed,
    Question,
    R,
    ReplicaFailed,
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
BUNDLE_BYTES_MAX = 2**20  # unless one alone is longer
AGAIN_S = 2.0  # until a question that may be answered twice is asked again

Said = tuple[RequestId, Question[Any] | Answered]
Respond = Callable[..., None]  # each argument is what is said to the sender of a request
REQUEST_ID_BYTES = 16
ALL = "*"  # in place of a replica's name: every replica of the set

log = logging.getLogger("tops.replication")


class Bundles:
    """Gathers what is said to each party until the loop's turn is over, and publishes it in order."""

    def __init__(
        self,
        publish: Callable[[str, bytes], Awaitable[object]],
        failed: Callable[[str, Sequence[Said], TopsError], None],
    ) -> None:
        self._publish, self._failed = publish, failed
        self._waiting: dict[str, list[Said]] = {}
        self._sender: asyncio.Task[None] | None = None

    def put(self, to: str, *said: Said) -> None:
        self._waiting.setdefault(to, []).extend(said)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.ensure_future(self._send_all())

    async def _send_all(self) -> None:
        while self._waiting:
            to = next(iter(self._waiting))
            await self._send(to, self._waiting.pop(to))

    async def _send(self, to: str, bundle: Sequence[Said]) -> None:
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
    hear: Callable[[str, Answered | TopsError], None]


class Connection(Protocol):
    """A connection to one replica that needs no broker; what is put there arrives, or `Caller.fail` tells that it may
    not have."""

    def put(self, request_id: RequestId, question: Question[Any]) -> None: ...

    def forget(self, request_id: RequestId) -> None:
        """Nobody waits for the response any more."""


class Repeated(NamedTuple):
    """A question that is asked again when it is due, until it is answered."""

    due: float
    to: str
    question: Question[Any]


class Caller(Participant):
    """A client's end: asks replicas of one set, and matches responses to requests.

    A response counts only if the broker stamped it with the replica that was asked, and if it has the request's id,
    which only that replica and this client know."""

    def __init__(self, site: Site, replica_set: str, brokers: tuple[str, ...]) -> None:
        super().__init__()
        self._site, self._set = site, replica_set
        self._asked = question_type(replica_set, brokers)
        self._answered = answer_type(replica_set, brokers)
        self._waiting: dict[RequestId, Pending] = {}
        self._bundles = Bundles(self._publish, self._unpublished)
        self._repeated: dict[RequestId, Repeated] = {}  # the one that is due next comes first
        self._repeating = False

    async def start(self) -> None:
        """Be ready to ask."""
        await self._site.advertise(self._asked)
        await self._site.subscribe(self._answered, responses_filter(NodeId(self._site.name)), participant=self)
        await self._site.flush()

    async def _publish(self, to: str, body: bytes) -> None:
        await self._site.publish(self._asked, {"to": to, "body": body})

    def _unpublished(self, to: str, questions: Sequence[Said], error: TopsError) -> None:
        self.fail([request_id for request_id, _ in questions], error)

    def on_notify(self, event: Received) -> None:
        sender = event.sender
        if sender is None or sender.replica_set != self._set:
            log.warning("a response that no replica of the set sent is ignored", extra={"sender": str(sender)})
            return
        self.hear(sender.identity, event.body["body"])

    def hear(self, responder: str, bundle: bytes) -> None:
        """Responses of an authenticated replica."""
        for request_id, answer in calls.decode_answers(bundle):
            pending = self._waiting.get(request_id)
            if pending is not None and pending.to in (ALL, responder) and _is_own(responder, answer):
                pending.hear(responder, answer)

    def fail(self, request_ids: Iterable[RequestId], error: TopsError) -> None:
        """No response will come to these."""
        for request_id in request_ids:
            if request_id in self._waiting:
                self._waiting[request_id].hear("", error)

    async def ask(self, to: str, question: Question[R], timeout_s: float, over: "Connection | None" = None) -> R:
        """Ask one replica's agent (or, with `*`, all: the first answer counts), `over` a connection to it if given.

        Raises ReplicaFailed for an error of the replica, and for a response of another kind than the request's."""
        loop = asyncio.get_running_loop()
        heard: asyncio.Future[Answered | TopsError | None] = loop.create_future()
        timer = loop.call_later(timeout_s, _hear, heard, "", None)
        number = os.urandom(REQUEST_ID_BYTES)
        self._waiting[number] = Pending(to, partial(_hear, heard))
        try:
            if over is not None:
                over.put(number, question)
            else:
                self._bundles.put(to, (number, question))
                if isinstance(question, calls.Read):
                    self._repeat(number, to, question)
            answer = await heard
        finally:
            timer.cancel()
            self._repeated.pop(number, None)
            if over is not None:
                over.forget(number)
            del self._waiting[number]
        if answer is None:
            whom = f"replica agent {to}" if to != ALL else "no replica's agent"
            raise NotReachable(f"{whom} {'did not answer' if to != ALL else 'answered'} within {timeout_s:g} s")
        if isinstance(answer, TopsError):
            raise answer
        if isinstance(answer, Denied):
            raise answer.error()
        if isinstance(answer, Failed):
            raise ReplicaFailed(to, answer)
        if isinstance(answer, calls.response_to(question)):
            return answer
        raise ReplicaFailed(to, calls.unexpected(question, answer))

    def _repeat(self, number: RequestId, to: str, question: Question[Any]) -> None:
        loop = asyncio.get_running_loop()
        self._repeated[number] = Repeated(loop.time() + AGAIN_S, to, question)
        if not self._repeating:
            self._repeating = True
            loop.call_later(AGAIN_S, self._say_again)

    def _say_again(self) -> None:
        """Whatever is due; one timer serves all questions."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for number, (due, to, question) in list(self._repeated.items()):
            if due > now:
                break
            self._bundles.put(to, (number, question))
            del self._repeated[number]
            self._repeated[number] = Repeated(now + AGAIN_S, to, question)
        self._repeating = bool(self._repeated)
        if self._repeated:
            loop.call_at(next(iter(self._repeated.values())).due, self._say_again)

    async def ask_all(
        self,
        question: Question[R],
        timeout_s: float,
        enough: int,
        counts: Callable[[R | Failed | Denied], bool] = bool,
    ) -> list[R | Failed | Denied]:
        """Ask every replica; returns with `enough` answers that count, or with those that came in time.

        Each replica counts once; a response of another kind than the request's is a failure of the replica. Raises
        PermissionDenied if no replica does it for this client."""
        number, heard = os.urandom(REQUEST_ID_BYTES), asyncio.Queue[tuple[str, Answered | TopsError]]()
        self._waiting[number] = Pending(ALL, lambda responder, answer: heard.put_nowait((responder, answer)))
        answers: dict[str, R | Failed | Denied] = {}
        wanted = calls.response_to(question)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    self._bundles.put(ALL, (number, question))
                    while enough > 0 or not heard.empty():
                        responder, answer = await heard.get()
                        if isinstance(answer, TopsError):
                            raise answer
                        if responder not in answers:
                            if not isinstance(answer, (wanted, Failed, Denied)):
                                answer = calls.unexpected(question, answer)
                            answers[responder] = answer
                            enough -= counts(answer)
        finally:
            del self._waiting[number]
        denied = [answer for answer in answers.values() if isinstance(answer, Denied)]
        if denied and len(denied) == len(answers):
            raise denied[0].error()
        return list(answers.values())


def _hear(heard: asyncio.Future[Answered | TopsError | None], _: str, answer: Answered | TopsError | None) -> None:
    if not heard.done():
        heard.set_result(answer)


def _is_own(responder: str, answer: Answered) -> bool:
    """Whether a replica responds under its own name."""
    claimed = getattr(answer, "replica", None)
    return claimed is None or responder.partition("/")[2] == claimed


class Answerer(Participant):
    """An agent's end: works at requests, each in its own task and writes that came together in one, and publishes the
    responses.

    Identities share what an agent can do at a time, so that the requests of one do not hold up those of the others. A
    request that waits for a position takes nothing of that before the position is reached."""

    def __init__(
        self,
        site: Site,
        replica_set: str,
        brokers: tuple[str, ...],
        ready: Callable[[AnyQuestion], Awaitable[None]],
        answer: Callable[[AnyQuestion, str], Awaitable[AnyAnswer]],
        write: Callable[[Sequence[calls.Write]], Awaitable[Sequence[AnyAnswer]]],
        guard: RequestGuard,
    ) -> None:
        """`ready` returns when a request can be worked at; `answer` gets the identity that is accountable for it."""
        super().__init__()
        self._site, self._ready, self._answer, self._write, self._guard = site, ready, answer, write, guard
        self._asked = question_type(replica_set, brokers)
        self._answered = answer_type(replica_set, brokers)
        self._slots = FairShare(PARALLEL_MAX, PARALLEL_SHARE)
        self._administrative = FairShare(ADMINISTRATIVE_MAX, ADMINISTRATIVE_SHARE)
        self._under_way: dict[str, set[tuple[str, RequestId]]] = {}  # by identity: whose request, and which
        self._tasks: set[asyncio.Task[None]] = set()
        self._bundles = Bundles(self._publish, self._unpublished)

    async def start(self) -> None:
        await self._site.advertise(self._answered)
        await self._site.subscribe(self._asked, requests_filter(NodeId(self._site.name)), participant=self)
        await self._site.flush()

    async def _publish(self, to: str, body: bytes) -> None:
        await self._site.publish(self._answered, {"to": to, "body": body})

    def _unpublished(self, to: str, answers: Sequence[Said], error: TopsError) -> None:
        """Whoever asked asks again, unless the answer is one that can never be sent: then that is the answer."""
        log.info("answers could not be sent", extra={"answers": len(answers), "reason": str(error)})
        if isinstance(error, ProtocolError):
            self._bundles.put(to, *[(number, _unsendable(error)) for number, _ in answers])

    def on_notify(self, event: Received) -> None:
        sender = event.sender
        if sender is None:
            log.warning("a request without a stamped sender is ignored")
            return
        self.receive(sender, event.body["body"], partial(self._bundles.put, sender.node))

    def receive(self, sender: Sender, bundle: bytes, respond: Respond) -> None:
        """Requests of an authenticated sender, and where their responses go."""
        client, ids, writes = sender.node, [], []
        for request_id, question in self._understood(bundle, respond):
            if (client, request_id) in self._under_way.get(sender.accountable, ()):
                continue  # it was sent again before it had its response
            try:
                self._guard.check(sender, question)
                self._count(sender, request_id, question)
            except PermissionDenied as error:
                respond((request_id, Denied.because(error)))
            except LimitExceeded as error:
                respond((request_id, Failed.because(error)))
            else:
                if isinstance(question, calls.Write):
                    ids.append(request_id)
                    writes.append(question)
                else:
                    self._begin(self._work(sender, request_id, question, respond), sender, [request_id])
        if writes:
            self._begin(self._work_together(sender, ids, writes, respond), sender, ids)

    def _count(self, sender: Sender, request_id: RequestId, question: AnyQuestion) -> None:
        under_way = self._under_way.setdefault(sender.accountable, set())
        if len(under_way) >= UNDER_WAY_MAX:
            error = LimitExceeded(
                f"{sender.accountable} has {UNDER_WAY_MAX} requests under way at {self._site.name}, which is the "
                "quota: wait for responses first"
            )
            self._guard.note_over_quota(sender, question, error)
            raise error
        under_way.add((sender.node, request_id))

    def _understood(self, bundle: bytes, respond: Respond) -> Sequence[tuple[RequestId, AnyQuestion]]:
        """One that can't be read is answered so; it does not keep the others from being answered."""
        try:
            return calls.decode_questions(bundle)
        except msgspec.DecodeError:
            understood = []
        for number, encoded in calls.undecoded(bundle):
            try:
                understood.append((number, calls.decode_question(encoded)))
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
        under_way.difference_update((sender.node, request_id) for request_id in ids)
        if not under_way:
            del self._under_way[sender.accountable]

    async def _work(self, sender: Sender, request_id: RequestId, question: AnyQuestion, respond: Respond) -> None:
        slots = self._administrative if type(question) in ADMINISTRATIVE else self._slots
        try:
            await self._ready(question)
            async with slots.slot(sender.accountable):
                answer = await self._answer(question, sender.accountable)
        except Exception as error:
            if isinstance(error, LimitExceeded):
                self._guard.note_over_quota(sender, question, error)
            answer = _failure(error)
        respond((request_id, answer))

    async def _work_together(
        self, sender: Sender, ids: Sequence[RequestId], writes: Sequence[calls.Write], respond: Respond
    ) -> None:
        async with self._slots.slot(sender.accountable):
            try:
                answers = await self._write(writes)
            except Exception as error:
                answers = [_failure(error)] * len(writes)
        respond(*zip(ids, answers, strict=True))

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
