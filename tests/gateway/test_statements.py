"""What becomes of a statement is known by its text; in doubt it is not passed on."""

import pytest

from replication.gateway.statements import What, classify

TABLE = {
    What.READ: [
        "select 1", "values (1)", "table accounts", "with a as (select 1) select * from a", "show timezone",
        "explain select 1", "select 1; select 2",
    ],
    What.WRITE: [
        "insert into t values (1)", "update t set a = 1", "delete from t", "truncate t",
        "merge into t using s on t.a = s.a when matched then delete",
        "with a as (insert into t values (1) returning *) select * from a",
        "insert into t values (1) on conflict do nothing returning *",
    ],
    What.BEGIN: ["begin", "begin read only", "start transaction isolation level repeatable read"],
    What.END: ["commit", "end", "rollback", "abort"],
    What.SESSION: [
        "set work_mem = '1MB'", "reset all", "discard all", "deallocate a", "savepoint a", "rollback to a", "close a",
        "set transaction read only", "set local datestyle to iso",
    ],
    What.OWN_SET: ["set tops.consistency = 'current'", "set tops.max_lag to 5", "reset tops.max_lag"],
    What.OWN_SHOW: ["show tops.consistency"],
    What.EMPTY: ["", " -- nothing", ";"],
    What.REJECTED: [
        "selec 1", "create table t (a int)", "drop table t", "grant select on t to a", "vacuum", "copy t from stdin",
        "copy t to stdout", "listen a", "notify a", "prepare a as select 1", "execute a", "prepare transaction 'a'",
        "commit prepared 'a'", "begin read write", "set transaction read write", "set role admin",
        "set session_replication_role = replica", "set row_security = off", "set default_transaction_read_only = off",
        "set tops.other = 1", "set session characteristics as transaction read write", "select 1 for update",
        "explain analyze insert into t values (1)",
        "select * from t for share", "insert into t values (1); select 1", "begin; select 1", "lock table t",
        "select set_config('a.b', 'c', false)", "select pg_advisory_lock(1)", "do $$ begin end $$", "call p()",
        "select * into a from t", "create table a as select 1", "insert into tops.log values (1)",
        "refresh materialized view a", "select pg_notify('a', 'b')",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("what", "sql"), [(what, sql) for what, texts in TABLE.items() for sql in texts])
def test_each_statement_goes_where_the_table_says(what: What, sql: str) -> None:
    assert {statement.what for statement in classify(sql)} == {what}


@pytest.mark.parametrize("sql", TABLE[What.REJECTED])
def test_what_is_rejected_has_a_code_and_a_reason(sql: str) -> None:
    statement = classify(sql)[0]

    assert statement.sqlstate in ("0A000", "42501", "42601")
    assert statement.text


def test_settings_of_the_gateway_have_their_values() -> None:
    values = [classify(f"set tops.max_lag = {value}")[0].value for value in ("5", "0.5", "'7'")]

    assert values == ["5", "0.5", "7"]
    assert classify("set tops.max_lag to default")[0].value is None
