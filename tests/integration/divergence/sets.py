"""Checks of running replica sets: a small cluster, writers that go on, and the check beside them."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from adapters import EmbeddedPostgres
from adapters.changes import Change, Update, decode_member
from replication import ReplicaSet
from replication.divergence.check.check import Check
from replication.divergence.check.options import CheckOptions
from replication.divergence.explain.leads import SetKnowledge
from replication.divergence.explain.set_barrier import SetBarrier
from replication.divergence.explain.set_link import SetLink, linked
from replication.divergence.explain.set_log import SetLog
from replication.divergence.read.sets import load_set
from replication.divergence.repair.repair import Plan, Planner, Repaired, Strategy
from replication.divergence.repair.set_repair import SetRepair
from replication.divergence.results.folder import read_differences
from replication.divergence.results.model import CheckResult, Difference, Kind
from replication.model.events import batch_in
from replication.rpc.rejections import WriteRejected
from tests.integration.replication.inprocess import SmallCluster, small_cluster
from tops.model.errors import OutcomeUnknown

SCHEMA = "create table t (id bigint primary key, v int not null, label text, at timestamptz);"
FILL = (
    "insert into t select i, 0, 'label ' || i, '2024-01-01Z'::timestamptz + i * interval '1 s' "
    "from generate_series(1, {rows}) i"
)


@dataclass
class CheckedSet:
    """A running set named `shop`, and checks of it."""

    small: SmallCluster
    link: SetLink
    spark: SparkSession | None  # None: no checks, only barriers and repairs
    out: Path
    tables: tuple[str, ...] = ("t",)  # that are checked unless a check says otherwise; empty: all

    async def on(self, replica: str, *statements: str) -> None:
        """By hand, past replication."""
        for statement in statements:
            await self.small.sql(replica, statement)

    def check(self, options: CheckOptions | None = None, wait_s: float = 240.0, **more: Any) -> Check:
        described = load_set(str(self.small.cluster.path), "shop")
        options = options or CheckOptions()
        return Check(
            described.endpoints,
            replace(options, tables=options.tables or self.tables, primary=described.primary),
            self.out,
            set_name="shop",
            policy=described.policy,
            spark=self.spark,
            **{
                "log": SetLog(self.link),
                "knowledge": SetKnowledge(self.link),
                "new_barrier": lambda: SetBarrier(self.link, wait_s),
                **more,
            },
        )

    async def compare(self, options: CheckOptions | None = None, **more: Any) -> CheckResult:
        return await self.check(options, **more).run()

    def differences(self, result: CheckResult) -> list[Difference]:
        return list(read_differences(self.out / result.id))

    def real_differences(self, result: CheckResult) -> list[Difference]:
        return [d for d in self.differences(result) if d.kind is not Kind.IN_FLIGHT]

    async def repair(
        self, found: CheckResult | list[Difference], by: Strategy, kind: type[SetRepair] = SetRepair, **more: Any
    ) -> Repaired:
        endpoints = load_set(str(self.small.cluster.path), "shop").endpoints
        planner = self.planner(by, **more)
        differences = self.differences(found) if isinstance(found, CheckResult) else found
        return await kind(self.link, endpoints, planner, 240.0).run(differences)

    def planner(self, by: Strategy, **more: Any) -> Planner:
        return Planner(list(self.small.databases), by, of_set=True, **more)

    def plan(self, result: CheckResult, by: Strategy = Strategy.LOG, **more: Any) -> Plan:
        return self.planner(by, **more).whole(self.differences(result))

    async def logged_keys(self) -> AsyncIterator[str]:
        """The idempotency keys of all transactions in the set's log."""
        told = await self.link.log()
        async for entry in self.link.entries(told.oldest, told.decided):
            for logged in entry.transactions:
                for event in logged.events:
                    for member in batch_in([event]) or [decode_member(event.body["write"])]:
                        yield member.idempotency_key


@asynccontextmanager
async def checked_set(
    server: EmbeddedPostgres,
    folder: Path,
    spark: SparkSession | None,
    keys: str,
    *,
    rows: int,
    schema: str = SCHEMA,
    tables: tuple[str, ...] = ("t",),
) -> AsyncIterator[CheckedSet]:
    """A set whose replicas begin with the same rows."""
    filled = f"{schema}\n{FILL.format(rows=rows)};\nanalyze t;"
    async with small_cluster(server, folder, f"{keys}\ntables = {list(tables)}", schema=filled) as small:
        async with linked(small.cluster, "shop") as link:
            yield CheckedSet(small, link, spark, folder / "runs")


@dataclass
class Writers:
    """Writes of random rows at a rate, through the set, until told to stop; what is refused is kept with its reason."""

    shop: ReplicaSet
    rows: tuple[int, int]
    rate: int
    change: Callable[[int, random.Random], Change] = lambda key, _: Update("t", {"id": key}, add={"v": 1})
    written: int = 0
    rejected: list[str] = field(default_factory=list)
    late: int = 0
    slowest_s: float = 0.0
    seconds: float = 0.0
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, writers: int = 16) -> None:
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(self._write(number, writers) for number in range(writers)))
        self.seconds = asyncio.get_running_loop().time() - began

    async def _write(self, number: int, writers: int) -> None:
        generator = random.Random(number)
        loop = asyncio.get_running_loop()
        due = loop.time()
        while not self._stop.is_set():
            began = loop.time()
            try:
                await self.shop.write([self.change(generator.randint(*self.rows), generator)])
                self.written += 1
            except WriteRejected as rejected:
                self.rejected.append(str(rejected))
            except OutcomeUnknown:
                self.late += 1  # a machine that is busy with other things answers late
            self.slowest_s = max(self.slowest_s, loop.time() - began)
            due = max(due + writers / self.rate, loop.time() - 1.0)
            await asyncio.sleep(max(0.0, due - loop.time()))

    def stop(self) -> None:
        self._stop.set()


@asynccontextmanager
async def writing(
    checked: CheckedSet, rows: tuple[int, int], rate: int = 500, writers: int = 16, **more: Any
) -> AsyncIterator[list[Writers]]:
    """Writers at every replica where every replica writes, together at this rate."""
    names = list(checked.small.databases)
    async with checked.small.connect(names[0]) as first, checked.small.connect(names[1]) as second:
        everyone = [Writers(shop, rows, rate // 2, **more) for shop in (first, second)]
        tasks = [asyncio.ensure_future(one.run(writers)) for one in everyone]
        try:
            yield everyone
        finally:
            for one in everyone:
                one.stop()
            await asyncio.gather(*tasks)
