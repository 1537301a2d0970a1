"""The privileges of a replica set's logins, as SQL: what `provision` runs is what `tops doctor --print-grants` prints.

Each statement may run again and then changes nothing. They need a superuser: who may set `session_replication_role`
and who goes round row security is not for others to say.
"""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import asyncpg

from adapters.changes import split_table_name
from adapters.postgres.access.guard_triggers import TRIGGER
from adapters.postgres.apply.session import Options, connect
from adapters.postgres.sql.literals import identifier, quote
from adapters.postgres.sql.logins import Logins, Roles, database_of, user_of, with_login
from adapters.revoked import EXTENSIONS, GROUPS
from tops.model.errors import ConfigError

Tables = Sequence[str] | Literal["*"]

TEMP_FILE_LIMIT = "1GB"
# What a query of a client may use for each sort and hash table. Every parallel worker would have the same once more.
QUERY_SETTINGS = {"work_mem": "16MB", "hash_mem_multiplier": "2", "max_parallel_workers_per_gather": "0"}

_OPTIONS = Options(lock_timeout_s=30.0, statement_timeout_s=600.0, connect_timeout_s=10.0)
# Roles are the whole server's: two databases that are provisioned at the same time take turns.
_ONE_AT_A_TIME = "lock table pg_catalog.pg_authid in share row exclusive mode"
_PLAIN = "nosuperuser nocreatedb nocreaterole noreplication"

# Names of roles come in as literals of a block: `%I` quotes them, whatever they hold.
_ROLE = """
do $tops$ begin
    if not exists (select from pg_roles where rolname = {literal}) then
        execute format('create role %I', {literal});
    end if;
end $tops$"""

# What an older agent made, before there was an owner, changes hands.
_OWN_SCHEMA = """
do $tops$ declare one record; begin
    create schema if not exists tops;
    execute format('alter schema tops owner to %I', {owner});
    for one in select c.oid::regclass as name from pg_class c where c.relnamespace = 'tops'::regnamespace
                  and c.relkind in ('r', 'S') and pg_get_userbyid(c.relowner) <> {owner}
                  and not exists (select from pg_depend d where d.objid = c.oid and d.deptype in ('a', 'i')) loop
        execute format('alter table %s owner to %I', one.name, {owner});
    end loop;
    for one in select p.oid::regprocedure as name from pg_proc p where p.pronamespace = 'tops'::regnamespace
                  and pg_get_userbyid(p.proowner) <> {owner} loop
        execute format('alter function %s owner to %I', one.name, {owner});
    end loop;
end $tops$"""

# Only a table's owner may switch its triggers to ALWAYS or take them away. These do so for the guard's triggers alone,
# with the rights of whoever runs this.
_GUARD = """
create or replace function {name}(guarded regclass) returns void language plpgsql security definer
    set search_path = pg_catalog, pg_temp as $tops$ begin
    execute format({command}, guarded);
end $tops$"""
_GUARDS = {
    "tops.keep_guard": f"alter table %s enable always trigger {TRIGGER}",
    "tops.drop_guard": f"drop trigger if exists {TRIGGER} on %s",
}

# With the sequences that fill the table's columns. A partition is written through its parent, but guarded and copied by
# itself.
_ONE_TABLE = """
do $tops$ declare one record; begin
    for one in select c.oid::regclass as name, c.relnamespace::regnamespace as schema from pg_class c
                where c.oid = to_regclass({table}) loop
        execute format('grant usage on schema %s to %I, %I, %I, %I', one.schema, {agent}, {read}, {write}, {check});
        execute format('grant all on %s to %I', one.name, {agent});
        execute format('grant select on %s to %I, %I', one.name, {read}, {check});
        execute format('grant select, insert, update, delete, truncate on %s to %I', one.name, {write});
    end loop;
    for one in select relid::regclass as name from pg_partition_tree(to_regclass({table}))
                where relid <> to_regclass({table}) loop
        execute format('grant all on %s to %I', one.name, {agent});
    end loop;
    for one in select s.oid::regclass as name from pg_depend d
                 join pg_attrdef f on d.classid = 'pg_attrdef'::regclass and f.oid = d.objid
                 join pg_class s on d.refclassid = 'pg_class'::regclass and s.oid = d.refobjid and s.relkind = 'S'
                where f.adrelid = to_regclass({table})
               union select s.oid::regclass from pg_depend d
                 join pg_class s on d.classid = 'pg_class'::regclass and s.oid = d.objid and s.relkind = 'S'
                where d.refobjid = to_regclass({table}) and d.deptype in ('a', 'i') loop
        execute format('grant all on sequence %s to %I', one.name, {agent});
        execute format('grant usage on sequence %s to %I', one.name, {write});
        execute format('grant select on sequence %s to %I', one.name, {check});
    end loop;
end $tops$"""

# Also for tables that the one who runs this makes later. Foreign tables are no part of any set.
_ALL_TABLES = """
do $tops$ declare one record; later text; begin
    for one in select n.oid::regnamespace as name from pg_namespace n
                where n.nspname not in ('tops', 'information_schema') and n.nspname not like 'pg\\_%' loop
        later := format('alter default privileges in schema %s', one.name);
        execute format('grant usage on schema %s to %I, %I, %I, %I', one.name, {agent}, {read}, {write}, {check});
        execute format('grant all on all tables in schema %s to %I', one.name, {agent});
        execute format('grant all on all sequences in schema %s to %I', one.name, {agent});
        execute format('%s grant all on tables to %I', later, {agent});
        execute format('%s grant all on sequences to %I', later, {agent});
        execute format('grant select on all tables in schema %s to %I, %I', one.name, {read}, {check});
        execute format('grant select on all sequences in schema %s to %I', one.name, {check});
        execute format('%s grant select on tables to %I, %I', later, {read}, {check});
        execute format('%s grant select on sequences to %I', later, {check});
        execute format('grant select, insert, update, delete, truncate on all tables in schema %s to %I',
                       one.name, {write});
        execute format('grant usage on all sequences in schema %s to %I', one.name, {write});
        execute format('%s grant select, insert, update, delete, truncate on tables to %I', later, {write});
        execute format('%s grant usage on sequences to %I', later, {write});
    end loop;
    for one in select c.oid::regclass as name from pg_class c join pg_namespace n on n.oid = c.relnamespace
                where c.relkind = 'f' and n.nspname not in ('tops', 'information_schema')
                  and n.nspname not like 'pg\\_%' loop
        execute format('revoke all on %s from %I, %I', one.name, {read}, {write});
    end loop;
end $tops$"""

_REVOKE = """
do $tops$ declare one record; begin
    for one in select p.oid::regprocedure as name from pg_proc p
                where p.pronamespace = 'pg_catalog'::regnamespace and p.proname in ({names}) loop
        execute format('revoke execute on function %s from public', one.name);{kept}
    end loop;
end $tops$"""
_KEPT = """
        execute format('grant execute on function %s to %I', one.name, {role});"""
_REVOKE_EXTENSIONS = """
do $tops$ declare one record; begin
    for one in select p.oid::regprocedure as name from pg_proc p
                 join pg_depend d on d.classid = 'pg_proc'::regclass and d.objid = p.oid and d.deptype = 'e'
                 join pg_extension e on d.refclassid = 'pg_extension'::regclass and d.refobjid = e.oid
                where p.prokind <> 'p' and e.extname in ({names}) loop
        execute format('revoke execute on function %s from public', one.name);
    end loop;
end $tops$"""


class Need(Enum):
    """When a section has to be run."""

    ALWAYS = "always"
    COPIES = "copies"  # where the agent makes tables: it takes a copy, or runs the set's schema file
    HARDENING = "hardening"  # where nobody else uses the database: it changes what others may do


@dataclass(frozen=True, slots=True)
class Section:
    """Some statements and what they are for."""

    title: str
    statements: tuple[str, ...]
    need: Need = Need.ALWAYS


def sections(roles: Roles, database: str, tables: Tables, temp_file_limit: str = TEMP_FILE_LIMIT) -> Iterator[Section]:
    """Everything that a database needs before an agent can serve a set from it, in order. `temp_file_limit`: what the
    files of one query may take of the server's disk."""
    kinds = ("owner", "agent", "read", "write", "check")
    owner, agent, read, write, check = (identifier(getattr(roles, kind)) for kind in kinds)
    literals = {kind: quote(getattr(roles, kind)) for kind in kinds}
    yield Section(
        "Roles. None is a superuser; the agent and the check see all rows of the tables that are granted to them",
        (
            *(_ROLE.format(literal=literal) for literal in literals.values()),
            f"alter role {owner} nologin {_PLAIN} nobypassrls",
            *(f"alter role {role} login inherit {_PLAIN} bypassrls" for role in (agent, check)),
            *(f"alter role {role} login inherit {_PLAIN} nobypassrls" for role in (read, write)),
            *(f"alter role {role} set default_transaction_read_only = on" for role in (read, check)),
            f"grant {owner}, {write} to {agent}",
            f"grant set on parameter session_replication_role to {agent}",
            f"grant connect on database {identifier(database)} to {agent}, {read}, {write}, {check}",
        ),
    )
    settings = {"temp_file_limit": temp_file_limit, **QUERY_SETTINGS}
    yield Section(
        "What one query of a client may use of the server",
        tuple(f"alter role {role} set {name} = {quote(to)}" for role in (read, write) for name, to in settings.items()),
    )
    yield Section(
        "Schema tops, the agents' memory. What an agent makes there belongs to the owner",
        (
            _OWN_SCHEMA.format(**literals),
            f"grant usage on schema tops to {read}, {write}, {check}",
            f"alter default privileges for role {owner} in schema tops grant select on tables to {check}",
        ),
    )
    yield Section(
        f"The guard against direct writes: the agent may keep the trigger {TRIGGER} of tables that it does not own",
        tuple(_guard(agent)),
    )
    yield Section("The set's tables, and the sequences of their columns", tuple(_tables(tables, literals)))
    yield Section(
        "The agent makes schema and tables: run it where a replica takes a copy (seed, a new replica) or has a schema "
        "file; it may be revoked when the replica has started",
        (
            f"grant create on database {identifier(database)} to {agent}",
            f"grant create on schema public to {agent}",
        ),
        Need.COPIES,
    )
    yield Section(
        "For a database that nobody else uses: what every login may do without any privilege",
        (
            *_revokes(literals),
            f"revoke connect, temporary on database {identifier(database)} from public",
            "revoke create on schema public from public",
        ),
        Need.HARDENING,
    )


def _guard(agent: str) -> Iterator[str]:
    for name, command in _GUARDS.items():
        yield _GUARD.format(name=name, command=quote(command))
        yield f"alter function {name}(regclass) owner to current_user"  # also if the schema's owner has it by now
        yield f"revoke all on function {name}(regclass) from public"
        yield f"grant execute on function {name}(regclass) to {agent}"


def table_grants(logins: Logins, tables: Tables) -> str:
    """What whoever made the tables runs for the logins to use them."""
    kinds = {"agent": logins.agent, "read": logins.read, "write": logins.write, "check": logins.check}
    return ";".join(_tables(tables, {kind: quote(user_of(dsn)) for kind, dsn in kinds.items()}))


def _tables(tables: Tables, literals: dict[str, str]) -> Iterator[str]:
    if tables == "*":
        yield _ALL_TABLES.format(**literals)
        return
    for table in tables:
        parts = [identifier(part) for part in split_table_name(table) if part is not None]
        yield _ONE_TABLE.format(table=quote(".".join(parts)), **literals)


def _revokes(literals: dict[str, str]) -> Iterator[str]:
    for group in GROUPS:
        kept = "".join(_KEPT.format(role=literals[kind]) for kind in group.kept_by)
        yield f"-- {group.reason}{_REVOKE.format(names=_listed(group.names), kept=kept)}"
    yield f"-- reach other servers, files or pages{_REVOKE_EXTENSIONS.format(names=_listed(EXTENSIONS))}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(quote, names))


async def provision(
    admin_dsn: str,
    replica_set: str,
    tables: Tables,
    *,
    passwords: Sequence[str] = (),
    harden: bool = True,
    temp_file_limit: str = TEMP_FILE_LIMIT,
) -> Logins:
    """Make a set's logins in a database and give them their privileges; the admin is needed for this alone.

    Without `passwords` (of agent, read, write and check) new ones are drawn. `harden` includes what is for a database
    that nobody else uses.
    """
    database = database_of(admin_dsn)
    roles = Roles.named_for(database, replica_set)
    users = (roles.agent, roles.read, roles.write, roles.check)
    given = dict(zip(users, passwords or [secrets.token_urlsafe(18) for _ in users], strict=True))
    needs = {Need.ALWAYS, Need.HARDENING} if harden else {Need.ALWAYS}  # the admin makes the tables
    parts = [part for part in sections(roles, database, tables, temp_file_limit) if part.need in needs]
    script = [
        _ONE_AT_A_TIME,
        *(statement for part in parts for statement in part.statements),
        *(f"alter role {identifier(user)} password {quote(password)}" for user, password in given.items()),
    ]
    connection = await connect(admin_dsn, "the server", "tops-provision", _OPTIONS)
    try:
        async with connection.transaction():
            await connection.execute(";".join(script))
    except asyncpg.PostgresError as error:
        raise ConfigError(f"the logins of replica set {replica_set!r} can't be made: {error}") from error
    finally:
        await connection.close()
    return Logins(*(with_login(admin_dsn, user, password) for user, password in given.items()))
