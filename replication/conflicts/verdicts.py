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
from replication.conflicts.tables import CONFLICTS, is_record, rejection_id, rejection_in
from replication.rpc.calls import Judgement, ReplicaFailed
from replication.rpc.conversation import Caller
from tops.model.errors import NotReachable, OutcomeUnknown
from tops.model.rejections import Rejection

REMEMBERED_MAX = 100_000
REQUESTED_MAX = 1_000
REQUESTS_MAX = 4  # on their way: writes that were logged later need not wait for the answer to earlier ones
REJECTION_KINDS = ("apply_error", "serialization")
_LOOK_UP = f"select id, discarded from {CONFLICTS} where id = any($1::text[]) and kind = any($2::text[])"


class Verdicts:
    """A replica's side: why transactions of the log were refused here."""

    def __init__(self, resource: Resource) -> None:
        self._resource = resource
        self._since = 0  # what was applied after it is remembered
        self._rejected: OrderedDict[str, tuple[int, Rejection]] = OrderedDict()

    def begin(self, position: int) -> None:
        self._since = position

    def note(self, entries: Sequence[Entry]) -> None:
        """These were applied."""
        for entry in entries:
            for record in filter(is_record, entry.members):
                for line in record.changes:
                    if isinstance(line, Upsert) and line.table == CONFLICTS and line.values["kind"] in REJECTION_KINDS:
                        self._rejected[line.key["id"]] = (entry.number, rejection_in(line.values["discarded"]))
        while len(self._rejected) > REMEMBERED_MAX:
            self._since, _ = self._rejected.popitem(last=False)[1]

    async def of(self, asked: Sequence[tuple[int, str]]) -> dict[str, Rejection]:
        """Why which of these transactions were refused, each by its number in the log and its id."""
        found: dict[str, Rejection] = {}
        earlier: dict[str, str] = {}
        for number, tx in asked:
            line = rejection_id(number, tx)
            if number <= self._since:
                earlier[line] = tx
            elif line in self._rejected:
                found[tx] = self._rejected[line][1]
        if earlier:
            rows = (await self._resource.read_own(_LOOK_UP, (list(earlier), list(REJECTION_KINDS)))).rows
            found |= {earlier[row["id"]]: rejection_in(row["discarded"]) for row in rows}
        return found


class VerdictClient:
    """A client's side."""

    def __init__(self, caller: Caller, sites: Callable[[], list[str]], timeout_s: float) -> None:
        self._caller, self._sites, self._timeout_s = caller, sites, timeout_s
        self._waiting: list[tuple[int, str, asyncio.Future[Rejection | None]]] = []
        self._asking: set[asyncio.Task[Any] | None] = set()

    async def rejection(self, number: int, tx: str) -> Rejection | None:
        """Why that transaction was rejected, or None; OutcomeUnknown if no replica tells in time."""
        response: asyncio.Future[Rejection | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((number, tx, response))
        if len(self._waiting) == 1 and len(self._asking) < REQUESTS_MAX:
            self._asking.add(asyncio.ensure_future(self._request_all()))
        return await response

    async def _request_all(self) -> None:
        try:
            await self._request_while_some_wait()
        finally:  # at once, and not when the task's end is told: who comes next must not rely on us
            self._asking.remove(asyncio.current_task())

    async def _request_while_some_wait(self) -> None:
        while self._waiting:
            asked, self._waiting = self._waiting[:REQUESTED_MAX], self._waiting[REQUESTED_MAX:]
            try:
                rejected = await self._request([(number, tx) for number, tx, _ in asked])
            except Exception as error:
                for _, tx, response in asked:
                    if not response.done():
                        unknown = isinstance(error, NotReachable)
                        response.set_exception(OutcomeUnknown(tx, str(error)) if unknown else error)
                continue
            for _, tx, response in asked:
                if not response.done():
                    response.set_result(rejected.get(tx))

    async def _request(self, asked: list[tuple[int, str]]) -> dict[str, Rejection]:
        """The nearest replica that answers; each gets its share of the time."""
        sites, problems = self._sites(), list[str]()
        share_s = self._timeout_s / len(sites)
        request = Judgement(asked=tuple(asked), wait_s=share_s)
        for site in sites:
            try:
                judged = await self._caller.request(site, request, share_s)
            except (NotReachable, ReplicaFailed) as error:
                problems.append(str(error))
                continue
            return judged.rejected
        raise NotReachable("; ".join(problems))
