"""Empty replicas take schema, rows and sequences from the seed, or from a live replica when they come later."""

import asyncio
import logging
from pathlib import Path

import pytest

from adapters import EmbeddedPostgres
from adapters.changes import Insert, Update
from adapters.postgres.copy.schema_dump import plain_sql
from adapters.postgres.copy.scripts import run_script
from replication import connect
from replication.model.config import Cluster
from tests.integration.start.seeding import SeededSet, _run, listed, seeded_set
from tests.integration.start.test_fingerprints import BASE
from tests.support.polling import eventually
from tops.model.errors import ConfigError

KEYS = 'policy = "quorum"\nwrite_quorum = 2\nseed = "r1"'
MORE = """
select setval('t_serial_no_seq', 4711);
create table numbered (id bigint generated always as identity primary key, body jsonb not null default '{}');
insert into numbered (body) select '{"a": 1}' from generate_series(1, 3);
create view seen as select id from t;
create function noted() returns trigger language plpgsql as 'begin return new; end';
create trigger mine before insert on keyless for each row execute function noted();
create schema app;
create table app."Odd Name" ("Key" text primary key, parent text references app."Odd Name");
insert into app."Odd Name" values ('b', 'a'), ('a', null);
create type pair as (a int, b mood);
create domain tiny as positive check (value < 9);
create table odd_types (
    id int primary key, gone int, moods mood[], pairs pair[], one pair, named regclass, small tiny, span int4range,
    at timestamptz, doc jsonb, raw bytea, price money, f float8, texts text[], host inet);
alter table odd_types drop column gone;
insert into odd_types values
    (1, '{sad,ok}', array[(1, 'ok')::pair], (2, 'sad'), 'app."Odd Name"', 3, '[1,5)', '-infinity', '{"a": [1]}',
     '\\x00ff', '1.50', 'nan', '{"a\tb",NULL}', '::1/64'),
    (2, null, '{}', null, null, null, 'empty', '2024-02-29 12:00Z', 'null', '', null, 1e-300, '{}', null);
create table plain_types (id bigint primary key, small tiny, m mood, n numeric, u uuid, d date, b boolean, t text);
insert into plain_types values (1, 1, 'sad', 'nan', gen_random_uuid(), 'infinity', true, E'tab\\there'),
    (2, null, null, 1.10, null, '0044-03-15 BC', null, ''),
    (3, 3, 'ok', 0, null, null, false, repeat('long ', 4000000));
create materialized view counted as select count(*) as n from t;
"""
SHAPE = """
select c.relname, c.relkind::text, coalesce(i.indexdef, '') from pg_class c
  left join pg_indexes i on i.indexname = c.relname and i.schemaname = c.relnamespace::regnamespace::text
 where c.relnamespace in ('public'::regnamespace, 'app'::regnamespace) order by 1, 2
"""
SEQUENCES = "select sequencename, last_value from pg_sequences where schemaname in ('public', 'app') order by 1"
ROWS = """
select (select sum(n) from t) as t, (select sum(doubled) from t) as doubled, (select count(*) from part_20) as part,
       (select count(*) from numbered) as numbered, (select n from counted) as counted,
       (select string_agg(o::text, ' ' order by id) from odd_types o) as odd_types,
       (select string_agg(md5(p::text), ' ' order by id) from plain_types p) as plain_types,
       (select string_agg("Key", ',' order by 1) from app."Odd Name") odd
"""


async def all_equal(seeded: SeededSet, *queries: str) -> None:
    for query in queries:
        first, *others = [await seeded.fetch(name, query) for name in seeded.agents]
        assert all(other == first for other in others), query
        assert first


async def test_a_mixed_schema_arrives_whole_and_later_joiners_take_it_from_a_live_replica(folder: Path) -> None:
    async with seeded_set(folder, KEYS) as seeded:
        await seeded.before("r1", BASE + MORE)
        await seeded.start("r1", "r2", "r3")
        await seeded.joined()
        await all_equal(seeded, SHAPE, SEQUENCES, ROWS)
        async with connect(seeded.cluster.urls(), "shop") as shop:
            await shop.write([Update("t", {"id": 1}, {"n": 77}), Insert("owner", {"id": 3})])
            await shop.wait_in_sync()
            for name in ("r1", "r2", "r3"):
                await seeded.fetch(name, "alter table owner add late int;")

            path = seeded.cluster.path
            path.write_text(path.read_text().replace(listed(3), listed(4)))
            await seeded.stop("r1", "r2", "r3")
            seeded.cluster = Cluster.load(path)
            await seeded.start("r1", "r2", "r3", "r4")
            await seeded.joined()
        async with connect(seeded.cluster.urls(), "shop") as shop:
            await shop.wait_in_sync()
            await shop.write([Update("owner", {"id": 3}, {"late": 5})])
            await shop.wait_in_sync()
        await all_equal(seeded, SHAPE, SEQUENCES, ROWS, "select * from owner order by id")


async def test_what_the_source_has_and_the_target_lacks_is_listed_before_the_first_row(folder: Path) -> None:
    async with seeded_set(folder, KEYS, replicas=2) as seeded:
        script = "create role auditor; create policy seen on t to auditor using (true);"
        await seeded.before("r1", f"create table t (id int primary key); insert into t values (1); {script}")
        await seeded.start("r1", "r2")

        async def told() -> bool:
            return "its server lacks what the schema of r1 needs: role auditor" in seeded.agents["r2"].not_started

        await eventually(told, 15.0, "the reason")
        assert not await seeded.fetch("r2", "select from pg_class where relname = 't' and relkind = 'r'")

        await seeded.fetch("r2", "create role auditor;")
        await seeded.joined()
        await all_equal(seeded, "select * from t", "select policyname from pg_policies")


async def test_a_seed_never_replaces_rows_that_it_did_not_bring(folder: Path) -> None:
    table = "create table t (id int primary key);"
    async with seeded_set(folder, KEYS, replicas=2) as seeded:
        await seeded.before("r1", f"{table} insert into t select generate_series(1, 100);")
        await seeded.before("r2", f"{table} insert into t values (7);")
        await seeded.start("r1", "r2")

        async def told() -> bool:
            return "100 on r1, 1 on r2" in seeded.agents["r2"].not_started

        await eventually(told, 15.0, "the difference")
        assert len(await seeded.fetch("r2", "select * from t")) == 1

        await seeded.stop("r2")
        await seeded.start("r2", overwrite=True)
        await seeded.joined()
        assert len(await seeded.fetch("r2", "select * from t")) == 100


async def test_a_seed_that_changes_before_the_start_is_taken_again(folder: Path) -> None:
    table = "create table t (id int primary key);"
    async with seeded_set(folder, KEYS, replicas=3) as seeded:
        await seeded.before("r1", f"{table} insert into t select generate_series(1, 100);")
        await seeded.start("r1", "r2")

        async def copied() -> bool:
            return len(await seeded.fetch("r2", "select * from t")) == 100

        await eventually(copied, 15.0, "the copy")
        await seeded.fetch("r1", "insert into t values (101);")
        await seeded.start("r3")
        await seeded.joined()
        await all_equal(seeded, "select count(*) from t where id = 101")


@pytest.mark.parametrize("line", ["\\restrict abc", "SET transaction_timeout = 0;", "\\unrestrict abc"])
def test_what_pg_dump_adds_for_psql_is_not_sent_to_a_server(line: str) -> None:
    assert plain_sql(f"create table t (id int);\n{line}\nselect 1;").split() == [
        "create",
        "table",
        "t",
        "(id",
        "int);",
        "select",
        "1;",
    ]


def test_a_search_path_that_pg_dump_empties_stays_as_it_is() -> None:
    script = "SELECT pg_catalog.set_config('search_path', '', false);\nSET check_function_bodies = false;\n"

    assert plain_sql(script).strip() == "SET LOCAL check_function_bodies = false;"


def test_the_body_of_a_function_stays_as_it_is() -> None:
    body = "create function f() returns void language plpgsql as $$ begin\nSET lock_timeout = 0;\nend $$;\n"
    atomic = "create function g() returns int begin atomic select 1;\nselect 2;\nend;\n"

    assert plain_sql(body + atomic) == body + atomic


def test_a_comment_at_the_end_of_a_statement_does_not_swallow_the_next_one() -> None:
    assert plain_sql("create table t (id int) -- one\n; select 1").split("\n") == [
        "create table t (id int) -- one",
        ";",
        "select 1;",
        "",
    ]


def test_a_dump_with_rows_is_rejected_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="--schema-only"):
        plain_sql("create table t (id int);\nCOPY public.t (id) FROM stdin;\n1\n\\.\n")


DUMPED = """
create role alice; create role "Bob B" in role alice;
create table bills (id bigint generated by default as identity primary key, note text default 'a;b');
comment on table bills is 'paid; or not';
create function touched() returns trigger language plpgsql as $$ begin
    -- A line that looks like one of pg_dump's own:
    perform set_config('lock_timeout', '0', true);
    return new; end $$;
create table lines (bill bigint references bills, n int, primary key (bill, n));
create index on lines (n);
create view totals as select bill, count(*) from lines group by 1;
alter table bills owner to alice; alter function touched() owner to alice; alter view totals owner to "Bob B";
grant select on bills to "Bob B" with grant option; revoke all on function touched() from public;
grant select (id) on bills to "Bob B"; alter default privileges for role alice grant select on tables to "Bob B";
"""


async def test_what_pg_dump_writes_is_accepted_as_the_schema_file_of_a_set(folder: Path) -> None:
    async with EmbeddedPostgres() as source:
        await _run(source.dsn, DUMPED)
        command = [str(source.binary("pg_dump")), "-s", "-d", source.dsn]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        dump = (await process.communicate())[0].decode()
    assert "OWNER TO alice" in dump
    assert 'TO "Bob B"' in dump
    # As newer versions write it.
    dump = f"\\restrict Xy\n\nSET transaction_timeout = 0;\nSET no_such_setting = on;\n{dump}\n\\unrestrict Xy\n"
    (folder / "schema.sql").write_text(dump)
    keys = 'policy = "quorum"\nwrite_quorum = 2\nschema = "schema.sql"\ntables = "*"'

    async with seeded_set(folder, keys, replicas=2) as seeded:
        await seeded.start("r1", "r2")
        await seeded.joined()
        async with connect(seeded.cluster.urls(), "shop") as shop:
            await shop.write([Insert("bills", {"id": 1}), Insert("lines", {"bill": 1, "n": 1})])
            await shop.wait_in_sync()
        await all_equal(seeded, SHAPE.replace("'app'", "'public'"), "select * from bills", "select * from totals")


async def test_a_healthy_start_warns_about_nothing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with seeded_set(folder, f'{KEYS}\ntables = "*"', replicas=2) as seeded:
        await seeded.before("r1", "create table t (id int primary key); insert into t values (1);")
        await seeded.start("r2", "r1")
        await seeded.joined()

    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_dump_of_a_database_that_is_in_a_set_is_a_schema_file(folder: Path, server: EmbeddedPostgres) -> None:
    await _run(server.dsn, "drop database if exists again with (force)")
    await _run(server.dsn, "create database again")
    async with seeded_set(folder, 'policy = "write-all"\ntables = "*"', replicas=1) as seeded:
        await seeded.before("r1", "create table t (id serial primary key, n int); create index on t (n);")
        await seeded.start("r1")
        await seeded.joined()
        dsn = seeded.agents["r1"].database.admin_dsn
        dump = await asyncio.create_subprocess_exec(
            str(server.binary("pg_dump")), "-s", "-d", dsn, stdout=asyncio.subprocess.PIPE
        )
        script, _ = await dump.communicate()
    assert b"tops_guard" in script

    await _run(server.dsn_for("again"), "create schema tops; create table tops.position (id int)")  # the agent's
    await run_script(server.dsn_for("again"), script.decode())

    await _run(server.dsn_for("again"), "insert into t (n) values (1)")
    left = "do $$ begin assert not exists (select from pg_trigger where not tgisinternal); end $$"
    await _run(server.dsn_for("again"), left)
    one = "do $$ begin assert (select count(*) = 1 from pg_class where relnamespace = 'tops'::regnamespace); end $$"
    await _run(server.dsn_for("again"), one)
