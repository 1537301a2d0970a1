"""What can go wrong is said clearly, and nothing half-done stays behind."""

import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest
from pyspark.sql import SparkSession

from adapters import EmbeddedPostgres
from replication.divergence.check.check import Check
from replication.divergence.read import jvm
from replication.divergence.read.rows import session
from replication.divergence.read.snapshots import SnapshotBarrier
from replication.divergence.read.task_errors import failure_in, task_failed
from replication.divergence.results.folder import RunFolder
from replication.divergence.results.model import LimitKind, Verdict
from replication.tables.catalog import LostConnection
from replication.tables.endpoints import ReplicaEndpoint, SnapshotHandle
from replication.tables.errors import AlreadyRunning, CheckRejected, JavaMissing, SnapshotLost
from tests.integration.divergence.conftest import QUICK, Databases
from tops.model.errors import ConfigError, InvariantBroken, NotReachable, TopsError

ROWS = ("CREATE TABLE t (id int PRIMARY KEY, v int)", "INSERT INTO t SELECT i, i FROM generate_series(1, 2000) i")


class Stopped(Exception):
    """What a person's Ctrl-C does to a check."""


def nowhere() -> ReplicaEndpoint:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return ReplicaEndpoint("gone", f"postgresql://postgres@127.0.0.1:{probe.getsockname()[1]}/postgres")


async def test_with_an_unreachable_replica_the_check_is_partial_and_never_equal(databases: Databases) -> None:
    await databases.everywhere(*ROWS)

    result = await databases.compare("t", endpoints=[*databases.endpoints, nowhere()])

    assert result.verdict is Verdict.PARTIAL
    assert [(limit.kind, limit.what) for limit in result.limits] == [(LimitKind.UNREACHABLE, "gone")]
    assert result.headline.startswith("PARTIAL")
    assert "EQUAL" not in result.headline
    assert result.exit_code == 3


async def test_with_fewer_than_two_reachable_replicas_there_is_no_result(databases: Databases) -> None:
    await databases.everywhere(*ROWS)

    with pytest.raises(NotReachable, match="gone"):
        await databases.compare("t", endpoints=[databases.endpoints[0], nowhere()])

    assert not databases.out.exists()


async def test_more_differences_than_the_cap_make_the_run_partial(databases: Databases) -> None:
    await databases.everywhere(*ROWS, "CREATE TABLE u (id int PRIMARY KEY)", "INSERT INTO u VALUES (1)")
    await databases.on("r1", "UPDATE t SET v = -1", "DELETE FROM u")

    result = await databases.compare("t", "u", options=replace(QUICK, cap=100))

    assert result.verdict is Verdict.PARTIAL
    assert [limit.kind for limit in result.limits] == [LimitKind.CAPPED]
    assert result.exit_code == 1
    assert result.tables[1].counts == {"r1": {"missing": 1}}  # a cap on one table does not starve the next


async def test_a_table_that_one_replica_lacks_is_said_to_be_skipped(databases: Databases) -> None:
    await databases.everywhere(*ROWS)
    await databases.on("r2", "CREATE TABLE only_here (id int PRIMARY KEY)")

    result = await databases.compare()

    assert result.verdict is Verdict.PARTIAL
    assert [(limit.kind, limit.what) for limit in result.limits] == [(LimitKind.SKIPPED, "only_here")]
    assert result.exit_code == 2


async def test_a_table_without_a_key_is_refused(databases: Databases) -> None:
    await databases.everywhere("CREATE TABLE t (id int, v int)", "CREATE UNIQUE INDEX ON t (id)")

    with pytest.raises(CheckRejected, match=r"no primary key.*r1, r2, r3.*add a key"):
        await databases.compare("t")

    assert not databases.out.exists()


async def test_a_role_without_the_right_to_read_is_refused_with_the_servers_words(databases: Databases) -> None:
    await databases.everywhere(*ROWS)
    await databases.on("r2", "DROP ROLE IF EXISTS blind", "CREATE ROLE blind LOGIN PASSWORD 'x'")
    second = databases.endpoints[1]
    address = second.dsn.partition("@")[2]

    with pytest.raises(CheckRejected, match=r"r2 refused.*permission denied for table t"):
        await databases.compare(
            "t", endpoints=[databases.endpoints[0], replace(second, dsn=f"postgresql://blind:x@{address}")]
        )


async def test_different_columns_are_refused_or_compared_as_far_as_shared(databases: Databases) -> None:
    await databases.everywhere(*ROWS)
    await databases.on("r2", "ALTER TABLE t ADD note text")

    with pytest.raises(CheckRejected, match="note only on r2"):
        await databases.compare("t")
    result = await databases.compare("t", options=replace(QUICK, common_columns=True))

    assert result.verdict is Verdict.DIFFERENT
    assert [(d.column, d.definitions) for d in result.tables[0].schema] == [
        ("note", {"r1": "absent", "r2": "text", "r3": "absent"})
    ]


async def test_a_column_of_another_type_is_a_difference_even_when_all_rows_are_equal(databases: Databases) -> None:
    await databases.everywhere(*ROWS)
    await databases.on("r3", "ALTER TABLE t ALTER v TYPE bigint")

    result = await databases.compare("t")

    assert result.verdict is Verdict.DIFFERENT
    assert result.differences == 0
    assert result.tables[0].schema[0].definitions == {"r1": "integer", "r2": "integer", "r3": "bigint"}


async def test_an_unknown_table_is_refused_with_the_replica_that_lacks_it(databases: Databases) -> None:
    await databases.everywhere(*ROWS)
    await databases.on("r3", "DROP TABLE t")

    with pytest.raises(CheckRejected, match="replica r3 has no table t"):
        await databases.compare("t")


class DeathAt(SnapshotBarrier):
    """A real barrier; when its snapshots are taken, something happens to a server."""

    def __init__(self, order: signal.Signals, server: EmbeddedPostgres) -> None:
        super().__init__()
        self._order, self._server = order, server

    async def open(self, endpoints: Sequence[ReplicaEndpoint]) -> Mapping[str, SnapshotHandle]:
        handles = await super().open(endpoints)
        if any(endpoint.dsn == self._server.dsn for endpoint in endpoints):
            for process in (psutil.Process(self._server.pid), *psutil.Process(self._server.pid).children()):
                with suppress(psutil.NoSuchProcess):  # without its postmaster, a process ends by itself
                    process.send_signal(self._order)
        return handles


@pytest.mark.parametrize("order", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_replica_that_dies_or_stalls_half_way_makes_the_run_partial_and_never_equal(
    databases: Databases, tmp_path: Path, spark: SparkSession, order: signal.Signals
) -> None:
    await databases.everywhere(*ROWS)
    async with EmbeddedPostgres(settings={"fsync": "off"}) as victim:
        fourth = ReplicaEndpoint("r4", victim.dsn)
        everyone = [*databases.endpoints, fourth]
        mortal = Databases([fourth], tmp_path / "runs", spark)
        await mortal.everywhere(*ROWS)
        processes = [psutil.Process(victim.pid), *psutil.Process(victim.pid).children()]
        try:
            result = await databases.compare("t", endpoints=everyone, new_barrier=lambda: DeathAt(order, victim))
        finally:
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT)

    assert (result.verdict, result.exit_code) == (Verdict.PARTIAL, 3)
    assert "r4" in result.headline and "EQUAL" not in result.headline
    assert [replica.name for replica in result.replicas if not replica.reachable] == ["r4"]
    assert set(result.tables[0].rows) == {"r1", "r2", "r3"}
    assert {path.name for path in databases.out.iterdir() if path.is_dir()} == {result.id, "history"}


async def test_a_stopped_check_goes_on_where_it_was(databases: Databases) -> None:
    await databases.everywhere(*ROWS, "CREATE TABLE u (id int PRIMARY KEY, v int)", "INSERT INTO u VALUES (1, 1)")
    await databases.on("r1", "UPDATE t SET v = 0 WHERE id = 5")
    await databases.on("r2", "UPDATE u SET v = 0")
    steps: list[tuple[str, str]] = []

    class StopAtSecondTable:
        def step(self, table: str, phase: str, done: int, total: int) -> None:
            if table == "u":
                raise Stopped

    class Recorder:
        def step(self, table: str, phase: str, done: int, total: int) -> None:
            steps.append((table, phase))

    with pytest.raises(Stopped):
        await databases.compare("t", "u", progress=StopAtSecondTable())
    (run,) = [path.name for path in databases.out.iterdir() if path.is_dir()]
    await databases.on("r1", "UPDATE t SET v = id")  # what was done is not looked at again
    result = await databases.check("t", "u", progress=Recorder()).resume(run)

    assert {table for table, _ in steps} == {"u"}
    assert {(d.table, d.replica) for d in databases.differences(result)} == {("t", "r1"), ("u", "r2")}
    assert result.resumed == 1
    with pytest.raises(ConfigError, match="no check to resume"):
        await databases.check("t", "u").resume(run)


async def test_a_big_table_is_resumed_by_key_range(databases: Databases) -> None:
    await databases.everywhere(
        "CREATE TABLE t (id int PRIMARY KEY, v int)",
        "INSERT INTO t SELECT i, i FROM generate_series(1, 4000) i",
        "ANALYZE t",
    )
    await databases.on("r1", "UPDATE t SET v = 0 WHERE id IN (1, 999, 1000, 1001, 2000, 4000)", "ANALYZE t")

    result = await databases.compare("t", options=replace(QUICK, shard_rows=1000))

    assert result.tables[0].counts == {"r1": {"changed": 6}}
    assert result.tables[0].rows == {"r1": 4000, "r2": 4000, "r3": 4000}


async def test_a_table_that_has_grown_is_resumed_with_the_cuts_it_was_begun_with(databases: Databases) -> None:
    await databases.everywhere(
        "CREATE TABLE t (id int PRIMARY KEY, v int)",
        "INSERT INTO t SELECT i, i FROM generate_series(1, 4000) i",
        "ANALYZE t",
    )
    ranges = 0

    class StopAtSecondRange:
        def step(self, table: str, phase: str, done: int, total: int) -> None:
            nonlocal ranges
            ranges += phase == "checksums"
            if ranges == 2:
                raise Stopped

    options = replace(QUICK, shard_rows=1000)
    with pytest.raises(Stopped):
        await databases.compare("t", options=options, progress=StopAtSecondRange())
    (run,) = [path.name for path in databases.out.iterdir() if path.is_dir()]
    await databases.everywhere("INSERT INTO t SELECT i, i FROM generate_series(4001, 8000) i")
    await databases.on("r1", "UPDATE t SET v = 0 WHERE id = 1500")
    result = await databases.check("t", options=options).resume(run)

    assert {d.key for d in databases.differences(result)} == {("1500",)}
    assert result.tables[0].rows == {"r1": 8000, "r2": 8000, "r3": 8000}


async def test_what_was_compared_without_a_replica_is_compared_again_when_it_is_back(databases: Databases) -> None:
    await databases.everywhere(*ROWS, "CREATE TABLE u (id int PRIMARY KEY, v int)", "INSERT INTO u VALUES (1, 1)")
    await databases.on("r3", "UPDATE t SET v = 0 WHERE id = 5")
    first, second, third = databases.endpoints

    class StopAtSecondTable:
        def step(self, table: str, phase: str, done: int, total: int) -> None:
            if table == "u":
                raise Stopped

    away = [first, second, replace(third, dsn=nowhere().dsn)]
    with pytest.raises(Stopped):
        await databases.compare("t", "u", progress=StopAtSecondTable(), endpoints=away)
    (run,) = [path.name for path in databases.out.iterdir() if path.is_dir()]
    result = await databases.check("t", "u").resume(run)

    assert {(d.table, d.replica) for d in databases.differences(result)} == {("t", "r3")}
    assert result.verdict is Verdict.DIFFERENT


async def test_resuming_with_other_replicas_is_refused(databases: Databases) -> None:
    await databases.everywhere(*ROWS)

    class Stop:
        def step(self, table: str, phase: str, done: int, total: int) -> None:
            raise Stopped

    with pytest.raises(Stopped):
        await databases.compare("t", progress=Stop())
    (run,) = [path.name for path in databases.out.iterdir() if path.is_dir()]

    with pytest.raises(ConfigError, match="resume it with the same replicas"):
        await databases.check("t", endpoints=databases.endpoints[:2]).resume(run)


async def test_two_checks_do_not_share_a_run(databases: Databases) -> None:
    folder = RunFolder(databases.out, "one")

    with folder.locked(), pytest.raises(AlreadyRunning), RunFolder(databases.out, "one").locked():
        pass


async def test_a_barrier_that_gives_different_positions_is_a_bug_not_a_result(databases: Databases) -> None:
    await databases.everywhere(*ROWS)

    class Uneven(SnapshotBarrier):
        async def open(self, endpoints: Sequence[ReplicaEndpoint]) -> Mapping[str, SnapshotHandle]:
            handles = await super().open(endpoints)
            return {name: replace(handle, position=i) for i, (name, handle) in enumerate(handles.items())}

    with pytest.raises(InvariantBroken, match="different positions"):
        await databases.compare("t", new_barrier=Uneven)


async def test_rows_on_their_way_at_the_first_look_are_not_reported(databases: Databases) -> None:
    """What follows by other means arrives between the looks; only what stays different counts."""
    await databases.everywhere(*ROWS)
    await databases.on("r1", "UPDATE t SET v = -1 WHERE id IN (7, 8, 9)")
    late = [7, 8]

    class ArrivesLate(SnapshotBarrier):
        opened = 0

        async def open(self, endpoints: Sequence[ReplicaEndpoint]) -> Mapping[str, SnapshotHandle]:
            ArrivesLate.opened += 1
            if ArrivesLate.opened == 2:
                for replica in ("r2", "r3"):
                    await databases.on(replica, f"UPDATE t SET v = -1 WHERE id IN ({late[0]}, {late[1]})")
            return await super().open(endpoints)

    result = await databases.compare("t", new_barrier=ArrivesLate)

    assert {(d.key, d.replica) for d in databases.differences(result)} == {(("9",), "r1")}
    assert result.tables[0].settled == 2


async def test_writes_after_the_barrier_do_not_show(databases: Databases) -> None:
    """Every partition of a replica reads the same snapshot, whatever is written meanwhile."""
    await databases.everywhere(*ROWS)

    class Busy(SnapshotBarrier):
        async def open(self, endpoints: Sequence[ReplicaEndpoint]) -> Mapping[str, SnapshotHandle]:
            handles = await super().open(endpoints)
            await databases.on("r1", "UPDATE t SET v = v + 1000", "DELETE FROM t WHERE id > 1900")
            return handles

    assert (await databases.compare("t", new_barrier=Busy)).verdict is Verdict.EQUAL


def test_missing_java_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(JavaMissing, match=r"Java 17 or newer.*install"):
        jvm.require_java()

    old = tmp_path / "bin" / "java"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    old.chmod(0o755)
    with pytest.raises(JavaMissing, match=r"11\.0\.2"):
        jvm.require_java()


async def test_without_java_nothing_is_written(
    databases: Databases, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(JavaMissing):
        await Check(databases.endpoints, QUICK, databases.out).run()

    assert not databases.out.exists()


def test_a_lost_connection_names_the_replica_and_the_remedy() -> None:
    error = LostConnection("r2", TimeoutError())

    assert str(error) == "replica r2 can't be read: TimeoutError; bring it back, then resume the check"


async def test_a_server_that_rejects_a_statement_while_rows_arrive_is_told_from_one_that_goes(
    databases: Databases,
) -> None:
    handle = SnapshotHandle("r1", databases.endpoints[0].dsn, None, None, datetime.now(UTC))

    with pytest.raises(CheckRejected, match=r"r1 refused a statement.*division by zero"), session(handle) as cursor:
        cursor.execute("select repeat('x', 1000) || 1 / (n - 100000) from generate_series(1, 200000) n")
        for _ in cursor.fetch_record_batch():
            pass
    with pytest.raises(LostConnection, match="r1 can't be read"), session(handle) as cursor:
        cursor.execute("select pg_backend_pid()")
        (pid,) = cursor.fetchone()
        cursor.execute("select repeat('x', 1000) || n from generate_series(1, 1000000) n")
        for number, _ in enumerate(cursor.fetch_record_batch()):
            if number == 0:
                await databases.on("r1", f"select pg_terminate_backend({pid})")


@pytest.mark.parametrize(
    "error",
    [
        LostConnection("r2", ConnectionError("it went; bring it back")),
        NotReachable("SnapshotLost: in its own words"),
        SnapshotLost("CheckRejected: x\nand more"),
        CheckRejected("LostConnection: replica r1 can't be read"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_a_task_gets_through_spark_whatever_its_words_are(error: TopsError) -> None:
    told = failure_in(f"[PYTHON_ERROR] Traceback ...\n{task_failed(error)}\n\tat org.apache.spark")

    assert type(told) is type(error)
    assert str(told) == str(error)


def test_words_that_look_like_an_error_of_a_task_are_none() -> None:
    assert failure_in("LostConnection: replica r2 can't be read: x; bring it back") is None


def test_contradictory_replicas_are_refused(tmp_path: Path) -> None:
    one = ReplicaEndpoint("r1", "postgresql://x/y")
    with pytest.raises(ConfigError, match="at least two"):
        Check([one], QUICK, tmp_path)
    with pytest.raises(ConfigError, match="same name"):
        Check([one, one], QUICK, tmp_path)
    with pytest.raises(ConfigError, match="none of the replicas"):
        Check([one, replace(one, name="r2")], replace(QUICK, primary="r3"), tmp_path)
