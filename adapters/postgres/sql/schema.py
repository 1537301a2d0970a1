"""The schema `tops`: what an adapter remembers inside the database that it serves, in the transactions of the data."""

import secrets

import asyncpg

from adapters.changes import OWN, SUMS, own_key
from adapters.postgres.sql import stamps
from adapters.postgres.sql.literals import identifier
from adapters.postgres.sql.sqlstates import ROWS_NOTICE, WRONG_COUNT, WRONG_VERSION
from tops.model.errors import ConfigError
from tops.model.ids import COUNTED
from tops.model.log_points import NO_DIGEST

VERSION = 5
IDS_PER_ROW = 63  # the bits of a bigint without its sign
OWN_TABLES = ("schema_version", "applied", "position", "row_versions", "idempotency_keys", "known_ids", "outbox")
_SHOWN = ("position", "applied")  # a client is told the position of what it reads
_UPGRADE_S = 3_600.0
_OWNER = "select pg_get_userbyid(nspowner) from pg_namespace where nspname = 'tops'"
_CAN_READ = "select bool_and(has_table_privilege($1::name, 'tops.' || name, 'select')) from unnest($2::text[]) as name"
_CLOSED = """
select string_agg('tops.' || name, ', ' order by name) from unnest($1::text[]) as name
 where not has_table_privilege('tops.' || name, 'insert')
"""

# The lock on a schema that a comment takes: who upgrades does so alone, and only its owner can hold others up.
_ALONE = "comment on schema tops is 'what agents remember, in the transactions of the data'"
_DDL = f"""
{_ALONE};
create table if not exists tops.schema_version (version int primary key);

-- Numbers of the log that are applied beyond the prefix. A row per number, so that a prepared epoch locks only its own.
create table if not exists tops.applied (
    replica_set text not null, number bigint not null, primary key (replica_set, number));
create table if not exists tops.position (
    replica_set text primary key, prefix bigint not null, at_ms bigint not null default 0) with (fillfactor = 50);
-- Which log the numbers are of: its history id, and the digest of everything up to the number. Since version 4.
alter table tops.applied add column if not exists history text not null default '',
    add column if not exists digest text not null default '{NO_DIGEST}';
alter table tops.position add column if not exists history text not null default '',
    add column if not exists digest text not null default '{NO_DIGEST}';

create table if not exists tops.row_versions (
    table_name text not null, key text not null, version bigint not null,
    primary key (table_name, key)) with (fillfactor = 80);

create table if not exists tops.idempotency_keys (
    replica_set text not null, key text not null, content text not null, tx text not null, number bigint not null,
    expires_ms bigint not null, primary key (key, replica_set));

-- Ids by which transactions are known that have no other key: a writer's series in blocks, a bit for each.
create table if not exists tops.known_ids (
    replica_set text not null, series text not null, block bigint not null, seen bigint not null,
    settled bigint not null, expires_ms bigint not null, primary key (series, block, replica_set))
    with (fillfactor = 70);
-- Before version 3 such a transaction had a key like any other. Taken apart once each: hence the offsets.
insert into tops.known_ids as known (replica_set, series, block, seen, settled, expires_ms)
select replica_set, series, number / {IDS_PER_ROW}, bit_or(bit), coalesce(bit_or(bit) filter (where settles), 0),
       max(expires_ms)
  from (select replica_set, id[1] || id[3] as series, number, settles, expires_ms,
               1::bigint << (number % {IDS_PER_ROW})::int as bit
          from (select replica_set, regexp_match(tx, '^{COUNTED.pattern}$') as id, content <> '{OWN}' as settles,
                       expires_ms
                  from tops.idempotency_keys where key = '{own_key("")}' || tx offset 0) as earlier,
               lateral (select ('x' || lpad(id[2], 16, '0'))::bit(64)::bigint as number offset 0) as placed
         where id is not null offset 0) as placed
 group by 1, 2, 3
    on conflict (series, block, replica_set) do update set seen = known.seen | excluded.seen,
       settled = known.settled | excluded.settled, expires_ms = greatest(known.expires_ms, excluded.expires_ms);
-- Keys come in the order of their ends.
create index if not exists idempotency_keys_end on tops.idempotency_keys using brin (expires_ms)
    with (autosummarize = on);
create index if not exists known_ids_end on tops.known_ids using brin (expires_ms) with (autosummarize = on);

create table if not exists {SUMS} (
    table_name text not null, key text not null, column_name text not null, amount numeric not null,
    primary key (table_name, key, column_name)) with (fillfactor = 70);

-- Transactions that were committed together share a row; size is how many they are.
create sequence if not exists tops.outbox_ids;
create table if not exists tops.outbox (
    replica_set text not null, id bigint not null, size int not null, members bytea not null,
    primary key (replica_set, id));
-- What is gone in a moment is not worth compressing.
alter table tops.outbox alter column members set storage external;

-- What an agent locks for as long as it serves a set. Drawn, not derived: nobody else can take it first.
create table if not exists tops.agent_locks (replica_set text primary key, key bigint not null);

-- A negative expectation asks for the number to be told instead of checked.
create or replace function tops.affected(expected int, actual bigint) returns void language plpgsql as $$
begin
    if expected < 0 then
        raise notice '%', actual using errcode = '{ROWS_NOTICE}';
    elsif actual <> expected then
        raise exception '% rows affected, not %', actual, expected using errcode = '{WRONG_COUNT}';
    end if;
end $$;
create or replace function tops.expect_version(of_table text, of_key text, expected bigint)
returns void language plpgsql as $$
declare found bigint;
begin
    select version into found from tops.row_versions where table_name = of_table and key = of_key;
    if coalesce(found, 0) <> expected then
        raise exception 'row % of % has version %, not %', of_key, of_table, coalesce(found, 0), expected
            using errcode = '{WRONG_VERSION}';
    end if;
end $$;
{stamps.FUNCTIONS}
insert into tops.schema_version values ({VERSION}) on conflict do nothing;
"""


async def ensure(connection: asyncpg.Connection, where: str, reader: str | None = None) -> None:
    """Make the schema, or refuse the database with what is missing and how to get it; nothing stays half made."""
    slots = int(await connection.fetchval("show max_prepared_transactions"))
    if slots == 0:
        raise ConfigError(
            f"{where}: max_prepared_transactions is 0, so nothing can be prepared: "
            f"set it to 16 or more in postgresql.conf and restart the server"
        )
    if await connection.fetchval("select pg_is_in_recovery()"):
        raise ConfigError(f"{where}: the server is a standby and takes no writes: give the address of its primary")
    if await _known_version(connection, where) == VERSION:
        closed = await connection.fetchval(_CLOSED, OWN_TABLES)
        if closed is not None:
            raise ConfigError(f"{where}: no right to write to {closed}: grant all on all tables in schema tops")
    else:
        await _make(connection, where)
    if reader is not None and not await connection.fetchval(_CAN_READ, reader, _SHOWN):
        shown = ", ".join(f"tops.{table}" for table in _SHOWN)
        await connection.execute(f"{await as_owner(connection)};grant select on {shown} to {identifier(reader)}")


async def lock_key(connection: asyncpg.Connection, replica_set: str) -> int:
    """What the agent of a set locks, the same for every agent of it."""
    drawn = secrets.randbits(63)
    await connection.execute("insert into tops.agent_locks values ($1, $2) on conflict do nothing", replica_set, drawn)
    return int(await connection.fetchval("select key from tops.agent_locks where replica_set = $1", replica_set))


async def as_owner(connection: asyncpg.Connection) -> str:
    """SQL by which what is made in schema `tops`, until the end of the transaction, belongs to the schema's owner.

    Agents of several sets share the schema; each of them can change what another one has made."""
    owner = await connection.fetchval(_OWNER)
    return "create schema tops" if owner is None else f"set local role {identifier(owner)}"


async def _make(connection: asyncpg.Connection, where: str) -> None:
    try:
        # One simple query is one transaction. What an earlier version left takes as long as it takes.
        await connection.execute(
            f"set local statement_timeout = 0; set local lock_timeout = 0;{await as_owner(connection)};{_DDL}",
            timeout=_UPGRADE_S,
        )
    except asyncpg.InsufficientPrivilegeError as error:
        raise ConfigError(
            f"{where}: no right to make the schema tops ({error.message}): "
            f"grant create on the database to this role, or let an owner run this once"
        ) from error


async def _known_version(connection: asyncpg.Connection, where: str) -> int:
    if await connection.fetchval("select to_regclass('tops.schema_version')") is None:
        return 0
    try:
        version = int(await connection.fetchval("select max(version) from tops.schema_version") or 0)
    except asyncpg.InsufficientPrivilegeError as error:
        raise ConfigError(
            f"{where}: no right to use the schema tops ({error.message}): grant usage on it and all on its tables"
        ) from error
    if version > VERSION:
        raise ConfigError(
            f"{where}: the schema tops is of version {version}, newer than this program knows ({VERSION})"
        )
    return version
