"""How fast a check is: against data-diff and against reading both tables out, over table sizes, over executors.

    python -m bench.divergence [--quick] [--format json]

Two PostgreSQL servers hold (bigint key, int, 32-character text, timestamptz) with 100 differences: 30 rows missing, 20
extra, 50 changed. Contenders alternate on the same two databases in the same run, and each must find all 100 keys.
"cold" is the command line from its start to its exit, Spark's start counted; "warm" is a check in a session that has
run one before, as a service or a notebook would. Every table is made once, in the databases. About 10 minutes on two
idle cores; `--quick` (3 minutes) runs 5 million rows once and leaves out 20 million, the curve over sizes, and the
executors.
"""

import argparse
import asyncio
import json
import os
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
from typing import Any

import adbc_driver_postgresql.dbapi as adbc
import asyncpg
from pyspark.sql import SparkSession

from adapters import EmbeddedPostgres
from bench import data_diff
from bench.machine import describe_machine
from bench.statistics import Better, Figure
from replication.divergence import session
from replication.divergence.check import Check
from replication.divergence.model import CheckResult
from replication.divergence.options import CheckOptions
from replication.divergence.ports import ReplicaEndpoint

MILLION = 1_000_000
KEYS_DIFFERING = 100
COLUMNS = "number,label,at"
SERVER = {"fsync": "off", "shared_buffers": "1GB", "max_wal_size": "16GB", "autovacuum": "off"}
ROOT = Path(__file__).resolve().parents[1]
_FILE_ROWS = """
WITH RECURSIVE numbers(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM numbers WHERE i < ?)
INSERT INTO rows SELECT i, (i * 7919) % 1000003, lower(hex(i * 2654435761)) || '-' || i || '-of-the-table',
    strftime('%Y-%m-%d %H:%M:%S+00:00', 1704067200 + i, 'unixepoch') FROM numbers
"""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Bench:
    """Two servers, and what was measured on them."""

    def __init__(self, servers: Sequence[EmbeddedPostgres], python: Path, folder: Path) -> None:
        self._endpoints = [ReplicaEndpoint(f"r{i}", server.dsn) for i, server in enumerate(servers, start=1)]
        self._python, self._folder = python, folder
        self.rows: list[dict[str, Any]] = []
        self.figures: dict[str, dict[str, Any]] = {}

    def load(self, rows: int) -> str:
        """The same table on both servers, and the differences on the second."""
        table = f"rows{rows}"
        began = time.monotonic()
        asyncio.run(_load([endpoint.dsn for endpoint in self._endpoints], table, rows))
        say(f"loaded 2 x {rows:,} rows in {time.monotonic() - began:.0f} s")
        return table

    def drop(self, table: str) -> None:
        asyncio.run(_everywhere([endpoint.dsn for endpoint in self._endpoints], f"DROP TABLE {table}"))

    def theirs(self, table: str) -> float:
        dsns = (self._endpoints[0].dsn, self._endpoints[1].dsn)
        found = data_diff.compare(self._python, dsns, table, "id", COLUMNS)
        _must_find(found["keys"], "data-diff")
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
        self._remember("tops cold", int(table.removeprefix("rows")), seconds, document["peak_memory_mb"])
        return seconds

    def warm(self, spark: SparkSession, table: str, name: str = "tops warm") -> float:
        began = time.monotonic()
        result = self.check(spark, table)
        seconds = time.monotonic() - began
        _must_find(result.differences, "tops")
        self._remember(name, max(result.tables[0].rows.values()), seconds, result.peak_memory_mb)
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
        bench = Bench([], self._python, self._folder)
        bench._endpoints = [ReplicaEndpoint(path.stem, f"sqlite:///{path}") for path in paths]
        bench.rows, bench.figures = self.rows, self.figures
        return bench

    def plain_read(self, table: str) -> float:
        """Both tables read out with ADBC at the same time, batch by batch, and thrown away."""
        began = time.monotonic()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda endpoint: _read_out(endpoint.dsn, table), self._endpoints))
        return time.monotonic() - began

    def alternate(self, runs: int, contenders: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
        """Every contender once, then every one again: what changes on the machine changes for all."""
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(runs):
            for name, contender in contenders.items():
                seconds[name].append(contender())
                say(f"  {name}: {seconds[name][-1]:.2f} s")
        return seconds

    def compare(self, figure: str, ours: Sequence[float], theirs: Sequence[float]) -> None:
        """Seconds of both; a ratio above 1 means that we are faster."""
        pairs = list(zip(ours, theirs, strict=True))
        self.figures[figure] = {
            **Figure.of_pairs(pairs, Better.LOWER).record(),
            "all_ours": [round(s, 2) for s in ours],
            "all_theirs": [round(s, 2) for s in theirs],
            "load": round(os.getloadavg()[0], 1),
        }
        made = self.figures[figure]
        say(f"{figure}: {made['ratio']:.1f} x ({made['ours']:.2f} s against {made['theirs']:.2f} s)")

    def _remember(self, system: str, rows: int, seconds: float, memory_mb: float) -> None:
        self.rows.append(
            {
                "system": system,
                "clients": 1,
                "rows": rows,
                "seconds": round(seconds, 2),
                "rows_per_s": round(2 * rows / seconds),
                "peak_memory_mb": memory_mb,
            }
        )


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


def run(quick: bool, million: int = MILLION) -> dict[str, Any]:
    """Measure, and return the results as `tops bench` prints them; a smaller `million` makes smaller tables."""
    python = data_diff.install()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tops-bench-") as folder:
        servers = asyncio.run(EmbeddedPostgres.start_many(2, settings=SERVER))
        try:
            bench = Bench(servers, python, Path(folder))
            _five_million(bench, 1 if quick else 3, million)
            if not quick:
                _curve(bench, million)
                _twenty_million(bench, million)
                _executors(bench, million)
        finally:
            for server in servers:
                server.__exit__(None, None, None)
    return {
        "name": "divergence",
        "machine": describe_machine(),
        "versions": {
            "postgresql": "16",
            "pyspark": version("pyspark"),
            "adbc": version("adbc-driver-postgresql"),
            "data-diff": data_diff.version(python),
        },
        "quick": quick,
        "left_out": ["check20m", "curve", "executors", "more than one round"] if quick else [],
        "seconds": round(time.monotonic() - began, 1),
        "peak_memory_mb": max(row["peak_memory_mb"] for row in bench.rows),
        "rows": bench.rows,
        "figures": bench.figures,
    }


def _five_million(bench: Bench, runs: int, million: int) -> None:
    table = bench.load(5 * million)
    spark = session.start()
    bench.check(spark, table)
    bench.cold(table)  # fills the caches of the disk and of class loading; neither is counted
    bench.rows.clear()
    seconds = bench.alternate(
        runs,
        {
            "tops cold": lambda: bench.cold(table),
            "data-diff": lambda: bench.theirs(table),
            "tops warm": lambda: bench.warm(spark, table),
            "plain read": lambda: bench.plain_read(table),
        },
    )
    spark.stop()
    bench.compare("check5m.vs_data_diff", seconds["tops cold"], seconds["data-diff"])
    bench.compare("check5m_warm.vs_data_diff", seconds["tops warm"], seconds["data-diff"])
    bench.compare("check5m_warm.vs_plain_read", seconds["tops warm"], seconds["plain read"])


def _curve(bench: Bench, million: int) -> None:
    """Seconds over table sizes; a ratio near 1 means that time grows as the rows do."""
    spark = session.start()
    seconds = {}
    for millions in (1, 2, 5, 10):
        table = f"rows{millions * million}" if millions == 5 else bench.load(millions * million)
        bench.check(spark, table)
        seconds[millions] = min(bench.warm(spark, table) for _ in range(3))
        bench.drop(table)
    spark.stop()
    per_million = (seconds[10] - seconds[1]) / 9
    bench.figures["curve"] = {
        "seconds_by_million_rows": {str(m): round(s, 2) for m, s in seconds.items()},
        "seconds_per_million_rows": round(per_million, 3),
        "ratio": round(seconds[5] / (seconds[1] + 4 * per_million), 2),
    }
    say(f"curve: {bench.figures['curve']}")


def _twenty_million(bench: Bench, million: int) -> None:
    table = bench.load(20 * million)
    contenders = {"tops cold": lambda: bench.cold(table), "data-diff": lambda: bench.theirs(table)}
    seconds = bench.alternate(2, contenders)
    bench.compare("check20m.vs_data_diff", seconds["tops cold"], seconds["data-diff"])
    bench.drop(table)


def _executors(bench: Bench, million: int) -> None:
    """Canonical checksums, the part that Spark computes, with one executor and with two, of one core each.

    Between files: a database server beside one executor would use the other core already."""
    files = bench.files(6 * million // 10)
    seconds = {}
    for count in (1, 2):
        spark = session.start(f"local-cluster[{count},1,1024]")
        files.check(spark, "rows")
        seconds[count] = [files.warm(spark, "rows", f"{count} executor(s)") for _ in range(2)]
        spark.stop()
    bench.compare("executors.two_vs_one", seconds[2], seconds[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    arguments = parser.parse_args()
    results = run(arguments.quick)
    text = json.dumps(results, indent=2)
    (ROOT / "bench" / "results").mkdir(exist_ok=True)
    (ROOT / "bench" / "results" / "divergence.json").write_text(text)
    if arguments.format == "json":
        print(text)
    else:
        for name, figure in results["figures"].items():
            print(f"{name:32} {figure}")


if __name__ == "__main__":
    main()
