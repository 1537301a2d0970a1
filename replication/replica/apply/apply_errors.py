"""A change of the log that a replica can't apply does what the set says, and is never tried in a silent loop.

`stop`: nothing more is applied until somebody resumes, and the reason is shown. `skip`: the transaction is left out
and recorded. `set-aside`: it is kept for `tops rs retry`. Under policies where every replica refuses the same, the
transaction is skipped; a peer-to-peer set sets it aside and is marked divergent.
"""

import logging
from datetime import UTC, datetime

from adapters.changes import Row, decode_member, encode_member
from adapters.resource import Entry, EntryFailed, Resource
from replication.conflicts.tables import CONFLICTS, DDL, QUARANTINED, quarantine_row, record_of, rejection_record
from replication.policies import EntryKind, OnApplyFailure, Policy
from replication.replica.apply.agreement import Agreement
from replication.replica.apply.participant import ReplicaParticipant
from replication.rpc.rejections import rejection

_DELETE = f"delete from {QUARANTINED} where tx = $1"

log = logging.getLogger("tops.replication")


class ApplyErrors:
    """What one replica does about changes that it can't apply, and what it remembers of them."""

    def __init__(self, policy: Policy, replica: str, participant: ReplicaParticipant) -> None:
        self._reaction = policy.on_apply_failure()
        self._replica, self._participant = replica, participant
        self._diverges = policy.entry_kind is EntryKind.VERSIONED  # when something is set aside: nobody else does it
        self.conflict_count = 0
        self.quarantined_count = 0
        self.agreement: Agreement | None = None  # where every replica must reject the same
        participant.on_failed_entry = self._on_failed

    @property
    def divergent(self) -> bool:
        return self.quarantined_count > 0 and self._diverges

    async def start(self) -> None:
        """Make the tables, and remember what is in them."""
        resource = self._participant.resource
        if resource.has_own_schema:
            await resource.run_own_script(DDL)
            await self.count()

    async def count(self) -> None:
        read = self._participant.resource.read_own
        counts = (
            await read(f"select (select count(*) from {CONFLICTS}) c, (select count(*) from {QUARANTINED}) a")
        ).rows
        self.conflict_count, self.quarantined_count = counts[0]["c"], counts[0]["a"]

    async def _on_failed(self, entry: Entry, failed: EntryFailed) -> Entry | None:
        rejected = rejection(failed.reason)
        reason = f"number {entry.number}, transaction {failed.tx}: {rejected}"
        reaction = self._reaction
        if reaction is OnApplyFailure.STOP:
            self._participant.stop(f"{reason}; mend it and `tops rs resume`, or let the set skip or set aside")
            await self._participant.resumed.wait()
            return None
        log.error(
            f"a transaction was not applied ({reaction.value})", extra={"replica": self._replica, "reason": reason}
        )
        left = tuple(member for member in entry.members if member.tx != failed.tx)
        culprit = next(member for member in entry.members if member.tx == failed.tx)
        if reaction is OnApplyFailure.SKIP:
            self.conflict_count += 1
            note = rejection_record(entry.number, failed.tx, "apply_error", rejected, "skip")
            if self.agreement is not None:
                self.agreement.rejected(entry.number, failed.tx, str(rejected))
        else:
            self.quarantined_count += 1
            at = datetime.now(UTC).isoformat()
            line = quarantine_row(failed.tx, at, entry.number, encode_member(culprit), str(rejected))
            note = record_of(failed.tx, line)
        return Entry(entry.number, (*left, note), entry.at_ms)

    async def conflicts(self, limit: int) -> list[Row]:
        """The newest conflicts and apply errors, with both versions."""
        sql = f"select * from {CONFLICTS} order by at desc, id desc limit $1"
        aside = f"select tx, at, number, reason from {QUARANTINED} order by at desc limit $1"
        found = (await self._participant.resource.read_own(sql, (limit,))).rows
        waiting = (await self._participant.resource.read_own(aside, (limit,))).rows
        return [*found, *({**row, "kind": "quarantined", "table_name": "", "key": ""} for row in waiting)]

    async def retry(self, resource: Resource) -> str:
        """Try what was set aside once more, as writes of this replica that only it carries out."""
        rows = (await resource.read_own(f"select tx, number, member from {QUARANTINED} order by number, tx")).rows
        done = 0
        for row in rows:
            vote = await resource.apply_quarantined(decode_member(row["member"]), _DELETE)
            done += vote.excluded is None
        await self.count()
        left = f"{self.quarantined_count} are still set aside"
        return f"{self._replica}: {done} of {len(rows)} transactions were applied; {left}"
