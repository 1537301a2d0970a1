"""The list-append workload: transactions that read some lists and append to some of them, from every site at once.

Each list starts empty, under keys that no run before has used, so a cluster serves many runs. What a writer was told
is kept; whoever was told nothing asks afterwards, so at the end every transaction is known to be there or not.
"""

import asyncio
import random
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from adapters.changes import Insert
from replication import ReplicaSet
from replication.rpc.rejections import WriteRejected
from tests.integration.replication.history import Tx, Version
from tops.model.errors import NotReachable, OutcomeUnknown

SITES = ("r1", "r2", "r3")
SETTLE_S = 60.0


class Connectable(Protocol):
    def connect(
        self, *, prefer: str | None = None, timeout_s: float = 5.0
    ) -> AbstractAsyncContextManager[ReplicaSet]: ...


class Run:
    """One history: who wrote what, after reading what, and what became of it."""

    def __init__(self, seed: int, *, keys: int = 8, writers: int = 4, locks: bool = True) -> None:
        self.seed, self.writers, self.locks = seed, writers, locks
        self.keys = range(seed * 1000, seed * 1000 + keys)
        self.history: list[Tx] = []
        self.unknown: list[tuple[Tx, str]] = []
        self.asked = 0
        self._moved = asyncio.Condition()

    @property
    def aborted(self) -> int:
        return sum(tx.committed is False for tx in self.history)

    @property
    def committed(self) -> int:
        return sum(tx.committed is True for tx in self.history)

    def start(self, cluster: Connectable, count: int) -> "asyncio.Task[None]":
        """At least `count` transactions; the task is done when every writer has its last answer."""
        return asyncio.create_task(self._write(cluster, count))

    async def reached(self, count: int, writing: "asyncio.Task[None]") -> None:
        """Wait until so many transactions have begun, or the writers have ended."""
        async with self._moved:
            await self._moved.wait_for(lambda: len(self.history) >= count or writing.done())

    async def _write(self, cluster: Connectable, count: int) -> None:
        async with cluster.connect() as shop:
            await shop.write([Insert("lists", {"key": key, "items": ""}) for key in self.keys])
            await shop.wait_in_sync()
        try:
            async with asyncio.TaskGroup() as writers:
                for site in SITES:
                    for number in range(self.writers):
                        writers.create_task(self._writer(cluster, site, number, count))
        finally:
            await self._tell()

    async def _tell(self) -> None:
        async with self._moved:
            self._moved.notify_all()

    async def _writer(self, cluster: Connectable, site: str, number: int, count: int) -> None:
        pick = random.Random(f"{self.seed}-{site}-{number}")
        while len(self.history) < count:
            try:
                async with cluster.connect(prefer=site) as shop:
                    while len(self.history) < count:
                        tx = Tx(f"{self.seed}{site}w{number}t{len(self.history)}")
                        self.history.append(tx)
                        await self._tell()
                        await self._one(shop, tx, pick)
            except NotReachable:
                continue  # its broker is away: connect again

    async def _one(self, shop: ReplicaSet, record: Tx, pick: random.Random) -> None:
        record.committed = False
        try:
            async with shop.transaction() as tx:
                for key in pick.sample(self.keys, pick.choice((1, 2, 2, 3))):
                    (row,) = await tx.fetch("select items from lists where key = $1", key)
                    before = as_version(row["items"])
                    record.reads.append((key, before))
                    if pick.random() < 0.6:
                        record.writes[key] = (*before, f"{record.name}.{key}")
                        await tx.update("lists", key={"key": key}, values={"items": ",".join(record.writes[key])})
                if not self.locks:
                    tx._locks.clear()
        except (WriteRejected, NotReachable):
            return
        except OutcomeUnknown as unknown:
            record.committed = None
            self.unknown.append((record, unknown.tx))
        else:
            record.committed = True

    async def settle(self, cluster: Connectable) -> list[str]:
        """Ask about what is unknown, then read every list at every replica; what contradicts what was said."""
        async with cluster.connect(timeout_s=10.0) as shop:
            await shop.wait_in_sync(SETTLE_S)
            self.asked = len(self.unknown)
            for record, tx in self.unknown:
                record.committed = await shop.outcome(tx) == "committed"
            await shop.wait_in_sync(SETTLE_S)
            finals = [await self._final(shop, site) for site in SITES]
        found = [
            f"{site} ends with other lists than {SITES[0]}"
            for site, f in zip(SITES, finals, strict=True)
            if f != finals[0]
        ]
        self.history.append(Tx(f"{self.seed}final", True, reads=list(finals[0].items())))
        return found + self._lost(finals[0])

    async def _final(self, shop: ReplicaSet, site: str) -> dict[int, Version]:
        sql = "select key, items from lists where key between $1 and $2"
        rows = await shop.fetch(sql, self.keys[0], self.keys[-1], replica=site)
        return {row["key"]: as_version(row["items"]) for row in sorted(rows, key=lambda row: row["key"])}

    def _lost(self, final: dict[int, Version]) -> list[str]:
        appended = [(key, version[-1], tx) for tx in self.history if tx.committed for key, version in tx.writes.items()]
        return [f"{tx.name} committed {value}, which is gone" for key, value, tx in appended if value not in final[key]]


def as_version(items: str) -> Version:
    return tuple(value for value in items.split(",") if value)


def told(problems: Sequence[str]) -> str:
    return "serializable" if not problems else f"NOT serializable: {problems[0]}"
