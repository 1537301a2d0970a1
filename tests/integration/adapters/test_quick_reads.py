"""Quick reads give what the driver gives, leave nothing behind, and do not wait for each other."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from adapters import PostgresAdapter
from adapters.postgres.quick import QuickRead, QuickStatement
from adapters.postgres.quick.session import RESULT_BYTES_MAX
from adapters.text_values import DECODERS, ENCODERS, decode_rows, encode_parameters
from replication.model.values import pack_rows, unpack_rows
from tests.contract.harness import PostgresDatabase
from tests.support.polling import eventually

Result = bytes | asyncpg.PostgresError | None
DONE_S = 60.0


class Awaited(QuickRead):
    """A read whose result can be waited for."""

    __slots__ = ("result",)

    def __init__(self, statement: QuickStatement, parameters: bytes) -> None:
        super().__init__(statement, parameters)
        self.result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

    def done(self, result: Result) -> None:
        self.result.set_result(result)


async def described(adapter: PostgresAdapter, sql: str, who: str = "anna") -> QuickStatement:
    statement = await adapter.quick.describe(sql, who)
    assert statement is not None, f"not quick: {sql}"
    return statement


def read_of(statement: QuickStatement, args: Sequence[Any] = ()) -> Awaited:
    parameters = encode_parameters([ENCODERS[oid] for oid in statement.parameters], args)
    assert parameters is not None, f"not to be encoded: {args}"
    return Awaited(statement, parameters)


async def results(adapter: PostgresAdapter, reads: Sequence[Awaited], who: str = "anna") -> list[Result]:
    adapter.quick.submit(who, reads)
    async with asyncio.timeout(DONE_S):
        return list(await asyncio.gather(*(read.result for read in reads)))


def rows_of(statement: QuickStatement, result: Result) -> list[dict[str, Any]]:
    assert isinstance(result, bytes), result
    return decode_rows(result, [name for name, _ in statement.columns], [DECODERS[oid] for _, oid in statement.columns])


async def quick(adapter: PostgresAdapter, sql: str, *args: Any, who: str = "anna") -> list[dict[str, Any]]:
    statement = await described(adapter, sql, who)
    (result,) = await results(adapter, [read_of(statement, args)], who)
    return rows_of(statement, result)


async def by_driver(adapter: PostgresAdapter, sql: str, *args: Any) -> list[dict[str, Any]]:
    """As a client gets it from the driver of the agent."""
    return unpack_rows(pack_rows((await adapter.read(sql, args)).rows))


@asynccontextmanager
async def session_to(database: PostgresDatabase) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(database.dsn)
    try:
        yield connection
    finally:
        await connection.close()


VALUES = [
    "true", "false", "null::bool", "1::int2", "-2147483648", "9223372036854775807", "1.1::float4", "0.1::float8",
    "'NaN'::float8", "'-Infinity'::float4", "1e-7::float8", "1.50::numeric", "'NaN'::numeric", "1e20::numeric",
    "''", "'ä\n\\'", "'x'::varchar(3)", "'x'::char(3)", "'x'::name", "'[1, 2]'::json", "'{\"a\": null}'::jsonb",
    "'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'::uuid", "'\\x00ff'::bytea", "''::bytea", "date '2024-02-29'",
    "date '0001-01-02'", "time '23:59:59.5'", "timestamp '2024-01-01 00:00:00.000001'", "timestamp '0044-03-15 01:02'",
    "timestamptz '2024-06-01 12:00:00+02'", "timestamptz '2024-06-01 12:00:00.12+00'",
]  # fmt: skip


async def test_values_are_the_driver_s(adapter: PostgresAdapter) -> None:
    for value in VALUES:
        sql = f"select {value} as v"
        ours, theirs = await quick(adapter, sql), await by_driver(adapter, sql)

        assert repr(ours) == repr(theirs), value
        assert type(ours[0]["v"]) is type(theirs[0]["v"]), value


PARAMETERS: list[tuple[str, Any]] = [
    ("bool", True), ("int2", -5), ("int4", 7), ("int8", 2**62), ("float8", 0.1), ("float8", float("inf")),
    ("numeric", Decimal("1.50")), ("numeric", 3), ("text", "it's ; \\ $$ ä"), ("varchar", ""), ("uuid", UUID(int=7)),
    ("bytea", b"\x00\xff\\"), ("date", date(2024, 2, 29)), ("timestamp", datetime(2024, 1, 1, 2, 3, 4, 5)),
    ("timestamptz", datetime(2024, 1, 1, tzinfo=UTC)), ("json", '{"a":1}'), ("int4", None), ("text", None),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "value"), PARAMETERS)
async def test_parameters_mean_what_they_mean_to_the_driver(adapter: PostgresAdapter, kind: str, value: Any) -> None:
    sql = f"select $1::{kind} as v"

    assert repr(await quick(adapter, sql, value)) == repr(await by_driver(adapter, sql, value))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("int4", True), ("int4", "5"), ("int4", 1.5), ("text", 5), ("bool", 1), ("timestamptz", datetime(2024, 1, 1)),
        ("timestamp", datetime(2024, 1, 1, tzinfo=UTC)), ("date", datetime(2024, 1, 1)), ("date", date.max),
        ("numeric", 0.1), ("text", "\ud800"), ("bytea", "x"), ("uuid", "x"),
    ],
)  # fmt: skip
async def test_a_value_that_needs_a_guess_is_left_to_the_driver(
    adapter: PostgresAdapter, kind: str, value: Any
) -> None:
    statement = await described(adapter, f"select $1::{kind} as v")

    assert encode_parameters([ENCODERS[oid] for oid in statement.parameters], [value]) is None


@pytest.mark.parametrize("value", ["date 'infinity'", "timestamptz '0044-03-15 BC'", "time '24:00'"])
async def test_a_value_that_python_has_no_type_for_is_not_decoded(adapter: PostgresAdapter, value: str) -> None:
    statement = await described(adapter, f"select {value} as v")
    (result,) = await results(adapter, [read_of(statement)])

    with pytest.raises(ValueError, match=r"\S"):
        rows_of(statement, result)


@pytest.mark.parametrize(
    "sql",
    [
        "select 1; select 2", "insert into acct (id) values (1)", "begin", "show timezone", "explain select 1",
        "select array[1]", "select interval '1 day'", "select 1 as a, 2 as a", "select", "selec", "select nothing()",
        "select set_config('work_mem', '1MB', false)", "select $1::point is null",
    ],
)  # fmt: skip
async def test_what_only_the_driver_can_do_is_not_quick(adapter: PostgresAdapter, sql: str) -> None:
    assert await adapter.quick.describe(sql, "anna") is None


async def test_many_reads_get_their_own_rows(adapter: PostgresAdapter) -> None:
    statement = await described(adapter, "select $1::int as a, repeat('x', $1::int) as b")
    found = await results(adapter, [read_of(statement, [number]) for number in range(500)])

    assert [rows_of(statement, result) for result in found] == [[{"a": n, "b": "x" * n}] for n in range(500)]


async def test_an_error_ends_its_own_read_alone(adapter: PostgresAdapter) -> None:
    statement = await described(adapter, "select 10 / $1::int as v")
    found = await results(adapter, [read_of(statement, [number % 3]) for number in range(60)])

    for number, result in enumerate(found):
        if number % 3:
            assert rows_of(statement, result) == [{"v": 10 // (number % 3)}]
        else:
            assert isinstance(result, asyncpg.DivisionByZeroError)


async def test_a_slow_read_does_not_hold_up_those_behind_it(adapter: PostgresAdapter) -> None:
    slow = await described(adapter, "select pg_sleep($1)::text as v")
    other = await described(adapter, "select $1::int as v")
    sleeping = read_of(slow, [20.0])
    others = [read_of(other, [number]) for number in range(100)]
    adapter.quick.submit("anna", [sleeping, *others])

    async with asyncio.timeout(15.0):
        await asyncio.gather(*(read.result for read in others))

    assert not sleeping.result.done()


async def test_nothing_is_written_and_nothing_is_left_for_another_identity(
    adapter: PostgresAdapter, database: PostgresDatabase
) -> None:
    async with session_to(database) as connection:
        await connection.execute(
            "create function leave_traces() returns text language sql volatile security definer as "
            "$$ select pg_advisory_lock(77); select set_config('tops.left', 'behind', false) $$;"
            "create function write() returns int language sql volatile security definer as "
            "$$ insert into acct (id, bal) values (91, 1) returning 1 $$"
        )

        assert await quick(adapter, "select leave_traces() as v") == [{"v": "behind"}]
        (written,) = await results(adapter, [read_of(await described(adapter, "select write() as v"))])
        assert isinstance(written, asyncpg.ReadOnlySQLTransactionError)
        for _ in range(8):
            assert await quick(adapter, "select current_setting('tops.left', true) as v", who="bert") in (
                [{"v": None}],
                [{"v": ""}],
            )

        async def is_free() -> bool:
            return bool(await connection.fetchval("select count(*) = 0 from pg_locks where locktype = 'advisory' "
                                                  "and objid = 77"))  # fmt: skip

        await eventually(is_free, what="the release of a lock that an idle session held")
        assert await connection.fetchval("select count(*) from acct where id = 91") == 0


async def test_a_large_result_is_handed_back_and_the_statement_is_known_for_it(adapter: PostgresAdapter) -> None:
    statement = await described(adapter, "select repeat('x', $1) as v")
    small, large, huge, after = (read_of(statement, [size]) for size in (10, RESULT_BYTES_MAX + 1, 8_000_000, 20))

    found = await results(adapter, [small, large, huge, after])

    assert found[1] is None
    assert found[2] is None
    assert rows_of(statement, found[0]) == [{"v": "x" * 10}]
    assert statement.is_large
    assert await quick(adapter, "select 1 as v") == [{"v": 1}]


async def test_a_statement_whose_table_has_changed_is_described_anew(
    adapter: PostgresAdapter, database: PostgresDatabase
) -> None:
    async with session_to(database) as connection:
        await connection.execute("create table changing (id int primary key); insert into changing values (1)")
        sql = "select * from changing"
        before = await described(adapter, sql)
        assert await quick(adapter, sql) == [{"id": 1}]
        await connection.execute("alter table changing add column name text default 'new'")

        (result,) = await results(adapter, [read_of(before)])

        assert isinstance(result, asyncpg.FeatureNotSupportedError)
        adapter.quick.drop(before)
        assert await quick(adapter, sql) == [{"id": 1, "name": "new"}]


async def test_one_identity_leaves_connections_for_another(adapter: PostgresAdapter) -> None:
    slow = await described(adapter, "select pg_sleep($1)::text as v")
    greedy = [read_of(slow, [20.0]) for _ in range(200)]
    adapter.quick.submit("anna", greedy)

    async with asyncio.timeout(15.0):
        assert await quick(adapter, "select 1 as v", who="bert") == [{"v": 1}]

    assert not any(read.result.done() for read in greedy)


async def test_reads_on_a_session_that_the_server_ends_are_handed_back(
    adapter: PostgresAdapter, database: PostgresDatabase
) -> None:
    slow = await described(adapter, "select pg_sleep($1)::text as v")
    reads = [read_of(slow, [20.0]) for _ in range(3)]
    adapter.quick.submit("anna", reads)
    async with session_to(database) as connection:

        async def have_begun() -> bool:
            ended = "select count(pg_terminate_backend(pid)) from pg_stat_activity where query ~ '^select pg_sleep'"
            return int(await connection.fetchval(ended)) > 0

        await eventually(have_begun, what="a slow read in the server")
        async with asyncio.timeout(15.0):
            done, _ = await asyncio.wait([read.result for read in reads], return_when=asyncio.FIRST_COMPLETED)

    for result in [read.result() for read in done]:
        assert result is None or isinstance(result, asyncpg.AdminShutdownError)


async def test_a_time_of_day_is_not_quick_as_a_parameter(adapter: PostgresAdapter) -> None:
    assert await adapter.quick.describe("select $1::time as v", "anna") is None
    assert await quick(adapter, "select time '01:02:03' as v") == [{"v": time(1, 2, 3)}]
