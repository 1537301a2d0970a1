"""Hostile SQL as data, what becomes of it, and everything that it could have changed, in one digest."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import asyncpg

from adapters import EmbeddedPostgres, sql
from adapters.changes import InvalidChange
from adapters.revoked import REVOKED

FOLDER = Path(__file__).parent
ATTACKS_FILE, VERDICTS_FILE = FOLDER / "hostile_sql.txt", FOLDER / "hostile_sql_verdicts.tsv"
SAMPLE_EVERY = 13  # of the ordinary run
OWNED = Path("/tmp/tops_owned")  # what an attack on the server's files would leave
OUTSIDE = "create table outside (id int primary key); insert into outside values (7);"

# Why SQL that PostgreSQL carries out for these logins does no harm, by the beginning of what it is.
HARMLESS = {
    "reads what every login of a server may read: names and definitions, no rows and no secrets": (
        "select * from pg_available_extensions", "select * from pg_cursors", "select * from pg_database",
        "select * from pg_roles", "select * from pg_settings", "select * from pg_stats", "select * from pg_stats_ext",
        "select * from pg_user_mapping", "select * from information_schema.tables", "select relname from pg_class",
        "select prosrc from pg_proc", "select pg_relation_filepath", "select has_table_privilege",
        "select pg_database_size", "select version()", "select current_setting", "select current_user",
        "show all", "show statement_timeout", "explain select * from outside",
    ),
    "computes, within the time that a statement has": (
        "select pg_sleep", "select count(*) from generate_series", "with recursive r", "select repeat",
        "select clock_timestamp()", "select amvalidate", "select xmlparse",
    ),
    "takes a transaction id, of which there are enough": ("select pg_current_xact_id()", "select txid_current()"),
    "tells the position of the log, as every read does": (
        "select * from tops.applied", "select * from tops.position", "select schema_to_xml('tops'",
    ),
    "counts or compares what it is given and keeps nothing": (
        "select tops.affected(-1, 99)", "select tops.expect_version",
    ),
    "changes nothing: PostgreSQL warns and passes it over": (
        "vacuum ", "analyze ", "grant all on schema tops to public", "revoke all on accounts", "drop trigger if exists",
        "create extension if not exists plpgsql",
    ),
    "is about objects that its login would make, and it can make none": ("alter default privileges",),
    "finds nothing that its login may see": ("select database_to_xml",),
    "lets go of the locks of its own session, which has none": ("select pg_advisory_unlock_all()",),
    "is about its own session, which is its own alone; sessions of a pool never take it for SQL": (
        "set ", "reset ", "discard ", "notify ", "listen ", "unlisten ", "prepare evil as", "prepare transaction ",
        "deallocate ", "declare ", "execute ",
        "close all", "begin", "start transaction", "commit", "rollback", "abort", "end", "do $$ begin end $$", "do ",
        "select 1; select 2", "select 1; set ",
    ),
}  # fmt: skip

_STATE = (
    "select rolname, rolsuper, rolcreaterole, rolpassword, rolbypassrls, rolcanlogin from pg_authid order by 1",
    "select roleid, member, admin_option from pg_auth_members order by 1, 2",
    "select * from pg_db_role_setting order by 1, 2",
    "select oid, relname, relowner, relacl::text, relkind, relpersistence from pg_class "
    "where relpersistence <> 't' and relnamespace::regnamespace::text !~ '^pg_(toast_)?temp' order by 1",
    "select count(*), md5(string_agg(concat(oid, proname, proowner, proacl), '' order by oid)) from pg_proc",
    "select nspname, nspowner, nspacl::text from pg_namespace where nspname !~ '^pg_(toast_)?temp' order by 1",
    "select datname, datacl::text from pg_database order by 1",
    "select parname, paracl::text from pg_parameter_acl order by 1",
    "select defaclrole, defaclnamespace, defaclacl::text from pg_default_acl "
    "where pg_get_userbyid(defaclrole) !~ '_(read|write)$' order by 1, 2, 3",
    "select extname from pg_extension order by 1",
    "select lanname from pg_language order by 1",
    "select tgname, tgenabled from pg_trigger order by 1",
    "select evtname from pg_event_trigger order by 1",
    "select polname from pg_policy order by 1",
    "select rulename from pg_rewrite where oid >= 16384 order by 1",
    "select typname from pg_type where oid >= 16384 and typrelid = 0 order by 1",
    "select conname from pg_constraint where oid >= 16384 order by 1",
    "select * from pg_largeobject_metadata",
    "select slot_name from pg_replication_slots",
    "select * from pg_replication_origin",
    "select pubname from pg_publication",
    "select subname from pg_subscription",
    "select spcname from pg_tablespace order by 1",
    "select fdwname from pg_foreign_data_wrapper",
    "select objoid, description from pg_description where objoid >= 16384 order by 1",
    "select label from pg_seclabel",
    "select name, setting from pg_settings where name not in ('application_name') order by 1",
    "select * from accounts order by 1",
    "select * from transfers order by 1",
    "select * from outside order by 1",
    "select last_value from tops.outbox_ids",
    "select * from tops.agent_locks order by 1",
    "select * from tops.outbox order by 1, 2",
    "select * from tops.row_sums order by 1, 2, 3",
    "select * from tops.conflicts order by 1",
    "select * from tops.set_aside order by 1",
    "select gid from pg_prepared_xacts where gid = 'evil'",
    "select pid, objid from pg_locks where locktype = 'advisory' order by 1, 2",
)
_MEMORY = (
    "select * from tops.position order by 1",
    "select * from tops.applied order by 1, 2",
    "select * from tops.idempotency_keys order by 1, 2",
    "select * from tops.known_ids order by 1, 2, 3",
)


class Attack(NamedTuple):
    category: str
    sql: str


class Verdicts(NamedTuple):
    """What became of an attack: with the read and the write login directly, and through the set."""

    read: str
    write: str
    api_read: str
    api_write: str


def attacks() -> list[Attack]:
    lines = [line for line in ATTACKS_FILE.read_text().splitlines() if line and not line.startswith("#")]
    return [Attack(*line.split(": ", 1)) for line in lines]


def queries() -> list[Attack]:
    """Those that are one query or one statement about rows: what they may do is for privileges alone to say."""
    return [attack for attack in attacks() if _is_about_rows(attack.sql)]


def _is_about_rows(text: str) -> bool:
    try:
        (parsed,) = sql.parse(text)
    except (InvalidChange, ValueError):
        return False
    return parsed.is_query or parsed.is_write


def sample() -> list[Attack]:
    return attacks()[::SAMPLE_EVERY]


def known_verdicts() -> dict[str, Verdicts]:
    rows = [line.split("\t") for line in VERDICTS_FILE.read_text().splitlines()[1:]]
    return {text: Verdicts(*verdicts) for *verdicts, text in rows}


def reason(text: str) -> str | None:
    """Why this does no harm; None if it is not among what may be carried out."""
    return next((why for why, starts in HARMLESS.items() if text.startswith(starts)), None)


def verdict(error: BaseException | None) -> str:
    """Denied by a privilege, by the list of revoked functions, for another reason, or carried out."""
    if error is None:
        return "harmless"
    if not isinstance(error, asyncpg.InsufficientPrivilegeError):
        return "other"
    return "revoke" if str(error).removeprefix("permission denied for function ") in REVOKED else "privilege"


async def digest(admin: asyncpg.Connection, server: EmbeddedPostgres, *, memory: bool) -> dict[str, str]:
    """Everything that an attack is after, by where it is; `memory`: also what moves with every write."""
    parts = [
        f"select {row_key}, md5(string_agg(found::text, '|')) from ({query}) as found"
        for row_key, query in enumerate((*_STATE, *(_MEMORY if memory else ())))
    ]
    rows = await admin.fetch(" union all ".join(parts))
    found = {(*_STATE, *_MEMORY)[row_key]: str(hashed) for row_key, hashed in rows}
    kept = [path for path in server.data_dir.iterdir() if path.name not in ("pg_wal", "server.log", "postmaster.pid")]
    files = {path.name: path.read_bytes() if path.suffix == ".conf" else b"" for path in sorted(kept)}
    found["files"] = hashlib.sha256(repr(files).encode()).hexdigest()
    found["outside the server"] = str(OWNED.exists())
    return found


def changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return [where for where, state in before.items() if after[where] != state]


def recorded(found: Sequence[tuple[str, Verdicts]]) -> str:
    lines = ["\t".join((*Verdicts._fields, "sql")), *("\t".join((*verdicts, text)) for text, verdicts in found)]
    return "\n".join(lines) + "\n"
