"""Continuous mode: rows are compared soon after they are written; a replica that stays divergent raises a metric."""

from datetime import UTC, datetime
from pathlib import Path

from replication.divergence.check.continuous import Watch
from replication.divergence.explain.logs import write_log
from replication.tables.endpoints import LogRecord
from tests.integration.divergence.conftest import Databases
from tests.support.polling import eventually


def write(number: int, key: str, value: str) -> LogRecord:
    return LogRecord(number, f"tx{number}", "s1", datetime.now(UTC), "t", (key,), None, {"v": value})


async def test_a_replica_that_stays_divergent_raises_a_metric_until_it_converges(
    databases: Databases, tmp_path: Path
) -> None:
    await databases.everywhere("CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (1, 'a'), (2, 'b')")
    await databases.on("r2", "UPDATE t SET v = 'lost update' WHERE id = 2")
    log = tmp_path / "log"
    log.mkdir()
    write_log(log / "1.parquet", [write(1, "1", "a")])
    watch = Watch(databases.spark, databases.endpoints, log, set_name="shop", grace_s=0.0)

    def metric(name: str, **labels: str) -> float:
        return watch.metrics.registry.get_sample_value(name, {"set": "shop", **labels}) or 0.0

    query = watch.start(tmp_path / "checkpoint", every_s=0.2)
    try:
        await eventually(lambda: metric("tops_divergence_converge_seconds_count") == 1)
        assert metric("tops_divergence_stays", replica="r2") == 0

        write_log(log / "2.parquet", [write(2, "2", "b")])
        await eventually(lambda: metric("tops_divergence_stays", replica="r2") == 1)
        assert metric("tops_divergence_rows", replica="r2") == 1
        assert metric("tops_divergence_rows", replica="r1") == 0

        await databases.on("r2", "UPDATE t SET v = 'b' WHERE id = 2")
        await eventually(lambda: metric("tops_divergence_stays", replica="r2") == 0)
        assert metric("tops_divergence_converge_seconds_count") == 2
    finally:
        query.stop()
