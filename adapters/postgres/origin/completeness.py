"""Whether everything that a transaction has changed was captured: what is not captured must not be acknowledged.

Two sources, since neither is enough. The counters of the transaction tell whose rows changed, also in catalogues, whose
locks are released at once; but they count what was rolled back to a savepoint as well. The locks tell what is still
touched, and which locks no row change takes. The origin's own session has its counters, the agent's may look at locks.
All that comes before old images are read: a lock that is too strong would keep that waiting.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import asyncpg

from adapters.postgres.sql.stamps import stamp_sql

_CHANGED = """
select c.oid, changed.rows from pg_catalog.pg_class c, lateral (select
       pg_catalog.pg_stat_get_xact_tuples_inserted(c.oid) + pg_catalog.pg_stat_get_xact_tuples_updated(c.oid)
       + pg_catalog.pg_stat_get_xact_tuples_deleted(c.oid) as rows) as changed
 where c.relkind in ('r', 'm', 'f') and changed.rows > 0
"""
# A partition's root is what its capture trigger tells as the table.
_RELATIONS = f"""
with locked as (select l.relation as oid, array_agg(l.mode) as locks from pg_locks l
     where l.pid = $3 and l.locktype = 'relation' and l.granted
       and l.database = (select oid from pg_database where datname = current_database()) group by 1)
select c.oid, format('%I.%I', n.nspname, c.relname) as name, c.relkind::text as kind, n.nspname as schema,
       coalesce(locked.locks, '{{}}') as locks,
       case when c.oid = any($4::oid[]) then {stamp_sql("c.oid")} end as stamp,
       (select convert_from(rtrim(t.tgargs, '\\x00'), 'UTF8') from pg_trigger t
         where t.tgrelid = c.oid and t.tgname = $2 and t.tgenabled <> 'D') as captured_as,
       (select t.tgname from pg_trigger t where t.tgrelid = c.oid and t.tgenabled in ('A', 'R') and not t.tgisinternal
           and t.tgname not like 'tops\\_%' limit 1) as fires_again
  from pg_class c join pg_namespace n on n.oid = c.relnamespace left join locked on locked.oid = c.oid
 where c.oid = any($1::oid[]) or c.oid = any($4::oid[]) or exists (select from unnest(locked.locks) as mode
       where mode not in ('AccessShareLock', 'RowShareLock'))
"""
_LAST_VALUES = (
    "select name, pg_sequence_last_value(name::regclass) as value from unnest($1::text[]) as name order by name"
)
# What INSERT, UPDATE, DELETE, MERGE, SELECT and SELECT FOR UPDATE take; anything stronger does something else.
_ORDINARY = frozenset({"AccessShareLock", "RowShareLock", "RowExclusiveLock"})
_CATALOGUES = frozenset({"pg_catalog", "information_schema", "pg_toast"})
_OWN_NOTES = "captured"

Changed = dict[int, int]  # rows by relation


class Touched(NamedTuple):
    """What a transaction did besides what was captured: why it can't be replicated, and sequences that it advanced;
    and the stamps of the tables whose rows were captured, which the transaction's locks keep as they are."""

    problem: str
    sequences: tuple[str, ...]
    stamps: dict[int, str]


async def changed_rows(connection: asyncpg.Connection) -> Changed:
    """The counters of the session; only differences within one transaction mean anything."""
    return {row["oid"]: row["rows"] for row in await connection.fetch(_CHANGED)}


async def touched(
    connection: asyncpg.Connection,
    agent: asyncpg.Connection,
    before: Changed,
    captured: Mapping[str, int],
    trigger: str,
    unfit: Mapping[int, str],
) -> Touched:
    """What the transaction did since its counters were `before`; `captured` are the tables with noted keys, and their
    oids; `unfit` tells of tables of the set why their rows can't be captured."""
    after = await changed_rows(connection)
    rose = {oid for oid, rows in after.items() if rows > before.get(oid, 0)}
    problem = ""
    sequences: list[str] = []
    stamps: dict[int, str] = {}
    pid, oids = connection.get_server_pid(), list(captured.values())
    for relation in await agent.fetch(_RELATIONS, list(rose), trigger, pid, oids):
        problem = problem or _problem(relation, captured, unfit, rose=relation["oid"] in rose)
        if relation["kind"] == "S" and relation["schema"] != "tops":
            sequences.append(relation["name"])
        if relation["stamp"] is not None:
            stamps[relation["oid"]] = relation["stamp"]
    return Touched(problem, tuple(sequences), stamps)


async def last_values(agent: asyncpg.Connection, sequences: Collection[str]) -> tuple[tuple[str, int], ...]:
    """By name; what a sequence has handed out is not rolled back, and every session sees it."""
    if not sequences:
        return ()
    rows = await agent.fetch(_LAST_VALUES, list(sequences))
    return tuple((row["name"], row["value"]) for row in rows if row["value"] is not None)


def _problem(relation: asyncpg.Record, captured: Collection[str], unfit: Mapping[int, str], *, rose: bool) -> str:
    name, schema, locks = relation["name"], relation["schema"], set(relation["locks"])
    if schema == "tops" and name.removeprefix("tops.") == _OWN_NOTES:
        return ""
    if rose and schema in _CATALOGUES:
        return f"it changes the catalogue {name}: definitions and large objects are not replicated"
    if strong := sorted(locks - _ORDINARY):
        return f"it takes a lock on {name} ({strong[0]}) that no change of rows takes"
    if not rose or "RowExclusiveLock" not in locks:
        return ""
    if (reason := unfit.get(relation["oid"])) is not None:
        return f"it changes {name}, which {reason}"
    if relation["fires_again"] is not None:
        # The write set holds what the trigger did; on every replica that applies it the trigger would do it again.
        state = "ENABLE ALWAYS or ENABLE REPLICA"
        return f"it changes {name}, whose trigger {relation['fires_again']} ({state}) also fires where rows are applied"
    if relation["captured_as"] is None:
        return (
            f"it changes {name}, which is no table of the replica set, or one whose rows can't be captured: without a "
            "primary key, unlogged, with row security, in an inheritance tree, or with columns of oid types"
        )
    if relation["captured_as"] not in captured:
        return f"rows of {name} changed without being captured"
    return ""
