"""Which agent holds a replica: a second one on the same database takes it away, which nobody wants by mistake.

The holder is whoever has the set's advisory lock; `tops.agents` says which process on which host that is. An agent of
this host that has died is replaced at once; one that can't be looked at is given a moment to let go.
"""

import asyncio
import os
import platform
from datetime import UTC, datetime

import asyncpg
import psutil

from adapters.postgres.apply.session import Connection, Options, connect
from adapters.postgres.sql.schema import as_owner
from tops.model.errors import ConfigError

WAIT_S = 5.0  # for the server to end the session of an agent that has just died
_POLL_S = 0.1
_SAME_PROCESS_S = 2.0  # a process id that was given away again belongs to a process that began at another time
_OPTIONS = Options(lock_timeout_s=10.0, statement_timeout_s=60.0, connect_timeout_s=10.0)
DDL = """
create table if not exists tops.agents (
    replica_set text primary key, host text not null, pid int not null, began double precision not null,
    since timestamptz not null);
"""
_HOLDER = """
select s.pid as backend, s.client_addr::text as address, s.backend_start as since from pg_locks l
  join tops.agent_locks k on k.key = (l.classid::bigint << 32 | l.objid::bigint)
  join pg_stat_activity s on s.pid = l.pid
 where l.locktype = 'advisory' and l.granted and l.objsubid = 1 and k.replica_set = $1
   and l.database = (select oid from pg_database where datname = current_database())
"""


class ReplicaHeld(ConfigError):
    """Another agent serves this replica."""


async def check_free(dsn: str, replica_set: str, replica: str, *, replaceable: bool = True) -> None:
    """Raises ReplicaHeld if another agent serves the replica. It is not replaceable if the server ends with it."""
    connection = await connect(dsn, f"replica {replica}", "tops-holder", _OPTIONS)
    try:
        deadline = asyncio.get_running_loop().time() + WAIT_S
        while holder := await _holder(connection, replica_set):
            known = await _known(connection, replica_set)
            if known is not None and known["host"] == platform.node() and not _runs(known):
                return
            is_here = known is not None and known["host"] == platform.node() and known["pid"] != os.getpid()
            if is_here or asyncio.get_running_loop().time() > deadline:
                raise ReplicaHeld(_told(replica_set, replica, holder, known, replaceable))
            await asyncio.sleep(_POLL_S)
    finally:
        connection.terminate()


async def register(dsn: str, replica_set: str) -> None:
    """Say which process holds the replica from now on."""
    connection = await connect(dsn, "the database", "tops-holder", _OPTIONS)
    try:
        async with connection.transaction():
            await connection.execute(f"{await as_owner(connection)};{DDL}")
        await connection.execute(
            "insert into tops.agents values ($1, $2, $3, $4, $5) on conflict (replica_set) do update set "
            "host = excluded.host, pid = excluded.pid, began = excluded.began, since = excluded.since",
            replica_set,
            platform.node(),
            os.getpid(),
            psutil.Process().create_time(),
            datetime.now(UTC),
        )
    finally:
        connection.terminate()


async def _holder(connection: Connection, replica_set: str) -> asyncpg.Record | None:
    if await connection.fetchval("select to_regclass('tops.agent_locks')") is None:
        return None
    return await connection.fetchrow(_HOLDER, replica_set)


async def _known(connection: Connection, replica_set: str) -> asyncpg.Record | None:
    if await connection.fetchval("select to_regclass('tops.agents')") is None:
        return None
    return await connection.fetchrow("select * from tops.agents where replica_set = $1", replica_set)


def _runs(known: asyncpg.Record) -> bool:
    try:
        return bool(abs(psutil.Process(known["pid"]).create_time() - known["began"]) < _SAME_PROCESS_S)
    except psutil.NoSuchProcess:
        return False


def _told(
    replica_set: str, replica: str, holder: asyncpg.Record, known: asyncpg.Record | None, replaceable: bool
) -> str:
    if known is not None:
        who = f"process {known['pid']} on host {known['host']}, since {known['since']:%Y-%m-%d %H:%M:%S}"
    else:
        where = holder["address"] or "the server's own host"
        who = f"a process at {where}, since {holder['since']:%Y-%m-%d %H:%M:%S}"
    name = f"{replica_set}/{replica}"
    cure = "stop that one, or add --take-over to replace it" if replaceable else "stop that one first"
    return f"replica {name} is served by another agent ({who}): {cure}"
