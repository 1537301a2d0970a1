"""The guard: a trigger on every table of a set that keeps writes past replication out, or notes them.

One statement trigger per table and partition, for every session but the agent's, which pays nothing for it: the
condition is in the trigger, not in its function. `ENABLE ALWAYS`, so that no setting of a session switches it off. The
functions are in schema `tops` and run with their owner's rights, since a direct writer has none there. Sessions in
which an origin executes statements are registered in `tops.sessions`, which only the agent's login writes: they pass.
"""

from collections.abc import Sequence
from enum import Enum

import asyncpg

from adapters.postgres.sql.literals import quote
from adapters.postgres.sql.sqlstates import NOT_SUPPORTED

TRIGGER = "tops_guard"
REJECTED = "25006"  # read_only_sql_transaction: what drivers and poolers take for "not here"

SESSIONS = """create table if not exists tops.sessions (
    pid int primary key, backend_start timestamptz not null, server_start timestamptz);
do $$ begin  -- not at every start: it waits for all who look at the table
    perform from pg_attribute where attrelid = 'tops.sessions'::regclass and attname = 'server_start';
    if not found then
        alter table tops.sessions add column server_start timestamptz;
    end if;
end $$"""
# The agent removes sessions that have ended whenever it registers one: a process id may become another session's. After
# a restart of the server, which may give out the same ids again, none of the former ones counts.
IS_MINE = "s.pid = pg_catalog.pg_backend_pid() and s.server_start = pg_catalog.pg_postmaster_start_time()"
# With triggers switched off, rows change without being captured, and nothing else would tell: the guard fires always.
_PASS_AN_ORIGIN = f"""
    if exists (select from tops.sessions s where {IS_MINE}) then
        if current_setting('session_replication_role') = 'replica' then
            raise exception 'rows of table % change while triggers are switched off, and are not captured then',
                tg_relid::regclass using errcode = '{NOT_SUPPORTED}',
                hint = 'leave session_replication_role as it is in functions that a replica set executes';
        end if;
        return null;
    end if;"""
DDL = f"""
{SESSIONS};
-- A row per table and backend, so that direct writers do not wait for each other.
create table if not exists tops.direct_writes (
    replica_set text not null, table_name text not null, backend int not null, writes bigint not null,
    last_at timestamptz not null, login text not null, application text not null,
    primary key (replica_set, table_name, backend)) with (fillfactor = 70);
create or replace function tops.note_direct_write() returns trigger language plpgsql security definer
    set search_path = pg_catalog as $$
begin{_PASS_AN_ORIGIN}
    insert into tops.direct_writes as noted values (tg_argv[0], tg_relid::regclass::text, pg_backend_pid(), 1,
        clock_timestamp(), session_user, current_setting('application_name'))
    on conflict (replica_set, table_name, backend) do update set writes = noted.writes + 1,
        last_at = excluded.last_at, login = excluded.login, application = excluded.application;
    return null;
end $$;
create or replace function tops.reject_direct_write() returns trigger language plpgsql security definer
    set search_path = pg_catalog as $$
begin{_PASS_AN_ORIGIN}
    raise exception 'table % belongs to the TOPS replica set "%": write through the set, not to one of its databases',
        tg_relid::regclass, tg_argv[0] using errcode = '{REJECTED}',
        hint = 'connect to the set; direct_writes = "warn" or "allow" in its configuration permits this';
end $$;
revoke all on function tops.note_direct_write(), tops.reject_direct_write() from public;
"""
# The tables and everything below them: a partition can be written by its own name.
_GUARDED = """
with recursive wanted as (
    select unnest($1::text[])::regclass::oid as oid
    union select i.inhrelid from wanted join pg_inherits i on i.inhparent = wanted.oid
), guards as (
    select t.tgrelid, pg_get_triggerdef(t.oid) as definition, t.tgenabled::text as enabled
      from pg_trigger t where t.tgname = $2
)
select w.oid::regclass::text as name, g.definition, coalesce(g.enabled, '') as enabled,
       pg_has_role(c.relowner, 'usage') as is_owner,
       coalesce(has_function_privilege(to_regprocedure('tops.keep_guard(regclass)'), 'execute'), false) as is_helped
  from wanted w join pg_class c on c.oid = w.oid left join guards g on g.tgrelid = w.oid
 where c.relkind in ('r', 'p') order by 1
"""
_ALL_GUARDED = """
select t.tgrelid::regclass::text as name from pg_trigger t join pg_proc f on f.oid = t.tgfoid
  join pg_namespace n on n.oid = f.pronamespace
 where t.tgname = $1 and n.nspname = 'tops'
"""


class Guard(Enum):
    """What a write past replication meets."""

    NOTE = "warn"
    REJECT = "reject"
    NONE = "allow"

    @property
    def function(self) -> str:
        return "tops.note_direct_write" if self is Guard.NOTE else "tops.reject_direct_write"


async def install(
    connection: asyncpg.Connection, replica_set: str, tables: Sequence[str], guard: Guard, agent: str
) -> list[str]:
    """Put this guard on tables (SQL names) and their partitions where another one is; the names of those changed.

    Each change waits for writers of that table, up to the session's lock_timeout. Inside a transaction all tables
    stay locked against writers until its end.
    """
    changed = []
    for row in await connection.fetch(_GUARDED, list(tables), TRIGGER):
        name, may_alter = row["name"], row["is_owner"] or row["is_helped"]
        is_this = _is_this(row["definition"], replica_set, guard, agent)
        # Without the right to more the trigger stays as it was made: whoever may set session_replication_role can
        # switch it off, and one that is not wanted any more does nothing.
        is_final = row["enabled"] == ("" if guard is Guard.NONE else "A") or not may_alter
        if is_this and is_final:
            continue
        if not is_this:
            condition = "false" if guard is Guard.NONE else f"session_user <> {quote(agent)}"
            await connection.execute(
                f"create or replace trigger {TRIGGER} before insert or update or delete or truncate on {name} "
                f"for each statement when ({condition}) execute function {guard.function}({quote(replica_set)})"
            )
        if may_alter:
            await connection.execute(_finish(name, guard, is_owner=row["is_owner"]))
        changed.append(name)
    return changed


def _finish(name: str, guard: Guard, *, is_owner: bool) -> str:
    """What the owner of a table may do with a trigger; for others, functions of `grants.py` do it."""
    if guard is Guard.NONE:
        return f"drop trigger {TRIGGER} on {name}" if is_owner else f"select tops.drop_guard({quote(name)}::regclass)"
    if is_owner:
        return f"alter table {name} enable always trigger {TRIGGER}"
    return f"select tops.keep_guard({quote(name)}::regclass)"


def _is_this(definition: str | None, replica_set: str, guard: Guard, agent: str) -> bool:
    """By what PostgreSQL prints: `… WHEN ((SESSION_USER <> 'a'::name)) EXECUTE FUNCTION tops.f('shop')`."""
    if definition is None:
        return guard is Guard.NONE
    condition = "WHEN (false)" if guard is Guard.NONE else f"SESSION_USER <> {quote(agent)}::name"
    return condition in definition and definition.endswith(f" {guard.function}({quote(replica_set)})")


async def noted(connection: asyncpg.Connection, replica_set: str) -> list[asyncpg.Record]:
    """Direct writes that were noted, by table: how many, and the last one's time, login and application."""
    return await connection.fetch(
        "select table_name, sum(writes)::int8 as writes, max(last_at) as last_at, "
        "(array_agg(login order by last_at desc))[1] as login, "
        "(array_agg(application order by last_at desc))[1] as application "
        "from tops.direct_writes where replica_set = $1 group by table_name order by table_name",
        replica_set,
    )


async def forget_noted(connection: asyncpg.Connection, replica_set: str) -> None:
    await connection.execute("delete from tops.direct_writes where replica_set = $1", replica_set)


async def remove_everything(connection: asyncpg.Connection) -> None:
    """Take all that TOPS has put into a database out of it: the guards, and schema `tops` with all it remembers."""
    async with connection.transaction():
        for row in await connection.fetch(_ALL_GUARDED, TRIGGER):
            await connection.execute(f"drop trigger if exists {TRIGGER} on {row['name']}")
        await connection.execute("drop schema if exists tops cascade")
