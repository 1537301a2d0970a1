"""What a client's SQL is taken for, before any database sees it."""

import pytest

from adapters import sql as postgres
from adapters.changes import InvalidChange
from adapters.sqlite import guards as sqlite

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


@pytest.mark.parametrize("rows", [1_000, 5_000])
def test_an_insert_of_as_many_rows_as_libraries_send_is_let_through(rows: int) -> None:
    numbers = iter(range(1, 3 * rows + 1))
    parameters = ",".join(f"(${next(numbers)}::int, ${next(numbers)}, ${next(numbers)})" for _ in range(rows))
    literals = ",".join(f"({row}, 'it''s', default)" for row in range(rows))

    postgres.check_statement(f"insert into t (a, b, c) values {parameters} returning a")
    postgres.check_statement(f"insert into t (a, b, c) values {literals} on conflict (a) do nothing")


@pytest.mark.parametrize(
    "sql",
    [
        "select 1, 2" + " union all select 1, 2" * 16_000,
        "select 1 from (select 1, 2" + " union all select 1, 2" * 16_000 + ") x",
        "select " + "(1, " * 16_000 + "1" + ")" * 16_000,
        "select " + "array[1, " * 16_000 + "1" + "]" * 16_000,
        "select f(1, 'a'" + "||f(1, 2)" * 16_000 + ")",
        "select 1 from t where a in (1, 2)" + " or a in (1, 2)" * 16_000,
        "select 1 from a, b" + " join c on true, d" * 16_000,
        "select 1" + "::int" * 16_000,
        "insert into t values " + ",".join(["(1, 2, 3)"] * 50_000),
    ],
)
def test_a_text_that_nests_too_deeply_or_is_too_long_is_rejected_with_a_way_out(sql: str) -> None:
    with pytest.raises(InvalidChange, match=r"unnest\(\$1::int\[\]"):
        postgres.check_query(sql)


@pytest.mark.parametrize(
    ("sql", "command"),
    [
        ("alter table t add c int", "ALTER TABLE"),
        ("SET work_mem = 1", "SET"),
        ("/* é */ create unique index i on t (a)", "CREATE UNIQUE INDEX"),
        ("create or replace function f() returns int language sql as 'select 1'", "CREATE OR REPLACE FUNCTION"),
        ("create temp table x (a int)", "CREATE TEMP TABLE"),
        ("drop table if exists t", "DROP TABLE"),
        ("refresh materialized view v", "REFRESH MATERIALIZED VIEW"),
        ("vacuum t", "VACUUM"),
        ("begin", "BEGIN"),
        ("copy t from stdin", "COPY"),
        ("select 1 into x", "SELECT INTO"),
    ],
)
def test_a_rejection_names_the_command_as_it_is_written(sql: str, command: str) -> None:
    with pytest.raises(InvalidChange, match=f"INSERT, UPDATE, DELETE, MERGE or SELECT, not {command}: "):
        postgres.check_statement(sql)
    with pytest.raises(InvalidChange, match=f", not {command}: "):
        postgres.check_query(sql)


def test_names_are_those_of_the_parse_tree() -> None:
    (parsed,) = postgres.parse(
        """with q as (select 'notes' as said) update U&"\\0061ccounts" as notes set v = x.longest /* other */
           from shop.lists x, q where x.id @@@ 7 returning lower(v)"""
    )

    assert set(parsed.relations) == {(None, "accounts"), ("shop", "lists"), (None, "q")}
    assert parsed.with_queries == {"q"}
    assert {"longest", "@@@", "lower"} <= parsed.names
    assert {"notes", "other"}.isdisjoint(parsed.names)


def test_columns_that_a_condition_fixes() -> None:
    (parsed,) = postgres.parse("delete from t where a = $1 and (b = 'x' and t.c = 3)")
    (wider,) = postgres.parse("delete from t where a = $1 and b > 2")
    (twice,) = postgres.parse("delete from t where a = 1 and a = 2")

    assert postgres.fixed_columns(parsed.node.whereClause, (7,)) == ({"a": 7, "b": "x", "c": 3}, True)  # type: ignore[attr-defined]
    assert postgres.fixed_columns(wider.node.whereClause, (7,)) == ({"a": 7}, False)  # type: ignore[attr-defined]
    assert not postgres.fixed_columns(twice.node.whereClause, ())[1]  # type: ignore[attr-defined]


@pytest.mark.parametrize("sql", ["insert into t values ('\0')", "select 1 -- \0", "select '\ud800'"])
def test_a_text_that_no_server_can_be_sent_is_not_left_to_the_server(sql: str) -> None:
    for check in (postgres.check_statement, postgres.check_query):
        with pytest.raises(InvalidChange) as rejected:
            check(sql)
        assert not isinstance(
            rejected.value, postgres.NotParsed
        )  # such a text goes on to the server, which explains it
