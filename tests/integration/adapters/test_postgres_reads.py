"""Reads with parameters as they come off the wire, and with values that have no plain Python type."""

import uuid
from datetime import UTC, date, datetime

import msgspec
import pytest

from adapters import PostgresAdapter
from tests.contract.harness import PostgresDatabase
from tops.changes import InvalidChange
from tops.errors import ResourceError, ResourceRefused


@pytest.mark.parametrize(
    ("sql", "value", "result"),
    [
        ("select $1::int + 1 as v", "5", 6),
        ("select $1::date as v", "2026-01-02", date(2026, 1, 2)),
        ("select $1::date as v", date(2026, 1, 2), date(2026, 1, 2)),
        ("select $1::timestamptz as v", "2026-01-02T00:00:00Z", datetime(2026, 1, 2, tzinfo=UTC)),
        ("select $1::bigint[] as v", ["1", "2"], [1, 2]),
        ("select $1::text as v", 5, "5"),
        ("select $1::text as v", "it's; \\ $$", "it's; \\ $$"),
        ("select $1::int is null as v", None, True),
    ],
)
async def test_parameters_may_be_values_or_their_text(
    adapter: PostgresAdapter, sql: str, value: object, result: object
) -> None:
    assert (await adapter.read(sql, (value,))).rows == [{"v": result}]
    assert (await adapter.read(sql, (value,), with_position=True)).rows == [{"v": result}]


async def test_rows_of_any_type_can_travel(adapter: PostgresAdapter) -> None:
    found = await adapter.read(
        "select '10.0.0.1'::inet as a, '[1,5)'::int4range as b, row(1, 'x') as c, array['1.1.1.1'::inet] as d, "
        "gen_random_uuid() as e, 1.50::numeric as f, '{\"a\": 1}'::jsonb as g, '101'::bit(3) as h"
    )

    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(found.rows))
    assert wire[0]["a"] == "10.0.0.1"
    assert uuid.UUID(wire[0]["e"])
    assert (wire[0]["f"], wire[0]["g"]) == ("1.50", '{"a": 1}')


@pytest.mark.parametrize(
    ("sql", "args"), [("select $1::int", ()), ("select $1::int", (1, 2)), ("select $1::int", ("x",))]
)
async def test_parameters_that_do_not_fit_are_told(
    adapter: PostgresAdapter, sql: str, args: tuple[object, ...]
) -> None:
    with pytest.raises((InvalidChange, ResourceError)):
        await adapter.read(sql, args)

    assert (await adapter.read("select 1 as one")).rows == [{"one": 1}]


async def test_a_read_that_takes_too_long_is_cut_short(database: PostgresDatabase) -> None:
    async with database.open(statement_timeout_s=1.0) as adapter:
        with pytest.raises(ResourceRefused, match="statement timeout"):
            await adapter.read("select pg_sleep(30)")


async def test_a_function_that_writes_cannot_be_called_by_a_read(
    database: PostgresDatabase, adapter: PostgresAdapter
) -> None:
    await database.sql("create function wipe() returns void language sql as 'delete from acct'")

    with pytest.raises((ResourceError, ResourceRefused), match="read-only"):
        await adapter.read("select wipe()")

    assert await database.sql("select count(*) from acct") == [(3,)]


@pytest.mark.parametrize(
    "value", ["'0044-03-15 BC'::date", "'24:00'::time", "'294000-01-01'::timestamptz", "'170000000 years'::interval"]
)
async def test_a_value_that_python_has_no_type_for_is_told_with_the_way_out(
    adapter: PostgresAdapter, value: str
) -> None:
    with pytest.raises(ResourceError, match="cast it to text"):
        await adapter.read(f"select {value} as v")

    assert len((await adapter.read(f"select ({value})::text as v")).rows) == 1


async def test_a_read_goes_on_after_its_table_has_changed(database: PostgresDatabase, adapter: PostgresAdapter) -> None:
    for with_position in (True, False):
        await adapter.read("select * from acct", with_position=with_position)
        await database.sql(f"alter table acct add column extra_{with_position} int")

        found = await adapter.read("select * from acct", with_position=with_position)

        assert f"extra_{with_position}".lower() in found.rows[0]
