"""What `tops doctor` and `tops rs validate` find about a set's tables and its file before it is started."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import asyncpg

from adapters.changes import InvalidChange, volatile_part
from adapters.postgres.sql.catalog import find_table, sql_name
from adapters.postgres.sql.logins import user_of
from replication.conflicts.row_names import key_problem
from replication.model.config import ReplicaConfig, ReplicaSetConfig

_FACTS = """
select c.relkind::text as kind, c.relpersistence::text as persistence,
       exists (select from pg_inherits i join pg_class p on p.oid in (i.inhparent, i.inhrelid)
                where c.oid in (i.inhparent, i.inhrelid) and not c.relispartition and c.relkind = 'r') as inherits,
       array(select t.tgname::text from pg_trigger t join pg_proc f on f.oid = t.tgfoid
              where t.tgrelid = c.oid and t.tgenabled = 'A' and not t.tgisinternal
                and f.pronamespace is distinct from to_regnamespace('tops')) as always,
       array(select pg_get_constraintdef(k.oid) from pg_constraint k where k.conrelid = c.oid and k.contype = 'f'
                and not exists (select from pg_index i where i.indrelid = c.oid and i.indpred is null
                    and (i.indkey::int2[])[0:cardinality(k.conkey) - 1] @> k.conkey)) as unindexed,
       array(select pg_get_constraintdef(k.oid) from pg_constraint k
              where k.conrelid = c.oid and k.contype = 'c') as checks,
       array(select pg_get_constraintdef(k.oid) from pg_constraint k
               join pg_depend d on d.classid = 'pg_constraint'::regclass and d.objid = k.oid
                and d.refclassid = 'pg_proc'::regclass join pg_proc f on f.oid = d.refobjid
              where k.conrelid = c.oid and k.contype = 'c' and f.provolatile <> 'i') as varying,
       array(select format('%s of domain %s', pg_get_constraintdef(k.oid), format_type(k.contypid, null))
               from pg_attribute a join pg_constraint k on k.contypid = a.atttypid and k.contype = 'c'
              where a.attrelid = c.oid and not a.attisdropped) as domains
  from pg_class c where c.oid = to_regclass($1)
"""


# With `tables = "*"` nothing names them: they are no tables that a set can have.
_FOREIGN = """
select c.oid::regclass::text as name from pg_class c join pg_namespace n on n.oid = c.relnamespace
 where c.relkind = 'f' and n.nspname not in ('tops', 'information_schema') and n.nspname not like 'pg\\_%' order by 1
"""
_MATERIALIZED = """
select c.oid::regclass::text as name, c.relispopulated as populated from pg_class c where c.relkind = 'm' order by 1
"""
# Sessions of TOPS call themselves tops-...
_SAME_LOGIN = """
select distinct coalesce(nullif(application_name, ''), 'an unnamed program') as name from pg_stat_activity
 where usename = current_user and datname = current_database() and pid <> pg_backend_pid()
   and application_name not like 'tops%' order by 1
"""


class Found(NamedTuple):
    """`level` is error (it will not work) or warning (it may surprise)."""

    level: str
    text: str
    remedy: str


async def of_table(connection: "asyncpg.Connection[asyncpg.Record]", table: str) -> list[Found]:
    """What is wrong with a table that exists; its primary key and its privileges are looked at elsewhere."""
    facts = await connection.fetchrow(_FACTS, sql_name(table))
    return list(_found(table, facts)) if facts is not None else []


async def of_key(connection: "asyncpg.Connection[asyncpg.Record]", table: str) -> list[Found]:
    """What is wrong with the key of a table that peers write."""
    try:
        found = await find_table(connection, table)
    except InvalidChange:
        return []  # no table: a finding already
    unfit = [(column, found.columns[column]) for column in found.key if not found.columns[column].has_stored_form]
    return [Found("error", key_problem(table, *problem), "change the key's type") for problem in unfit]


def _found(table: str, facts: asyncpg.Record) -> Iterator[Found]:
    if facts["kind"] not in ("r", "p"):
        what = "a foreign table" if facts["kind"] == "f" else "no table"
        yield Found("error", f"{table} is {what}: its rows can't be replicated", "take it out of the set")
        return
    if facts["persistence"] == "u":
        text = f"table {table} is unlogged: a crash empties it on one replica"
        yield Found("error", text, f"alter table {table} set logged")
    if facts["inherits"]:
        text = f"table {table} inherits, or is inherited from: its rows are in several tables"
        yield Found("error", text, "use partitions, or separate tables")
    for name in facts["always"]:
        text = f"{table} has the trigger {name}, which is ENABLE ALWAYS and also runs where rows are applied"
        yield Found("warning", text, f"alter table {table} enable trigger {name}")
    for definition in facts["unindexed"]:
        text = f"{table}: no index leads with the columns of {definition}: deleting a parent reads the whole table"
        yield Found("warning", text, "create an index on the referring columns")
    checks = [*facts["checks"], *facts["domains"]]
    varying = {*facts["varying"], *(check for check in checks if volatile_part(check))}
    for definition in sorted(varying):
        text = f"{table}: {definition} depends on more than the row, and may hold on one replica alone"
        yield Found("error", text, "check only what is in the row")


async def of_database(connection: "asyncpg.Connection[asyncpg.Record]", *, all_tables: bool) -> list[Found]:
    """What a database holds beside the tables of the set, and who else uses the agent's login."""
    told = []
    for row in await connection.fetch(_FOREIGN) if all_tables else ():
        text = f"{row['name']} is a foreign table: it is no part of the set, and its rows are not replicated"
        told.append(Found("warning", text, 'name the set\'s tables instead of "*" if that is what you want'))
    for row in await connection.fetch(_MATERIALIZED):
        text = (
            f"{row['name']} is a materialized view: it is not replicated, and a refresh here changes no other replica"
        )
        text += "" if row["populated"] else "; it holds nothing yet"
        remedy = f"refresh materialized view {row['name']} at every replica; a read of it has to name its replica"
        told.append(Found("warning", text, remedy))
    names = [row["name"] for row in await connection.fetch(_SAME_LOGIN)]
    if names:
        text = f"the agent's login is also used by {', '.join(names)}: direct writes with it are not noticed"
        told.append(Found("warning", text, "give the agent a login of its own"))
    return told


def of_logins(replica: ReplicaConfig) -> list[Found]:
    """Who can't be told from the agent, by the file."""
    if replica.write_dsn is not None and user_of(replica.write_dsn) != user_of(replica.dsn or ""):
        return []
    text = "client SQL has the agent's login: the guard can't tell a direct write with it from replication"
    return [Found("warning", text, "give the set logins of its own: read_dsn and write_dsn")]


def of_sqlite() -> Found:
    text = "an SQLite file is not compared with the others when the set starts: it follows the log, whatever it holds"
    return Found("warning", text, "begin with an empty file, and run tops check now and then")


def missing(tables: Mapping[str, Sequence[str]]) -> list[tuple[str, Found]]:
    """Tables that some databases have and others lack, by replica: with `tables = "*"` nothing else names them."""
    every = sorted({table for found in tables.values() for table in found})
    told = []
    for table in every:
        having = [name for name, found in tables.items() if table in found]
        text = f"table {table} is missing, and exists on {', '.join(having)}"
        remedy = "create it, or drop it there: a set begins with equal tables"
        told += [(name, Found("error", text, remedy)) for name in tables if name not in having]
    return told


def of_file(config: ReplicaSetConfig) -> list[Found]:
    """What a file permits and its writer may not have meant."""
    told = []
    if config.write_quorum == 1 and len(config.replica) > 1:
        text = "write_quorum is 1: an acknowledged write is at one replica, and lost with it"
        told.append(Found("warning", text, f"make it {len(config.replica) // 2 + 1}"))
    if config.direct_writes == "allow":
        text = 'direct_writes is "allow": a write past replication makes the replicas differ unnoticed'
        told.append(Found("warning", text, 'use "reject" or "warn"'))
    if config.trust_equal:
        text = "trust_equal: the databases are not compared row by row when the set starts"
        told.append(Found("warning", text, "remove it if they are not clones"))
    return told
