"""Capture triggers: they note which rows a registered session has changed, as keys.

Images are not noted: nested triggers do not fire in the order of the changes, so an image may be out of date when its
trigger fires. A key never is. `tops.captured` is written by the trigger functions alone, with the rights of their
owner; its rows live as long as the transaction that wrote them, since an origin always rolls back. A partition notes
the name of its root: the argument of the root's trigger is copied to the partitions.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import asyncpg

from adapters.postgres.access.guard_triggers import IS_MINE, SESSIONS
from adapters.postgres.origin.slots import TABLE as SLOTS_TABLE
from adapters.postgres.sql import schema
from adapters.postgres.sql.catalog import Table, find_table
from adapters.postgres.sql.literals import TEXT_SETTINGS, identifier, quote
from adapters.postgres.sql.sqlstates import CAPTURED_NOTICE

TRIGGER = "tops_capture"
# Only keys of registered sessions are kept: whoever else changes a row is the guard's business.
_TABLES = f"""
{SESSIONS};
{SLOTS_TABLE};
create unlogged table if not exists tops.captured (
    id bigint generated always as identity primary key, relation text not null, old_key text[], new_key text[]);
-- Tells where the keys of one transaction of a chain end, without a question of its own.
create or replace function tops.captured_so_far() returns void language plpgsql security definer
    set search_path to pg_catalog, pg_temp as $$ begin
    raise notice '%', (select case when is_called then last_value else 0 end from tops.captured_id_seq)
        using errcode = '{CAPTURED_NOTICE}'; end $$;
"""
_INSTALLED = """
select t.tgrelid as oid, obj_description(t.tgfoid, 'pg_proc') as mark from pg_trigger t
 where t.tgname = $1 and t.tgparentid = 0
"""
_UNFIT = """
select case when c.relrowsecurity then 'has row security'
            when c.relpersistence <> 'p' then 'is not logged'
            when exists (select from pg_inherits where inhparent = c.oid) and c.relkind = 'r' then 'is inherited from'
            when exists (select from pg_inherits where inhrelid = c.oid) then 'inherits'
            when bad.attname is not null then format('has a column %I of type %s', bad.attname, bad.type_name)
            when odd.attname is not null
            then format('has a key column %I whose collation takes different texts for equal', odd.attname)
       end
  from pg_class c
  left join lateral (select a.attname, format_type(a.atttypid, a.atttypmod) as type_name from pg_attribute a
    where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
      and (a.atttypid::regtype::text like 'reg%' or a.atttypid in ('oid'::regtype, 'xid'::regtype, 'xid8'::regtype,
           'cid'::regtype, 'tid'::regtype)) limit 1) as bad on true
  left join lateral (select a.attname from pg_attribute a join pg_collation l on l.oid = a.attcollation
    join pg_index i on i.indrelid = a.attrelid and i.indisprimary and a.attnum = any(i.indkey)
    where a.attrelid = c.oid and not l.collisdeterministic limit 1) as odd on true
 where c.oid = $1
"""


class Unfit(NamedTuple):
    """A table whose rows can't be captured, and why."""

    oid: int
    problem: str


async def problem_with(connection: asyncpg.Connection, table: int) -> str | None:
    """Why the rows of a table that has a primary key can't be captured; None if they can."""
    found: str | None = await connection.fetchval(_UNFIT, table)
    return found


async def install(connection: asyncpg.Connection, tables: Sequence[str], agent: str, write: str) -> "dict[str, Unfit]":
    """Put capture triggers on tables that lack them, for all sessions but the agent's; by table, why one can't have it.

    `write` is the login of origin sessions: it reads what was captured and writes none of it."""
    as_owner = await schema.as_owner(connection)
    await connection.execute(f"{as_owner};{_TABLES};grant select on tops.captured to {identifier(write)}")
    installed = {row["oid"]: row["mark"] for row in await connection.fetch(_INSTALLED, TRIGGER)}
    unfit: dict[str, Unfit] = {}
    for name in tables:
        table = await find_table(connection, name)
        problem = await problem_with(connection, table.oid) if table.key else "has no primary key"
        if problem is not None:
            unfit[name] = Unfit(table.oid, problem)
            continue
        function = _function(table)
        mark = _mark(f"{name} {function}", agent)
        if installed.get(table.oid) != mark:
            await connection.execute(f"{as_owner};{_install_sql(table, name, function, mark, agent)}")
    return unfit


def _function(table: Table) -> str:
    """The trigger function's definition: it notes old and new key, all spellings of a key as one text."""
    name = f"tops.{identifier(_name(table))}"
    old, new = (_key(table, row) for row in ("old", "new"))
    note = "insert into tops.captured (relation, old_key, new_key) select tg_argv[0], {}, {} from tops.sessions s"
    mine = f"where {IS_MINE}"
    settings = " ".join(f"set {setting} to {quote(value)}" for setting, value in TEXT_SETTINGS.items())
    return (
        f"create or replace function {name}() returns trigger language plpgsql security definer "
        f"set search_path to pg_catalog, pg_temp {settings if _depends_on_settings(table) else ''} as $capture$ begin\n"
        f"if tg_op = 'INSERT' then {note.format('null', new)} {mine};\n"
        f"elsif tg_op = 'DELETE' then {note.format(old, 'null')} {mine};\n"
        f"else {note.format(old, new)} {mine}; end if;\n"
        "return null; end $capture$"
    )


def _key(table: Table, row: str) -> str:
    parts = [f"({table.columns[name].canonical(f'{row}.{identifier(name)}')})::text" for name in table.key]
    return f"array[{', '.join(parts)}]"


def _depends_on_settings(table: Table) -> bool:
    """Whether the text of a key depends on settings that the session's own SQL could have changed."""
    types = [table.columns[name] for name in table.key]
    return any(not (kind.is_integer or kind.is_uuid or kind.category in ("S", "B", "E")) for kind in types)


def _name(table: Table) -> str:
    return f"capture_{hashlib.sha256(table.sql_name.encode()).hexdigest()[:16]}"


def _mark(function: str, agent: str) -> str:
    """Recognises a trigger that is there already and does the same."""
    return f"capture {hashlib.sha256(f'{agent} {function}'.encode()).hexdigest()[:32]}"


def _install_sql(table: Table, table_name: str, function: str, mark: str, agent: str) -> str:
    """`table_name` is what changes call the table."""
    name = f"tops.{identifier(_name(table))}"
    return (
        f"{function};comment on function {name}() is {quote(mark)};reset role;"
        f"create or replace trigger {TRIGGER} after insert or update or delete on {table.sql_name} for each row "
        f"when (session_user <> {quote(agent)}) execute function {name}({quote(table_name)})"
    )
