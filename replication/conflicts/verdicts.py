"""Writes that are logged first and applied then may be refused then, by every replica alike: who remembers, who asks.

A replica remembers what it refused in this life; what was before, it looks up in its conflict log. A client asks about
all writes at once that were logged together; while several questions are on their way, the next one gathers more.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from adapters.changes import Upsert
from adapters.resource import Entry, Resource
from replication.conflicts.tables import CONFLICTS, is_record, refusal_id, rejection_in
from replication.rpc.calls import Judgement, ReplicaFailed
from replication.rpc.conversation import Caller
from tops.model.errors import NotReachable, OutcomeUnknown
from tops.model.rejections import Rejection

REMEMBERED_MAX = 100_000
ASKED_MAX = 1_000
QUESTIONS_MAX = 4  # on their way: writes that were logged later need not wait for the answer to earlier ones
REFUSALS = ("apply_error", "serialization")
_LOOK_UP = f"select id, discarded from {CONFLICTS} where id = any($1::text[]) and kind = any($2::text[])"


class Verdicts:
    """A replica's side: why transactions of the log were refused here."""

    def __init__(self, resource: Resource) -> None:
        self._resource = resource
        self._since = 0  # what was applied after it is remembered
        self._refused: OrderedDict[str, tuple[int, Rejection]] = OrderedDict()

    def begin(self, position: int) -> None:
        self._since = position

    def note(self, entries: Sequence[Entry]) -> None:
        """These were applied."""
        for entry in entries:
            for record in filter(is_record, entry.members):
                for line in record.changes:
                    if isinstance(line, Upsert) and line.table == CONFLICTS and line.values["kind"] in REFUSALS:
                        self._refused[line.key["id"]] = (entry.number, rejection_in(line.values["discarded"]))
        while len(self._refused) > REMEMBERED_MAX:
            self._since, _ = self._refused.popitem(last=False)[1]

    async def of(self, asked: Sequence[tuple[int, str]]) -> dict[str, Rejection]:
        """Why which of these transactions were refused, each by its number in the log and its id."""
        found: dict[str, Rejection] = {}
        earlier: dict[str, str] = {}
        for number, tx in asked:
            line = refusal_id(number, tx)
            if number <= self._since:
                earlier[line] = tx
            elif line in self._refused:
                found[tx] = self._refused[line][1]
        if earlier:
            rows = (await self._resource.read_own(_LOOK_UP, (list(earlier), list(REFUSALS)))).rows
            found |= {earlier[row["id"]]: rejection_in(row["discarded"]) for row in rows}
        return found


class VerdictAsker:
    """A client's side."""

    def __init__(self, caller: Caller, sites: Callable[[], list[str]], timeout_s: float) -> None:
        self._caller, self._sites, self._timeout_s = caller, sites, timeout_s
        self._waiting: list[tuple[int, str, asyncio.Future[Rejection | None]]] = []
        self._asking: set[asyncio.Task[Any] | None] = set()

    async def refusal(self, number: int, tx: str) -> Rejection | None:
        """Why that transaction was rejected, or None; OutcomeUnknown if no replica tells in time."""
        answer: asyncio.Future[Rejection | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((number, tx, answer))
        if len(self._waiting) == 1 and len(self._asking) < QUESTIONS_MAX:
            self._asking.add(asyncio.ensure_future(self._ask_all()))
        return await answer

    async def _ask_all(self) -> None:
        try:
            await self._ask_while_some_wait()
        finally:  # at once, and not when the task's end is told: who comes next must not rely on us
            self._asking.remove(asyncio.current_task())

    async def _ask_while_some_wait(self) -> None:
        while self._waiting:
            asked, self._waiting = self._waiting[:ASKED_MAX], self._waiting[ASKED_MAX:]
            try:
                rejected = await self._ask([(number, tx) for number, tx, _ in asked])
            except Exception as error:
                for _, tx, answer in asked:
                    if not answer.done():
                        unknown = isinstance(error, NotReachable)
                        answer.set_exception(OutcomeUnknown(tx, str(error)) if unknown else error)
                continue
            for _, tx, answer in asked:
                if not answer.done():
                    answer.set_result(rejected.get(tx))

    async def _ask(self, asked: list[tuple[int, str]]) -> dict[str, Rejection]:
        """The nearest replica that answers; each gets its share of the time."""
        sites, problems = self._sites(), list[str]()
        patience_s = self._timeout_s / len(sites)
        question = Judgement(asked=tuple(asked), wait_s=patience_s)
        for site in sites:
            try:
                judged = await self._caller.ask(site, question, patience_s)
            except (NotReachable, ReplicaFailed) as error:
                problems.append(str(error))
                continue
            return judged.rejected
        raise NotReachable("; ".join(problems))
