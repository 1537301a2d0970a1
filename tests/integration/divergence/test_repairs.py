"""Repairs make replicas equal again, touch nothing else, and never write over a row that moved."""

import sqlite3
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from replication.divergence.repair.repair import Planner, Repaired, Strategy, carry_out
from replication.divergence.repair.writer import DirectWriter
from replication.divergence.results.folder import read_differences
from replication.divergence.results.model import CheckResult, Verdict
from replication.tables.endpoints import ReplicaEndpoint
from replication.tables.errors import CheckRejected, RowMoved
from tests.integration.divergence.conftest import Databases
from tests.integration.divergence.test_planted_differences import CHANGES, EVERY_TYPE
from tops.model.errors import ConfigError


async def repaired(
    databases: Databases, result: CheckResult, planner: Planner, endpoints: list[ReplicaEndpoint] | None = None
) -> Repaired:
    changes = planner.changes(read_differences(databases.out / result.id))
    return await carry_out(changes, DirectWriter(endpoints or databases.endpoints))


async def test_after_a_repair_by_majority_every_type_is_equal_again(databases: Databases) -> None:
    await databases.everywhere(EVERY_TYPE)
    for number, (column, change) in enumerate(CHANGES.items()):
        replica = f"r{number % 3 + 1}"
        await databases.on(
            replica,
            f"UPDATE everything SET {column} = {change} WHERE id = {100 + number}",
            f"UPDATE everything SET {column} = NULL WHERE id = {200 + number}",
        )
    await databases.on("r1", "DELETE FROM everything WHERE id IN (1, 3000)")
    await databases.on("r2", "INSERT INTO everything (id) VALUES (-1), (5000)")
    untouched = "SELECT xmin::text, ctid::text FROM everything WHERE id BETWEEN 1000 AND 2000 ORDER BY id"
    before = await databases.fetch("r1", untouched)

    result = await databases.compare("everything")
    done = await repaired(databases, result, Planner(["r1", "r2", "r3"], Strategy.MAJORITY))

    assert done.written == result.differences == 2 * len(CHANGES) + 4
    assert done.moved == 0
    assert (await databases.compare("everything")).verdict is Verdict.EQUAL
    assert await databases.fetch("r1", untouched) == before


async def test_a_row_that_changed_since_the_check_is_left_alone(databases: Databases) -> None:
    await databases.everywhere(
        "CREATE TABLE t (id int PRIMARY KEY, v int)", "INSERT INTO t SELECT i, i FROM generate_series(1, 9) i"
    )
    await databases.on("r1", "UPDATE t SET v = 0 WHERE id IN (1, 2)", "DELETE FROM t WHERE id IN (3, 4)")
    await databases.on("r2", "INSERT INTO t VALUES (10, 0), (11, 0)")
    result = await databases.compare("t")
    await databases.on("r1", "UPDATE t SET v = 77 WHERE id = 1", "INSERT INTO t VALUES (3, 77)")
    await databases.on("r2", "UPDATE t SET v = 77 WHERE id = 10")

    done = await repaired(databases, result, Planner(["r1", "r2", "r3"], Strategy.MAJORITY))

    assert (done.written, done.moved) == (3, 3)
    assert [tuple(r) for r in await databases.fetch("r1", "SELECT id, v FROM t WHERE id < 5 ORDER BY 1")] == [
        (1, 77),
        (2, 2),
        (3, 77),
        (4, 4),
    ]
    assert [tuple(r) for r in await databases.fetch("r2", "SELECT id, v FROM t WHERE id > 9")] == [(10, 77)]


async def test_a_source_row_that_changed_since_the_check_is_not_copied(databases: Databases) -> None:
    await databases.everywhere("CREATE TABLE t (id int PRIMARY KEY, v int)", "INSERT INTO t VALUES (1, 1)")
    await databases.on("r3", "UPDATE t SET v = 2")
    result = await databases.compare("t")
    await databases.on("r1", "UPDATE t SET v = 9")

    done = await repaired(databases, result, Planner(["r1", "r2", "r3"], Strategy.MAJORITY))

    assert (done.written, done.moved) == (0, 1)


async def test_a_batch_is_written_whole_or_not_at_all(databases: Databases) -> None:
    await databases.everywhere(
        "CREATE TABLE t (id int PRIMARY KEY, v int UNIQUE)", "INSERT INTO t SELECT i, i FROM generate_series(1, 5) i"
    )
    await databases.on("r1", "DELETE FROM t WHERE id IN (1, 2)")
    result = await databases.compare("t")
    await databases.on("r1", "INSERT INTO t VALUES (99, 2)")  # takes the value that row 2 needs

    with pytest.raises((CheckRejected, RowMoved)):
        await DirectWriter(databases.endpoints).apply(
            list(Planner(["r1", "r2", "r3"], Strategy.MAJORITY).changes(read_differences(databases.out / result.id)))
        )

    assert [r["id"] for r in await databases.fetch("r1", "SELECT id FROM t ORDER BY 1")] == [3, 4, 5, 99]


async def test_rows_past_the_largest_key_of_the_others_are_deleted_only_by_a_majority(databases: Databases) -> None:
    await databases.everywhere("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    await databases.on("r1", "INSERT INTO t VALUES (1000000)")
    await databases.on("r2", "INSERT INTO t VALUES (1000000)")
    result = await databases.compare("t")

    await repaired(databases, result, Planner(["r1", "r2", "r3"], Strategy.MAJORITY))

    assert [r["id"] for r in await databases.fetch("r3", "SELECT id FROM t ORDER BY 1")] == [1, 1000000]


async def test_without_a_majority_nothing_is_guessed(databases: Databases) -> None:
    await databases.everywhere("CREATE TABLE t (id int PRIMARY KEY, v text)")
    for replica in ("r1", "r2", "r3"):
        await databases.on(replica, f"INSERT INTO t VALUES (1, '{replica}')")
    result = await databases.compare("t")
    planner = Planner(["r1", "r2", "r3"], Strategy.MAJORITY)

    assert list(planner.changes(read_differences(databases.out / result.id))) == []
    assert planner.plan.undecided_rows == 1
    assert "no majority" in planner.plan.undecided[0].reason


async def test_by_primary_the_others_become_what_the_primary_is(databases: Databases) -> None:
    await databases.everywhere("CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (1, 'x'), (2, 'x')")
    await databases.on("r3", "UPDATE t SET v = 'primary' WHERE id = 1", "DELETE FROM t WHERE id = 2")
    result = await databases.compare("t")

    await repaired(databases, result, Planner(["r1", "r2", "r3"], Strategy.PRIMARY, primary="r3"))

    for replica in ("r1", "r2", "r3"):
        assert [tuple(r) for r in await databases.fetch(replica, "SELECT * FROM t")] == [(1, "primary")]


async def test_by_newest_the_largest_stamp_wins(databases: Databases) -> None:
    await databases.everywhere("CREATE TABLE t (id int PRIMARY KEY, v text, at timestamptz)")
    for replica, second in (("r1", "09"), ("r2", "10.5"), ("r3", "10")):
        await databases.on(replica, f"INSERT INTO t VALUES (1, '{replica}', '2024-01-01 00:00:{second}Z')")
    result = await databases.compare("t")

    await repaired(databases, result, Planner(["r1", "r2", "r3"], Strategy.NEWEST, newest_by="at"))

    assert {(await databases.fetch(r, "SELECT v FROM t"))[0]["v"] for r in ("r1", "r2", "r3")} == {"r2"}


async def test_values_of_any_size_and_engine_are_copied_whole(databases: Databases, tmp_path: Path) -> None:
    table = "CREATE TABLE t (id {} PRIMARY KEY, txt text, raw {}, f {}, flag boolean, at timestamptz)"
    path = tmp_path / "embedded.db"
    connection = sqlite3.connect(path)
    with connection:
        connection.execute(table.format("integer", "blob", "double"))
        connection.execute("INSERT INTO t VALUES (2, 'only here', x'00ff', 0.1, 1, '2024-01-01T10:00:00Z')")
    embedded = ReplicaEndpoint("embedded", f"sqlite:///{path}")
    await databases.on(
        "r1",
        table.format("bigint", "bytea", "float8"),
        "INSERT INTO t VALUES (1, repeat('grün ', 100000), decode(repeat('00ff', 50000), 'hex'), 1e-7, true, now())",
    )
    endpoints = [databases.endpoints[0], embedded]

    result = await databases.compare("t", endpoints=endpoints)
    await repaired(databases, result, Planner(["r1", "embedded"], Strategy.PRIMARY, primary="r1"), endpoints)
    assert (await databases.compare("t", endpoints=endpoints)).verdict is Verdict.EQUAL
    assert connection.execute("SELECT id, length(txt), length(raw) FROM t").fetchall() == [(1, 500000, 100000)]

    with connection:
        connection.execute("UPDATE t SET txt = 'from the embedded one'")
    connection.close()
    result = await databases.compare("t", endpoints=endpoints)
    await repaired(databases, result, Planner(["r1", "embedded"], Strategy.PRIMARY, primary="embedded"), endpoints)
    assert (await databases.fetch("r1", "SELECT txt FROM t"))[0]["txt"] == "from the embedded one"


WITH_TRIGGERS = (
    "CREATE TABLE audit (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), t_id int)",
    "CREATE TABLE t (id int PRIMARY KEY, v int UNIQUE DEFERRABLE, at timestamptz)",
    "CREATE TABLE child (id int PRIMARY KEY, t_id int REFERENCES t ON DELETE CASCADE)",
    "CREATE FUNCTION stamp() RETURNS trigger LANGUAGE plpgsql AS "
    "$$ BEGIN new.at := clock_timestamp(); INSERT INTO audit (t_id) VALUES (new.id); RETURN new; END $$",
    "INSERT INTO t SELECT i, i, '2024-01-01Z' FROM generate_series(1, 5) i",
    "INSERT INTO child SELECT i, i FROM generate_series(1, 5) i",
    "CREATE TRIGGER stamp BEFORE INSERT OR UPDATE ON t FOR EACH ROW EXECUTE FUNCTION stamp()",
)
QUIETLY = "SET session_replication_role = replica"


async def test_repairs_of_plain_databases_fire_no_triggers(databases: Databases) -> None:
    await databases.everywhere(*WITH_TRIGGERS)
    await databases.on("r1", QUIETLY, "UPDATE t SET v = -1 WHERE id = 1", "DELETE FROM t WHERE id = 2")
    result = await databases.compare("t")

    done = await repaired(databases, result, Planner(["r1", "r2", "r3"], Strategy.LOG))

    assert done.written == 2
    assert (await databases.compare("t", "audit", "child")).verdict is Verdict.EQUAL


async def test_without_triggers_constraints_are_checked_all_the_same(databases: Databases) -> None:
    await databases.everywhere(*WITH_TRIGGERS)
    # To r1, row 1 is missing, and another row has its value; row 6 is one too many, and has a child.
    await databases.on("r1", QUIETLY, "DELETE FROM t WHERE id = 1", "INSERT INTO t VALUES (7, 1)")
    await databases.on("r1", QUIETLY, "INSERT INTO t VALUES (6, 6)", "INSERT INTO child VALUES (6, 6)")
    result = await databases.compare("t")
    planned = list(Planner(["r1", "r2", "r3"], Strategy.MAJORITY).changes(read_differences(databases.out / result.id)))

    for key, constraint in (("1", "t_v_key"), ("6", "child_t_id_fkey")):
        with pytest.raises(CheckRejected, match=f"breaks the constraint {constraint}"):
            await DirectWriter(databases.endpoints).apply([change for change in planned if change.key == (key,)])

    assert [r["id"] for r in await databases.fetch("r1", "SELECT id FROM t ORDER BY 1")] == [2, 3, 4, 5, 6, 7]


async def test_a_login_that_may_not_switch_triggers_off_is_told_what_it_needs(databases: Databases) -> None:
    await databases.everywhere(*WITH_TRIGGERS)
    await databases.on("r1", QUIETLY, "UPDATE t SET v = -1 WHERE id = 1")
    await databases.on("r1", "CREATE ROLE fixer LOGIN PASSWORD 'x'", "GRANT ALL ON t, audit, child TO fixer")
    result = await databases.compare("t")
    first, *others = databases.endpoints
    parts = urlsplit(first.dsn)
    limited = parts._replace(netloc=f"fixer:x@{parts.netloc.rpartition('@')[2]}").geturl()

    with pytest.raises(CheckRejected, match='GRANT SET ON PARAMETER session_replication_role TO "fixer"'):
        await repaired(
            databases,
            result,
            Planner(["r1", "r2", "r3"], Strategy.LOG),
            [ReplicaEndpoint(first.name, limited), *others],
        )

    assert (await databases.fetch("r1", "SELECT v FROM t WHERE id = 1"))[0]["v"] == -1
    await databases.on("r1", "DROP OWNED BY fixer", "DROP ROLE fixer")


async def test_by_default_nothing_is_deleted_for_want_of_a_log(databases: Databases) -> None:
    await databases.everywhere("CREATE TABLE t (id int PRIMARY KEY, v int)", "INSERT INTO t VALUES (1, 1)")
    await databases.on("r1", "UPDATE t SET v = 9", "INSERT INTO t VALUES (2, 2)")
    result = await databases.compare("t")
    planner = Planner(["r1", "r2", "r3"], Strategy.LOG)

    done = await repaired(databases, result, planner)

    assert done.written == 1
    assert planner.plan.sources == {"majority": 1}
    (left,) = planner.plan.undecided
    assert left.key == ("2",)
    assert "to copy the row" in left.reason and "--force" in left.reason
    assert [tuple(r) for r in await databases.fetch("r1", "SELECT * FROM t ORDER BY 1")] == [(1, 1), (2, 2)]


def test_by_primary_needs_a_primary() -> None:
    with pytest.raises(ConfigError, match="--primary"):
        Planner(["r1", "r2"], Strategy.PRIMARY)
