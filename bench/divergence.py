"""How fast a check is: against data-diff and against reading both tables out, over table sizes, over executors.

    tops bench divergence [--quick] [--figures NAME,…] [--format json]

Two PostgreSQL servers hold (bigint key, int, 32-character text, timestamptz) with 100 differences: 30 rows missing, 20
extra, 50 changed. Contenders alternate on the same two databases in the same run, and each must find all 100 keys.
"cold" is the command line from its start to its exit, Spark's start counted; "warm" is a check in a session that has
run one before, as a service or a notebook would. Every table is made once, in the databases. About 15 minutes on two
idle cores; `--quick` (3 minutes) runs 5 million rows once and leaves out 20 million, the curve over sizes, and the
executors.
"""

import asyncio
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import adbc_driver_postgresql.dbapi as adbc
import asyncpg
import psutil
import pyspark
from pyspark.sql import SparkSession

from adapters import EmbeddedPostgres
from bench import data_diff
from bench.harness import say
from bench.machine import describe_machine, load_average, package_versions
from bench.results import Result
from bench.statistics import Better, Figure
from replication.divergence.check.check import Check
from replication.divergence.check.options import CheckOptions
from replication.divergence.read import session
from replication.divergence.results.model import CheckResult
from replication.tables.endpoints import ReplicaEndpoint
from tops.model.errors import ConfigError

MILLION = 1_000_000
ROUNDS = 3
KEYS_DIFFERING = 100
COLUMNS = "number,label,at"
SERVER = {"fsync": "off", "shared_buffers": "1GB", "max_wal_size": "16GB", "autovacuum": "off"}
ROOT = Path(__file__).resolve().parents[1]
_FILE_ROWS = """
WITH RECURSIVE numbers(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM numbers WHERE i < ?)
INSERT INTO rows SELECT i, (i * 7919) % 1000003, lower(hex(i * 2654435761)) || '-' || i || '-of-the-table',
    strftime('%Y-%m-%d %H:%M:%S+00:00', 1704067200 + i, 'unixepoch') FROM numbers
"""


class Bench:
    """Two servers, and what was measured on them."""

    def __init__(self, endpoints: Sequence[ReplicaEndpoint], python: Path, folder: Path) -> None:
        self._endpoints, self._python, self._folder = endpoints, python, folder
        self._seconds: dict[tuple[str, int], list[float]] = {}
        self._memory_mb: dict[tuple[str, int], float] = {}
        self._loaded: set[str] = set()
        self.figures: dict[str, dict[str, Any]] = {}

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One per system and table size: the median of its runs, and its largest memory."""
        return [
            {
                "system": system,
                "rows": size,
                "seconds": round(median(runs), 2),
                "rows_per_s": round(2 * size / median(runs)),
                "peak_memory_mb": self._memory_mb.get((system, size)),
                "runs": len(runs),
            }
            for (system, size), runs in self._seconds.items()
        ]

    def forget(self) -> None:
        """What was measured so far only filled caches."""
        self._seconds.clear()
        self._memory_mb.clear()

    def load(self, rows: int) -> str:
        """The same table on both servers, and the differences on the second."""
        table = f"rows{rows}"
        if table in self._loaded:
            return table
        self._loaded.add(table)
        began = time.monotonic()
        asyncio.run(_load([endpoint.dsn for endpoint in self._endpoints], table, rows))
        say(f"loaded 2 x {rows:,} rows in {time.monotonic() - began:.0f} s")
        return table

    def drop(self, table: str) -> None:
        self._loaded.discard(table)
        asyncio.run(_everywhere([endpoint.dsn for endpoint in self._endpoints], f"DROP TABLE {table}"))

    def theirs(self, table: str) -> float:
        dsns = (self._endpoints[0].dsn, self._endpoints[1].dsn)
        found = data_diff.compare(self._python, dsns, table, "id", COLUMNS)
        _must_find(found["keys"], "data-diff")
        self._remember("data-diff", _size(table), found["seconds"])
        return float(found["seconds"])

    def cold(self, table: str) -> float:
        """The whole command, Spark's start included."""
        given = [part for e in self._endpoints for part in ("--dsn", f"{e.name}={e.dsn}")]
        program = "from tops.cli.main import main; main()"
        command = [sys.executable, "-c", program, "divergence", "check", *given, "--table", table]
        began = time.monotonic()
        done = subprocess.run(
            [*command, "--out", str(self._folder / "cold"), "--format", "json"],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        seconds = time.monotonic() - began
        if done.returncode != 1:
            raise RuntimeError(f"the check ended with {done.returncode}: {done.stderr}")
        document = json.loads(done.stdout)
        _must_find(document["differences"], "tops")
        self._remember("tops cold", _size(table), seconds, document["peak_memory_mb"])
        return seconds

    def warm(self, spark: SparkSession, table: str, name: str = "tops warm") -> float:
        began = time.monotonic()
        result = self.check(spark, table)
        seconds = time.monotonic() - began
        _must_find(result.differences, "tops")
        self._remember(name, result.tables[0].rows[self._endpoints[0].name], seconds, result.peak_memory_mb)
        return seconds

    def check(self, spark: SparkSession, table: str) -> CheckResult:
        options = CheckOptions(tables=(table,))
        return asyncio.run(Check(self._endpoints, options, self._folder / "warm", spark=spark).run())

    def files(self, rows: int) -> "Bench":
        """The same measurements between two SQLite files, which no server reads: all work is Spark's."""
        paths = [self._folder / f"{name}.db" for name in ("one", "other")]
        for path, statements in zip(paths, ([], _planted("rows", rows)), strict=True):
            with closing(sqlite3.connect(path)) as connection, connection:
                connection.execute("CREATE TABLE rows (id bigint PRIMARY KEY, number int, label text, at timestamptz)")
                connection.execute(_FILE_ROWS, (rows,))
                for statement in statements:
                    connection.execute(statement)
        endpoints = [ReplicaEndpoint(path.stem, f"sqlite:///{path}") for path in paths]
        bench = Bench(endpoints, self._python, self._folder)
        bench._seconds, bench._memory_mb, bench.figures = self._seconds, self._memory_mb, self.figures
        return bench

    def plain_read(self, table: str) -> float:
        """Both tables read out with ADBC at the same time, batch by batch, and thrown away."""
        began = time.monotonic()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda endpoint: _read_out(endpoint.dsn, table), self._endpoints))
        seconds = time.monotonic() - began
        self._remember("plain read", _size(table), seconds)
        return seconds

    def alternate(self, runs: int, contenders: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
        """Every contender once, then every one again: what changes on the machine changes for all."""
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(runs):
            for name, contender in contenders.items():
                seconds[name].append(contender())
                say(f"  {name}: {seconds[name][-1]:.2f} s")
        return seconds

    def compare(self, figure: str, ours: Sequence[float], theirs: Sequence[float], least: float | None = None) -> None:
        """Seconds of both; a ratio above 1 means that we are faster, `least` is what must be reached."""
        made = Figure.of_pairs(list(zip(ours, theirs, strict=True)), Better.LOWER)
        self.figures[figure] = {
            **made.record(),
            **({"least": least} if least is not None else {}),
            "all_ours": [round(s, 2) for s in ours],
            "all_theirs": [round(s, 2) for s in theirs],
            "load": load_average(),
        }
        say(f"{figure}: {made.ratio:.1f} x ({made.ours:.2f} s against {made.theirs:.2f} s)")

    def _remember(self, system: str, rows: int, seconds: float, memory_mb: float | None = None) -> None:
        self._seconds.setdefault((system, rows), []).append(seconds)
        if memory_mb is not None:
            self._memory_mb[system, rows] = max(memory_mb, self._memory_mb.get((system, rows), 0.0))


def _size(table: str) -> int:
    return int(table.removeprefix("rows"))


def _must_find(keys: int, who: str) -> None:
    if keys != KEYS_DIFFERING:
        raise RuntimeError(f"{who} found {keys} differing keys, there are {KEYS_DIFFERING}")


async def _load(dsns: Sequence[str], table: str, rows: int) -> None:
    await _everywhere(
        dsns,
        f"CREATE UNLOGGED TABLE {table} (id bigint, number int, label text, at timestamptz)",
        f"INSERT INTO {table} SELECT i, (i * 7919) % 1000003, md5(i::text), '2024-01-01Z'::timestamptz + i * "
        f"interval '1 second' FROM generate_series(1::int8, {rows}) AS i",
        f"ALTER TABLE {table} ADD PRIMARY KEY (id)",
    )
    await _everywhere(dsns[1:], *_planted(table, rows))
    await _everywhere(dsns, f"VACUUM ANALYZE {table}")


def _planted(table: str, rows: int) -> list[str]:
    """30 rows missing, 50 changed, 20 extra; in words that every database understands."""
    step = rows // 80
    missing = ", ".join(str(i * step + 7) for i in range(30))
    changed = ", ".join(str(i * step + 11) for i in range(30, 80))
    extra = ", ".join(f"({rows + i}, {i}, 'extra', '2024-01-01 00:00:00+00')" for i in range(1, 21))
    return [
        f"DELETE FROM {table} WHERE id IN ({missing})",
        f"UPDATE {table} SET label = upper(label) || '!', number = -number - 1 WHERE id IN ({changed})",
        f"INSERT INTO {table} VALUES {extra}",
    ]


async def _everywhere(dsns: Sequence[str], *statements: str) -> None:
    async def run(dsn: str) -> None:
        connection = await asyncpg.connect(dsn, command_timeout=3600)
        try:
            for statement in statements:
                await connection.execute(statement)
        finally:
            await connection.close()

    await asyncio.gather(*map(run, dsns))


def _read_out(dsn: str, table: str) -> int:
    with adbc.connect(dsn) as connection, connection.cursor() as cursor:
        cursor.execute(f"SELECT * FROM {table}")
        return sum(batch.num_rows for batch in cursor.fetch_record_batch())


def run(quick: bool, figures: Sequence[str] = (), million: int = MILLION) -> Result:
    """Measure, and return the results as `tops bench` prints them.

    `figures`: measure these alone, with what is measured beside them. A smaller `million` makes smaller tables.
    """
    parts = _chosen(figures or (_FIGURES[_five_million] if quick else _ALL_FIGURES))
    left_out = [name for part, names in _FIGURES.items() if part not in parts for name in names]
    python = data_diff.install()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tops-bench-") as folder:
        servers = asyncio.run(EmbeddedPostgres.start_many(2, settings=SERVER))
        try:
            endpoints = [ReplicaEndpoint(f"r{i}", server.dsn) for i, server in enumerate(servers, start=1)]
            bench = Bench(endpoints, python, Path(folder))
            for part in parts:
                part(bench, 1 if quick else ROUNDS, million)
        finally:
            for server in servers:
                server.__exit__(None, None, None)
    return {
        "name": "divergence",
        "machine": describe_machine(),
        "versions": {
            **package_versions(),
            "postgresql": "16",
            "pyspark": version("pyspark"),
            "adbc": version("adbc-driver-postgresql"),
            "data-diff": data_diff.version(python),
        },
        "ours": [row["system"] for row in bench.rows if row["peak_memory_mb"] is not None],
        "quick": quick,
        "left_out": [*left_out, "more than one round"] if quick else left_out,
        "seconds": round(time.monotonic() - began, 1),
        "peak_memory_mb": max(row["peak_memory_mb"] or 0.0 for row in bench.rows),
        "rows": bench.rows,
        "figures": bench.figures,
    }


def _five_million(bench: Bench, rounds: int, million: int) -> None:
    table = bench.load(5 * million)
    bench.cold(table)
    _await_class_archives()
    bench.cold(table)  # caches of the disk and of class loading are full now
    spark = session.start()
    bench.check(spark, table)
    bench.forget()
    seconds = bench.alternate(
        rounds,
        {
            "tops cold": lambda: bench.cold(table),
            "data-diff": lambda: bench.theirs(table),
            "tops warm": lambda: bench.warm(spark, table),
            "plain read": lambda: bench.plain_read(table),
        },
    )
    spark.stop()
    bench.compare("check5m.vs_data_diff", seconds["tops cold"], seconds["data-diff"], 2)
    bench.compare("check5m_warm.vs_data_diff", seconds["tops warm"], seconds["data-diff"], 4)
    bench.compare("check5m_warm.vs_plain_read", seconds["tops warm"], seconds["plain read"])


def _await_class_archives(timeout_s: float = 120.0) -> None:
    """The first check on a machine leaves a JVM behind that writes an archive of classes: it would disturb the next."""
    deadline = time.monotonic() + timeout_s
    while any(_writes_archive(process) for process in psutil.process_iter()) and time.monotonic() < deadline:
        time.sleep(0.2)


def _writes_archive(process: psutil.Process) -> bool:
    try:
        return any("ArchiveClassesAtExit" in argument for argument in process.cmdline())
    except psutil.Error:
        return False


def _curve(bench: Bench, rounds: int, million: int) -> None:
    """Seconds over table sizes. The figure sets ten million rows beside the line through one and five million."""
    spark = session.start()
    seconds: dict[int, list[float]] = {}
    for millions in (1, 2, 5, 10):
        table = bench.load(millions * million)
        bench.check(spark, table)
        seconds[millions] = [bench.warm(spark, table) for _ in range(rounds)]
        say(f"  {millions * million:,} rows: {median(seconds[millions]):.2f} s")
        bench.drop(table)
    spark.stop()
    line = [one + 9 * (five - one) / 4 for one, five in zip(seconds[1], seconds[5], strict=True)]
    bench.compare("check10m_warm.vs_linear", seconds[10], line)


def _twenty_million(bench: Bench, rounds: int, million: int) -> None:
    table = bench.load(20 * million)
    contenders = {"tops cold": lambda: bench.cold(table), "data-diff": lambda: bench.theirs(table)}
    seconds = bench.alternate(min(2, rounds), contenders)
    bench.compare("check20m.vs_data_diff", seconds["tops cold"], seconds["data-diff"], 4)
    bench.drop(table)


def _executors(bench: Bench, rounds: int, million: int) -> None:
    """Canonical checksums, the part that Spark computes, with one executor and with two, of one core each.

    Between files: a database server beside one executor would use the other core already."""
    files = bench.files(6 * million // 10)
    seconds = {}
    for count in (1, 2):
        spark = session.start(f"local-cluster[{count},1,1024]")
        files.check(spark, "rows")
        seconds[count] = [files.warm(spark, "rows", f"{count} executor{'s'[: count - 1]}") for _ in range(rounds)]
        application = spark.sparkContext.applicationId
        spark.stop()
        shutil.rmtree(Path(pyspark.__file__).parent / "work" / application, ignore_errors=True)  # its executors' logs
    bench.compare("executors.two_vs_one", seconds[2], seconds[1])


# What each part of the benchmark measures.
_FIGURES: Mapping[Callable[[Bench, int, int], None], Sequence[str]] = {
    _five_million: ("check5m.vs_data_diff", "check5m_warm.vs_data_diff", "check5m_warm.vs_plain_read"),
    _curve: ("check10m_warm.vs_linear",),
    _twenty_million: ("check20m.vs_data_diff",),
    _executors: ("executors.two_vs_one",),
}
_ALL_FIGURES = [name for names in _FIGURES.values() for name in names]


def _chosen(figures: Sequence[str]) -> list[Callable[[Bench, int, int], None]]:
    unknown = [name for name in figures if name not in _ALL_FIGURES]
    if unknown:
        raise ConfigError(f"there is no figure {unknown[0]!r}; there are {', '.join(_ALL_FIGURES)}")
    return [part for part, names in _FIGURES.items() if set(names) & set(figures)]
