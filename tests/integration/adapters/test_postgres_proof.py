"""The proof against a real server: what it is told there, and what it must not be fooled by."""

import asyncpg
import pytest

from adapters import EmbeddedPostgres, Logins, PostgresAdapter
from adapters.changes import Insert, Statement
from adapters.postgres.proof import NotProved, Prover, Reason, Shipped
from adapters.postgres.proof.functions import listed
from adapters.resource import Why
from tests.contract.harness import PostgresDatabase, entry, epoch, member

_DECLARED = """
select format('%s(%s)', p.proname, array_to_string(array(
         select format_type(a.type, null) from unnest(p.proargtypes) with ordinality as a(type, place) order by place
       ), ',')) as signature
  from pg_proc p where p.pronamespace = 'pg_catalog'::regnamespace and p.provolatile = 'i' and p.prokind = 'f'
   and not p.proretset and p.oid < 10000
"""


async def test_every_function_of_the_list_is_built_in_and_immutable(database: PostgresDatabase) -> None:
    declared = {row[0] for row in await database.sql(_DECLARED)}

    assert listed().keys() - declared == set()


@pytest.mark.parametrize(
    "name",
    ["x} {FUNCEXPR :funcid 1299", ":expr <>", "<>", "a\\b", "()", "[ 1 ]", "{", "line\nbreak", '"quoted"', "ü" * 30],
)
async def test_names_do_not_pass_for_the_tree(database: PostgresDatabase, name: str) -> None:
    connection = await asyncpg.connect(database.dsn)
    quoted = '"' + name.replace('"', '""') + '"'
    await connection.execute(f"create table {quoted} (id int primary key, {quoted} int)")
    prover = Prover(connection)

    shipped = await prover.statement(f"update {quoted} set {quoted} = 1 where id = 1 returning id as {quoted}")
    clocked = await prover.statement(f"update {quoted} set {quoted} = extract(hour from now()) where id = 1")
    await connection.close()

    # A name may be unreadable, which proves nothing; it never hides what is there.
    assert isinstance(shipped, Shipped) or shipped.reason is Reason.UNREADABLE
    assert isinstance(clocked, NotProved)


_LONG = "x" * 300


@pytest.mark.parametrize(
    ("condition", "ships"),
    [
        ("note like 'a%'", True),
        (f"note like '%{_LONG}%'", False),
        ("note like note", False),
        ("strpos(note, 'x') > 0", True),
        ("strpos(note, $1) > 0", False),
        ("replace(note, 'a', repeat('b', 3)) = 'b'", False),
        ("translate(note, 'abc', 'xyz') = 'x'", True),
        ("btrim(note) = 'x'", True),
        ("btrim(note, note) = 'x'", False),
    ],
)
async def test_what_no_time_out_ends_does_not_run_in_the_agent_s_session(
    database: PostgresDatabase, condition: str, ships: bool
) -> None:
    connection = await asyncpg.connect(database.dsn)
    prover = Prover(connection)

    verdict = await prover.statement(f"update acct set bal = case when {condition} then 1 else 2 end where id = 1")
    await connection.close()

    assert isinstance(verdict, Shipped) if ships else isinstance(verdict, NotProved)
    assert isinstance(verdict, Shipped) or verdict.reason is Reason.SLOW


async def test_nothing_of_the_proof_stays_in_the_session(database: PostgresDatabase) -> None:
    connection = await asyncpg.connect(database.dsn)
    heard: list[str] = []
    await Prover(connection).statement("update acct set bal = 1 where id = 1")
    with pytest.raises(asyncpg.PostgresSyntaxError):
        await Prover(connection).statement("update acct sett bal = 1")
    connection.add_log_listener(lambda _, message: heard.append(message.message))
    assert await connection.fetchval("show debug_print_rewritten") == "off"
    await connection.execute("select 1")
    await connection.close()

    assert heard == []


async def test_a_rejection_names_the_reason_the_place_and_what_to_do(adapter: PostgresAdapter) -> None:
    response = await adapter.prepare(
        epoch(1, member("t1", Statement("update acct set note = now()::text where id = 1")))
    )

    rejected = response.votes[0].excluded
    assert rejected is not None
    assert (rejected.why, rejected.sqlstate) == (Why.INVALID, "0A000")
    assert rejected.message.startswith("not proved deterministic [function]: now()")
    assert "SET" in rejected.message and "parameter" in rejected.message


async def test_a_trigger_that_comes_later_is_noticed(database: PostgresDatabase, adapter: PostgresAdapter) -> None:
    change = Insert("transfer", {"id": 1, "acct": 1, "amount": 1})
    assert (await adapter.apply([entry(1, member("t1", change))])).failed is None
    await database.sql(
        "create function pass() returns trigger language plpgsql as $$ begin return new; end $$;"
        "create trigger pass before insert on transfer for each row execute function pass()"
    )
    await adapter.book.run(_look_again, "looking at the tables again")  # as it does by itself after a few seconds

    failed = (
        await adapter.apply([entry(2, member("t2", Insert("transfer", {"id": 2, "acct": 1, "amount": 1})))])
    ).failed

    assert failed is not None
    assert "[trigger]" in failed.reason.message


async def _look_again(_: asyncpg.Connection, statements: object) -> None:
    statements.look_again()  # type: ignore[attr-defined]


async def test_servers_that_read_a_statement_in_two_ways_have_different_fingerprints(
    database: PostgresDatabase, adapter: PostgresAdapter, shared_server: EmbeddedPostgres
) -> None:
    connection = await asyncpg.connect(shared_server.dsn)
    name = f"{database.name}_latin"
    await connection.execute(f"create database {name} encoding 'LATIN1' locale 'C' template template0")
    async with PostgresAdapter(Logins.alone(shared_server.dsn_for(name)), cluster="latin", replica_set="shop") as other:
        same, different = await adapter.fingerprint(), await other.fingerprint()
    await connection.execute(f"drop database {name} with (force)")
    await connection.close()

    assert same == await adapter.fingerprint()
    assert any(text.startswith("encoding: UTF8, LATIN1") for text in same.differences(different))
    assert same.time_zones == different.time_zones != ""


async def test_a_database_set_to_another_replication_role_is_written_to_as_origin(database: PostgresDatabase) -> None:
    name = database.name
    await database.sql(f"alter database {name} set session_replication_role = replica")
    async with database.open() as adapter:
        result = await adapter.apply([entry(1, member("t1", Insert("transfer", {"id": 1, "acct": 99, "amount": 1})))])

    assert result.failed is not None
    assert result.failed.reason.why is Why.CONSTRAINT
