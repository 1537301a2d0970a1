"""Increments whose sums are kept beside the rows: both or neither, together or one by one."""

from adapters import PostgresAdapter
from adapters.changes import SUMS, Update
from adapters.resource import Why
from tests.contract.harness import PostgresDatabase, entry, member

FOUND = f"select table_name, key, column_name, amount::text from {SUMS} order by key, column_name"


def added(row: int, **amounts: int) -> Update:
    return Update("acct", {"id": row}, add=amounts, must_exist=True, sum_key=f"row {row}")


async def test_increments_and_their_sums_are_one(adapter: PostgresAdapter, database: PostgresDatabase) -> None:
    together = [member("t1", added(1, bal=5)), member("t2", added(2, bal=7)), member("t3", added(1, bal=-2))]

    votes = await adapter.write_all_local(together)
    result = await adapter.apply([entry(1, *(member(f"e{n}", added(n, bal=10)) for n in (1, 2)))])

    assert [vote.rows for vote in votes] == [(1,), (1,), (1,)]
    assert (result.position, result.failed) == (1, None)
    assert await database.sql("select bal from acct where id in (1, 2) order by id") == [(113,), (117,)]
    assert await database.sql(FOUND) == [("acct", "row 1", "bal", "13"), ("acct", "row 2", "bal", "17")]


async def test_several_columns_have_a_sum_each(adapter: PostgresAdapter, database: PostgresDatabase) -> None:
    await database.sql("create table pairs (id int primary key, a int not null, b numeric not null)")
    await database.sql("insert into pairs values (1, 0, 0), (2, 0, 0)")
    both = [Update("pairs", {"id": n}, add={"a": n, "b": "0.5"}, must_exist=True, sum_key=f"{n}") for n in (1, 2)]

    await adapter.write_all_local([member("t1", *both), member("t2", *both)])

    assert await database.sql("select a, b::text from pairs order by id") == [(2, "1.0"), (4, "1.0")]
    assert await database.sql(FOUND) == [
        ("pairs", "1", "a", "2"),
        ("pairs", "1", "b", "1.0"),
        ("pairs", "2", "a", "4"),
        ("pairs", "2", "b", "1.0"),
    ]


async def test_an_increment_of_a_missing_row_leaves_no_sum(
    adapter: PostgresAdapter, database: PostgresDatabase
) -> None:
    votes = await adapter.write_all_local([member("t1", added(1, bal=5)), member("t2", added(99, bal=5))])

    assert votes[0].rows == (1,)
    assert votes[1].excluded is not None and votes[1].excluded.why is Why.VERSION
    assert await database.sql(FOUND) == [("acct", "row 1", "bal", "5")]


async def test_increments_without_a_sum_beside_those_with_one(
    adapter: PostgresAdapter, database: PostgresDatabase
) -> None:
    await adapter.write_all_local(
        [member("t1", added(1, bal=5)), member("t2", Update("acct", {"id": 2}, add={"bal": 5}))]
    )

    assert await database.sql("select bal from acct where id in (1, 2) order by id") == [(105,), (105,)]
    assert await database.sql(FOUND) == [("acct", "row 1", "bal", "5")]
