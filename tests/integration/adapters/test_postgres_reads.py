"""Reads with parameters as they come off the wire, and with values that have no plain Python type."""

import asyncio
import uuid
from contextlib import suppress
from datetime import UTC, date, datetime

import asyncpg
import msgspec
import pytest

from adapters import PostgresAdapter, provision
from adapters.changes import InvalidChange
from adapters.postgres.access.grants import QUERY_SETTINGS
from adapters.postgres.access.privileges import complaints
from adapters.postgres.apply.orphans import QueriesLeft
from adapters.postgres.apply.session import Options, connect
from adapters.postgres.sql.logins import user_of
from adapters.postgres.sql.sqlstates import is_connection_loss
from tests.contract.harness import PostgresDatabase
from tests.support.logins import PASSWORDS
from tests.support.polling import eventually
from tops.model.errors import NotReachable, ResourceError, ResourceRejected, Retry


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
    async with database.open(read_timeout_s=1.0) as adapter:
        with pytest.raises(ResourceRejected, match="statement timeout"):
            await adapter.read("select pg_sleep(30)")


async def test_a_function_that_writes_cannot_be_called_by_a_read(
    database: PostgresDatabase, adapter: PostgresAdapter
) -> None:
    await database.sql("create function wipe() returns void language sql as 'delete from acct'")

    with pytest.raises((ResourceError, ResourceRejected), match="read-only"):
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


def endless(seconds: float) -> str:
    """A query of at least so many seconds on a fast machine, whose function does not look whether it was cancelled."""
    return f"select length(translate(repeat('a', 200000), repeat('b', {round(seconds * 4_000)}), '')) as n"


async def backends(database: PostgresDatabase, of: str = "translate") -> int:
    ((count,),) = await database.sql(
        "select count(*) from pg_stat_activity where pid <> pg_backend_pid() and state = 'active' "
        f"and datname = current_database() and query like '%{of}%'"
    )
    return int(count)


async def all_ended(database: PostgresDatabase) -> None:
    async def none_left() -> bool:
        return await backends(database) == 0

    await eventually(none_left, what="the end of the queries")


async def given_up(adapter: PostgresAdapter, sql: str, who: str) -> None:
    """A read that its caller does not wait for any more, after it has begun."""
    reading = asyncio.ensure_future(adapter.read(sql, who=who))
    await asyncio.sleep(0.3)
    reading.cancel()
    with suppress(asyncio.CancelledError):
        await reading


async def test_a_query_that_can_t_be_cancelled_runs_once(database: PostgresDatabase) -> None:
    async with database.open(read_timeout_s=0.2) as adapter:
        with pytest.raises(ResourceError, match="did not end") as failed:
            await adapter.read(endless(10), who="greedy")

        assert failed.value.retry is Retry.NEVER
        assert await backends(database) == 1
        await all_ended(database)


async def test_a_query_whose_backend_is_terminated_is_not_run_again(database: PostgresDatabase) -> None:
    async with database.open() as adapter:
        reading = asyncio.ensure_future(adapter.read("select pg_sleep(20)"))
        await asyncio.sleep(0.3)
        await database.sql("select pg_terminate_backend(pid) from pg_stat_activity where query ~ '^select pg_sleep'")

        with pytest.raises(NotReachable):
            async with asyncio.timeout(5):
                await reading
        assert await backends(database, "pg_sleep") == 0


async def test_a_read_on_an_idle_connection_that_broke_is_tried_again(database: PostgresDatabase) -> None:
    async with database.open() as adapter:
        await adapter.read("select 1 as one")
        await database.sql(
            # With a time-out the function waits for the end: a backend that only has the signal still runs a BEGIN.
            "select pg_terminate_backend(pid, 20000) from pg_stat_activity where application_name = 'tops-reader'"
        )

        assert (await adapter.read("select 1 as one")).rows == [{"one": 1}]


async def test_a_backend_that_does_not_end_counts_as_its_identity_s_connection(database: PostgresDatabase) -> None:
    async with database.open(read_connections=2) as adapter:
        await asyncio.gather(*(given_up(adapter, endless(3), "greedy") for _ in range(2)))

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await adapter.read("select 1 as one", who="greedy")
        assert (await adapter.read("select 1 as one", who="other")).rows == [{"one": 1}]
        assert await backends(database) == 2
        async with asyncio.timeout(20):  # they end, and the identity has its connections back
            assert (await adapter.read("select 1 as one", who="greedy")).rows == [{"one": 1}]


async def test_an_identity_with_too_many_backends_that_do_not_end_is_rejected(database: PostgresDatabase) -> None:
    async with database.open(read_connections=4) as adapter:
        await asyncio.gather(*(given_up(adapter, endless(3), "greedy") for _ in range(4)))

        with pytest.raises(QueriesLeft, match="4 earlier queries of greedy were cancelled and do not end"):
            async with asyncio.timeout(4):
                await adapter.read("select 1 as one", who="greedy")
        with pytest.raises(QueriesLeft):
            await adapter.read("select 1 as one", who="greedy")
        assert (await adapter.read("select 1 as one", who="other")).rows == [{"one": 1}]
        await all_ended(database)


async def test_a_query_that_its_caller_gives_up_is_cancelled_in_the_database(database: PostgresDatabase) -> None:
    async with database.open(read_connections=1) as adapter:
        await given_up(adapter, "select pg_sleep(20)", "calm")

        async with asyncio.timeout(3):
            assert (await adapter.read("select 1 as one", who="calm")).rows == [{"one": 1}]


async def test_a_query_s_files_on_the_server_s_disk_are_bounded(database: PostgresDatabase) -> None:
    shown = {}
    async with database.open() as adapter:
        for name in ("temp_file_limit", *QUERY_SETTINGS):
            ((shown[name],),) = ((await adapter.read(f"select current_setting('{name}') as v")).rows[0].values(),)
    assert shown == {**QUERY_SETTINGS, "temp_file_limit": "1GB"}

    logins = await provision(database.dsn, "shop", "*", passwords=PASSWORDS, temp_file_limit="20MB")
    async with PostgresAdapter(logins, cluster="test", replica_set="shop") as adapter:
        sort = "select count(*) from (select repeat(md5(i::text), 200) x from generate_series(1, 20000) i order by x) s"
        with pytest.raises(ResourceRejected, match="temp_file_limit"):
            await adapter.read(sort)


async def test_a_login_without_a_bound_for_its_files_is_complained_about(database: PostgresDatabase) -> None:
    assert not [
        one for one in await complaints(database.logins, [], "here", all_tables=False) if "temp_file_limit" in one.text
    ]

    for login in (database.logins.read, database.logins.write):
        await database.sql(f"alter role {user_of(login)} reset temp_file_limit")
    found = [
        one for one in await complaints(database.logins, [], "here", all_tables=False) if "temp_file_limit" in one.text
    ]

    assert [one.open for one in found] == [True, True]
    assert "can fill the server's disk" in found[0].text
    await database.provision()


@pytest.mark.parametrize("how", ["execute", "fetch", "fetchval", "prepare"])
async def test_a_session_that_its_server_is_ending_is_a_lost_connection(database: PostgresDatabase, how: str) -> None:
    options = Options(lock_timeout_s=1.0, statement_timeout_s=5.0, connect_timeout_s=10.0)
    connection = await connect(database.dsn, "here", "tops-test", options)

    # What a server that dies says to an idle session; the end of the connection comes later.
    said = b"SFATAL\0VFATAL\0C57P01\0Mterminating connection\0\0"
    connection._protocol.data_received(b"E" + (len(said) + 4).to_bytes(4, "big") + said)  # type: ignore[attr-defined]

    assert not connection.is_closed()
    with pytest.raises(asyncpg.PostgresConnectionError) as lost:
        await getattr(connection, how)("select 1")
    assert is_connection_loss(lost.value)
    assert connection.is_closed()
