"""Values that PostgreSQL takes for equal and writes differently: one row stays one row."""

import asyncpg
import pytest

from adapters.changes import Delete, Insert
from adapters.postgres.origin import Executed
from tests.integration.origin.databases import OriginDatabase

SPELLINGS = {
    "interval": ("1 day", "24:00:00"),
    "jsonb": ('{"a": 1.0}', '{"a": 1.00}'),
    "numeric[]": ("{1.0}", "{1.00}"),
    "numrange": ("[1.0,2)", "[1.00,2)"),
    "float8[]": ("{0}", "{-0}"),
    "bpchar[]": ("{a}", '{"a  "}'),
    "pair": ("(1.0,x)", "(1.00,x)"),
    "far": ("1.0", "1.00"),
    "numeric": ("1.0", "1.00"),
}
TYPES = "create type pair as (a numeric, b text); create domain near as numeric; create domain far as near;"
Plain = asyncpg.Connection


def schema(kind: str) -> str:
    one, _ = SPELLINGS[kind]
    return f"""{TYPES} create table t (id {kind} primary key, v int);
               create table c (id int primary key, t {kind} references t);
               insert into t values ('{one}', 1); insert into c values (1, '{one}')"""


@pytest.mark.parametrize("kind", SPELLINGS)
async def test_a_key_that_is_written_anew_is_one_row(database: OriginDatabase, plain: Plain, kind: str) -> None:
    _, other = SPELLINGS[kind]
    await database.begin(schema(kind))

    done = await database.execute(f"update t set id = '{other}'")

    assert isinstance(done, Executed), done
    assert [type(change) for change in done.write_set.changes] == [Delete, Insert]
    vote = await database.apply("respelled", done)
    assert vote.excluded is None
    assert await plain.fetchval("select id::text from t") == await plain.fetchval(f"select '{other}'::{kind}::text")


@pytest.mark.parametrize("kind", SPELLINGS)
async def test_one_transaction_uses_several_spellings(database: OriginDatabase, plain: Plain, kind: str) -> None:
    one, other = SPELLINGS[kind]
    await database.begin(schema(kind))
    await database.sql("delete from c; delete from t")

    inserted = await database.execute(f"insert into t values ('{one}', 1)", f"update t set id = '{other}', v = 2")
    assert isinstance(inserted, Executed), inserted
    assert [type(change) for change in inserted.write_set.changes] == [Insert]
    assert (await database.apply("inserted", inserted)).excluded is None
    deleted = await database.execute(
        f"update t set id = '{one}' where id = '{one}'::{kind}", f"delete from t where id = '{other}'::{kind}"
    )
    assert isinstance(deleted, Executed), deleted
    assert [type(change) for change in deleted.write_set.changes] == [Delete]
    assert (await database.apply("deleted", deleted)).excluded is None
    assert await plain.fetch("select * from t") == []


@pytest.mark.parametrize("kind", SPELLINGS)
async def test_members_of_a_chain_touch_one_row_by_several_spellings(
    database: OriginDatabase, plain: Plain, kind: str
) -> None:
    one, other = SPELLINGS[kind]
    await database.begin(schema(kind))

    outcomes = await database.execute_all(
        [f"update t set id = '{other}', v = v + 1 where id = '{one}'::{kind}"],
        [f"update t set v = v + 1 where id = '{one}'::{kind}"],
        [f"update t set id = '{one}', v = v + 1 where id = '{one}'::{kind}"],
    )

    executed = [outcome for outcome in outcomes if isinstance(outcome, Executed)]
    assert len(executed) == 3, outcomes
    for number, member in enumerate(executed):  # each builds on the one before
        assert (await database.apply(f"member{number}", member)).excluded is None
    assert await plain.fetchval("select v from t") == 4
