"""Why replicas of a running set differ: what its policies allow, and what happens past them, named by the log."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from pyspark.sql import SparkSession

from adapters import EmbeddedPostgres
from adapters.changes import Row, Update
from replication.divergence.explain.set_barrier import SetBarrier
from replication.divergence.repair.repair import Strategy
from replication.divergence.repair.set_repair import SetRepair
from replication.divergence.results.model import Kind, LimitKind, Verdict
from replication.tables.endpoints import ReplicaEndpoint, SnapshotHandle
from tests.integration.divergence.conftest import kinds
from tests.integration.divergence.sets import checked_set

QUORUM = 'policy = "quorum"\nwrite_quorum = 2'


_turns = itertools.cycle([True, False])


def moody(table: str, key: Row, kept: Row, came: Row, kept_site: str, came_site: str) -> Row:
    """No resolution at all: what it decides depends on how often it was asked, not on the rows."""
    return kept if next(_turns) else came


async def test_peers_that_do_not_resolve_conflicts_diverge_and_both_writers_are_named(
    cluster_server: EmbeddedPostgres, folder: Path, spark: SparkSession
) -> None:
    keys = f'policy = "peer-to-peer"\nresolver = "{__name__}:moody"'
    async with checked_set(cluster_server, folder, spark, keys, rows=100) as checked:
        async with checked.small.connect("r1") as one, checked.small.connect("r2") as two:
            for replica in ("r1", "r2"):
                await one.order(replica, "pause")
            first = await one.write([Update("t", {"id": 7}, {"v": 1})])
            second = await two.write([Update("t", {"id": 7}, {"v": 2})])
            for replica in ("r1", "r2"):
                await one.order(replica, "resume")
            await one.wait_in_sync()

            result = await checked.compare()

    assert result.verdict is Verdict.DIFFERENT
    found = checked.real_differences(result)
    assert {(d.key, d.kind) for d in found} <= {(("7",), Kind.CHANGED), (("7",), Kind.STALE)}
    assert len(found) == 1
    cause = found[0].cause
    assert cause is not None
    assert cause.summary.startswith("conflicting writes without resolution: ")
    assert "r1" in cause.summary and "r2" in cause.summary
    assert cause.tx in (first.tx, second.tx)
    assert cause.site in ("r1", "r2")
    assert cause.committed_at is not None and cause.number is not None


async def test_changes_by_hand_are_told_apart_from_writes_that_are_missing(
    cluster_server: EmbeddedPostgres, folder: Path, spark: SparkSession
) -> None:
    async with checked_set(cluster_server, folder, spark, QUORUM, rows=100) as checked:
        async with checked.small.connect() as shop:
            written = await shop.write([Update("t", {"id": 6}, {"v": 66})])
            stale = await shop.write([Update("t", {"id": 8}, {"v": 88})])
            await shop.wait_in_sync()
            await checked.on("r2", "UPDATE t SET v = -1 WHERE id = 6", "UPDATE t SET v = -1 WHERE id = 9")
            await checked.on("r3", "DELETE FROM t WHERE id = 8")

            result = await checked.compare()

    found = {(d.key[0], d.replica): d for d in checked.real_differences(result)}
    by_hand = found["6", "r2"].cause
    assert by_hand is not None
    assert "changed outside replication" in by_hand.summary
    assert (by_hand.tx, by_hand.number) == (written.tx, written.position)
    gone = found["8", "r3"]
    assert gone.kind is Kind.MISSING
    assert gone.cause is not None and gone.cause.tx == stale.tx
    assert found["9", "r2"].cause is None  # the log has nothing on this row
    assert len(found) == 3


async def test_a_replica_that_stopped_or_does_not_get_there_makes_the_run_partial(
    cluster_server: EmbeddedPostgres, folder: Path, spark: SparkSession
) -> None:
    async with checked_set(cluster_server, folder, spark, QUORUM, rows=100) as checked:
        async with checked.small.connect() as shop:
            await shop.order("r3", "pause")
            await shop.write([Update("t", {"id": 1}, {"v": 5})])
            paused = await checked.compare(wait_s=2.0)
            await shop.order("r3", "resume")
            await shop.wait_in_sync()

            class DiesAfterTheFirst(SetBarrier):
                opened = 0

                async def open(self, endpoints: Sequence[ReplicaEndpoint]) -> Mapping[str, SnapshotHandle]:
                    DiesAfterTheFirst.opened += 1
                    if DiesAfterTheFirst.opened == 2:
                        await checked.small.stop("r3")
                    return await super().open(endpoints)

            await checked.on("r2", "UPDATE t SET v = -1 WHERE id = 6")
            died = await checked.compare(new_barrier=lambda: DiesAfterTheFirst(checked.link, 2.0))

    for result in (paused, died):
        assert result.verdict is Verdict.PARTIAL
        assert [(limit.kind, limit.what) for limit in result.limits] == [(LimitKind.UNREACHABLE, "r3")]
        assert "EQUAL" not in result.headline
    assert paused.exit_code == 3
    assert kinds(checked.real_differences(died)) == {(("6",), "r2", "changed", ("v",))}


async def test_a_row_that_is_written_between_the_look_and_the_repair_keeps_the_newer_value(
    cluster_server: EmbeddedPostgres, folder: Path, spark: SparkSession
) -> None:
    async with checked_set(cluster_server, folder, spark, QUORUM, rows=100) as checked:
        async with checked.small.connect() as shop:
            await checked.on("r2", "UPDATE t SET v = -1 WHERE id IN (6, 7)", "DELETE FROM t WHERE id IN (8, 9)")
            result = await checked.compare()

            seen: list[Sequence[object]] = []

            class Late(SetRepair):
                rounds = 0

                async def _write(self, *planned: object) -> None:
                    Late.rounds += 1
                    if Late.rounds == 1:
                        # First: r2 has no such row, so it takes both others, and after a write one of them may be late.
                        await shop.execute("delete from t where id = $1", 8)
                        # Back to the value that the repair expects to find, and away again: no compare would notice.
                        await shop.write([Update("t", {"id": 6}, {"v": -1})])
                    await super()._write(*planned)  # type: ignore[arg-type]
                    if Late.rounds == 1:
                        await shop.wait_in_sync()
                        seen.extend(
                            tuple(row)
                            for row in await checked.small.sql("r2", "select id, v from t where id in (6, 8)")
                        )

            done = await checked.repair(result, Strategy.MAJORITY, Late)
            again = await checked.compare()
            rows = {
                replica: await checked.small.sql(replica, "select id, v from t where id between 6 and 9 order by id")
                for replica in ("r1", "r2", "r3")
            }

    assert [tuple(row) for row in seen] == [(6, -1)]
    assert again.verdict is Verdict.EQUAL, again.headline
    assert {tuple(map(tuple, found)) for found in rows.values()} == {((6, -1), (7, 0), (9, 0))}
    assert done.moved == 0
