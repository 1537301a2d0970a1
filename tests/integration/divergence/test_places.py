"""Which rows a change touches, and what a guard of rows therefore lets a repair write."""

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from adapters.changes import Change, Delete, Insert, Member, Repair, Statement, Update, Upsert
from replication.conflicts.own_statements import REPAIR_CALL
from replication.model.events import member_in, write_body
from replication.model.touched_rows import key_in, loose, row_key, tables_named_in
from replication.replica.apply.checks import AtReplica, _Guard
from replication.rpc.control import control_key
from tops.model.ids import TxId
from tops.protocol.messages import Event

ID = frozenset({"id"})


@pytest.mark.parametrize(
    ("sql", "args", "key"),
    [
        ("update t set v = $1 where id = $2", (5, 7), {"id": 7}),
        ("UPDATE public.t SET v = v + 1 WHERE v > 3 AND id = 7;", (), {"id": 7}),
        ('delete from t where "id" = $1 returning *', (7,), {"id": 7}),
        ("insert into t (v, id) values ($1, $2) on conflict do nothing", (1, 7), {"id": 7}),
        ("update t set v = 1 where name = 'it''s' and id = 'x''y'", (), {"id": "x'y"}),
        ('update U&"\\0074" as u set v = 1 where id = 7 -- or id = 8', (), {"id": 7}),
        ("update t set id = 8 where id = 7", (), None),
        ("insert into t (id, v) values (7, 1) on conflict (v) do update set v = 2", (), None),
        ("update t set v = 1", (), None),
        ("update t set v = 1 where id = $1 or v = 2", (7,), None),
        ("update t set v = 1 where id > $1", (7,), None),
        ("update t set v = u.v from u where u.id = $1", (7,), None),
        ("delete from t where id in (select id from u where id = $1)", (7,), None),
        ("insert into t (id) values (1), (2)", (), None),
        ("insert into t select * from u", (), None),
        ("insert into t (id) values (nextval('s'))", (), None),
        ("update t set v = 1 where id = $3", (7,), None),
    ],
)
def test_a_statement_tells_its_row_only_if_it_is_one(
    sql: str, args: tuple[Any, ...], key: dict[str, Any] | None
) -> None:
    assert key_in(sql, args, ID) == key


def test_spellings_of_one_value_are_one_place() -> None:
    moment = datetime(2024, 1, 1, 12, tzinfo=UTC)
    assert loose(7) == loose("7") == loose(Decimal("7.0")) == loose("7.00")
    assert loose(moment) == loose("2024-01-01 12:00:00+00") == loose("2024-01-01T13:00:00+01:00")
    assert loose(7) == loose("0x7") == loose(" +7 ")
    assert loose(True) == loose("t") == loose("yes")
    assert loose(b"\x0f") == loose("\\x0F")
    ident = "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"
    assert loose(ident) == loose(ident.upper()) == loose(f"{{{ident.replace('-', '')}}}")
    assert loose("7") != loose("8")
    assert row_key("public.t", {"a": 1, "b": "X"}) == row_key("t", {"b": "x", "a": "1"})


@pytest.mark.parametrize(
    ("sql", "named"),
    [
        ("update accounts set v = 1", ["accounts"]),
        ('update U&"\\0061ccounts" as account set v = 1', ["accounts"]),
        ("update shop.accounts set v = 'accounts' /* accounts */", ["shop.accounts"]),
        ("update account set v = (select max(v) from public.accounts)", ["accounts", "account"]),
        ("no SQL that PostgreSQL knows", ["accounts", "account", "shop.accounts"]),
    ],
)
def test_tables_are_found_in_statements_as_postgresql_reads_them(sql: str, named: list[str]) -> None:
    assert tables_named_in(sql, ["accounts", "account", "shop.accounts"]) == named


def repair_of_row(key: int) -> Change:
    return Statement(REPAIR_CALL, (msgspec.json.encode(row_key("t", {"id": key})).decode(), ["select 1"]))


@pytest.mark.parametrize(
    ("change", "left_alone"),
    [
        (Update("t", {"id": 7}, {"v": 1}), {7}),
        (Update("public.t", {"id": "7"}, add={"v": 1}), {7}),
        (Insert("t", {"id": 8, "v": 1}), {8}),
        (Upsert("t", {"id": 8}, {"v": 1}), {8}),
        (Delete("t", {"id": 7}), {7}),
        (Delete("u", {"id": 7}), set()),
        (Delete("t", {"id": 9}), set()),
        (Statement("update t set v = 0 where id = $1", (8,)), {8}),
        (Statement("update t set v = 0 where v = 1"), {7, 8}),
        (Statement("update u set v = 0"), set()),
    ],
)
def test_a_row_that_was_written_since_the_look_is_left_alone(change: Change, left_alone: set[int]) -> None:
    guard = _Guard(frozenset({row_key("t", {"id": 7}), row_key("t", {"id": 8})}))

    guard.saw(Member(TxId("tx"), (change,)), 12)

    kept = {key for key in (7, 8) if guard.untouched(repair_of_row(key), 11)}
    assert kept == {7, 8} - left_alone
    assert all(guard.untouched(repair_of_row(key), 12) for key in (7, 8))  # looked at after it


def test_a_repair_without_a_guard_writes_nothing_and_neither_does_what_is_no_repair_of_a_row() -> None:
    repair = Repair("shop-r1", "ident", 11)
    member = Member(TxId("tx"), (repair_of_row(7),), control=repair)
    visitor = AtReplica("r1", None)  # type: ignore[arg-type]

    assert visitor.permitted(member, repair).changes == ()
    assert not _Guard(frozenset({row_key("t", {"id": 7})})).untouched(Statement("delete from t"), 11)


def test_what_a_transaction_is_travels_beside_its_changes_and_nobody_claims_it_inside_them() -> None:
    repair = Repair("shop/r1", "ident", 11, 2)
    body = write_body(Member(TxId("tx"), (), control_key(repair), control=repair, origin="r1"))
    claimed = {"at": body["at"], "write": body["write"], "reads": b""}

    assert member_in(Event("rs.shop", body)).control == repair
    assert member_in(Event("rs.shop", body)).origin == "r1"
    assert member_in(Event("rs.shop", claimed)).control is None
    assert member_in(Event("rs.shop", claimed)).origin == ""
