"""What a set's replicas and log know about rows at the moment of a barrier, beside the rows themselves.

First of all, what a replica had committed by itself beyond the barrier: in its snapshot, and not yet at the others.
Under peer-to-peer every replica leads by such transactions, under primary-site the primary does. They are in the
replica's outbox, or in the log after the barrier; a row that they wrote is in flight, until the others have it too.
Then the versions of rows, transactions that a replica did not apply, and what may have changed a row otherwise.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

import asyncpg

from adapters.changes import Member, decode_member, unpack_members
from adapters.postgres.apply.keys import known_keys
from adapters.postgres.apply.replica_mode import ReplicaMode
from adapters.postgres.sql.catalog import find_table
from replication.conflicts.tables import CLOCKS, rejection_in
from replication.conflicts.versions import Ranking, Version
from replication.divergence.explain.clock_keys import clock_keys
from replication.divergence.explain.explain import RowClock
from replication.divergence.explain.log_records import Origin, TableRecords, members_of
from replication.divergence.explain.set_link import SetLink
from replication.model.touched_rows import table_name
from replication.policies import EntryKind
from replication.tables.catalog import postgres_at
from replication.tables.endpoints import Key, LogRecord, SnapshotHandle
from replication.tables.schema import CommonTable

_OUTBOX = "SELECT members FROM tops.outbox WHERE replica_set = $1 ORDER BY id"
_REFUSED = """
SELECT tx, reason, NULL AS discarded FROM tops.set_aside
UNION ALL SELECT tx, NULL, discarded FROM tops.conflicts WHERE kind IN ('apply_error', 'serialization')
"""
_CLOCKS = f"""
SELECT key, generation, deleted, edits, clock, site FROM {CLOCKS} WHERE table_name = $1 AND key = ANY ($2::text[])
"""
# A partition counts as its table.
_DIRECT = """
SELECT sum(writes)::int8 AS writes, max(last_at) AS last_at, (array_agg(login ORDER BY last_at DESC))[1] AS login
  FROM tops.direct_writes
 WHERE replica_set = $1 AND to_regclass($2) IN (to_regclass(table_name), pg_partition_root(to_regclass(table_name)))
"""


@dataclass(frozen=True, slots=True)
class Influences:
    """What may have changed rows of a table, other than a logged write that came out as it was written."""

    direct_writes: Mapping[str, str] = field(default_factory=dict)  # by replica, as far as they were noted
    with_triggers: frozenset[str] = frozenset()  # replicas whose table has triggers or rules


@dataclass(frozen=True, slots=True)
class Lead:
    """One replica's own transactions beyond the barrier, as far as they concern one table."""

    rows: dict[Key, list[LogRecord]] = field(default_factory=dict)
    any_row: list[LogRecord] = field(default_factory=list)  # statements that do not tell which rows they changed

    def of(self, key: Key) -> list[LogRecord]:
        return [*self.any_row, *self.rows.get(key, ())]


class SetKnowledge:
    """What a set's replicas and log tell about the moment of a barrier, beside the rows."""

    def __init__(self, link: SetLink) -> None:
        self._link = link

    @property
    def log_decides(self) -> bool:
        """Whether the last write in the log is what every replica should hold; a merged row is in no entry."""
        return not self._link.policy.merges_rows

    async def leads(self, table: CommonTable, handles: Mapping[str, SnapshotHandle]) -> dict[str, Lead]:
        if not self._link.policy.local_first:
            return {}
        logged = await self._logged(min(handle.position or 0 for handle in handles.values()))
        return {name: await self._lead(table, handle, logged.get(name, [])) for name, handle in handles.items()}

    async def _logged(self, barrier: int) -> dict[str, list[tuple[Origin, Member]]]:
        """What was published after the barrier, by the replica that had committed it."""
        found: dict[str, list[tuple[Origin, Member]]] = {}
        last = (await self._link.log()).decided
        async for entry in self._link.entries(barrier + 1, last):
            for origin, member in members_of(entry, self._link.config):
                found.setdefault(origin.site, []).append((origin, member))
        return found

    async def _lead(self, table: CommonTable, handle: SnapshotHandle, logged: list[tuple[Origin, Member]]) -> Lead:
        lead, records = Lead(), TableRecords(table, self._link.config)
        if handle.snapshot is None:
            return lead
        name = self._link.config.name
        async with postgres_at(handle) as connection:
            sql, args = known_keys(name, [member for _, member in logged])
            known = {row["key"] for row in await connection.fetch(sql, *args)} if logged else set()
            outbox = await connection.fetch(_OUTBOX, name)
        unpublished = [decode_member(one) for row in outbox for one in unpack_members(row["members"])]
        led = {member.tx: (origin, member) for origin, member in logged if member.key in known}
        for member in unpublished:
            origin = Origin((handle.position or 0) + 1, member.tx, handle.replica, datetime.now(UTC))
            led.setdefault(member.tx, (origin, member))
        for origin, member in led.values():
            for key, record in records.of(origin, member):
                (lead.any_row if key is None else lead.rows.setdefault(key, [])).append(record)
        return lead

    async def clocks(
        self, table: CommonTable, keys: Collection[Key], handles: Mapping[str, SnapshotHandle]
    ) -> dict[Key, dict[str, RowClock]]:
        """The versions of rows in a peer-to-peer set, by row and replica."""
        config = self._link.config
        found: dict[Key, dict[str, RowClock]] = {}
        if self._link.policy.entry_kind is not EntryKind.VERSIONED:
            return found
        if any(handle.snapshot is None for handle in handles.values()):
            return found  # versions of some replicas alone say nothing
        ranking = Ranking(config.resolver, config.site_priority)
        for name, handle in handles.items():
            async with postgres_at(handle) as connection:
                texts = await clock_keys(connection, table, keys)
                rows = await connection.fetch(_CLOCKS, table_name(table.label), list(texts))
            for key, *version in map(tuple, rows):
                rank = ranking.rank(Version(*version))
                found.setdefault(texts[key], {})[name] = RowClock(rank, version[1])
        return found

    async def influences(self, table: CommonTable, handles: Mapping[str, SnapshotHandle]) -> Influences:
        direct: dict[str, str] = {}
        triggers: set[str] = set()
        for name, handle in handles.items():
            if handle.snapshot is None:
                continue
            async with postgres_at(handle) as connection:
                described = await find_table(connection, table.label)
                if (await ReplicaMode(connection).ties(described)).has_triggers:
                    triggers.add(name)
                if noted := await self._noted(connection, described.sql_name):
                    direct[name] = noted
        return Influences(direct, frozenset(triggers))

    async def _noted(self, connection: asyncpg.Connection, sql_name: str) -> str:
        if await connection.fetchval("SELECT to_regclass('tops.direct_writes')") is None:
            return ""
        row = await connection.fetchrow(_DIRECT, self._link.config.name, sql_name)
        if row is None or not row["writes"]:
            return ""
        return f"{row['writes']:,} direct write(s) of the table were noted here, the last by login {row['login']!r}"

    async def rejected(self, handles: Mapping[str, SnapshotHandle]) -> dict[str, dict[str, str]]:
        """Transactions of the log that a replica did not apply, and why: by replica, by transaction."""
        found: dict[str, dict[str, str]] = {}
        for name, handle in handles.items():
            if handle.snapshot is not None:
                async with postgres_at(handle) as connection:
                    rows = await connection.fetch(_REFUSED)
                    found[name] = {row["tx"]: row["reason"] or str(rejection_in(row["discarded"])) for row in rows}
        return found
