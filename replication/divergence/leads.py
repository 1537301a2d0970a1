"""What a replica had committed by itself beyond the barrier: in its snapshot, and not yet at the others.

Under peer-to-peer every replica leads by such transactions, under primary-site the primary does. They are in the
replica's outbox, or in the log after the barrier; a row that they wrote is in flight, until the others have it too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from adapters.postgres.keys import known_keys
from replication.divergence.catalog import postgres_at
from replication.divergence.log_records import Origin, TableRecords, members_of
from replication.divergence.ports import Key, LogRecord, SnapshotHandle
from replication.divergence.schema import CommonTable
from replication.divergence.set_link import SetLink
from tops.changes import Member, decode_member, unpack_members

_OUTBOX = "SELECT members FROM tops.outbox WHERE replica_set = $1 ORDER BY id"
_REFUSED = """
SELECT tx, reason FROM tops.set_aside
UNION ALL SELECT tx, discarded FROM tops.conflicts WHERE kind IN ('apply_error', 'serialization')
"""


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
        config = self._link.config
        merges = config.policy == "peer-to-peer" and (config.resolver == "per-column" or ":" in config.resolver)
        return not merges

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

    async def refused(self, handles: Mapping[str, SnapshotHandle]) -> dict[str, dict[str, str]]:
        """Transactions of the log that a replica did not apply, and why: by replica, by transaction."""
        found: dict[str, dict[str, str]] = {}
        for name, handle in handles.items():
            if handle.snapshot is not None:
                async with postgres_at(handle) as connection:
                    found[name] = {row["tx"]: row["reason"] for row in await connection.fetch(_REFUSED)}
        return found
