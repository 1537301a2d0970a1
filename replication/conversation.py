"""How questions and answers travel between clients and replicas: as ordinary events through the brokers.

What is said to one party in one turn of the loop is one event: clients that write together are answered together, and
write together again. What is said can be lost with a link: a read of one replica is asked for again, and whoever asks
gives a time bound and asks elsewhere. What may not be done twice carries the transaction's id or an idempotency key.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import msgspec

from replication import calls
from replication.calls import AnyAnswer, AnyQuestion, Failed, ReplicaFailed
from replication.events import answer_type, question_type
from tops.errors import NotReachable, ProtocolError, Retry, TopsError
from tops.filters import Filter
from tops.participants import Participant, Received
from tops.site import Site

PARALLEL_MAX = 256  # pieces of work that one agent is at; more wait their turn
BUNDLE_BYTES_MAX = 2**20  # unless one alone is longer
AGAIN_S = 2.0  # until a question that may be answered twice is asked again

Said = tuple[int, AnyQuestion | AnyAnswer]  # the number of the question, and the question or the answer to it

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


class Repeated(NamedTuple):
    """A question that is asked again when it is due, until it is answered."""

    due: float
    to: str
    question: AnyQuestion


class Caller(Participant):
    """A client's end: asks replicas of one set, and matches answers to questions."""

    def __init__(self, site: Site, replica_set: str, brokers: tuple[str, ...]) -> None:
        super().__init__()
        self._site = site
        self._asked = question_type(replica_set, brokers)
        self._answered = answer_type(replica_set, brokers)
        self._waiting: dict[int, Callable[[AnyAnswer | TopsError], None]] = {}
        self._numbers = itertools.count(1)
        self._bundles = Bundles(self._publish, self._unpublished)
        self._repeated: dict[int, Repeated] = {}  # the one that is due next comes first
        self._repeating = False

    async def start(self) -> None:
        """Be ready to ask."""
        await self._site.advertise(self._asked)
        await self._site.subscribe(self._answered, Filter.where("to", "=", self._site.name), participant=self)
        await self._site.flush()

    async def _publish(self, to: str, body: bytes) -> None:
        await self._site.publish(self._asked, {"to": to, "reply_to": self._site.name, "body": body})

    def _unpublished(self, to: str, questions: Sequence[Said], error: TopsError) -> None:
        for number, _ in questions:
            if number in self._waiting:
                self._waiting[number](error)

    def on_notify(self, event: Received) -> None:
        for number, answer in calls.decode_answers(event.body["body"]):
            hear = self._waiting.get(number)
            if hear is not None:
                hear(answer)

    async def ask(self, to: str, question: AnyQuestion, timeout_s: float) -> AnyAnswer:
        """Ask one replica's agent (or, with `*`, all: the first answer counts)."""
        loop = asyncio.get_running_loop()
        heard: asyncio.Future[AnyAnswer | TopsError | None] = loop.create_future()
        timer = loop.call_later(timeout_s, _hear, heard, None)
        number = next(self._numbers)
        self._waiting[number] = partial(_hear, heard)
        try:
            self._bundles.put(to, (number, question))
            if isinstance(question, calls.Read):
                self._repeat(number, to, question)
            answer = await heard
        finally:
            timer.cancel()
            self._repeated.pop(number, None)
            del self._waiting[number]
        if answer is None:
            whom = f"replica agent {to}" if to != "*" else "no replica's agent"
            raise NotReachable(f"{whom} {'did not answer' if to != '*' else 'answered'} within {timeout_s:g} s")
        if isinstance(answer, TopsError):
            raise answer
        if isinstance(answer, Failed):
            raise ReplicaFailed(to, answer)
        return answer

    def _repeat(self, number: int, to: str, question: AnyQuestion) -> None:
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
        self, question: AnyQuestion, timeout_s: float, enough: int, counts: Callable[[AnyAnswer], bool] = bool
    ) -> list[AnyAnswer]:
        """Ask every replica; returns with `enough` answers that count, or with those that came in time."""
        number, heard = next(self._numbers), asyncio.Queue[AnyAnswer | TopsError]()
        self._waiting[number] = heard.put_nowait
        answers: list[AnyAnswer] = []
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    self._bundles.put("*", (number, question))
                    while enough > 0 or not heard.empty():
                        answer = await heard.get()
                        if isinstance(answer, TopsError):
                            raise answer
                        answers.append(answer)
                        enough -= counts(answer)
        finally:
            del self._waiting[number]
        return answers


def _hear(heard: asyncio.Future[AnyAnswer | TopsError | None], answer: AnyAnswer | TopsError | None) -> None:
    if not heard.done():
        heard.set_result(answer)


class Answerer(Participant):
    """An agent's end: works at questions, each in its own task and writes that came together in one, and publishes the
    answers."""

    def __init__(
        self,
        site: Site,
        replica_set: str,
        brokers: tuple[str, ...],
        answer: Callable[[AnyQuestion], Awaitable[AnyAnswer]],
        write: Callable[[Sequence[calls.Write]], Awaitable[Sequence[AnyAnswer]]],
    ) -> None:
        super().__init__()
        self._site, self._answer, self._write = site, answer, write
        self._asked = question_type(replica_set, brokers)
        self._answered = answer_type(replica_set, brokers)
        self._turn = asyncio.Semaphore(PARALLEL_MAX)
        self._tasks: set[asyncio.Task[None]] = set()
        self._bundles = Bundles(self._publish, self._unpublished)

    async def start(self) -> None:
        await self._site.advertise(self._answered)
        mine = Filter.where("to", "in", [self._site.name, "*"])
        await self._site.subscribe(self._asked, mine, participant=self)
        await self._site.flush()

    async def _publish(self, to: str, body: bytes) -> None:
        await self._site.publish(self._answered, {"to": to, "body": body})

    def _unpublished(self, to: str, answers: Sequence[Said], error: TopsError) -> None:
        """Whoever asked asks again, unless the answer is one that can never be sent: then that is the answer."""
        log.info("answers could not be sent", extra={"answers": len(answers), "reason": str(error)})
        if isinstance(error, ProtocolError):
            self._bundles.put(to, *[(number, _unsendable(error)) for number, _ in answers])

    def on_notify(self, event: Received) -> None:
        reply_to, numbers, writes = event.body["reply_to"], [], []
        for number, question in self._understood(reply_to, event.body["body"]):
            if isinstance(question, calls.Write):
                numbers.append(number)
                writes.append(question)
            else:
                self._begin(self._work(reply_to, number, question))
        if writes:
            self._begin(self._work_together(reply_to, numbers, writes))

    def _understood(self, reply_to: str, bundle: bytes) -> Sequence[tuple[int, AnyQuestion]]:
        """One that can't be read is answered so; it does not keep the others from being answered."""
        try:
            return calls.decode_questions(bundle)
        except msgspec.DecodeError:
            understood = []
        for number, encoded in calls.undecoded(bundle):
            try:
                understood.append((number, calls.decode_question(encoded)))
            except msgspec.DecodeError as error:
                self._bundles.put(reply_to, (number, _failure(error)))
        return understood

    def _begin(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _work(self, reply_to: str, number: int, question: AnyQuestion) -> None:
        async with self._turn:
            try:
                answer = await self._answer(question)
            except Exception as error:
                answer = _failure(error)
        self._bundles.put(reply_to, (number, answer))

    async def _work_together(self, reply_to: str, numbers: Sequence[int], writes: Sequence[calls.Write]) -> None:
        async with self._turn:
            try:
                answers = await self._write(writes)
            except Exception as error:
                answers = [_failure(error)] * len(writes)
        self._bundles.put(reply_to, *zip(numbers, answers, strict=True))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _unsendable(error: ProtocolError) -> Failed:
    # What was asked for may be done: only the answer did not fit.
    return Failed(kind=type(error).__name__, text=f"the answer can't be sent: {error}", retry=Retry.ASK_FIRST.value)


def _failure(error: Exception) -> Failed:
    if isinstance(error, TopsError):
        return Failed.because(error)
    log.error("a question could not be answered", exc_info=error)
    # Nobody knows how far it got: a write may have been committed before this.
    return Failed(kind=type(error).__name__, text=f"{type(error).__name__}: {error}", retry=Retry.ASK_FIRST.value)
