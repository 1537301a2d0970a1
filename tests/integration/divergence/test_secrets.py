"""A check reads with a login that can't write, and nobody finds its password in what Spark and the check leave."""

import io
from contextlib import redirect_stdout
from pathlib import Path

import asyncpg
import pytest
from pyspark.sql import SparkSession

from adapters import EmbeddedPostgres
from replication.divergence.check.diff import canonical_rows
from replication.divergence.check.options import CheckOptions
from replication.divergence.read import rows
from replication.divergence.read.sets import load_set
from replication.divergence.read.snapshots import SnapshotBarrier
from replication.tables.buckets import HashBuckets
from replication.tables.catalog import describe
from replication.tables.schema import common_table
from tests.integration.divergence.sets import checked_set
from tests.support.logins import CHECK_PASSWORD


async def test_no_plan_event_log_or_report_holds_a_password(
    cluster_server: EmbeddedPostgres, folder: Path, spark: SparkSession, event_log: Path
) -> None:
    async with checked_set(cluster_server, folder, spark, 'policy = "write-all"', rows=50) as checked:
        await checked.on("r2", "update t set v = 7 where id = 3")
        result = await checked.compare(CheckOptions(settle_s=0.0))
        endpoints = load_set(str(checked.small.cluster.path), "shop").endpoints
        assert {found.key for found in checked.differences(result)} == {("3",)}
        assert all(CHECK_PASSWORD in endpoint.dsn for endpoint in endpoints), "the check must log in with a password"

        barrier = SnapshotBarrier()
        handles = await barrier.open(endpoints)
        table = common_table("t", {e.name: await describe(e, "t") for e in endpoints}, common_columns_only=True)
        requests = [rows.request_for(table, h, HashBuckets(1), native_buckets=False) for h in handles.values()]
        frame = canonical_rows(spark, requests)
        assert frame.count() == 50 * len(endpoints)
        shown = io.StringIO()
        with redirect_stdout(shown):
            frame.explain(mode="extended")
        leaf = frame._jdf.queryExecution().analyzed().collectLeaves().apply(0)
        options = str(leaf.options().asCaseSensitiveMap())
        assert '"table"' in options or "RowsRequest" in options or "handle" in options, options
        await barrier.release()

    assert CHECK_PASSWORD not in shown.getvalue()
    assert CHECK_PASSWORD not in options
    events = [path for path in event_log.rglob("*") if path.is_file()]
    assert any(b"tops_replica" in path.read_bytes() for path in events), "Spark must have written down the plans"
    reports = [path for path in folder.rglob("*") if path.is_file() and path.name != "tops.toml"]
    assert reports
    left = [*events, *reports]
    assert [path for path in left if CHECK_PASSWORD.encode() in path.read_bytes()] == []


async def test_a_check_cannot_write(cluster_server: EmbeddedPostgres, folder: Path) -> None:
    async with checked_set(cluster_server, folder, None, 'policy = "write-all"', rows=1) as checked:
        (endpoint, *_) = load_set(str(checked.small.cluster.path), "shop").endpoints
        connection = await asyncpg.connect(endpoint.dsn)
        try:
            for statement in ("update t set v = 1", "delete from tops.applied", "truncate t"):
                await connection.execute("set default_transaction_read_only = off")
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await connection.execute(statement)
        finally:
            await connection.close()
