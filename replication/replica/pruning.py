"""What replicas remember of old conflicts and deleted rows goes away with age, and never before every replica has it.

Each replica prunes its own conflict log up to the number that all replicas have applied. A deleted row's record is what
keeps a late update from bringing the row back, so all replicas drop it at the same place in the log: the set's first
replica logs an order, once every replica has applied the delete and has published all that it had committed before.
"""

import asyncio
import logging
import secrets
import time

from adapters.changes import Housekeeping, Member, Statement
from adapters.postgres.copy.scripts import run_script
from adapters.resource import Resource
from replication.conflicts.clock import reading_at, wall_ms
from replication.conflicts.own_statements import DROP_SUMS, DROP_TOMBSTONES
from replication.conflicts.tables import CLOCKS, CONFLICTS, KEYS, LOGGED_KEYS
from replication.conflicts.verdicts import REJECTION_KINDS
from replication.model.events import write_body
from replication.policies import EntryKind, Policy
from replication.replica.apply.participant import ReplicaParticipant
from replication.rpc.calls import Status, StatusReported
from replication.rpc.conversation import Caller
from tops.client.site import Site
from tops.model.errors import NotReachable, TopsError
from tops.model.event_types import EventType
from tops.model.ids import TxId

ROUND_MIN_S, ROUND_MAX_S = 0.5, 600.0
BATCH_MAX = 500
REFUSALS_KEPT = 100_000  # numbers; as long as a coordinator may remember that a transaction was logged
REQUEST_S, TIMEOUT_S, AGAIN_S = 2.0, 4.0, 0.2
_OLD = (
    f"select table_name, key, clock, site from {CLOCKS} where deleted and clock < $1 order by clock limit {BATCH_MAX}"
)
_OUTBOX = (
    "select coalesce(min(id), 0) as oldest, coalesce(max(id), 0) as newest from tops.outbox where replica_set = $1"
)

log = logging.getLogger("tops.replication")


class Flushed:
    """Up to which position of the log everything that was committed here before it is in the log, too."""

    def __init__(self, resource: Resource, replica_set: str, participant: ReplicaParticipant) -> None:
        self._resource, self._set, self._participant = resource, replica_set, participant
        self._sample: tuple[int, int] | None = None  # a position, and the newest that was unpublished there
        self.position = 0

    async def look(self) -> int:
        reached = self._participant.reached
        (row,) = (await self._resource.read_own(_OUTBOX, (self._set,))).rows
        if row["newest"] == 0:
            self.position, self._sample = reached, None
        elif self._sample is None:
            self._sample = (reached, row["newest"])
        elif row["oldest"] > self._sample[1]:
            self.position, self._sample = self._sample[0], (reached, row["newest"])
        return self.position


class Pruning:
    """The part of one replica's agent that forgets."""

    def __init__(
        self,
        policy: Policy,
        replica: str,
        site: Site,
        log_type: EventType,
        dsn: str,
        resource: Resource,
    ) -> None:
        self._config, self._replica, self._site, self._log_type = policy.config, replica, site, log_type
        self._dsn, self._resource, self._plan = dsn, resource, policy.plan()
        # Tombstones are versions of deleted rows. One replica deletes them for all, by a transaction of the log.
        versioned = policy.entry_kind is EntryKind.VERSIONED
        self._deletes_tombstones = versioned and replica == policy.config.names[0]
        self.rounds = 0
        self._caller: Caller | None = None

    async def run(self) -> None:
        shortest_s = min(self._config.keep_conflicts_s, self._config.keep_tombstones_s)
        while True:
            await asyncio.sleep(min(ROUND_MAX_S, max(ROUND_MIN_S, shortest_s / 4)))
            try:
                await self._conflicts()
                if self._deletes_tombstones:
                    await self._tombstones()
            except TopsError as error:
                log.info("nothing was pruned this time", extra={"replica": self._replica, "reason": str(error)})
            except (
                Exception
            ):  # a server that goes away in the middle, for example: forgetting can wait, the agent goes on
                log.exception("pruning failed", extra={"replica": self._replica})
            self.rounds += 1

    async def _conflicts(self) -> None:
        told = await self._site.get_log_state(self._log_type)
        positions = {follower.name: follower.position for follower in told.followers}
        everyone = min(positions.get(site, 0) for site in self._config.sites())
        await run_script(
            self._dsn,
            f"delete from {CONFLICTS} where number <= {everyone} "
            f"and at < now() - interval '{self._config.keep_conflicts_s:f} seconds' "
            f"and (kind not in {REJECTION_KINDS} or number <= {everyone - REFUSALS_KEPT});"
            f"delete from {LOGGED_KEYS} l where not exists "
            f"(select from {KEYS} k where (k.replica_set, k.key, k.tx) = (l.replica_set, l.key, l.tx))",
        )

    async def _tombstones(self) -> None:
        before = reading_at(wall_ms() - int(self._config.keep_tombstones_s * 1000))
        found = (await self._resource.read_own(_OLD, (before,))).rows
        if not found:
            return
        await self._everyone_past(await self._logged_head())
        columns = [[row[name] for row in found] for name in ("table_name", "key", "clock", "site")]
        drops = (Statement(DROP_TOMBSTONES, tuple(columns)), Statement(DROP_SUMS, tuple(columns[:2])))
        order = Member(TxId(f"prune-{secrets.token_hex(8)}!"), drops, control=Housekeeping())
        await self._site.execute(self._log_type, self._plan.tx_type, events=[write_body(order)], limit=self._plan.limit)
        log.info("records of deleted rows are dropped", extra={"replica": self._replica, "rows": len(found)})

    async def _logged_head(self) -> int:
        """The log's end once all that is committed here now is in it."""
        (row,) = (await self._resource.read_own(_OUTBOX, (self._config.name,))).rows
        deadline = time.monotonic() + TIMEOUT_S
        while row["newest"]:
            (now,) = (await self._resource.read_own(_OUTBOX, (self._config.name,))).rows
            if now["oldest"] == 0 or now["oldest"] > row["newest"]:
                break
            if time.monotonic() > deadline:
                raise NotReachable("what is committed here does not get into the log")
            await asyncio.sleep(AGAIN_S)
        return (await self._site.get_log_state(self._log_type)).decided

    async def _everyone_past(self, number: int) -> None:
        """Returns when every replica has applied `number` and has published what it had committed before."""
        if self._caller is None:
            self._caller = Caller(self._site, self._config.name, self._site.brokers)
            await self._caller.start()
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            responses = await self._caller.request_all(Status(), REQUEST_S, len(self._config.replica))
            past = {
                a.replica for a in responses if isinstance(a, StatusReported) and a.fields.get("flushed", 0) >= number
            }
            late = sorted(set(self._config.names) - past)
            if not late:
                return
            if time.monotonic() > deadline:
                raise NotReachable(f"{', '.join(late)} may still send changes of rows that were deleted")
            await asyncio.sleep(AGAIN_S)
