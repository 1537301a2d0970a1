"""How fast a check is: against data-diff and against reading both tables out, over table sizes, over executors.

    python -m bench.divergence [--quick] [--format json]

Two PostgreSQL servers hold (bigint key, int, 32-character text, timestamptz) with 100 differences: 30 rows missing, 20
extra, 50 changed. Contenders alternate on the same two databases in the same run, and each must find all 100 keys.
"cold" is the command line from its start to its exit, Spark's start counted; "warm" is a check in a session that has
run one before, as a service or a notebook would. `--quick` runs 5 million rows once and leaves out 20 million, the
curve over sizes, and the executors.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import adbc_driver_postgresql.dbapi as adbc
import asyncpg
import psutil
from pyspark.sql import SparkSession

from adapters import EmbeddedPostgres
from bench import data_diff
from replication.divergence import session
from replication.divergence.check import Check
from replication.divergence.model import CheckResult
from replication.divergence.options import CheckOptions, Method
from replication.divergence.ports import ReplicaEndpoint

MILLION = 1_000_000
KEYS_DIFFERING = 100
COLUMNS = "number,label,at"
SERVER = {"fsync": "off", "shared_buffers": "1GB", "max_wal_size": "16GB", "autovacuum": "off"}
ROOT = Path(__file__).resolve().parents[1]


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
        self._remember("tops cold", table, seconds, document["peak_memory_mb"])
        return seconds

    def warm(self, spark: SparkSession, table: str, method: Method = Method.AUTO, name: str = "tops warm") -> float:
        began = time.monotonic()
        result = self.check(spark, table, method)
        seconds = time.monotonic() - began
        _must_find(result.differences, "tops")
        self._remember(name, table, seconds, result.peak_memory_mb)
        return seconds

    def check(self, spark: SparkSession, table: str, method: Method = Method.AUTO) -> CheckResult:
        options = CheckOptions(tables=(table,), method=method)
        return asyncio.run(Check(self._endpoints, options, self._folder / "warm", spark=spark).run())

    def plain_read(self, table: str) -> float:
        """Both tables read out with ADBC at the same time, batch by batch, and thrown away."""
        began = time.monotonic()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda endpoint: _read_out(endpoint.dsn, table), self._endpoints))
        return time.monotonic() - began

    def pairs(self, figure: str, table: str, runs: int, ours: Callable[[], float], other: Callable[[], float]) -> None:
        """Alternate the two and compare the medians; a ratio above 1 means that we are faster."""
        mine, others = [], []
        for _ in range(runs):
            mine.append(ours())
            others.append(other())
        ratio = statistics.median(others) / statistics.median(mine)
        self.figures[figure] = {
            "ratio": round(ratio, 2),
            "ours": round(statistics.median(mine), 2),
            "theirs": round(statistics.median(others), 2),
            "runs": runs,
            "all_ours": [round(s, 2) for s in mine],
            "all_theirs": [round(s, 2) for s in others],
        }
        told = self.figures[figure]
        say(f"{figure}: {ratio:.1f} x ({told['ours']} s against {told['theirs']} s, {table})")

    def _remember(self, system: str, table: str, seconds: float, memory_mb: float) -> None:
        rows = int(table.removeprefix("rows"))
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
    step = rows // 80
    await _everywhere(
        dsns[1:],
        f"DELETE FROM {table} WHERE id IN (SELECT i * {step} + 7 FROM generate_series(0, 29) AS i)",
        f"UPDATE {table} SET label = upper(label), number = -number - 1 WHERE id IN "
        f"(SELECT i * {step} + 11 FROM generate_series(30, 79) AS i)",
        f"INSERT INTO {table} SELECT {rows} + i, i, 'extra', now() FROM generate_series(1, 20) AS i",
    )
    await _everywhere(dsns, f"VACUUM ANALYZE {table}")


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


def machine() -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30),
        "system": platform.platform(),
        "load": os.getloadavg()[0],
    }


def run(quick: bool) -> dict[str, Any]:
    """Measure, and return the results as `tops bench` prints them."""
    python = data_diff.install()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tops-bench-") as folder:
        servers = asyncio.run(EmbeddedPostgres.start_many(2, settings=SERVER))
        try:
            bench = Bench(servers, python, Path(folder))
            _five_million(bench, 1 if quick else 3)
            if not quick:
                _twenty_million(bench)
                _curve(bench)
                _executors(bench)
        finally:
            for server in servers:
                server.__exit__(None, None, None)
    return {
        "name": "divergence",
        "machine": machine(),
        "versions": {
            "postgresql": "16",
            "pyspark": version("pyspark"),
            "adbc": version("adbc-driver-postgresql"),
            "data-diff": data_diff.version(python),
        },
        "quick": quick,
        "left_out": ["check20m", "curve", "executors", "more than one pair"] if quick else [],
        "seconds": round(time.monotonic() - began, 1),
        "rows": bench.rows,
        "figures": bench.figures,
    }


def _five_million(bench: Bench, runs: int) -> None:
    table = bench.load(5 * MILLION)
    bench.cold(table)  # fills the caches of the disk and of class loading; not counted
    bench.rows.clear()
    bench.pairs("check5m.vs_data_diff", table, runs, lambda: bench.cold(table), lambda: bench.theirs(table))
    spark = session.start()
    bench.check(spark, table)
    warm = partial(bench.warm, spark, table)
    bench.pairs("check5m_warm.vs_data_diff", table, runs, warm, lambda: bench.theirs(table))
    bench.pairs("check5m_warm.vs_plain_read", table, runs, warm, lambda: bench.plain_read(table))
    spark.stop()
    bench.drop(table)


def _twenty_million(bench: Bench) -> None:
    table = bench.load(20 * MILLION)
    bench.pairs("check20m.vs_data_diff", table, 1, lambda: bench.cold(table), lambda: bench.theirs(table))
    bench.drop(table)


def _curve(bench: Bench) -> None:
    """Seconds over table sizes; `linear` near 1 means that time grows as the rows do."""
    spark = session.start()
    seconds = {}
    for millions in (1, 2, 5, 10):
        table = bench.load(millions * MILLION)
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


def _executors(bench: Bench) -> None:
    """Canonical checksums, the part that Spark computes, with one executor and with two."""
    table = bench.load(MILLION)
    seconds = {}
    for count in (1, 2):
        spark = session.start(f"local-cluster[{count},1,1024]")
        bench.check(spark, table, Method.CANONICAL)
        seconds[count] = min(bench.warm(spark, table, Method.CANONICAL, f"{count} executor(s)") for _ in range(2))
        spark.stop()
    bench.drop(table)
    bench.figures["executors.two_vs_one"] = {
        "ratio": round(seconds[1] / seconds[2], 2),
        "ours": round(seconds[2], 2),
        "theirs": round(seconds[1], 2),
        "runs": 2,
    }
    say(f"executors: {bench.figures['executors.two_vs_one']}")


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
