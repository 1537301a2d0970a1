"""A database's schema as SQL that another one can run, by PostgreSQL's own `pg_dump`."""

import asyncio
import logging
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit

import asyncpg
from pglast.parser import ParseError, split

from adapters.embedded.programs import binary
from adapters.postgres.apply.session import Connection, Options, connect
from tops.model.errors import ConfigError, ResourceError

EMBEDDED_MAJOR = 16  # of the wheel's programs: pg_dump does not read newer servers
_SELF = frozenset({"CURRENT_USER", "SESSION_USER", "CURRENT_ROLE", "PUBLIC"})
_NO_SETTINGS = frozenset({"role", "constraints", "transaction", "session", "time"})  # SET has other forms, too
_OPTIONS = Options(lock_timeout_s=30.0, statement_timeout_s=600.0, connect_timeout_s=10.0)
# psql's own commands, which a server does not know; pg_dump writes them at the beginning of a line.
_PSQL = re.compile(r"^\\(?:restrict|unrestrict|connect|encoding|set)\b.*$", re.MULTILINE)
_ROWS = re.compile(r"^\\\.\s*$", re.MULTILINE)
# Settings of the session that ran pg_dump: names in its output are qualified anyway. An extension has its comment, and
# only its owner may change it.
_OF_ITS_SESSION = re.compile(
    r"SET (?:statement_timeout|lock_timeout|idle_in_transaction_session_timeout|transaction_timeout|client_encoding"
    r"|standard_conforming_strings|xmloption|client_min_messages|row_security|default_tablespace"
    r"|default_table_access_method) = [^;]*$"
    r"|SELECT pg_catalog\.set_config\('search_path', '', false\)$"
    r"|COMMENT ON EXTENSION "
)
_SETTING = re.compile(r"SET (?:SESSION |LOCAL )?([\w.]+) (?:=|TO) ", re.IGNORECASE)
_OWNER = re.compile(r'ALTER [\s\S]* OWNER TO ("(?:[^"]|"")+"|\w+)$', re.IGNORECASE)
_GRANTED = re.compile(
    r'(?:GRANT|REVOKE|ALTER DEFAULT PRIVILEGES) [\s\S]* (?:TO|FROM) ("(?:[^"]|"")+"|\w+)'
    r"(?: WITH GRANT OPTION| GRANTED BY \S+)?$",
    re.IGNORECASE,
)
_COMMENTS = re.compile(r"(?:\s|--[^\n]*(?:\n|$))+")
# Triggers of TOPS, by their functions: pg_dump writes each on one line, and its state on another.
_OWN_TRIGGER = re.compile(r"^CREATE (?:CONSTRAINT )?TRIGGER (\S+) .* EXECUTE FUNCTION tops\..*;$", re.MULTILINE)
# What else a dump of a database in a set has of TOPS: schema tops with all that is in it, and who may use it.
_OWN_OBJECT = re.compile(
    r"(?:CREATE|ALTER|COMMENT)(?: [A-Z]+)* (?:SCHEMA tops\b|tops\.)"
    r"|(?:CREATE|COMMENT)(?: [A-Z]+)* \S+(?: [A-Z]+)* ON (?:ONLY )?tops\."
    r"|(?:GRANT|REVOKE) [^;]*? ON (?:SCHEMA tops\b|[A-Z ]*\btops\.)"
    r"|ALTER DEFAULT PRIVILEGES [^;]*? IN SCHEMA tops "
)
_NEW_SCHEMA = re.compile(r"^CREATE SCHEMA ", re.MULTILINE)

log = logging.getLogger("tops.adapters")


class SchemaDump(NamedTuple):
    """`pre_data` before the rows, `post_data` (indexes, constraints, triggers) after them; and what they name that a
    server must have: extensions, and the roles that row security is for."""

    pre_data: str
    post_data: str
    extensions: tuple[str, ...]
    roles: tuple[str, ...]


def plain_sql(script: str) -> str:
    """A script as a server takes it: what `pg_dump` adds for psql, or for its own session, is left out."""
    kept = [text for text, bare in _statements(script) if not _OF_ITS_SESSION.match(bare)]
    return _joined(kept).replace("SET check_function_bodies", "SET LOCAL check_function_bodies")


async def fitting_sql(connection: Connection, script: str) -> str:
    """A script of `pg_dump -s` as this server takes it from this login: settings that it does not have, owners that the
    login can't make, privileges of roles that do not exist, and what is ours are left out, too."""
    settings = {row[0] for row in await connection.fetch("select name from pg_settings")}
    roles = {
        row[0]: row[1] for row in await connection.fetch("select rolname, pg_has_role(oid, 'member') from pg_roles")
    }
    kept = []
    for text, bare in _statements(_without_own_triggers(plain_sql(script))):
        setting, owner, granted = _SETTING.match(bare), _OWNER.match(bare), _GRANTED.match(bare)
        if _OWN_OBJECT.match(bare):
            log.info("what belongs to TOPS is left out", extra={"statement": bare[:200]})
        elif setting and "." not in setting[1] and setting[1].lower() not in settings | _NO_SETTINGS:
            log.info("a setting that the server does not have is left out", extra={"statement": bare})
        elif owner and not roles.get(_name(owner[1]), _name(owner[1]).upper() in _SELF):
            log.info("an owner that can't be had here is left out", extra={"statement": bare})
        elif granted and _name(granted[1]) not in roles and _name(granted[1]).upper() not in _SELF:
            log.info("privileges of a role that does not exist are left out", extra={"statement": bare})
        else:
            kept.append(text)
    return _joined(kept)


def _statements(script: str) -> list[tuple[str, str]]:
    """The statements of a script, each also without the comments before it.

    The body of a function in SQL's own form is cut as well, which does not matter to whoever joins them again."""
    if _ROWS.search(script):
        raise ConfigError("it holds rows for psql: write it with pg_dump --schema-only, or load the rows into a seed")
    try:
        found = split(_PSQL.sub("", script), with_parser=False)
    except ParseError as error:
        raise ConfigError(f"it can't be read: {error}") from error
    return [(text, text[match.end() :] if (match := _COMMENTS.match(text)) else text) for text in found]


def _joined(statements: Sequence[str]) -> str:
    # What ends a statement must not become a part of a comment at its end.
    ends = ["\n;\n" if "--" in statement.rpartition("\n")[2] else ";\n" for statement in statements]
    return "".join(f"{statement}{end}" for statement, end in zip(statements, ends, strict=True))


def _name(written: str) -> str:
    return written[1:-1].replace('""', '"') if written.startswith('"') else written.lower()


async def dump_schema(dsn: str) -> SchemaDump:
    """The schema of a database without owners, privileges, publications, subscriptions and what is ours."""
    connection = await connect(dsn, "the database", "tops-dump", _OPTIONS)
    try:
        major = int(await connection.fetchval("select current_setting('server_version_num')::int / 10000"))
        found = await connection.fetch("select extname from pg_extension where extname <> 'plpgsql' order by 1")
        roles = await connection.fetch(
            "select distinct rolname from pg_policy, unnest(polroles) as role join pg_roles on oid = role order by 1"
        )
    finally:
        await connection.close()
    program = _program(major)
    pre_data, post_data = [await _section(program, dsn, section) for section in ("pre-data", "post-data")]
    extensions, named = (tuple(row[0] for row in rows) for rows in (found, roles))
    return SchemaDump(pre_data, post_data, extensions, named)


def _program(major: int) -> Path:
    if major <= EMBEDDED_MAJOR:
        return binary("pg_dump")
    found = shutil.which("pg_dump")
    if found is None:
        raise ConfigError(f"the schema of PostgreSQL {major} is read by its own pg_dump: put that on the PATH")
    return Path(found)


async def _section(program: Path, dsn: str, section: str) -> str:
    parts = urlsplit(dsn)
    user, _, place = parts.netloc.rpartition("@")
    name, _, password = user.partition(":")
    address = urlunsplit(parts._replace(netloc=f"{name}@{place}"))  # others see a program's arguments
    process = await asyncio.create_subprocess_exec(
        str(program), "--schema-only", f"--section={section}", "--no-owner", "--no-privileges", "--no-publications",
        "--no-subscriptions", "--no-tablespaces", "--no-security-labels", "--exclude-schema=tops", "-d", address,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PGPASSWORD": unquote(password)},
    )  # fmt: skip
    out, errors = await process.communicate()
    if process.returncode != 0:
        raise ResourceError("the source", f"its schema can't be read: {errors.decode(errors='replace').strip()}")
    return _without_own_triggers(plain_sql(out.decode()))


def _without_own_triggers(script: str) -> str:
    names = "|".join(map(re.escape, sorted(set(_OWN_TRIGGER.findall(script)))))
    states = re.compile(rf"^ALTER TABLE .* TRIGGER (?:{names});$", re.MULTILINE)
    return states.sub("", _OWN_TRIGGER.sub("", script)) if names else script


async def makes_schemas(connection: Connection, pre_data: str, extensions: Sequence[str]) -> bool:
    """Whether what comes before the rows makes schemas, or extensions that are not there yet."""
    missing = "select exists (select from unnest($1::text[]) as e where e not in (select extname from pg_extension))"
    return bool(_NEW_SCHEMA.search(pre_data) or await connection.fetchval(missing, list(extensions)))


async def missing_objects(connection: Connection, extensions: Sequence[str], roles: Sequence[str]) -> list[str]:
    """What this server lacks of the extensions and roles that a schema names."""
    rows = await connection.fetch(
        "select 'extension ' || name from unnest($1::text[]) as name "
        "where name not in (select name from pg_available_extensions) "
        "union all select 'role ' || name from unnest($2::text[]) as name "
        "where name not in (select rolname from pg_roles) order by 1",
        list(extensions),
        list(roles),
    )
    return [row[0] for row in rows]


async def sequence_values(connection: asyncpg.Connection) -> dict[str, int]:
    """How far the sequences that are not ours have come, by SQL name; those never used are left out."""
    rows = await connection.fetch(
        "select format('%I.%I', schemaname, sequencename) as name, last_value from pg_sequences "
        "where last_value is not null and schemaname <> 'tops'"
    )
    return {row["name"]: row["last_value"] for row in rows}


async def set_sequences(connection: asyncpg.Connection, values: Mapping[str, int]) -> None:
    """Let the sequences that exist here go on where those of the source are."""
    for name, value in values.items():
        await connection.execute("select setval(to_regclass($1), $2) where to_regclass($1) is not null", name, value)
