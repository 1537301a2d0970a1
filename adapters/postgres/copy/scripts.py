"""What is done to a database before a replica set lives in it: is a table there, run the set's schema file."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import asyncpg

from adapters.changes import split_table_name
from adapters.postgres.apply.session import Connection, Options, connect
from adapters.postgres.copy.schema_dump import fitting_sql
from adapters.postgres.sql.literals import identifier
from adapters.postgres.sql.schema import as_owner
from tops.model.errors import ConfigError

_OPTIONS = Options(lock_timeout_s=30.0, statement_timeout_s=600.0, connect_timeout_s=10.0)
_TABLES = """
select format('%I.%I', n.nspname, c.relname) as name, n.nspname = any (current_schemas(false)) as visible,
       c.relname as short
  from pg_class c join pg_namespace n on n.oid = c.relnamespace
 where c.relkind in ('r', 'p') and not c.relispartition
   and n.nspname not in ('tops', 'information_schema') and n.nspname not like 'pg\\_%' order by 1
"""


@asynccontextmanager
async def _connection(dsn: str) -> AsyncIterator[Connection]:
    connection = await connect(dsn, "the database", "tops-setup", _OPTIONS)
    try:
        yield connection
    finally:
        await connection.close()


async def user_tables(dsn: str) -> list[str]:
    """The tables that are not ours or the server's, as they are named in changes."""
    async with _connection(dsn) as connection:
        return [_short(row["short"]) if row["visible"] else row["name"] for row in await connection.fetch(_TABLES)]


def _short(name: str) -> str:
    """A dot inside a name is not the one after a schema."""
    return identifier(name) if "." in name or '"' in name else name


async def missing_tables(dsn: str, tables: Sequence[str]) -> list[str]:
    """Those of the named tables that do not exist."""
    missing = []
    async with _connection(dsn) as connection:
        for table in tables:
            if await connection.fetchval("select to_regclass($1)", _sql_name(table)) is None:
                missing.append(table)
    return missing


async def filled_tables(dsn: str, tables: Sequence[str]) -> list[str]:
    """Those of the named tables that exist and hold a row."""
    filled = []
    async with _connection(dsn) as connection:
        for table in tables:
            name = _sql_name(table)
            exists = await connection.fetchval("select to_regclass($1) is not null", name)
            if exists and await connection.fetchval(f"select exists (select from {name})"):
                filled.append(table)
    return filled


def _sql_name(table: str) -> str:
    return ".".join(identifier(part) for part in split_table_name(table) if part is not None)


async def run_own_script(dsn: str, script: str) -> None:
    """Make what is to be in schema `tops`, for the agents of all sets in this database."""
    async with _connection(dsn) as connection, connection.transaction():
        await connection.execute(f"{await as_owner(connection)};{script}")


async def run_script(dsn: str, script: str, *, only_if_empty: bool = False) -> None:
    """Run a script, also one of `pg_dump -s`, as one transaction; with `only_if_empty` not on a database that has
    tables already."""
    async with _connection(dsn) as connection:
        if only_if_empty and await connection.fetch(_TABLES):
            return
        try:
            async with connection.transaction():
                await connection.execute(await fitting_sql(connection, script))
        except ConfigError as error:
            raise ConfigError(f"the schema file: {error}") from error
        except asyncpg.InsufficientPrivilegeError as error:
            raise ConfigError(
                f"the schema file fails, and left nothing behind: {error}: give the agent's login that right "
                "(`tops doctor SET --print-grants` prints the grants that schema files need), or run the file yourself"
            ) from error
        except asyncpg.PostgresError as error:
            raise ConfigError(f"the schema file fails, and left nothing behind: {error}") from error
