"""How a write travels: as a transaction at the coordinator, or to the replica that commits it first."""

import asyncio
import secrets

import msgspec

from replication.calls import Caller, Read, ReadDone, ReplicaFailed, Write, WriteDone
from replication.config import ReplicaSetConfig
from replication.events import log_type, write_body
from replication.marked import RESERVED
from replication.policies import Policy, Route
from replication.refusals import Duplicate, TooFewReplicas, WriteRefused, understand
from replication.values import pack_values, unpack_rows
from tops.changes import Change, Member, Row, Statement, check_statement, encode_member
from tops.errors import NotReachable, OutcomeUnknown, Retry, TopsError, TransactionAborted
from tops.ids import TxId
from tops.messages import TxOutcome
from tops.site import Site
from tops.transactions import Outcome, TxType

RETRY_FIRST_S = 0.02
TRANSIENT_TRIES = 6
FORWARD_S = 10.0
_REFUSED_SQL = "select discarded from tops.conflicts where tx = $1 and kind in ('apply_error', 'serialization')"
_returned = msgspec.msgpack.Decoder(list[bytes])


class WriteResult(msgspec.Struct, frozen=True):
    """A committed write. `token` is what a later read asks for to see it; `pending` replicas have yet to finish."""

    tx: str
    token: str
    rows: tuple[int, ...] = ()
    returned: tuple[tuple[Row, ...], ...] = ()
    position: int | None = None
    pending: tuple[str, ...] = ()
    duplicate: bool = False


class Writer:
    """The writing half of a connected replica set."""

    def __init__(
        self, site: Site, config: ReplicaSetConfig, policy: Policy, caller: Caller, prefer: str | None
    ) -> None:
        self._site, self._config, self._policy, self._caller = site, config, policy, caller
        self._prefer = prefer
        self._log_type = log_type(config.name)
        self._position, self._replica = 0, ""

    @property
    def token(self) -> str:
        return f"{self._replica}@{self._position}" if self._replica else str(self._position)

    async def write(self, changes: tuple[Change, ...], key: str, reads: bytes = b"") -> WriteResult:
        """Commit; `reads` is what a serializable transaction depends on, and makes it a transaction even if it only
        reads."""
        for change in changes:
            if isinstance(change, Statement):
                check_statement(change.sql, allow_volatile=self._config.allow_volatile)
        if key.startswith(RESERVED):
            raise WriteRefused("", "invalid", f"idempotency keys that begin with {RESERVED!r} are not for applications")
        if not changes and not reads:
            return WriteResult("", self.token)
        member = Member(TxId(""), changes, key, int(self._config.key_ttl_s))
        result = await self._insist(member, reads)
        self._position = max(self._position, result.position or 0)
        return result

    async def _insist(self, member: Member, reads: bytes) -> WriteResult:
        """Passing conflicts are tried again with back-off; too few replicas for as long as the set says."""
        deadline = asyncio.get_running_loop().time() + self._config.block_s
        pause_s, tries = RETRY_FIRST_S, 0
        while True:
            try:
                return await self._once(member, reads)
            except TooFewReplicas:
                if self._config.on_failure != "block" or asyncio.get_running_loop().time() > deadline:
                    raise
            except WriteRefused as refused:
                tries += 1
                if (
                    refused.retry is not Retry.SAFE
                    or refused.why in ("version", "serialization")
                    or tries >= TRANSIENT_TRIES
                ):
                    raise
            await asyncio.sleep(pause_s * (0.5 + secrets.randbelow(1000) / 1000))
            pause_s = min(pause_s * 2, 1.0)

    async def _once(self, member: Member, reads: bytes) -> WriteResult:
        match self._policy.route:
            case Route.COORDINATOR:
                return await self._coordinated(member, reads)
            case Route.PRIMARY:
                return await self._forwarded(self._config.primary or "", member)
            case Route.REPLICA:
                return await self._at_some_replica(member)

    # ------------------------------------------------------------------------------------------- at the coordinator

    async def _coordinated(self, member: Member, reads: bytes) -> WriteResult:
        plan = self._policy.plan()
        if plan.tx_type is TxType.LOCAL:
            tx = TxId(f"{self._site.name}.{secrets.token_hex(8)}")
            keyed = member.idempotency_key or f"tx:{tx}"
            member = msgspec.structs.replace(member, tx=tx, idempotency_key=keyed)
        try:
            outcome = await self._site.execute(
                self._log_type,
                plan.tx_type,
                events=[write_body(member, reads)],
                limit=plan.limit,
                constraints=plan.constraints,
                local_outcome=plan.local_outcome,
            )
        except TransactionAborted as aborted:
            error = self._named(understand(aborted.tx, aborted.reason))
            if isinstance(error, Duplicate):
                return WriteResult(error.tx, str(error.number), position=error.number, duplicate=True)
            raise error from None
        result = self._result(outcome)
        return result if plan.tx_type is TxType.DISTRIBUTED else await self._applied(member.tx, result)

    async def _applied(self, tx: str, result: WriteResult) -> WriteResult:
        """What is logged first and applied then may be refused then, by all replicas alike: ask the nearest one."""
        number = result.position or 0
        question = Read(sql=_REFUSED_SQL, args=pack_values([tx]), at_least=number, wait_s=self._config.wait_s)
        try:
            done = await self._caller.ask(self._config.site_of(self._nearest()), question, FORWARD_S)
        except (NotReachable, ReplicaFailed):
            raise OutcomeUnknown(tx, f"replica {self._nearest()}") from None
        assert isinstance(done, ReadDone)
        for row in unpack_rows(done.rows):
            (reason,) = msgspec.json.decode(row["discarded"])
            raise understand(tx, reason)
        return msgspec.structs.replace(result, tx=tx)

    def _named(self, error: TopsError) -> TopsError:
        """Replicas by the names that the DBA gave them."""
        if isinstance(error, TooFewReplicas):
            text = error.text
            for name in self._config.names:
                text = text.replace(self._config.site_of(name), name)
            return TooFewReplicas(error.tx, error.why, text, retry=Retry.SAFE)
        return error

    def _result(self, outcome: TxOutcome) -> WriteResult:
        number = outcome.log_number or 0
        returned = (
            tuple(tuple(unpack_rows(rows)) for rows in _returned.decode(outcome.result)) if outcome.result else ()
        )
        pending = tuple(self._config.replica_of(site) for site in outcome.pending)
        return WriteResult(outcome.tx, str(number), outcome.rows, returned, number, pending)

    # ------------------------------------------------------------------------------------------------- at a replica

    async def _forwarded(self, replica: str, member: Member, tx: str = "") -> WriteResult:
        tx = tx or f"{self._site.name}.{secrets.token_hex(8)}"
        question = Write(tx=tx, member=encode_member(member))
        try:
            done = await self._caller.ask(self._config.site_of(replica), question, FORWARD_S)
        except NotReachable:
            raise OutcomeUnknown(tx, f"replica {replica}") from None
        except ReplicaFailed as failed:
            if failed.retry is Retry.ASK_FIRST:
                raise OutcomeUnknown(tx, f"replica {replica}") from failed
            raise WriteRefused(tx, failed.kind, str(failed), retry=failed.retry) from failed
        assert isinstance(done, WriteDone)
        if done.refused:
            raise understand(tx, done.refused)
        self._replica = replica
        returned = tuple(tuple(unpack_rows(rows)) for rows in _returned.decode(done.returned)) if done.returned else ()
        token = f"{replica}@{done.position or 0}"
        return WriteResult(done.tx, token, done.rows, returned, done.position, duplicate=done.duplicate)

    async def _at_some_replica(self, member: Member) -> WriteResult:
        """The preferred replica, or the one beside our broker; it alone is asked, since it may have committed."""
        return await self._forwarded(self._nearest(), member)

    def _nearest(self) -> str:
        if self._prefer is not None:
            return self._config.replica_named(self._prefer).name
        near = [r.name for r in self._config.replica if r.broker == self._site.broker]
        return near[0] if near else self._config.names[0]

    # ---------------------------------------------------------------------------------------------------- questions

    async def outcome(self, tx: str, key: str) -> str:
        if self._policy.route is Route.COORDINATOR and self._policy.plan().tx_type is TxType.DISTRIBUTED:
            outcome = await self._site.ask_outcome(tx, self._log_type)
            return "committed" if outcome.outcome is Outcome.COMMITTED else "aborted"
        if self._policy.route is Route.COORDINATOR:
            return await self._ordered_outcome(tx, key)
        # An empty transaction under the same key: either the first one is there, or it can't come any more.
        probe = Member(TxId(tx), (), key or f"tx:{tx}", int(self._config.key_ttl_s))
        replica = self._config.primary if self._policy.route is Route.PRIMARY else self._nearest()
        try:
            await self._forwarded(replica or "", probe, tx)
        except WriteRefused as refused:
            if refused.why == "key-reused":
                return "committed"
            raise
        return "aborted"

    async def _ordered_outcome(self, tx: str, key: str) -> str:
        """Log an empty transaction under the same key: behind it, either the first one is there or it never will be."""
        probe = Member(TxId(f"{tx}?"), (), key or f"tx:{tx}", int(self._config.key_ttl_s))
        plan = self._policy.plan()
        outcome = await self._site.execute(
            self._log_type, plan.tx_type, events=[write_body(probe)], limit=plan.limit, local_outcome=plan.local_outcome
        )
        question = Read(
            sql="select tx from tops.idempotency_keys where replica_set = $1 and key = $2",
            args=pack_values([self._config.name, probe.idempotency_key]),
            at_least=outcome.log_number or 0,
            wait_s=self._config.wait_s,
        )
        done = await self._caller.ask(self._config.site_of(self._nearest()), question, FORWARD_S)
        assert isinstance(done, ReadDone)
        return "committed" if any(row["tx"] == tx for row in unpack_rows(done.rows)) else "aborted"
