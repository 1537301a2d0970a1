"""Questions from clients to replicas, and their answers: what can be asked, and how it travels.

Carried as ordinary events through the brokers, so an answer can be lost with a link; whoever asks gives a time bound
and asks elsewhere, or again. What may not be done twice carries the transaction's id or an idempotency key.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec

from replication.events import answer_type, question_type
from tops.errors import NotReachable, Retry, TopsError
from tops.filters import Filter
from tops.participants import Participant, Received
from tops.site import Site

PARALLEL_MAX = 256  # questions that one agent works at; more wait their turn

log = logging.getLogger("tops.replication")


class Question(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Something a client asks a replica."""


class Describe(Question, frozen=True):
    """What is this set? Answer: `Described`."""


class Where(Question, frozen=True):
    """How far are you? Answer: `Located`."""


class Read(Question, frozen=True):
    """A query, once the replica's position has reached `at_least`. Answer: `ReadDone`.

    `settled`: not before the outcome of what this replica has promised is known here, too."""

    sql: str
    args: bytes
    at_least: int = 0
    wait_s: float = 5.0
    max_lag_s: float | None = None
    settled: bool = False


class LockedRead(Question, frozen=True):
    """A query inside a serializable transaction. Answer: `LockedReadDone`, with what of the data it depends on."""

    sql: str
    args: bytes


class Judgement(Question, frozen=True):
    """What became of logged transactions (number, id), once the last of them is applied. Answer: `Judged`."""

    asked: tuple[tuple[int, str], ...]
    wait_s: float = 5.0


class Write(Question, frozen=True):
    """Changes to commit at this replica first. Answer: `WriteDone`."""

    tx: str
    member: bytes


class Status(Question, frozen=True):
    """Answer: `StatusTold`."""


class Order(Question, frozen=True):
    """`pause`, `resume`, `retry`, `reload`; the sender must have the right to publish questions. Answer: `Told`."""

    what: str
    argument: str = ""


class Conflicts(Question, frozen=True):
    """The newest entries of the conflict log. Answer: `RowsTold`."""

    limit: int = 100


class CopyWanted(Question, frozen=True):
    """A consistent copy of the set's tables, chunk by chunk; `number` counts from 0. Answer: `CopyChunk`."""

    copy: str
    number: int


class Answered(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Something a replica answers."""


class Failed(Answered, frozen=True):
    """An error of the family, by name; raised again at the client."""

    kind: str
    text: str
    retry: str


class Described(Answered, frozen=True):
    replica: str
    config: bytes  # the set's configuration as JSON, without addresses and secrets


class Located(Answered, frozen=True):
    replica: str
    position: int
    prepared: tuple[int, ...]


class ReadDone(Answered, frozen=True):
    replica: str
    rows: bytes
    position: int


class LockedReadDone(Answered, frozen=True):
    """`locks`: table and key (empty: the whole table)."""

    replica: str
    rows: bytes
    position: int
    locks: tuple[tuple[str, str], ...]


class Judged(Answered, frozen=True):
    """Why which of the transactions were refused."""

    refused: dict[str, str]


class WriteDone(Answered, frozen=True):
    replica: str
    tx: str
    rows: tuple[int, ...]
    returned: bytes = b""
    position: int | None = None
    duplicate: bool = False
    refused: str = ""  # why it is nowhere, as `refusals.describe` says it


class StatusTold(Answered, frozen=True):
    replica: str
    fields: dict[str, Any]


class Told(Answered, frozen=True):
    text: str


class RowsTold(Answered, frozen=True):
    replica: str
    rows: bytes


class CopyChunk(Answered, frozen=True):
    """`table` None: the copy is complete, as of `position`."""

    table: str | None
    data: bytes = b""
    position: int = 0


AnyQuestion = Describe | Where | Read | LockedRead | Judgement | Write | Status | Order | Conflicts | CopyWanted
AnyAnswer = (
    Failed
    | Described
    | Located
    | ReadDone
    | LockedReadDone
    | Judged
    | WriteDone
    | StatusTold
    | Told
    | RowsTold
    | CopyChunk
)
_encoder = msgspec.msgpack.Encoder()
_questions: msgspec.msgpack.Decoder[AnyQuestion] = msgspec.msgpack.Decoder(AnyQuestion)
_answers: msgspec.msgpack.Decoder[AnyAnswer] = msgspec.msgpack.Decoder(AnyAnswer)


class ReplicaFailed(TopsError):
    """A replica could not do what was asked; `kind` is its error's name."""

    def __init__(self, replica: str, failed: Failed) -> None:
        self.replica, self.kind = replica, failed.kind
        self.retry = Retry(failed.retry)
        super().__init__(f"{replica}: {failed.text}")


class Caller(Participant):
    """A client's end: asks replicas of one set, and matches answers to questions."""

    def __init__(self, site: Site, replica_set: str, brokers: tuple[str, ...]) -> None:
        super().__init__()
        self._site = site
        self._asked = question_type(replica_set, brokers)
        self._answered = answer_type(replica_set, brokers)
        self._waiting: dict[int, tuple[str, asyncio.Queue[AnyAnswer]]] = {}
        self._numbers = itertools.count(1)

    async def start(self) -> None:
        """Be ready to ask."""
        await self._site.advertise(self._asked)
        await self._site.subscribe(self._answered, Filter.where("to", "=", self._site.name), participant=self)
        await self._site.flush()

    def on_notify(self, event: Received) -> None:
        waiting = self._waiting.get(event.body["number"])
        if waiting is not None:
            waiting[1].put_nowait(_answers.decode(event.body["body"]))

    async def ask(self, to: str, question: AnyQuestion, timeout_s: float) -> AnyAnswer:
        """Ask one replica's agent (or, with `*`, all: the first answer counts)."""
        answers = await self._ask(to, question, timeout_s, 1)
        if not answers:
            whom = f"replica agent {to}" if to != "*" else "no replica's agent"
            raise NotReachable(f"{whom} {'did not answer' if to != '*' else 'answered'} within {timeout_s:g} s")
        answer = answers[0]
        if isinstance(answer, Failed):
            raise ReplicaFailed(to, answer)
        return answer

    async def ask_all(
        self, question: AnyQuestion, timeout_s: float, enough: int, counts: Callable[[AnyAnswer], bool] = bool
    ) -> list[AnyAnswer]:
        """Ask every replica; returns with `enough` answers that count, or with those that came in time."""
        return await self._ask("*", question, timeout_s, enough, counts)

    async def _ask(
        self,
        to: str,
        question: AnyQuestion,
        timeout_s: float,
        enough: int,
        counts: Callable[[AnyAnswer], bool] = bool,
    ) -> list[AnyAnswer]:
        number, queue = next(self._numbers), asyncio.Queue[AnyAnswer]()
        self._waiting[number] = (to, queue)
        body = {"to": to, "reply_to": self._site.name, "number": number, "body": _encoder.encode(question)}
        answers: list[AnyAnswer] = []
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._site.publish(self._asked, body)
                    while enough > 0 or not queue.empty():
                        answers.append(await queue.get())
                        enough -= counts(answers[-1])
        finally:
            del self._waiting[number]
        return answers


class Answerer(Participant):
    """An agent's end: works at questions, each in its own task, and publishes the answers."""

    def __init__(
        self,
        site: Site,
        replica_set: str,
        brokers: tuple[str, ...],
        answer: Callable[[AnyQuestion], Awaitable[AnyAnswer]],
    ) -> None:
        super().__init__()
        self._site, self._answer = site, answer
        self._asked = question_type(replica_set, brokers)
        self._answered = answer_type(replica_set, brokers)
        self._turn = asyncio.Semaphore(PARALLEL_MAX)
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        await self._site.advertise(self._answered)
        mine = Filter.where("to", "in", [self._site.name, "*"])
        await self._site.subscribe(self._asked, mine, participant=self)
        await self._site.flush()

    def on_notify(self, event: Received) -> None:
        task = asyncio.ensure_future(self._work(event))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _work(self, event: Received) -> None:
        async with self._turn:
            answer = await self._answer_or_failure(event.body["body"])
        with suppress(NotReachable):  # whoever asked asks again
            body = {"to": event.body["reply_to"], "number": event.body["number"], "body": _encoder.encode(answer)}
            await self._site.publish(self._answered, body)

    async def _answer_or_failure(self, body: bytes) -> AnyAnswer:
        try:
            return await self._answer(_questions.decode(body))
        except TopsError as error:
            return Failed(kind=type(error).__name__, text=str(error), retry=error.retry.value)
        except Exception as error:
            log.exception("a question could not be answered")
            # Nobody knows how far it got: a write may have been committed before this.
            text, ask_first = f"{type(error).__name__}: {error}", Retry.ASK_FIRST.value
            return Failed(kind=type(error).__name__, text=text, retry=ask_first)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
