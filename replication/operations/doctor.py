"""What would go wrong with a replica set, found before it does: databases, tables, clocks, rights."""

import asyncio
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

import asyncpg
import msgspec

from adapters.embedded.servers import kept_logins
from adapters.postgres.access.privileges import MissingRight, complaints, missing_for_schema
from adapters.postgres.copy.scripts import user_tables
from adapters.postgres.origin import capture, slots
from adapters.postgres.sql.catalog import sql_name
from replication.client.replica_set import connect_by_file
from replication.model.config import Cluster, ReplicaConfig, ReplicaSetConfig
from replication.operations import findings as table_findings
from replication.policies import EntryKind, Route, policy_of
from replication.replica.agent import OTHER_HISTORY, UNPUBLISHABLE
from replication.replica.databases import given_logins
from replication.replica.start import fingerprint
from tops.model.errors import TopsError
from tops.security import split_address

RETRIED = "it is tried again; if it lasts, see docs/operations.md"
CONNECT_S = 5.0
REMEDIES = {  # of a replica that stopped, by its code; any other code is that of an agent that ended
    "": "tops rs resume",
    OTHER_HISTORY: "stop its agent, empty its database and start it again (tops replica run --name {set}/{replica}): "
    "it gets a copy of another one",
    UNPUBLISHABLE: "tops rs quarantine {set} --replica {replica}, then tops divergence check and repair",
}
DEFINED_BY = "defaults, constraints, unique indexes, triggers, rules or policies"


class Finding(msgspec.Struct, frozen=True, order=True):
    """`level` is error (it will not work), warning (it may surprise) or ok (information)."""

    level: str
    replica: str
    text: str
    remedy: str = ""


_COLUMNS = """
select c.relname as table_name, a.attname as name, format_type(a.atttypid, a.atttypmod) as type, a.attnotnull as needed,
       c.oid as table_oid
  from pg_attribute a join pg_class c on c.oid = a.attrelid
 where a.attrelid = to_regclass($1) and a.attnum > 0 and not a.attisdropped order by a.attnum
"""
# By which column they are drawn from: the default calls one, or an identity column owns one.
_SEQUENCES = """
select distinct a.attname as column_name, format('%I.%I', n.nspname, c.relname) as name
  from pg_attribute a left join pg_attrdef ad on ad.adrelid = a.attrelid and ad.adnum = a.attnum
  join pg_depend d on (d.classid = 'pg_attrdef'::regclass and d.objid = ad.oid and d.refclassid = 'pg_class'::regclass)
    or (d.classid = 'pg_class'::regclass and d.refclassid = 'pg_class'::regclass and d.refobjid = a.attrelid
        and d.refobjsubid = a.attnum and d.deptype = 'i')
  join pg_class c on c.oid = case when d.classid = 'pg_attrdef'::regclass then d.refobjid else d.objid end
  join pg_namespace n on n.oid = c.relnamespace
 where a.attrelid = to_regclass($1) and c.relkind = 'S' order by 1
"""
_CONSTRAINTS = """
select contype::text as kind, conname as name, pg_get_constraintdef(oid) as definition
  from pg_constraint where conrelid = to_regclass($1) order by conname
"""
_LACKING = """
select r as right from unnest(array['select', 'insert', 'update', 'delete']) as r
 where not has_table_privilege(to_regclass($1)::oid, r)
"""
_CAN_MAKE_SCHEMA = """
select has_database_privilege(current_database(), 'create')
    or coalesce((select pg_has_role(nspowner, 'member') from pg_namespace where nspname = 'tops'), false)
"""


class Seen(msgspec.Struct):
    """What one database looks like."""

    version: str = ""
    clock_ahead_s: float = 0.0
    tables: dict[str, list[tuple[str, str, bool]]] = {}
    schemas: dict[str, str] = {}  # digests of all that belongs to a table's definition
    filled: dict[str, bool] = {}  # whether a table holds rows, of a database that has followed no log yet
    is_new: bool = True  # it has followed no log yet
    missing_rights: list[MissingRight] = []  # to make the tables of a copy


async def examine(cluster: Cluster, config: ReplicaSetConfig, keys: Path | None = None) -> list[Finding]:
    """All findings, the worst first; a set without any has one that says so."""
    findings: list[Finding] = []
    seen: dict[str, Seen] = {}
    embedded = []
    for replica in config.replica:
        dsn = replica.dsn
        if dsn is None:
            # A server of ours that runs is looked into with the agent's login; one that does not can't be.
            kept = kept_logins(cluster.data_of(config, replica) / "postgres", config.name)
            embedded += [replica.name] if kept is None else []
            dsn = kept.agent if kept is not None else None
        elif dsn.startswith("sqlite:"):
            findings.append(_finding(replica.name, table_findings.of_sqlite()))
            continue
        if dsn is not None:
            found, looks = await _database(config, replica, dsn)
            findings += found
            if looks is not None:
                seen[replica.name] = looks
    findings += [_finding("", f) for f in table_findings.of_file(config)]
    copied = _copied(config, seen)
    findings += _of_copies(config, seen, copied)
    findings += _differences(seen, copied)
    if config.tables == "*":
        known = {name: list(looks.tables) for name, looks in seen.items() if name not in copied}
        findings += [_finding(name, f) for name, f in table_findings.missing(known)]
    else:
        findings += _missing(config.tables, seen, copied)
    findings += await _running(cluster, config, keys)
    findings += await _gateways(cluster, config)
    if embedded:
        findings.append(
            Finding("ok", ", ".join(embedded), "embedded PostgreSQL that does not run: its tables are not looked into")
        )
    rank = {"error": 0, "warning": 1, "ok": 2}
    findings.sort(key=lambda f: (rank[f.level], f.replica, f.text))
    return findings or [Finding("ok", "", "nothing was found that would go wrong")]


async def _gateways(cluster: Cluster, config: ReplicaSetConfig) -> list[Finding]:
    """Whether the set's gateways can serve, and do."""
    findings = []
    for gateway in [gateway for gateway in cluster.gateways if gateway.replica_set == config.name]:
        name = f"gateway {gateway.name}"
        if gateway.consistency not in policy_of(config).consistencies():
            text = f"the policy {config.policy} can't promise {gateway.consistency!r} reads: it will not start"
            findings.append(Finding("error", name, text, "choose another consistency"))
        if cluster.config.broker[0].keys is not None and gateway.keys is None:
            remedy = f"tops keys issue {gateway.name} --kind site --role service, and name the folder as its keys"
            findings.append(Finding("error", name, "brokers have keys and the gateway has none", remedy))
        host, port = split_address(gateway.listen)
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), CONNECT_S)
        except (OSError, TimeoutError):
            remedy = f"tops gateway run --name {gateway.name}"
            findings.append(Finding("warning", name, f"nothing listens at {gateway.listen}", remedy))
        else:
            writer.close()
    return findings


async def _database(config: ReplicaSetConfig, replica: ReplicaConfig, dsn: str) -> tuple[list[Finding], Seen | None]:
    try:
        connection = await asyncpg.connect(dsn, timeout=CONNECT_S)
    except (asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InsufficientPrivilegeError) as error:
        text = f"the database does not accept the agent's login: {error}"
        remedy = f"make the set's logins: {_grants(config)}; if they are made, check the password in dsn"
        return [Finding("error", replica.name, text, remedy)], None
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        problem = Finding(
            "error", replica.name, f"the database can't be reached: {error}", "check the dsn and the server"
        )
        return [problem], None
    try:
        return await _look(config, replica, dsn, connection)
    finally:
        await connection.close()


async def _look(
    config: ReplicaSetConfig, replica: ReplicaConfig, dsn: str, connection: "asyncpg.Connection[asyncpg.Record]"
) -> tuple[list[Finding], Seen]:
    name, findings, seen = replica.name, [], Seen(tables={}, filled={})
    seen.version = str(await connection.fetchval("show server_version"))
    before = time.time()
    there = float(await connection.fetchval("select extract(epoch from clock_timestamp())"))
    seen.clock_ahead_s = there - (before + time.time()) / 2
    if abs(seen.clock_ahead_s) > config.clock_skew_max_s:
        findings.append(
            Finding("warning", name, f"its clock is {seen.clock_ahead_s:+.1f} s off ours", "keep time with NTP")
        )
    if int(await connection.fetchval("show max_prepared_transactions")) == 0:
        findings.append(
            Finding(
                "error", name, "max_prepared_transactions is 0: nothing can be prepared", "set it to 16 and restart"
            )
        )
    if not await connection.fetchval(_CAN_MAKE_SCHEMA):
        findings.append(Finding("error", name, "no right to create the schema tops", _grants(config)))
    tables = await user_tables(dsn) if config.tables == "*" else config.tables
    with suppress(TopsError, asyncpg.PostgresError):  # a right that is missing is a finding of its own
        seen.schemas = await fingerprint.schemas(dsn, name, tables)
    for table in tables:
        findings += await _table(config, name, connection, table, seen)
        findings += [_finding(name, f) for f in await table_findings.of_table(connection, table)]
        if policy_of(config).entry_kind is EntryKind.VERSIONED and table in seen.tables:
            findings += [_finding(name, f) for f in await table_findings.of_key(connection, table)]
    others = await table_findings.of_database(connection, all_tables=config.tables == "*")
    findings += [_finding(name, f) for f in others]
    if replica.dsn is not None:
        findings += [_finding(name, f) for f in table_findings.of_logins(replica)]
        findings += await _logins(config, replica, tables)
        seen.missing_rights = await missing_for_schema(connection, schemas=True, in_public=True)
    with suppress(asyncpg.InsufficientPrivilegeError):  # which is a finding already
        seen.is_new = await _is_new(connection, config.name)
        if seen.is_new:
            for table in seen.tables:
                with suppress(asyncpg.ObjectNotInPrerequisiteStateError):  # a foreign table, which is one, too
                    seen.filled[table] = await connection.fetchval(f"select exists (select from {sql_name(table)})")
    return findings, seen


def _finding(replica: str, found: table_findings.Found) -> Finding:
    return Finding(found.level, replica, found.text, found.remedy)


async def _logins(config: ReplicaSetConfig, replica: ReplicaConfig, tables: list[str]) -> list[Finding]:
    """Whether client SQL may do what it must, and nothing more."""
    if config.allow_superuser is not None:
        text = "client SQL may do whatever the agent's login may: the file allows it"
        return [Finding("warning", replica.name, text, _grants(config))]
    try:
        logins = await given_logins(config, replica)
        found = await complaints(logins, tables, replica.name, all_tables=config.tables == "*")
    except TopsError as error:
        return [Finding("error", replica.name, str(error), _grants(config))]
    levels = {complaint: "error" if complaint.lacking or not complaint.open else "warning" for complaint in found}
    return [Finding(level, replica.name, one.text, _grants(config)) for one, level in levels.items()]


def _grants(config: ReplicaSetConfig) -> str:
    return f"tops doctor {config.name} --print-grants prints what to run"


async def _is_new(connection: "asyncpg.Connection[asyncpg.Record]", replica_set: str) -> bool:
    """Whether this database has taken nothing from the set's log so far."""
    if await connection.fetchval("select to_regclass('tops.position') is null"):
        return True
    followed = "select exists (select from tops.position where replica_set = $1 and prefix > 0)"
    return not await connection.fetchval(followed, replica_set)


async def _table(
    config: ReplicaSetConfig, replica: str, connection: "asyncpg.Connection[asyncpg.Record]", table: str, seen: Seen
) -> list[Finding]:
    name = sql_name(table)
    columns = await connection.fetch(_COLUMNS, name)
    if not columns:
        return []  # `_missing` says so
    seen.tables[table] = [(c["name"], c["type"], c["needed"]) for c in columns]
    constraints = await connection.fetch(_CONSTRAINTS, name)
    findings = []
    lacking = [row["right"] for row in await connection.fetch(_LACKING, name)]
    if lacking:
        rights = ", ".join(lacking)
        findings.append(
            Finding("error", replica, f"no right to {rights} on {table}", f"grant {rights} on {table} to …")
        )
    if not any(c["kind"] == "p" for c in constraints):
        findings.append(
            Finding("error", replica, f"table {table} has no primary key", f"alter table {table} add primary key")
        )
    elif problem := await capture.problem_with(connection, columns[0]["table_oid"]):
        text = f"table {table} {problem}: a change of it that has to be executed once is rejected"
        findings.append(Finding("error", replica, text, "change that, or take the table out of the set"))
    if policy_of(config).route is Route.REPLICA:
        findings += await _shared(config, replica, connection, table, constraints)
    return findings


async def _shared(
    config: ReplicaSetConfig,
    replica: str,
    connection: "asyncpg.Connection[asyncpg.Record]",
    table: str,
    constraints: list[asyncpg.Record],
) -> list[Finding]:
    """What several replicas that commit first can't share."""
    findings = []
    slot = config.names.index(replica)
    for sequence in await connection.fetch(_SEQUENCES, sql_name(table)):
        if problem := await slots.problem_with(connection, sequence["name"], slot):
            text = f"{table}.{sequence['column_name']}: sequence {sequence['name']} {problem}: replicas can't share it"
            remedy = "alter sequence … increment 1 minvalue 1 no cycle cache 1, or let the application give the value"
            findings.append(Finding("error", replica, text, remedy))
    for c in constraints:
        if c["kind"] in ("u", "f", "x", "c"):
            text = (
                f"{table}: {c['definition']} can be violated by changes that meet: "
                "such a transaction is quarantined and the set is divergent"
            )
            remedy = "write the rows that it is about at one site, or use a policy with one writer or one order"
            findings.append(Finding("warning", replica, text, remedy))
    return findings


def _copied(config: ReplicaSetConfig, seen: dict[str, Seen]) -> dict[str, str]:
    """From where replicas take what they begin with, which the others have: from the seed, or, once the set has
    started, from any that takes part."""
    started = [name for name, looks in seen.items() if not looks.is_new]
    source = "a live replica" if started else config.seed
    if source is None:
        return {}
    takes = {n: s for n, s in seen.items() if s.is_new and n != config.seed and not any(s.filled.values())}
    whole = set().union(*(looks.tables for looks in seen.values())) if config.tables == "*" else set(config.tables)
    return {name: source for name, looks in takes.items() if not looks.tables or whole <= looks.tables.keys()}


def _of_copies(config: ReplicaSetConfig, seen: dict[str, Seen], copied: dict[str, str]) -> list[Finding]:
    findings = []
    for name, source in copied.items():
        if seen[name].tables:
            findings.append(Finding("ok", name, f"its tables are empty: it takes the rows from {source}"))
            continue
        text = f"it has none of the set's tables: it takes schema and rows from {source}"
        findings.append(Finding("ok", name, text))
        if missing := seen[name].missing_rights:
            text = f"{' and '.join(right.text for right in missing)}: a copy needs that"
            findings.append(Finding("error", name, text, f"{_grants(config)}, in the part for copies"))
    return findings


def _missing(tables: Sequence[str], seen: dict[str, Seen], copied: dict[str, str]) -> list[Finding]:
    """Tables that the file names and a database lacks."""
    remedy = "create it, or give the set a schema file"
    return [
        Finding("error", name, f"table {table} does not exist", remedy)
        for name, looks in seen.items()
        for table in tables
        if table not in looks.tables and name not in copied
    ]


def _differences(seen: dict[str, Seen], copied: Collection[str]) -> list[Finding]:
    findings: list[Finding] = []
    names = sorted(seen)
    for name in names[1:]:
        first = seen[names[0]]
        if seen[name].version.split(".")[0] != first.version.split(".")[0]:
            text = f"PostgreSQL {seen[name].version} here, {first.version} at {names[0]}"
            findings.append(Finding("warning", name, text, "upgrade one of them"))
        for table in sorted(first.tables.keys() & seen[name].tables.keys()):
            if first.tables[table] != seen[name].tables[table]:
                text = f"table {table} differs from that of {names[0]}"
                findings.append(Finding("error", name, text, "make the columns and types the same"))
            elif first.schemas.get(table, "") != seen[name].schemas.get(table, ""):
                text = f"table {table} is defined differently than on {names[0]}: {DEFINED_BY} differ"
                findings.append(Finding("error", name, text, "make the definitions the same"))
        if {name, names[0]} & set(copied):  # the rows are to come
            continue
        for table in sorted(first.filled.keys() & seen[name].filled.keys()):
            if first.filled[table] != seen[name].filled[table]:
                text = (
                    f"table {table} holds {'rows' if seen[name].filled[table] else 'none'} here, unlike at {names[0]}"
                )
                remedy = "a set begins with what its databases hold: load the same rows into all of them"
                findings.append(Finding("error", name, text, remedy))
    return findings


async def _running(cluster: Cluster, config: ReplicaSetConfig, keys: Path | None) -> list[Finding]:
    try:
        async with (
            asyncio.timeout(10.0),
            connect_by_file(cluster, config.name, keys=keys, timeout_s=3.0) as replica_set,
        ):
            status = await replica_set.status()
    except (TopsError, TimeoutError) as error:
        return [Finding("warning", "", f"the set does not run: {error}", "tops up, or tops replica run")]
    findings = []
    for replica in status["replicas"]:
        if replica.get("unreachable"):
            findings.append(Finding("warning", replica["replica"], "its agent does not answer", "tops replica run"))
        elif replica["stopped"]:
            remedy = REMEDIES.get(replica.get("failure_code", ""), "start its agent again: tops replica run")
            remedy = remedy.format(set=config.name, replica=replica["replica"])
            findings.append(Finding("error", replica["replica"], f"stopped: {replica['stopped']}", remedy))
        elif replica["not_started"]:
            text = f"not started: {replica['not_started']}"
            findings.append(Finding("error", replica["replica"], text, RETRIED))
        elif replica["last_error"]:
            findings.append(Finding("error", replica["replica"], replica["last_error"], RETRIED))
        if replica.get("warning"):
            remedy = "keep time with NTP; after direct writes, tops check"
            findings.append(Finding("warning", replica["replica"], replica["warning"], remedy))
        if replica.get("differences"):
            remedy = f"tops divergence repair {config.name}"
            findings.append(Finding("error", replica["replica"], replica["differences"], remedy))
        if replica.get("divergent"):
            findings.append(
                Finding("error", replica["replica"], "may differ from the others", "tops rs conflicts, retry")
            )
    return findings
