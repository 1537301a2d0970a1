"""How a write travels: as a transaction at the coordinator, or to the replica that commits it first."""

import asyncio
import itertools
import secrets
import time
from collections.abc import Awaitable

import msgspec

from adapters.changes import SETTLED, Change, Member, Row, Settle, Statement, content_digest, encode_member, own_key
from adapters.resource import Why
from adapters.sql import check_statement
from replication.client.origin_choice import Fallback
from replication.conflicts.verdicts import VerdictClient
from replication.model.config import ReplicaSetConfig
from replication.model.events import log_type, write_body
from replication.model.values import unpack_rows
from replication.policies import Policy, Route, policy_of, write_spec
from replication.rpc.calls import Describe, Described, Held, ReplicaFailed, Write
from replication.rpc.control import check_key
from replication.rpc.conversation import Caller
from replication.rpc.rejections import (
    Duplicate,
    NotStarted,
    TooFewReplicas,
    WriteRejected,
    WriteTooLarge,
    check_request,
    error_for,
)
from tops.client.site import Site
from tops.model.errors import (
    EventTooLarge,
    InvalidTransaction,
    JournalStale,
    NotReachable,
    OutcomeUnknown,
    Retry,
    TopsError,
    TransactionAborted,
    code_of,
)
from tops.model.ids import TxId, counted_id, identity_in, parts_of_counted
from tops.model.rejections import RejectionCode
from tops.model.transactions import Outcome, TxType
from tops.protocol.messages import TxOutcome

RETRY_FIRST_S = 0.02
STARTED_S = 2.0
TRANSIENT_TRIES = 6
COORDINATOR = Route.COORDINATOR  # looked at with every write
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
    notices: tuple[str, ...] = ()  # what the database has said on the way, where the write was executed once


class Writer:
    """The writing half of a connected replica set."""

    def __init__(
        self,
        site: Site,
        config: ReplicaSetConfig,
        policy: Policy,
        caller: Caller,
        prefer: str | None,
        timeout_s: float,
        *,
        started: bool = True,
    ) -> None:
        """`started`: that the set has started is known; if it is not, it is asked before the first write."""
        self._site, self._config, self._policy, self._caller = site, config, policy, caller
        self._prefer, self._timeout_s, self._started = prefer, timeout_s, started
        self._key_ttl_s = int(config.key_ttl_s)
        self._log_type = log_type(config.name)
        self._route = policy.route
        self._spec = write_spec(self._log_type, policy)  # of every write: stated once
        # Peers replicate rows; and what is applied from the log alone could not tell how many rows it changed.
        logged_first = self._route is COORDINATOR and self._spec.tx_type is TxType.LOCAL
        self._ships_statements = self._route is not Route.REPLICA and not logged_first
        self._fallback = Fallback(site, config, policy, caller, self._by_nearness, timeout_s)
        self._position, self._replica = 0, ""
        self._life, self._numbers = secrets.token_hex(8), itertools.count(1)
        self._verdicts = VerdictClient(
            caller, lambda: [config.site_of(name) for name in self._by_nearness()], timeout_s
        )

    @property
    def token(self) -> str:
        return f"{self._replica}@{self._position}" if self._replica else str(self._position)

    async def write(self, changes: tuple[Change, ...], key: str, reads: bytes = b"") -> WriteResult:
        """Commit; `reads` is what a serializable transaction depends on, and makes it a transaction even if it only
        reads. Passing conflicts are tried again with back-off; too few replicas for as long as the set says. What is
        not proved deterministic is executed once, at an origin."""
        if key:
            check_key(key)
        if not changes and not reads:
            return WriteResult("", self.token)
        if not self._started:
            await self._check_started()
        member = Member(TxId(""), changes, key, self._key_ttl_s)
        if key:
            # Replicas add versions and read locks to the changes; a repeated request is known by what it asked for.
            member = msgspec.structs.replace(member, content=content_digest(member))
        began = time.monotonic()
        pause_s, tries = RETRY_FIRST_S, 0
        executed = self._must_be_executed(changes)
        while True:
            try:
                result = await (self._executed(member, reads) if executed else self._once(member, reads))
            except TooFewReplicas:
                if self._config.on_failure != "block" or time.monotonic() > began + self._config.block_s:
                    raise
            except WriteRejected as rejected:
                if not executed and self._fallback.wanted_by(rejected, changes):
                    executed = True
                    continue
                tries += 1
                if not _is_transient(rejected) or tries >= TRANSIENT_TRIES:
                    raise
                if rejected.why == RejectionCode.AGAINST_PLAN.value:
                    await self._describe_again()
            else:
                if result.position is not None and result.position > self._position:
                    self._position = result.position
                return result
            await asyncio.sleep(pause_s * (0.5 + secrets.randbelow(1000) / 1000))
            pause_s = min(pause_s * 2, 1.0)

    async def _check_started(self) -> None:
        """A set that has started stays so; one replica that takes part is enough to know it."""
        responses = await self._caller.request_all(Describe(), STARTED_S, len(self._config.replica))
        reasons = {a.replica: a.not_started for a in responses if isinstance(a, Described)}
        if not reasons:
            raise NotReachable(f"no replica of set {self._config.name!r} responds")
        if all(reasons.values()):
            response = sorted(set(reasons.values()))
            raise NotStarted(f"set {self._config.name!r} has not started: {'; '.join(response)}")
        self._started = True

    async def _describe_again(self) -> None:
        """The set's configuration has changed since this client connected."""
        described = await self._caller.request("*", Describe(), self._timeout_s)
        self._config = ReplicaSetConfig.model_validate_json(described.config)
        self._policy = policy_of(self._config)
        self._route, self._spec = self._policy.route, write_spec(self._log_type, self._policy)

    def _once(self, member: Member, reads: bytes) -> Awaitable[WriteResult]:
        route = self._route
        if route is COORDINATOR:
            return self._coordinated(member, reads)
        if route is Route.PRIMARY:
            return self._forwarded(self._config.primary or "", member)
        return self._at_some_replica(member)

    def _must_be_executed(self, changes: tuple[Change, ...]) -> bool:
        """Whether the changes can't be shipped: known from before, or statements where those never are."""
        statements = [change for change in changes if isinstance(change, Statement)]
        for change in statements:
            check_statement(change.sql, any_dialect=True)
        return self._fallback.is_needed(changes) or (bool(statements) and not self._ships_statements)

    async def _executed(self, member: Member, reads: bytes) -> WriteResult:
        done = await self._fallback.execute(
            lambda replica: self._new_tx(member.idempotency_key, replica), member, reads, self._position
        )
        token = str(done.position or 0)
        if self._route is not COORDINATOR:
            self._replica, token = done.replica, f"{done.replica}@{token}"
        return WriteResult(
            done.tx,
            token,
            done.rows,
            _rows_in(done.returned),
            done.position,
            tuple(self._config.replica_of(site) for site in done.pending),
            done.duplicate,
            done.notices,
        )

    # ------------------------------------------------------------------------------------------- at the coordinator

    async def _coordinated(self, member: Member, reads: bytes) -> WriteResult:
        """The transaction goes by the coordinator's id, and so does every question about it."""
        try:
            outcome = await self._site.run(self._spec, [write_body(member, reads)])
        except EventTooLarge as too_large:
            raise WriteTooLarge("", str(too_large)) from too_large
        except JournalStale as stale:
            raise WriteRejected(stale.tx, stale.code, stale.reason) from stale
        except TransactionAborted as aborted:
            error = self._named(error_for(aborted.tx, aborted.rejection))
            if isinstance(error, Duplicate):
                return WriteResult(error.tx, str(error.number), position=error.number, duplicate=True)
            raise error from None
        if self._spec.tx_type is TxType.LOCAL and (rejection := await self._rejection(outcome)) is not None:
            raise rejection
        return self._result(outcome)

    async def _rejection(self, logged: TxOutcome) -> TopsError | None:
        """What is logged first and applied then may be refused then."""
        rejected = await self._verdicts.rejection(logged.log_number or 0, logged.tx)
        return None if rejected is None else error_for(logged.tx, rejected)

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
        if not outcome.result and not outcome.pending:
            return WriteResult(outcome.tx, str(number), outcome.rows, (), number)
        pending = tuple(self._config.replica_of(site) for site in outcome.pending)
        return WriteResult(outcome.tx, str(number), outcome.rows, _rows_in(outcome.result), number, pending)

    # ------------------------------------------------------------------------------------------------- at a replica

    async def _forwarded(self, replica: str, member: Member, tx: str = "") -> WriteResult:
        tx = tx or self._new_tx(member.idempotency_key, replica)
        encoded = encode_member(member)
        check_request(encoded)
        request = Write(tx=tx, member=encoded)
        try:
            done = await self._caller.request(self._config.site_of(replica), request, self._timeout_s)
        except NotReachable:
            raise OutcomeUnknown(tx, f"replica {replica}") from None
        except ReplicaFailed as failed:
            if failed.retry is Retry.ASK_FIRST:
                raise OutcomeUnknown(tx, f"replica {replica}") from failed
            if failed.code == code_of(NotStarted):
                raise NotStarted(str(failed), tx) from failed
            raise WriteRejected(tx, failed.code, str(failed), retry=failed.retry) from failed
        if done.rejection is not None:
            raise error_for(tx, done.rejection)
        self._replica = replica
        token, returned = f"{replica}@{done.position or 0}", _rows_in(done.returned)
        return WriteResult(done.tx, token, done.rows, returned, done.position, duplicate=done.duplicate)

    async def _at_some_replica(self, member: Member) -> WriteResult:
        """The preferred replica, or the one beside our broker; it alone is asked, since it may have committed."""
        return await self._forwarded(self._nearest(), member)

    def _nearest(self) -> str:
        if self._prefer is not None:
            return self._config.replica_named(self._prefer).name  # an unknown name is refused
        return self._by_nearness()[0]

    def _by_nearness(self) -> list[str]:
        """The preferred replica, then those at our broker, then the others, as they are listed."""
        if self._prefer is not None:
            self._config.replica_named(self._prefer)  # an unknown name is refused
        near = sorted(self._config.replica, key=lambda r: (r.name != self._prefer, r.broker != self._site.broker))
        return [replica.name for replica in near]

    # ---------------------------------------------------------------------------------------------------- questions

    async def outcome(self, tx: str, key: str) -> str:
        if self._policy.route is Route.COORDINATOR:
            if _parts_of(tx)[1]:
                return await self._executed_outcome(tx, key)
            return await self._coordinated_outcome(tx, key)
        # An empty transaction under the same key: either the first one is there, or it can't come any more.
        key_part, replica = _parts_of(tx)
        probe = Member(TxId(tx), (), key or key_part or own_key(tx), self._key_ttl_s)
        try:
            await self._forwarded(self._asked_replica(replica), probe, tx)
        except WriteRejected as rejected:
            if rejected.why == "key-reused":
                return "committed"
            raise
        return "aborted"

    async def _executed_outcome(self, tx: str, key: str) -> str:
        """Of a write that an origin was to execute: an empty transaction under its key, which no attempt can pass."""
        mine = identity_in(tx) == identity_in(self._site.name)
        probe = Member(
            TxId(""),
            (),
            key or _parts_of(tx)[0] or own_key(tx),
            self._key_ttl_s,
            content=SETTLED,
            control=None if mine else Settle(),  # which needs an operator's right
        )
        try:
            await self._coordinated(probe, b"")
        except WriteRejected as rejected:
            if rejected.why == Why.KEY_REUSED.value:
                return "committed"
            raise
        return "aborted"

    async def _coordinated_outcome(self, tx: str, key: str) -> str:
        """The coordinator refuses an id that it has never heard of, for good, before it says so. With a key, the same
        request may have been committed by another transaction."""
        outcome = await self._site.get_outcome(tx, self._log_type, self._spec.tx_type)
        if outcome.outcome is Outcome.UNKNOWN:
            raise OutcomeUnknown(tx, f"the coordinator ({outcome.reason})")
        rejected = outcome.outcome is Outcome.ABORTED
        if not rejected and self._spec.tx_type is TxType.LOCAL:
            rejected = await self._rejection(outcome) is not None
        return "aborted" if rejected and not (key and await self._is_held(key)) else "committed"

    async def _is_held(self, key: str) -> bool:
        """Whether anything is committed under an idempotency key, as of now."""
        decided = (await self._site.get_log_state(self._log_type)).decided
        request = Held(key=key, at_least=decided, wait_s=self._config.wait_s)
        problems = []
        for name in self._by_nearness():
            try:
                done = await self._caller.request(self._config.site_of(name), request, self._timeout_s)
            except (NotReachable, ReplicaFailed) as error:
                problems.append(str(error))
                continue
            return done.held
        raise NotReachable(f"no replica of {self._config.name!r} could answer: {'; '.join(problems)}")

    def _new_tx(self, key: str, replica: str) -> TxId:
        return counted_id(self._site.name, self._life, next(self._numbers), key, replica)

    def _asked_replica(self, response: str) -> str:
        if self._policy.route is Route.PRIMARY:
            return self._config.primary or ""
        return self._config.replica_named(response).name if response else self._nearest()


def _is_transient(rejected: WriteRejected) -> bool:
    """Whether the same may succeed in a moment; what was read before must be read again first."""
    return rejected.retry is Retry.SAFE and rejected.why not in ("version", "serialization", "not-started")


def _rows_in(returned: bytes) -> tuple[tuple[Row, ...], ...]:
    """What the changes of a write gave back, change by change."""
    return tuple(tuple(unpack_rows(rows)) for rows in _returned.decode(returned)) if returned else ()


def _parts_of(tx: str) -> tuple[str, str]:
    """The idempotency key and the replica that the id of a local-first write tells; nothing for other ids."""
    try:
        return parts_of_counted(tx)
    except ValueError:
        raise InvalidTransaction(f"{tx!r} is no id of a transaction") from None
