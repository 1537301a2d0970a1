"""What PostgreSQL and its driver do that a two-phase commit must not fall for; each on a real server."""

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import asyncpg
import pytest

from adapters import EmbeddedPostgres, Logins, PostgresAdapter
from adapters.changes import Change, Delete, Insert, Statement, Update
from adapters.postgres.apply.prepared_transactions import PreparedTransactions
from adapters.resource import Position, Why
from tests.contract.harness import AlwaysShip, PostgresDatabase, attempt, entry, epoch, member
from tests.support.logins import logins_in
from tops.model.errors import (
    AgentReplaced,
    ConfigError,
    NotReachable,
    OutcomeUnknown,
    PermissionDenied,
    ResourceRejected,
    TopsError,
)


def balance(row: int, add: int) -> Update:
    return Update("acct", {"id": row}, add={"bal": add})


async def connect(database: PostgresDatabase) -> asyncpg.Connection:
    return await asyncpg.connect(database.dsn)


async def test_a_prepare_in_a_failed_transaction_is_not_taken_for_a_promise(
    database: PostgresDatabase, adapter: PostgresAdapter
) -> None:
    connection = await connect(database)
    await connection.execute("BEGIN")
    with pytest.raises(asyncpg.DivisionByZeroError):
        await connection.execute("select 1/0")
    tag = await connection.execute("PREPARE TRANSACTION 'nothing'")  # no error: that is the trap
    await connection.close()

    with pytest.raises(ResourceRejected, match="ROLLBACK"):
        PreparedTransactions(adapter._book)._check_tag(tag, attempt(1))
    assert await database.sql("select gid from pg_prepared_xacts where gid = 'nothing'") == []


@pytest.mark.parametrize("change", [balance(1, 1), balance(1, -1000)], ids=["together", "one by one"])
async def test_an_epoch_to_which_the_server_answers_rollback_is_a_no(
    adapter: PostgresAdapter, monkeypatch: pytest.MonkeyPatch, change: Change
) -> None:
    monkeypatch.setattr(
        PreparedTransactions, "_prepare_text", lambda *_: "ROLLBACK"
    )  # the same answer as in a failed transaction

    with pytest.raises(ResourceRejected, match="answered ROLLBACK"):
        await adapter.prepare(epoch(1, member("t1", change)))

    assert await adapter.recover() == []
    assert await adapter.applied() == Position(0)


def test_no_transaction_block_of_the_driver_is_used_where_something_is_prepared() -> None:
    folder = Path(__file__).parents[3] / "adapters" / "postgres"
    paths = [path for path in folder.rglob("*.py") if path.parent.name not in ("origin", "proof")]
    users = {path.name for path in paths if ".transaction(" in path.read_text()}

    assert users == {"copying.py", "grants.py", "guard_triggers.py", "reading.py", "scripts.py"}


@pytest.mark.parametrize("loops", range(8))
async def test_a_commit_cancelled_at_any_step_happens_once_and_is_known_afterwards(
    database: PostgresDatabase, adapter: PostgresAdapter, loops: int
) -> None:
    await adapter.prepare(epoch(1, member("t1", balance(1, 1))))

    task = asyncio.create_task(adapter.commit(attempt(1)))
    for _ in range(loops):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await adapter.commit(attempt(1))

    assert await database.sql("select bal from acct where id = 1") == [(101,)]
    assert await adapter.applied() == Position(1)


@pytest.mark.parametrize("loops", range(8))
async def test_a_prepare_cancelled_at_any_step_can_be_found_and_dropped(
    database: PostgresDatabase, adapter: PostgresAdapter, loops: int
) -> None:
    task = asyncio.create_task(adapter.prepare(epoch(1, member("t1", balance(1, 1)))))
    for _ in range(loops):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    for doubt in await adapter.recover():
        await adapter.rollback(doubt.attempt)

    assert await adapter.recover() == []
    assert await database.sql("select bal from acct where id = 1") == [(100,)]


_WAITING = "select count(*) from pg_stat_activity where wait_event = 'SyncRep'"
_CANCEL_WAITING = "select pg_cancel_backend(pid) from pg_stat_activity where wait_event = 'SyncRep'"


async def _commits_wait_for_standbys(database: PostgresDatabase, watcher: asyncpg.Connection) -> None:
    """A reloaded configuration counts when the checkpointer has seen it, which only a commit that waits shows."""
    probe = await connect(database)
    while True:
        commit = asyncio.create_task(probe.execute("select pg_logical_emit_message(true, 'probe', '')"))
        while not (await asyncio.wait([commit], timeout=0.02))[0]:
            if await watcher.fetchval(_WAITING):
                await watcher.fetch(_CANCEL_WAITING)
                await commit
                await probe.close()
                return


async def test_a_commit_whose_wait_the_server_cancels_is_carried_through(
    shared_server: EmbeddedPostgres, database: PostgresDatabase
) -> None:
    """With a synchronous standby that never answers, COMMIT PREPARED waits; cancelled, it is done all the same."""
    async with database.open(statement_timeout_s=20.0) as adapter:
        await adapter.prepare(epoch(1, member("t1", balance(1, 1))))
        try:
            await database.sql("alter system set synchronous_standby_names = 'nobody'")
            await database.sql("select pg_reload_conf()")
            watcher = await connect(database)
            await _commits_wait_for_standbys(database, watcher)
            task = asyncio.create_task(adapter.commit(attempt(1)))
            while not await watcher.fetchval(_WAITING):
                assert not task.done()
                await asyncio.sleep(0.01)
            await watcher.fetch(_CANCEL_WAITING)
            await watcher.close()
            await task
        finally:
            await database.sql("alter system reset synchronous_standby_names")
            await database.sql("select pg_reload_conf()")

        assert await adapter.applied() == Position(1)


async def test_a_recovered_promise_does_not_fail_serializable_readers() -> None:
    async with EmbeddedPostgres() as server:
        database = await PostgresDatabase.create(server, "recovered")
        async with database.open() as adapter:
            await adapter.prepare(epoch(1, member("t1", balance(1, 1))))
            await server.crash()
            await server.start()

            reader = await connect(database)
            for _ in range(5):
                async with reader.transaction(isolation="serializable"):
                    assert await reader.fetchval("select bal from acct where id = 1") == 100
            await reader.close()
            await adapter.commit(attempt(1))
            assert await database.sql("select bal from acct where id = 1") == [(101,)]


async def test_a_server_without_slots_for_promises_is_refused_at_the_start() -> None:
    async with EmbeddedPostgres(settings={"max_prepared_transactions": 0}) as server:
        with pytest.raises(ConfigError, match="max_prepared_transactions is 0"):
            await PostgresAdapter(Logins.alone(server.dsn), cluster="c", replica_set="s").start()

        connection = await asyncpg.connect(server.dsn)
        assert await connection.fetchval("select to_regnamespace('tops')") is None
        await connection.close()


async def test_exhausted_slots_are_a_no_that_leaves_nothing_behind(
    database: PostgresDatabase, adapter: PostgresAdapter
) -> None:
    blocker = await connect(database)
    gids = [f"blocker-{n}" for n in range(20)]
    for gid in gids:
        await blocker.execute(f"BEGIN; select txid_current(); PREPARE TRANSACTION '{gid}'")

    with pytest.raises(ResourceRejected, match="maximum number of prepared transactions") as rejected:
        await adapter.prepare(epoch(1, member("t1", balance(1, 1))))
    assert rejected.value.retry.value == "safe"
    for gid in gids:
        await blocker.execute(f"ROLLBACK PREPARED '{gid}'")
    await blocker.close()

    await adapter.prepare(epoch(1, member("t1", balance(1, 1))))
    await adapter.commit(attempt(1))
    assert await database.sql("select bal from acct where id = 1") == [(101,)]


async def test_promises_of_other_roles_and_databases_are_neither_listed_nor_touched(
    shared_server: EmbeddedPostgres, database: PostgresDatabase, adapter: PostgresAdapter
) -> None:
    others = await logins_in(shared_server, database.name, "another")
    await adapter.prepare(epoch(1, member("t1", balance(1, 1))))
    await adapter.close()

    async with PostgresAdapter(others, cluster="test", replica_set="shop") as other:
        assert await other.recover() == []
        with pytest.raises(PermissionDenied, match="role"):
            await other.commit(attempt(1))
    neighbour = await PostgresDatabase.create(shared_server, f"{database.name}_b")
    async with neighbour.open() as elsewhere:
        assert await elsewhere.recover() == []
        with pytest.raises(PermissionDenied, match="database"):
            await elsewhere.rollback(attempt(1))
    await neighbour.drop()

    async with database.open() as again:
        assert [doubt.attempt for doubt in await again.recover()] == [attempt(1)]
        await again.rollback(attempt(1))


NOT_PREPARABLE: dict[str, Change] = {
    "notify": Statement("select pg_notify($1, $2)", ("channel", "text")),
    "trigger": Insert("loud", {"id": 1}),
}


@pytest.mark.parametrize("name", NOT_PREPARABLE)
async def test_the_member_that_cannot_be_prepared_is_found_and_the_others_commit(
    database: PostgresDatabase, unproved_adapter: PostgresAdapter, name: str
) -> None:
    await database.sql(
        "create table loud (id int primary key);"
        "create function shout() returns trigger language plpgsql as $$ begin notify loud; return new; end $$;"
        "create trigger shout after insert on loud for each row execute function shout()"
    )
    members = [member(f"t{n}", balance(1 + n % 3, 1)) for n in range(9)]
    members[4] = member("t4", balance(1, 1), NOT_PREPARABLE[name])

    response = await unproved_adapter.prepare(epoch(1, *members))
    await unproved_adapter.commit(attempt(1))

    assert [vote.tx for vote in response.votes if vote.excluded is not None] == ["t4"]
    assert await database.sql("select sum(bal) from acct") == [(308,)]


async def test_two_members_that_cannot_be_prepared_are_both_found(
    database: PostgresDatabase, unproved_adapter: PostgresAdapter
) -> None:
    notify = Statement("select pg_notify($1, $2)", ("channel", "text"))
    members = [member(f"t{n}", *([notify] if n in (0, 5) else [balance(1, 1)])) for n in range(7)]

    response = await unproved_adapter.prepare(epoch(1, *members))

    assert [vote.tx for vote in response.votes if vote.excluded is not None] == ["t0", "t5"]


async def test_a_lock_held_too_long_becomes_a_no_and_leaves_nothing(
    database: PostgresDatabase, adapter: PostgresAdapter
) -> None:
    holder = await connect(database)
    await holder.execute("BEGIN; update acct set bal = 0 where id = 1")

    with pytest.raises(ResourceRejected, match="lock timeout"):
        await adapter.prepare(epoch(1, member("t1", balance(2, 1), balance(1, 1))))
    await holder.execute("ROLLBACK")
    await holder.close()

    assert await adapter.recover() == []
    assert await adapter.applied() == Position(0)
    await adapter.prepare(epoch(1, member("t1", balance(2, 1), balance(1, 1))))


async def test_a_statement_that_takes_too_long_becomes_a_no(database: PostgresDatabase) -> None:
    async with database.open(statement_timeout_s=1.0, prover=AlwaysShip) as adapter:
        with pytest.raises(ResourceRejected, match="statement timeout"):
            await adapter.prepare(epoch(1, member("t1", Statement("select pg_sleep($1)", (30,)))))

        assert await adapter.recover() == []


async def test_writers_in_opposite_order_on_two_servers_end_within_the_time_out(
    database: PostgresDatabase, shared_server: EmbeddedPostgres
) -> None:
    """A deadlock that no server can see: each adapter holds what the other one wants."""
    other = await PostgresDatabase.create(shared_server, f"{database.name}_c")
    async with (
        database.open("a", lock_timeout_s=0.3) as a1,
        database.open("b", lock_timeout_s=0.3) as b1,
        other.open("a", lock_timeout_s=0.3) as a2,
        other.open("b", lock_timeout_s=0.3) as b2,
    ):
        work = member("t1", balance(1, 1))
        await a1.prepare(epoch(1, work))
        await b2.prepare(epoch(1, work))

        results = await asyncio.gather(b1.prepare(epoch(1, work)), a2.prepare(epoch(1, work)), return_exceptions=True)

        assert all(isinstance(result, ResourceRejected) for result in results)
        await a1.rollback(attempt(1))
        await b2.rollback(attempt(1))
    await other.drop()


async def test_a_record_for_publication_never_appears_behind_one_already_seen(database: PostgresDatabase) -> None:
    """Two writers could draw ids in one order and commit in the other; there is one, the holder of the set's lock."""
    async with database.open() as former, database.open() as successor:
        await former.start()
        await former.write_local(member("first", balance(1, 1)))
        await successor.start()
        await successor.write_local(member("later", balance(1, 1)))
        with pytest.raises(AgentReplaced):
            await former.write_local(member("too late", balance(1, 1)))

        assert [one.tx for record in await successor.unpublished() for one in record.members] == ["first", "later"]


async def test_writes_that_commit_together_are_one_record_unless_they_are_long(adapter: PostgresAdapter) -> None:
    short = [member(f"short {n}", balance(1, 1)) for n in range(5)]
    long = [member(f"long {n}", Update("acct", {"id": 1}, {"note": "x" * 300_000})) for n in range(3)]

    await adapter.write_all_local(short)
    await adapter.write_all_local(long)
    records = await adapter.unpublished()

    assert [record.members for record in records] == [short, *([one] for one in long)]
    assert (await adapter.health()).unpublished == 8


async def test_a_frozen_server_is_given_up_within_the_deadline(database: PostgresDatabase) -> None:
    async with database.open(statement_timeout_s=1.0, prover=AlwaysShip) as adapter:
        await adapter.prepare(epoch(1, member("t1", balance(1, 1))))
        watcher = await connect(database)
        pid = await watcher.fetchval(
            "select pid from pg_locks where locktype = 'advisory' and granted and database = "
            "(select oid from pg_database where datname = current_database())"
        )
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(OutcomeUnknown):
                await asyncio.wait_for(adapter.commit(attempt(1)), timeout=30)
        finally:
            os.kill(pid, signal.SIGCONT)

        await adapter.commit(attempt(1))  # over a new connection; the old one is ended first
        assert await watcher.fetchval("select bal from acct where id = 1") == 101
        await watcher.close()


async def test_an_agent_that_was_replaced_does_not_come_back_by_reconnecting(
    database: PostgresDatabase, adapter: PostgresAdapter
) -> None:
    async with database.open() as successor:
        for _ in range(2):
            with pytest.raises(TopsError):
                await adapter.apply([entry(1, member("t1", balance(1, 1)))])
        with pytest.raises(AgentReplaced):
            await adapter.applied()

        await successor.apply([entry(1, member("t1", balance(1, 1)))])
    assert await database.sql("select bal from acct where id = 1") == [(101,)]
    await adapter.start()


async def test_a_broken_line_heals_and_nothing_is_done_twice(
    database: PostgresDatabase, adapter: PostgresAdapter
) -> None:
    await adapter.apply([entry(1, member("t1", balance(1, 1)))])
    await database.sql("select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'tops-%'")

    with suppress(OutcomeUnknown):  # unless the driver has seen the line break before we wrote
        await adapter.apply([entry(2, member("t2", balance(1, 1)))])
    await adapter.apply([entry(1, member("t1", balance(1, 1))), entry(2, member("t2", balance(1, 1)))])

    assert await database.sql("select bal from acct where id = 1") == [(102,)]
    assert (await adapter.read("select 1 as one")).rows == [{"one": 1}]


async def test_nobody_at_the_address_is_said_so() -> None:
    with pytest.raises(NotReachable, match="no connection"):
        await PostgresAdapter(Logins.alone("postgresql://postgres@127.0.0.1:1/x"), cluster="c", replica_set="s").start()


async def test_a_wrong_password_or_database_is_an_error_of_the_configuration(shared_server: EmbeddedPostgres) -> None:
    for dsn in (shared_server.dsn_for("postgres", password="wrong"), shared_server.dsn_for("nosuch")):
        with pytest.raises(ConfigError):
            await PostgresAdapter(Logins.alone(dsn), cluster="c", replica_set="s").start()


async def test_a_standby_is_refused(shared_server: EmbeddedPostgres) -> None:
    async with EmbeddedPostgres(standby_of=shared_server) as standby:
        with pytest.raises(ConfigError, match="standby"):
            await PostgresAdapter(Logins.alone(standby.dsn), cluster="c", replica_set="s").start()


async def test_a_role_without_rights_is_told_what_it_lacks(shared_server: EmbeddedPostgres) -> None:
    database = await PostgresDatabase.create(shared_server, "bare", provisioned=False)
    await database.sql("create role poor login password 'secret'")
    logins = Logins.alone(shared_server.dsn_for(database.name, user="poor", password="secret"))

    with pytest.raises(ConfigError, match="no right to make the schema tops"):
        await PostgresAdapter(logins, cluster="c", replica_set="s").start()
    assert await database.sql("select to_regnamespace('tops')") == [(None,)]

    await database.sql(f"grant create on database {database.name} to poor")
    async with PostgresAdapter(logins, cluster="c", replica_set="s") as adapter:
        response = await adapter.prepare(epoch(1, member("t1", balance(1, 1))))
        assert response.votes[0].excluded is not None
        assert response.votes[0].excluded.sqlstate == "42501"
        await adapter.rollback(attempt(1))
    await database.sql("drop owned by poor cascade; drop role poor")
    await database.drop()


async def test_names_too_long_for_a_global_id_are_refused_before_anything_is_done(database: PostgresDatabase) -> None:
    async with database.open(replica_set="x" * 150) as adapter:
        with pytest.raises(ConfigError, match="too long"):
            await adapter.prepare(epoch(1, member("t1", balance(1, 1)), of=attempt(1, coordinator="y" * 60)))

        assert await adapter.recover() == []


async def test_a_table_with_columns_that_the_writer_does_not_know(
    database: PostgresDatabase, adapter: PostgresAdapter
) -> None:
    await adapter.apply([entry(1, member("t1", Insert("transfer", {"id": 1, "acct": 1, "amount": 1})))])
    await database.sql("alter table transfer add column extra text")
    harmless = await adapter.apply([entry(2, member("t2", Insert("transfer", {"id": 2, "acct": 1, "amount": 1})))])
    await database.sql(
        "alter table transfer add column needed int not null default 0; alter table transfer alter needed drop default"
    )
    failing = await adapter.apply([entry(3, member("t3", Insert("transfer", {"id": 3, "acct": 1, "amount": 1})))])
    known = await adapter.apply(
        [entry(3, member("t3", Insert("transfer", {"id": 3, "acct": 1, "amount": 1, "needed": 5})))]
    )

    assert harmless.failed is None
    assert failing.failed is not None
    assert (failing.failed.reason.sqlstate, "needed" in failing.failed.reason.message) == ("23502", True)
    assert known.failed is None


async def test_a_column_that_was_dropped_under_a_running_adapter_is_missed_by_name(
    database: PostgresDatabase, adapter: PostgresAdapter
) -> None:
    change = Update("acct", {"id": 1}, {"note": "x"})
    await adapter.apply([entry(1, member("t1", change))])
    await database.sql("alter table acct drop column note")

    result = await adapter.apply([entry(2, member("t2", change))])

    assert result.failed is not None
    assert (result.failed.reason.why, "note" in result.failed.reason.message) == (Why.INVALID, True)


@pytest.mark.parametrize(
    "columns", ["id serial primary key, v int", "id int primary key, at timestamptz default now(), v int"]
)
async def test_a_column_that_fills_itself_differently_everywhere_must_be_given(
    database: PostgresDatabase, adapter: PostgresAdapter, columns: str
) -> None:
    await database.sql(f"create table own ({columns})")
    partial = Insert("own", {"v": 1} if "serial" in columns else {"id": 1, "v": 1})

    response = await adapter.prepare(epoch(1, member("t1", partial)))

    assert response.votes[0].excluded is not None
    assert response.votes[0].excluded.why is Why.INVALID


async def test_a_column_whose_type_changed_under_a_running_adapter_refuses_nobody(
    database: PostgresDatabase, adapter: PostgresAdapter
) -> None:
    by_sql = Statement("update acct set bal = $1 where id = 2", (7,))
    await adapter.apply([entry(1, member("t1", Update("acct", {"id": 1}, {"bal": 5}), by_sql))])
    await database.sql("alter table acct alter bal type numeric")

    by_sql = Statement("update acct set bal = $1 where id = 2", ("7.5",))
    result = await adapter.apply([entry(2, member("t2", Update("acct", {"id": 1}, {"bal": "5.5"}), by_sql))])

    assert result.failed is None
    assert await database.sql("select bal::text from acct where id < 3 order by id") == [("5.5",), ("7.5",)]


async def test_a_constraint_that_shares_its_name_with_one_that_cannot_wait_hurts_nobody(
    database: PostgresDatabase, adapter: PostgresAdapter
) -> None:
    await database.sql(
        "create table c1 (id int primary key, p int, constraint same foreign key (p) references c1 (id));"
        "create table c2 (id int primary key, p int,"
        " constraint same foreign key (p) references c2 (id) deferrable initially deferred);"
        "create table c3 (id int primary key, u int, constraint soon unique (u) deferrable initially immediate);"
        "create schema closed; create table closed.c4 (id int primary key,"
        " u int, constraint late unique (u) deferrable initially deferred);"
        "insert into c3 values (1, 1), (2, 2)"
    )
    waits = (Insert("c2", {"id": 1, "p": 2}), Insert("c2", {"id": 2, "p": 1}))
    does_not_wait = (Update("c3", {"id": 1}, {"u": 2}), Update("c3", {"id": 2}, {"u": 1}))

    response = await adapter.prepare(
        epoch(
            1,
            member("refused", balance(1, -1000)),
            member("swap", *does_not_wait),
            member("couple", *waits),
            member("plain", balance(1, 1)),
        )
    )
    await adapter.commit(attempt(1))

    assert [vote.tx for vote in response.votes if vote.excluded is not None] == ["refused", "swap"]
    assert await database.sql("select bal from acct where id = 1") == [(101,)]


async def test_a_trigger_that_waits_for_the_end_finds_what_its_own_member_left(
    database: PostgresDatabase, unproved_adapter: PostgresAdapter
) -> None:
    await database.sql(
        "create table ledger (id int primary key); create table seen (at int primary key, rows int);"
        "create function look() returns trigger language plpgsql as $$ begin"
        " insert into seen values (new.id, (select count(*) from ledger)); return null; end $$;"
        "create constraint trigger look after insert on ledger deferrable initially deferred"
        " for each row execute function look()"
    )

    await unproved_adapter.prepare(epoch(1, *(member(f"t{n}", Insert("ledger", {"id": n})) for n in (1, 2, 3))))
    await unproved_adapter.commit(attempt(1))

    assert await database.sql("select at, rows from seen order by at") == [(1, 1), (2, 2), (3, 3)]


@pytest.mark.parametrize(
    "change",
    [
        Statement("select set_config('timezone', 'Europe/Berlin', false)"),
        Statement("select \"set_config\" ('role', 'nobody', false)"),
        Statement("select pg_advisory_unlock_all()"),
        Statement("select pg_try_advisory_lock(1)"),
        Statement("select pg_terminate_backend(pid) from pg_stat_activity"),
        Statement("update tops.position set prefix = 77"),
        Statement('delete from "tops" . "applied"'),
        Update("tops.position", {"replica_set": "shop"}, {"prefix": 77}),
        Delete("tops.idempotency_keys", {"replica_set": "shop", "key": "k"}),
        Insert('"tops"."applied"', {"replica_set": "shop", "number": 5}),
    ],
    ids=str,
)
async def test_what_outlives_a_transaction_or_is_the_adapters_own_is_out_of_reach(
    adapter: PostgresAdapter, change: Change
) -> None:
    response = await adapter.prepare(epoch(1, member("t1", change), member("t2", balance(1, 1))))

    rejected = response.votes[0].excluded
    assert rejected is not None
    assert (rejected.why, response.votes[1].excluded) == (Why.INVALID, None)
    await adapter.commit(attempt(1))
    assert await adapter.applied() == Position(1)


async def test_words_in_strings_and_comments_are_no_calls(adapter: PostgresAdapter) -> None:
    harmless = Statement("update acct set note = 'set_config(1) tops.position' /* tops.applied */ where id = $1", (1,))

    response = await adapter.prepare(epoch(1, member("t1", harmless)))

    assert response.votes[0].rows == (1,)


@pytest.mark.parametrize("more", [(), (balance(2, -1000),)], ids=["together", "one by one"])
async def test_users_statements_may_be_planned_for_their_values_while_our_own_are_planned_once(
    database: PostgresDatabase, unproved_adapter: PostgresAdapter, more: tuple[Change, ...]
) -> None:
    await database.sql(
        "create function mode() returns trigger language plpgsql as "
        "$$ begin new.note := current_setting('plan_cache_mode'); return new; end $$;"
        "create trigger noting before update on acct for each row execute function mode()"
    )
    own, users = member("t1", balance(1, 1)), member("t2", Statement("update acct set bal = bal + 1 where id = 3"))

    await unproved_adapter.prepare(
        epoch(1, own, users, *(member(f"t{3 + place}", one) for place, one in enumerate(more)))
    )
    await unproved_adapter.commit(attempt(1))

    noted = await database.sql("select id, note from acct where id in (1, 3) order by id")
    assert [tuple(row) for row in noted] == [(1, "auto" if more else "force_generic_plan"), (3, "auto")]


async def test_a_read_cannot_open_its_session_for_writing(adapter: PostgresAdapter) -> None:
    with pytest.raises(TopsError, match="set_config"):
        await adapter.read("select set_config('default_transaction_read_only', 'off', false)")


async def test_a_default_that_a_function_of_the_users_computes_must_be_given(
    database: PostgresDatabase, adapter: PostgresAdapter
) -> None:
    await database.sql(
        "create function dice() returns int volatile language sql as 'select (random() * 6)::int';"
        "create function six() returns int immutable language sql as 'select 6';"
        "create table thrown (id int primary key, v int default dice(), w int default six())"
    )

    response = await adapter.prepare(
        epoch(
            1,
            member("t1", Insert("thrown", {"id": 1, "w": 1})),
            member("t2", Insert("thrown", {"id": 2, "v": 1})),  # declared immutable, which nobody has checked
            member("t3", Insert("thrown", {"id": 3, "v": 1, "w": 1})),
        )
    )

    first, second, third = (vote.excluded for vote in response.votes)
    assert first is not None and "dice()" in first.message
    assert second is not None and "six()" in second.message
    assert third is None


async def test_a_statement_that_returns_what_python_cannot_hold_is_refused_alone(
    database: PostgresDatabase, adapter: PostgresAdapter
) -> None:
    await database.sql("create table dated (id int primary key, d date); insert into dated values (1, null)")
    old = Statement("update dated set d = $1 where id = 1 returning d", ("0044-03-15 BC",))
    as_text = Statement("update dated set d = $1 where id = 1 returning d::text", ("0044-03-15 BC",))

    response = await adapter.prepare(epoch(1, member("t1", old), member("t2", balance(1, 1)), member("t3", as_text)))

    assert response.votes[0].excluded is not None
    assert "cast it to text" in response.votes[0].excluded.message
    assert response.votes[1].excluded is None
    assert response.votes[2].returned == (({"d": "0044-03-15 BC"},),)
