"""What the logins of a replica set may do, against what they should: nothing less, and nothing more."""

from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from dataclasses import dataclass

import asyncpg

from adapters.postgres.apply.session import Connection, Options, connect
from adapters.postgres.sql.catalog import sql_name
from adapters.postgres.sql.literals import identifier
from adapters.postgres.sql.logins import Logins, user_of
from adapters.revoked import REVOKED
from tops.model.errors import ConfigError

_OPTIONS = Options(lock_timeout_s=5.0, statement_timeout_s=30.0, connect_timeout_s=10.0)
# Who is in one of these can become a superuser by way of the server's files or programs, or by a grant.
_POWERS = """
select r.rolname as role, r.rolsuper as superuser, r.rolcreaterole as makes_roles,
       array(select p.rolname::text from pg_roles p where pg_has_role(r.oid, p.oid, 'member') and p.rolname in
             ('pg_read_server_files', 'pg_write_server_files', 'pg_execute_server_program') order by 1) as reaches
  from pg_roles r where r.rolname = coalesce($1, current_user)
"""
_CAN_BECOME = (
    "select coalesce((select pg_has_role(current_user, oid, 'member') from pg_roles where rolname = $1), false)"
)
# A partition holds rows of its table. A view over tables of the set alone shows nothing else; with all tables in the
# set, every view is one.
_HELD = """
with recursive parts as (
    select to_regclass(t)::oid as oid from unnest($2::text[]) as t where to_regclass(t) is not null
    union select tree.relid::oid from unnest($2::text[]) as t, pg_partition_tree(to_regclass(t)) as tree
), reads as (
    select r.ev_class as view, d.refobjid as oid from pg_rewrite r
      join pg_depend d on d.classid = 'pg_rewrite'::regclass and d.objid = r.oid
       and d.refclassid = 'pg_class'::regclass and d.refobjid <> r.ev_class
    union
    select a.view, d.refobjid from reads a join pg_rewrite r on r.ev_class = a.oid
      join pg_depend d on d.classid = 'pg_rewrite'::regclass and d.objid = r.oid
       and d.refclassid = 'pg_class'::regclass and d.refobjid <> r.ev_class
)
select r.rolname as role, n.nspname as schema, c.relname as name,
       concat(case when not pg_table_is_visible(c.oid) then n.nspname || '.' end, c.relname) as shown,
       c.oid = any (select to_regclass(t)::oid from unnest($2::text[]) as t) as in_set,
       c.oid in (select oid from parts) or (c.relkind in ('v', 'm') and n.nspname <> 'tops' and ($3 or not exists (
           select from reads a join pg_class b on b.oid = a.oid
            where a.view = c.oid and b.relkind not in ('v', 'm') and b.oid not in (select oid from parts)))) as of_set,
       array(select p from unnest(array['select', 'insert', 'update', 'delete', 'truncate']) as p
              where has_table_privilege(r.oid, c.oid, p)) as held
  from pg_class c join pg_namespace n on n.oid = c.relnamespace cross join pg_roles r
 where c.relkind in ('r', 'p', 'v', 'm', 'f') and n.nspname not like 'pg\\_%' and n.nspname <> 'information_schema'
   and r.rolname = any ($1::name[]) order by 1, 2, 3
"""
_OPEN = """
select distinct p.proname::text as name from pg_proc p where p.pronamespace = 'pg_catalog'::regnamespace
   and p.proname = any ($1::text[]) and has_function_privilege($2::name, p.oid, 'execute') order by 1
"""
_MAKES = "select has_database_privilege($1::name, current_database(), 'create, temporary')"
_MAKES_TABLES = """
select current_database()::text as database, current_user::text as role,
       has_database_privilege(current_database(), 'create') as in_database,
       coalesce(has_schema_privilege(to_regnamespace('public')::oid, 'create'), true) as in_public
"""
_CAN_SET = "select has_parameter_privilege('session_replication_role', 'set')"
# A role's own setting counts at its login, else the server's.
_FILES_BOUNDED = """
select coalesce((select split_part(c, '=', 2) from pg_roles r, unnest(r.rolconfig) c
                  where r.rolname = $1 and c like 'temp\\_file\\_limit=%'), current_setting('temp_file_limit')) <> '-1'
"""
_READS = frozenset({"select"})
_WRITES = frozenset({"select", "insert", "update", "delete", "truncate"})
_POSITION = frozenset({"position", "applied"})
_CAPTURED = "captured"  # an origin's sessions read there which rows they have changed
_KEPT_BY_READ = frozenset({"pg_advisory_unlock_all"})


@dataclass(frozen=True, slots=True)
class Powers:
    """Why a role could reach the server's files."""

    role: str
    reason: str


@dataclass(frozen=True, slots=True)
class MissingRight:
    """What a login that makes tables may not do, and what a superuser runs so that it may."""

    text: str
    grant: str


@dataclass(frozen=True, slots=True)
class Complaint:
    """A right that a login lacks, or has and should not; `open`: one that comes from PUBLIC, as on a new server."""

    text: str
    lacking: bool = False
    open: bool = False


async def powers(dsn: str, where: str, role: str | None = None) -> list[Powers]:
    """How the login of an address, or another role there, could reach the server's files; nothing if it could not."""
    connection = await connect(dsn, where, "tops-privileges", _OPTIONS)
    try:
        rows = await connection.fetch(_POWERS, role)
    finally:
        await connection.close()
    found = []
    for row in rows:
        if row["superuser"]:
            found.append(Powers(row["role"], "is a superuser"))
        elif row["makes_roles"]:
            found.append(Powers(row["role"], "may create roles"))
        elif row["reaches"]:
            found.append(Powers(row["role"], f"is a member of {', '.join(row['reaches'])}"))
    return found


async def missing_for_schema(connection: Connection, *, schemas: bool, in_public: bool) -> list[MissingRight]:
    """Which rights the connection's login lacks to make new schemas and extensions, and tables in schema public."""
    row = await connection.fetchrow(_MAKES_TABLES)
    assert row is not None
    role, missing = row["role"], []
    if schemas and not row["in_database"]:
        grant = f"grant create on database {identifier(row['database'])} to {identifier(role)}"
        missing.append(MissingRight(f"{role} may not create schemas in database {row['database']}", grant))
    if in_public and not row["in_public"]:
        grant = f"grant create on schema public to {identifier(role)}"
        missing.append(MissingRight(f"{role} may not create tables in schema public", grant))
    return missing


async def check_write_role(logins: Logins, where: str) -> None:
    """The agent must be able to hand a client's statement to the role that may do no more than write."""
    role = user_of(logins.write)
    connection = await connect(logins.agent, where, "tops-privileges", _OPTIONS)
    try:
        if not await connection.fetchval(_CAN_BECOME, role):
            raise ConfigError(f"{where}: the agent's login is no member of the role {role!r} of write_dsn: grant it")
    finally:
        await connection.close()


async def complaints(logins: Logins, tables: Collection[str], where: str, *, all_tables: bool) -> list[Complaint]:
    """Where the rights of the logins differ from what `grants` gives them; `tables` are those of the set, which has
    all tables of the database or some."""
    read, write = user_of(logins.read), user_of(logins.write)
    connection = await connect(logins.agent, where, "tops-privileges", _OPTIONS)
    try:
        return [
            *_of_tables(await connection.fetch(_HELD, [read, write], list(map(sql_name, tables)), all_tables), read),
            *[one for role in (read, write) async for one in _of_role(connection, role, read)],
            *[one async for one in _of_agent(connection)],
        ]
    finally:
        await connection.close()


async def _of_agent(connection: Connection) -> AsyncIterator[Complaint]:
    if not await connection.fetchval(_CAN_SET):
        yield Complaint("the agent may not set session_replication_role", lacking=True)


def _of_tables(rows: Iterable[asyncpg.Record], read: str) -> Iterator[Complaint]:
    for row in rows:
        wanted: frozenset[str] = frozenset()
        if row["in_set"]:
            wanted = _READS if row["role"] == read else _WRITES
        elif row["schema"] == "tops" and row["role"] == read and row["name"] in _POSITION:
            wanted = _READS
        held = frozenset(row["held"])
        if row["schema"] == "tops" and row["role"] != read and row["name"] == _CAPTURED:
            held -= _READS  # granted when the agent installs the capture triggers
        if lacks := wanted - held:
            yield Complaint(f"{row['role']} may not {', '.join(sorted(lacks))} {row['shown']}", lacking=True)
        allowed = wanted
        if row["of_set"]:
            allowed = _READS if row["role"] == read else _WRITES
        if more := held - allowed:
            yield Complaint(f"{row['role']} may {', '.join(sorted(more))} {row['shown']}, which it should not")


async def _of_role(connection: Connection, role: str, read: str) -> AsyncIterator[Complaint]:
    if await connection.fetchval(_MAKES, role):
        yield Complaint(f"{role} may make tables in the database", open=True)
    if not await connection.fetchval(_FILES_BOUNDED, role):
        yield Complaint(f"{role} has no temp_file_limit: its queries can fill the server's disk", open=True)
    names = sorted(REVOKED - _KEPT_BY_READ if role == read else REVOKED)
    found = [row["name"] for row in await connection.fetch(_OPEN, names, role)]
    if found:
        shown = ", ".join(found[:3])
        yield Complaint(f"{role} may call {len(found)} functions that no privilege on tables holds: {shown}", open=True)
