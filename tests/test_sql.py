"""What a client's SQL is taken for, before any database sees it."""

import pytest

from adapters import sql as postgres
from adapters.sqlite import guards as sqlite
from tops.changes import InvalidChange

NO_STATEMENTS = [
    "",
    "  -- nothing",
    "commit",
    "BEGIN",
    "rollback to x",
    "prepare transaction 'x'",
    "listen x",
    "notify x",
    "set a = 1",
    "create temp table x (a int)",
    "update t set a = 1; commit",
    "/**/commit",
    "copy t from stdin",
    "do $$ $$",
    "call p()",
]
NO_QUERIES = ["update t set a = 1", "", "commit", "call p()", "select 1; select 2"]


@pytest.mark.parametrize("sql", NO_STATEMENTS)
@pytest.mark.parametrize("engine", [postgres, sqlite], ids=["postgres", "sqlite"])
def test_what_could_end_the_transaction_or_leave_its_session_changed_is_rejected(engine, sql: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidChange):
        engine.check_statement(sql)


@pytest.mark.parametrize("sql", NO_QUERIES)
@pytest.mark.parametrize("engine", [postgres, sqlite], ids=["postgres", "sqlite"])
def test_what_is_no_query_is_rejected_as_a_read(engine, sql: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidChange):
        engine.check_query(sql)


@pytest.mark.parametrize(
    "sql",
    [
        "update t set a = ';' where b = 1;",
        "insert into t values ($1, $2) on conflict (id) do nothing returning id",
        "with moved as (delete from t returning *) insert into u select * from moved",
        "merge into t using u on t.id = u.id when matched then delete",
        "truncate t",
        "select f()",
    ],
)
def test_a_statement_that_changes_rows_is_let_through(sql: str) -> None:
    postgres.check_statement(sql)


@pytest.mark.parametrize(
    "sql", ["select 1", "table t", "values (1)", "explain select 1", "show timezone", "with x as (select 1) table x"]
)
def test_a_query_is_let_through(sql: str) -> None:
    postgres.check_query(sql)


@pytest.mark.parametrize(
    "sql",
    [
        "delete from tops.applied",
        'delete from U&"\\0074ops"."applied"',
        'update t set a = (select max(prefix) from "tops" . "position")',
        "select pg_catalog.set_config('role', 'none', true)",
        "update t set a = 1 where tops.affected(-1, 99) is null",
        'update t set a = 1 where U&"pg_advisory\\005flock"(1) is null',
        "select 1 into temp x",
    ],
)
def test_a_statement_is_known_under_every_spelling(sql: str) -> None:
    with pytest.raises(InvalidChange):
        postgres.check_statement(sql)


def test_what_only_another_database_understands_is_left_to_that_one() -> None:
    text = "insert or replace into t values (1)"

    postgres.check_statement(text, any_dialect=True)
    sqlite.check_statement("replace into t values (1)")
    with pytest.raises(postgres.NotParsed):
        postgres.check_statement(text)


def test_a_text_that_would_exhaust_the_parser_is_rejected() -> None:
    with pytest.raises(InvalidChange):
        postgres.check_query("select " + "+".join(["1"] * 200_000))
    with pytest.raises(InvalidChange):
        postgres.check_query("select " + "(" * 100_000 + "1" + ")" * 100_000)

    postgres.check_query("select * from t where a in (" + ",".join(["1"] * 5_000) + ")")
