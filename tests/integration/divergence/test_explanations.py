"""What a difference is, and what caused it, from log records that were exported as Parquet."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from replication.divergence.explain.explain import Circumstances, RowClock, explain, logged_row
from replication.divergence.explain.logs import ParquetLog, write_log
from replication.divergence.results.model import Basis, Difference, Kind, LoggedWrite, Suspect
from replication.tables.endpoints import LogRecord, Values
from replication.tables.schema import CommonTable
from tests.integration.divergence.conftest import Databases
from tops.model.errors import ConfigError

NOON = datetime(2024, 6, 1, 12, tzinfo=UTC)
KNOWN = Circumstances(("id", "v"), ("id",))


def record(
    number: int,
    new: Values | None,
    *,
    old: Values | None = None,
    site: str = "s1",
    statement: str = "",
    after_s: float = 60,
) -> LogRecord:
    at = NOON + timedelta(seconds=number * after_s)
    return LogRecord(number, f"tx{number}", site, at, "t", ("1",), old, new, statement)


def told(records: list[LogRecord], known: Circumstances = KNOWN, **versions: str | None) -> dict[str, Difference]:
    """Differences by replica; each version is the value of `v`, or None for no row."""
    suspect = Suspect(("1",), 0, {r: None if v is None else ("1", v) for r, v in versions.items()})
    return {d.replica: d for d in explain("t", suspect, records, known, looks=2, steady=True)}


def test_a_version_that_the_log_still_has_is_stale() -> None:
    found = told([record(1, {"v": "a"}), record(2, {"v": "b"}, old={"v": "a"})], r1="b", r2="a", r3="b")

    assert found.keys() == {"r2"}
    assert found["r2"].kind is Kind.STALE
    assert found["r2"].basis is Basis.LOG
    assert found["r2"].cause is not None
    assert (found["r2"].cause.tx, found["r2"].cause.site, found["r2"].cause.number) == ("tx2", "s1", 2)
    assert "was not applied here" in found["r2"].cause.summary


def test_the_log_is_right_against_the_majority() -> None:
    found = told([record(1, {"v": "a"}), record(2, {"v": "b"})], r1="a", r2="a", r3="b")

    assert {r: d.kind for r, d in found.items()} == {"r1": Kind.STALE, "r2": Kind.STALE}


def test_what_a_replica_has_not_applied_yet_is_in_flight() -> None:
    known = Circumstances(("id", "v"), ("id",), positions={"r1": 2, "r2": 1})

    found = told([record(1, {"v": "a"}), record(2, {"v": "b"})], known, r1="b", r2="a")

    assert found["r2"].kind is Kind.IN_FLIGHT


def test_an_insert_that_is_not_applied_yet_is_in_flight_and_not_missing() -> None:
    known = Circumstances(("id", "v"), ("id",), positions={"r1": 5, "r2": 4})

    assert told([record(5, {"v": "a"})], known, r1="a", r2=None)["r2"].kind is Kind.IN_FLIGHT
    assert told([record(4, {"v": "a"})], known, r1="a", r2=None)["r2"].kind is Kind.MISSING


def test_records_after_the_barrier_do_not_count() -> None:
    known = Circumstances(("id", "v"), ("id",), barrier=1)

    found = told([record(1, {"v": "a"}), record(2, {"v": "b"})], known, r1="a", r2="x")

    assert {r: d.kind for r, d in found.items()} == {"r2": Kind.CHANGED}


def test_a_row_that_the_log_deleted_is_deleted_elsewhere() -> None:
    found = told([record(1, {"v": "a"}), record(2, None, old={"v": "a"})], r1=None, r2="a", r3=None)

    assert found["r2"].kind is Kind.DELETED_ELSEWHERE
    assert found["r2"].cause is not None
    assert found["r2"].cause.tx == "tx2"


def test_a_row_that_the_log_wrote_and_a_replica_lacks_is_missing() -> None:
    found = told([record(1, {"v": "a"})], r1="a", r2=None)

    assert found["r2"].kind is Kind.MISSING
    assert found["r2"].cause is not None
    assert found["r2"].cause.tx == "tx1"


def test_peers_that_wrote_the_same_row_without_conflict_resolution_are_named() -> None:
    records = [record(1, {"v": "a"}, site="berlin", after_s=0.1), record(2, {"v": "b"}, site="paris", after_s=0.1)]

    found = told(records, r1="a", r2="b")

    assert found["r1"].cause is not None
    assert "conflicting writes" in found["r1"].cause.summary
    assert "berlin and paris" in found["r1"].cause.summary


def test_a_statement_that_is_not_deterministic_is_named() -> None:
    for statement, named in (("update t set v = now()", "now()"), ("insert into t values (1, random())", "random()")):
        found = told([record(1, {"v": "a"}, statement=statement)], r1="a", r2="b")

        assert found["r2"].kind is Kind.CHANGED
        assert found["r2"].cause is not None
        assert found["r2"].cause.summary == f"the statement is not deterministic: {named}"


def test_a_value_that_no_transaction_wrote_was_changed_outside_replication() -> None:
    found = told([record(1, {"v": "a"}, statement="update t set v = $1")], r1="a", r2="by hand")

    assert found["r2"].kind is Kind.CHANGED
    assert found["r2"].columns == ("v",)
    assert found["r2"].cause is not None
    assert "changed outside replication" in found["r2"].cause.summary


def test_a_statement_whose_result_is_not_in_the_log_came_out_differently() -> None:
    records = [record(1, {"v": "a"}), record(2, None, statement="update t set v = f(v) where id = $1")]

    found = told(records, r1="b", r2="c", r3="b")

    assert found["r2"].cause is not None
    assert found["r2"].cause.summary == (
        "a logged write came out differently here: the result of its statement is not in the log"
    )
    assert found["r2"].logged == LoggedWrite("tx2", 2, known=False)


def test_a_column_that_a_logged_insert_left_to_a_default_came_out_differently() -> None:
    known = Circumstances(("id", "v", "w"), ("id",))
    suspect = Suspect(("1",), 0, {"r1": ("1", "a", "x"), "r2": ("1", "a", "y"), "r3": ("1", "a", "x")})

    (found,) = explain("t", suspect, [record(1, {"v": "a"})], known, looks=2, steady=True)

    assert found.cause is not None
    assert found.cause.summary == "a logged write came out differently here: it left w to a default or a trigger"


def test_triggers_explain_a_row_change_and_not_an_image() -> None:
    known = Circumstances(("id", "v"), ("id",), with_triggers=frozenset({"r2"}))
    for is_image, story in ((False, "came out differently"), (True, "changed outside replication")):
        cause = told([replace(record(1, {"v": "a"}), is_image=is_image)], known, r1="a", r2="b")["r2"].cause

        assert cause is not None and story in cause.summary


def test_direct_writes_that_were_noted_are_evidence() -> None:
    known = Circumstances(("id", "v"), ("id",), direct_writes={"r2": "1 direct write"}, with_triggers=frozenset({"r2"}))

    for records in ([], [record(1, {"v": "a"})]):
        cause = told(records, known, r1="a", r2="b", r3="a")["r2"].cause
        assert cause is not None and cause.summary.startswith("changed outside replication: 1 direct write")


def test_increments_add_to_whichever_version_wins() -> None:
    known = Circumstances(("id", "v", "w"), ("id",))
    inserted = replace(record(1, {"v": "0", "w": "x"}), order=(1, False, 5, "r1"))
    added = replace(record(2, {}), unknown=("v",), creates=False)
    suspect = Suspect(("1",), 0, {"r1": ("1", "5", "x"), "r2": ("1", "5", "by hand"), "r3": ("1", "5", "x")})

    (found,) = explain("t", suspect, [inserted, added], known, looks=2, steady=True)

    assert (found.replica, found.columns, found.basis) == ("r2", ("w",), Basis.LOG)
    assert found.expected == {"id": "1", "v": "5", "w": "x"}


def test_an_update_of_a_deleted_row_does_not_bring_it_back() -> None:
    records = [record(1, {"v": "a"}), record(2, None), replace(record(3, {"v": "b"}), creates=False)]

    found = told(records, r1=None, r2="b", r3="b")

    assert {r: (d.kind, d.basis) for r, d in found.items()} == dict.fromkeys(
        ("r2", "r3"), (Kind.DELETED_ELSEWHERE, Basis.LOG)
    )


def test_a_row_that_only_the_log_holds_is_known_as_it_was_passed() -> None:
    records = [
        replace(record(1, {"v": "1", "w": "x"}), values={"id": 1, "v": 1, "w": "x"}),
        replace(record(2, {"w": "y"}), values={"id": 1, "w": "y"}, creates=False),
    ]
    known = Circumstances(("id", "v", "w", "double"), ("id",), generated=frozenset({"double"}))

    assert logged_row(records, known) == {"id": 1, "v": 1, "w": "y"}
    assert logged_row(records[1:], known) is None
    assert logged_row([*records, record(3, None)], known) is None
    assert logged_row([*records, record(3, None, statement="update t set v = f(v)")], known) is None


def test_the_newest_version_is_right_only_where_versions_differ() -> None:
    low, high = RowClock((1, False, 4, "r1"), deleted=False), RowClock((1, False, 9, "r2"), deleted=False)
    gone = RowClock((1, True, 9, "r2"), deleted=True)

    def basis(row: str | None, **clocks: RowClock) -> tuple[Basis, Values | None]:
        found = next(
            iter(told([], Circumstances(("id", "v"), ("id",), clocks=clocks), r1="a", r2=row, r3="a").values())
        )
        return found.basis, found.expected

    assert basis("b", r1=low, r2=high, r3=low) == (Basis.NEWEST, {"id": "1", "v": "b"})
    assert basis("b", r2=high) == (Basis.NEWEST, {"id": "1", "v": "b"})
    assert basis(None, r1=low, r2=gone, r3=low) == (Basis.NEWEST, None)
    assert basis("b", r1=high, r2=high, r3=high)[0] is Basis.MAJORITY
    assert basis(None, r1=low, r2=high, r3=low)[0] is Basis.MAJORITY  # deleted past replication


def test_without_records_there_is_no_cause_to_tell() -> None:
    found = told([], r1="a", r2="b", r3="a")

    assert found["r2"].cause is None
    assert found["r2"].basis is Basis.MAJORITY


def test_partial_updates_are_joined_to_whole_versions() -> None:
    known = Circumstances(("id", "v", "w"), ("id",))
    records = [record(1, {"v": "a", "w": "x"}), record(2, {"v": "b"}), record(3, {"w": "y"})]
    suspect = Suspect(("1",), 0, {"r1": ("1", "b", "y"), "r2": ("1", "b", "x"), "r3": ("1", "a", "y")})

    found = {d.replica: d for d in explain("t", suspect, records, known, looks=2, steady=True)}

    assert {r: d.kind for r, d in found.items()} == {"r2": Kind.STALE, "r3": Kind.CHANGED}


def own(new: Values | None, **more: object) -> LogRecord:
    """A replica's own write beyond the barrier."""
    return LogRecord(9, "tx9", "r2", NOON, "t", ("1",), None, new, **more)  # type: ignore[arg-type]


def test_a_replicas_own_newer_write_is_in_flight_and_the_others_are_judged_without_it() -> None:
    known = Circumstances(("id", "v"), ("id",), barrier=5, leads={"r2": [own({"v": "new"})]})

    found = told([record(1, {"v": "a"})], known, r1="a", r2="new", r3="wrong")

    assert {r: d.kind for r, d in found.items()} == {"r2": Kind.IN_FLIGHT, "r3": Kind.CHANGED}
    assert found["r2"].cause is not None
    assert (found["r2"].cause.tx, found["r2"].cause.site) == ("tx9", "r2")


def test_a_row_that_is_not_what_the_replicas_own_newer_write_made_of_it_is_no_row_in_flight() -> None:
    known = Circumstances(("id", "v"), ("id",), barrier=5, leads={"r2": [own({"v": "new"})]})

    assert told([], known, r1="a", r2="by hand", r3="a")["r2"].kind is Kind.CHANGED
    assert told([], known, r1="a", r2=None, r3="a")["r2"].kind is Kind.MISSING


def test_what_a_statement_did_is_not_guessed_from_the_log() -> None:
    by_statement = record(2, None, statement="update t set v = upper(v) where id = $1")

    found = told([record(1, {"v": "a"}), by_statement], r1="A", r2="A", r3="a")

    assert {r: (d.kind, d.basis) for r, d in found.items()} == {"r3": (Kind.STALE, Basis.MAJORITY)}


def test_versions_win_by_their_rank_and_not_by_their_number() -> None:
    older, newer = record(2, {"v": "b"}), record(1, {"v": "a"})
    records = [replace(older, order=(1, False, 5, "r1")), replace(newer, order=(1, False, 9, "r2"))]

    assert told(records, r1="a", r2="b", r3="b").keys() == {"r2", "r3"}


def test_a_transaction_that_every_replica_refused_is_no_version_and_one_that_a_single_one_did_is_the_cause() -> None:
    records = [record(1, {"v": "a"}), record(2, {"v": "b"})]
    everyone = Circumstances(("id", "v"), ("id",), rejected={r: {"tx2": "serialization"} for r in ("r1", "r2")})
    one = Circumstances(("id", "v"), ("id",), rejected={"r1": {}, "r2": {"tx2": "unique [23505]: taken"}})

    assert told(records, everyone, r1="a", r2="x").keys() == {"r2"}
    cause = told(records, one, r1="b", r2="a")["r2"].cause
    assert cause is not None and cause.number == 2
    assert cause.summary == "this replica could not apply the transaction: unique [23505]: taken"


async def test_an_exported_log_gives_back_what_was_written(tmp_path: Path) -> None:
    records = [record(2, {"v": None}), record(1, {"v": "a"}, old={"v": "z"}), record(3, None)]
    other = LogRecord(4, "tx4", "s2", NOON, "u", ("1", "x"), None, {"v": "q"})
    write_log(tmp_path / "log.parquet", [*records, other])
    log = ParquetLog(str(tmp_path / "log.parquet"))

    table, other_table = CommonTable("t", ("id",), (), {}, ()), CommonTable("u", ("id", "k"), (), {}, ())
    assert await log.records_of(table, [("1",), ("9",)], None) == {("1",): sorted(records, key=lambda r: r.number)}
    assert await log.records_of(table, [("1",)], 1) == {("1",): [records[1]]}
    assert await log.records_of(other_table, [("1", "x")], None) == {("1", "x"): [other]}
    assert await log.records_of(other_table, [("1", "y")], None) == {}
    with pytest.raises(ConfigError, match="no such file"):
        ParquetLog(str(tmp_path / "none"))


async def test_a_check_with_a_log_explains_what_it_finds(databases: Databases, tmp_path: Path) -> None:
    await databases.everywhere(
        "CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (1, 'b'), (2, 'x'), (3, 'kept'), (5, 'm')"
    )
    await databases.on("r1", "UPDATE t SET v = 'a' WHERE id = 1")
    await databases.on("r2", "UPDATE t SET v = 'by hand' WHERE id = 2")
    await databases.everywhere("DELETE FROM t WHERE id = 3 AND current_setting('port') <> ''")
    await databases.on("r3", "INSERT INTO t VALUES (3, 'kept')")
    write_log(
        tmp_path / "log.parquet",
        [
            LogRecord(1, "tx1", "s1", NOON, "t", ("1",), None, {"id": "1", "v": "a"}),
            LogRecord(2, "tx2", "s2", NOON + timedelta(minutes=1), "t", ("1",), {"v": "a"}, {"v": "b"}),
            LogRecord(3, "tx3", "s1", NOON, "t", ("2",), None, {"id": "2", "v": "x"}),
            LogRecord(4, "tx4", "s1", NOON, "t", ("3",), None, {"id": "3", "v": "kept"}),
            LogRecord(5, "tx5", "s1", NOON, "t", ("3",), {"id": "3", "v": "kept"}, None),
        ],
    )

    result = await databases.compare("t", log=ParquetLog(str(tmp_path / "log.parquet")))

    assert {(d.key[0], d.replica, d.kind, d.cause.tx if d.cause else "") for d in databases.differences(result)} == {
        ("1", "r1", Kind.STALE, "tx2"),
        ("2", "r2", Kind.CHANGED, "tx3"),
        ("3", "r3", Kind.DELETED_ELSEWHERE, "tx5"),
    }
    assert sum(result.tables[0].causes.values()) == 3
