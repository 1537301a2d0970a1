"""What an application holds: one replica set, to write to and to read from.

async with connect("ws://127.0.0.1:7420", "shop") as shop:
    await shop.execute("update accounts set balance = balance - $1 where id = $2", 10, 1)
    row = await shop.fetchrow("select balance from accounts where id = $1", 1, consistency="current")
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from adapters.changes import Change, Row, Statement
from replication.client.direct import DirectConnections
from replication.client.reads import Consistency, Reader, ReadResult
from replication.client.transaction import Transaction
from replication.client.writes import Writer, WriteResult
from replication.model.config import Cluster, ReplicaSetConfig
from replication.model.events import log_type
from replication.model.values import unpack_rows
from replication.policies import EntryKind, policy_of
from replication.rpc.calls import Conflicts as ConflictsWanted
from replication.rpc.calls import (
    Describe,
    Described,
    OperationDone,
    Pause,
    Quarantine,
    Reload,
    ReplicaRequest,
    Resume,
    RetryErrors,
    RowsReturned,
    Status,
    StatusReported,
)
from replication.rpc.conversation import Caller
from replication.rpc.rejections import SerializationFailure, VersionConflict
from tops.client.site import Site
from tops.core.participant.participation import SiteOptions
from tops.model.errors import ConfigError, NotReachable
from tops.protocol.messages import LogRecovered, Principal

T = TypeVar("T")
DESCRIBE_S = 2.0
STATUS_S = 2.0
CONFLICTS_S = 10.0  # a long log takes its time

log = logging.getLogger("tops.replication")


class ReplicaSet:
    """One replica set, connected; `connect` makes it. Safe to use from many tasks at once."""

    def __init__(
        self,
        site: Site,
        config: ReplicaSetConfig,
        caller: Caller,
        prefer: str | None,
        timeout_s: float = 10.0,
        *,
        started: bool = True,
        direct: DirectConnections | None = None,
    ) -> None:
        self.config, self.policy, self._site, self._caller = config, policy_of(config), site, caller
        self.direct = direct
        self._writer = Writer(site, config, self.policy, caller, prefer, timeout_s, started=started)
        self._reader = Reader(site, config, self.policy, caller, prefer, direct)

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def token(self) -> str:
        """What a later read must be given to see everything written through this object so far."""
        return self._writer.token

    # ------------------------------------------------------------------------------------------------------- writes

    async def execute(self, sql: str, *args: Any, idempotency_key: str = "") -> WriteResult:
        """One parameterised statement as one transaction."""
        return await self.write([Statement(sql, args)], idempotency_key=idempotency_key)

    def write(self, changes: Sequence[Change], *, idempotency_key: str = "") -> Coroutine[Any, Any, WriteResult]:
        """Some changes as one transaction.

        Raises WriteRejected (nothing happened), or OutcomeUnknown with an id to ask `outcome` about. With an
        idempotency key, writing the same again is safe: it is done once.
        """
        return self._writer.write(tuple(changes), idempotency_key)

    @asynccontextmanager
    async def transaction(self, *, idempotency_key: str = "") -> AsyncIterator[Transaction]:
        """Collects changes and commits them on leaving; an exception drops them."""
        serializable = self.policy.entry_kind is EntryKind.CERTIFIED
        tx = Transaction(self._writer, self._reader, idempotency_key, serializable=serializable)
        yield tx
        if tx.result is None:
            await tx.commit()

    async def run(self, work: Callable[[Transaction], Awaitable[T]], *, tries: int = 10) -> T:
        """Run a transaction, again from its beginning if it lost against another one; the last error after `tries`."""
        retrying = AsyncRetrying(
            stop=stop_after_attempt(tries),
            # A random pause, so that the same two transactions do not collide again.
            wait=wait_random_exponential(multiplier=0.02, max=1.0),
            retry=retry_if_exception_type((SerializationFailure, VersionConflict)),
            before_sleep=self._log_retry,
            reraise=True,
        )

        async def once() -> T:
            async with self.transaction() as tx:
                return await work(tx)

        return await retrying(once)

    def _log_retry(self, state: RetryCallState) -> None:
        reason = str(state.outcome.exception()) if state.outcome is not None else ""
        extra = {"replica_set": self.config.name, "attempt": state.attempt_number, "reason": reason}
        log.info("the transaction is run again", extra=extra)

    async def outcome(self, tx: str, *, idempotency_key: str = "") -> str:
        """What became of a write whose answer was lost: `committed` or `aborted`; never a guess.

        One that is not known is refused for good before this says `aborted`. OutcomeUnknown if whoever knows can't be
        asked now, or has forgotten."""
        return await self._writer.outcome(tx, idempotency_key)

    # -------------------------------------------------------------------------------------------------------- reads

    async def read(
        self,
        sql: str,
        *args: Any,
        consistency: Consistency = "any",
        after: str = "",
        wait_s: float | None = None,
        max_lag: float | None = None,
        replica: str | None = None,
    ) -> ReadResult:
        """One query, in one snapshot of one replica, with where it was read and who was found to be behind.

        `any` promises nothing by itself; `after` is a write's token that the read must see, `max_lag` bounds in
        seconds how old the data may be. `primary`, `current` and `quorum` see everything that was acknowledged.
        """
        return await self._reader.read(sql, args, consistency, after, wait_s, max_lag, replica)

    async def fetch(
        self,
        sql: str,
        *args: Any,
        consistency: Consistency = "any",
        after: str = "",
        wait_s: float | None = None,
        max_lag: float | None = None,
        replica: str | None = None,
    ) -> list[Row]:
        """The rows of `read`, without where they were read: that is quicker."""
        return await self._reader.rows(sql, args, consistency, after, wait_s, max_lag, replica)

    async def fetchrow(self, sql: str, *args: Any, **options: Any) -> Row | None:
        """The first row, or None."""
        rows = await self.fetch(sql, *args, **options)
        return rows[0] if rows else None

    async def fetchval(self, sql: str, *args: Any, **options: Any) -> Any:
        """The first column of the first row, or None."""
        row = await self.fetchrow(sql, *args, **options)
        return next(iter(row.values())) if row else None

    # ----------------------------------------------------------------------------------------------------- operation

    async def status(self, timeout_s: float = STATUS_S) -> dict[str, Any]:
        """The set as its replicas and its coordinator see it; who does not answer is `unreachable`."""
        responses = await self._caller.request_all(Status(), timeout_s, len(self.config.replica))
        response = {a.replica: a.fields for a in responses if isinstance(a, StatusReported)}
        coordinator: dict[str, Any] = {"reachable": False}
        try:
            log = await self._site.get_log_state(log_type(self.name), timeout_s=timeout_s)
            coordinator = {"reachable": True, "head": log.decided, "oldest": log.oldest, "history": log.history}
            coordinator["stale"] = str(log.stale) if log.stale is not None else ""
            behind = {f.name: log.decided - f.position for f in log.followers}
            # A replica may not have heard yet that its coordinator started again, and on which journal.
            response = _with_unpublished(response)
            response = (
                response if log.is_open else {name: {**fields, "in_sync": False} for name, fields in response.items()}
            )
        except NotReachable as error:
            coordinator["problem"], behind = str(error), {}
        replicas = []
        for name in self.config.names:
            lost = {"replica": name, "in_sync": False, "unreachable": True}
            site = self.config.site_of(name)
            lost["lag_transactions"] = behind.get(site)
            lost["lag_s"] = max((fields["others_lag_s"].get(site, 0.0) for fields in response.values()), default=None)
            replicas.append(response.get(name, lost))
        return {"name": self.name, "policy": self.config.policy, "coordinator": coordinator, "replicas": replicas}

    async def conflicts(self, limit: int = 100) -> dict[str, list[Row]]:
        """The conflict log of every replica that answers, newest first."""
        responses = await self._caller.request_all(ConflictsWanted(limit=limit), CONFLICTS_S, len(self.config.replica))
        return {a.replica: unpack_rows(a.rows) for a in responses if isinstance(a, RowsReturned)}

    async def order(self, replica: str, what: str, argument: str = "") -> str:
        """An operator's request to one replica: `pause` (with a reason), `resume`, `retry`, `reload` or
        `quarantine`."""
        response = await self._caller.request(self.config.site_of(replica), _operation(what, argument), 30.0)
        return response.text

    async def recover_log(self, *, accept_loss: bool = False) -> LogRecovered:
        """Let the log of a coordinator whose journal is stale go on in a new history, behind the most advanced
        replica; what was written before stays as it is there."""
        sites = [self.config.site_of(name) for name in self.config.names]
        needed = self.policy.responses_needed()
        return await self._site.recover_log(log_type(self.name), sites, needed, accept_loss=accept_loss)

    async def wait_in_sync(self, timeout_s: float = 30.0) -> None:
        """Returns when every replica answers and is in sync; NotReachable, naming the others, after the bound."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            status = await self.status()
            head = status["coordinator"].get("head")
            late = [_named(r) for r in status["replicas"] if _late(r, head)]
            if head is not None and not late:
                return
            if asyncio.get_running_loop().time() > deadline:
                problem = f"; the coordinator: {status['coordinator']['problem']}" if head is None else ""
                raise NotReachable(f"not in sync after {timeout_s:g} s: {', '.join(late) or 'nobody knows'}{problem}")
            await asyncio.sleep(0.2)


def _with_unpublished(response: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What a replica has committed and not published is missing at all others, which can't know that."""
    seen = {}
    for name, fields in response.items():
        others = [other for other in response.values() if other is not fields]
        missing = sum(other["unpublished"] for other in others)
        seen[name] = fields
        if missing:
            seen[name] = {
                **fields,
                "in_sync": False,
                "lag_transactions": fields["lag_transactions"] + missing,
                "lag_network": fields["lag_network"] + missing,
                "lag_s": max([fields["lag_s"], *(other["unpublished_s"] for other in others)]),
            }
    return seen


def _named(replica: dict[str, Any]) -> str:
    reason = replica.get("not_started")
    return f"{replica['replica']} (not started: {reason})" if reason else str(replica["replica"])


def _operation(what: str, reason: str) -> ReplicaRequest[OperationDone]:
    match what:
        case "pause":
            return Pause(reason=reason)
        case "resume":
            return Resume()
        case "retry":
            return RetryErrors()
        case "reload":
            return Reload()
        case "quarantine":
            return Quarantine()
    raise ConfigError(f"no operation is named {what!r}: pause, resume, retry, reload or quarantine")


def _late(replica: dict[str, Any], head: int | None) -> bool:
    """Whether a replica has not reached the end of the log, or keeps something that is not in the log yet."""
    return not replica["in_sync"] or replica["position"] < (head or 0) or replica["unpublished"] > 0


@asynccontextmanager
async def connect(
    url: str | Sequence[str],
    replica_set: str,
    *,
    name: str | None = None,
    keys: Path | None = None,
    on_behalf_of: Principal | None = None,
    insecure: str | None = None,
    prefer: str | None = None,
    timeout_s: float = 10.0,
    direct: bool = True,
) -> AsyncIterator[ReplicaSet]:
    """Connect to a replica set through one of the cluster's brokers.

    `prefer` names the replica that local-first writes and reads of `any` go to; without it, one at the broker that
    this client is connected to. `keys` is the folder that `tops keys issue` wrote for this client. A service acts
    `on_behalf_of` another identity: everything is done with the rights that both have. `timeout_s` bounds connecting,
    and then every write: after it the outcome is unknown. Reads go over direct connections to the replicas, where
    these can be reached, unless `direct` is False.
    Raises NotReachable if no broker, or no replica of the set, answers.
    """
    options = SiteOptions(retry_s=0.5, give_up_s=timeout_s)
    # Every process of an application has a session of its own, also where they share a certificate.
    instance = secrets.token_hex(4) if keys is not None else ""
    async with Site.connect(
        url,
        name=name,
        instance=instance,
        on_behalf_of=on_behalf_of,
        keys=keys,
        insecure=insecure,
        timeout_s=timeout_s,
        options=options,
    ) as site:
        caller = Caller(site, replica_set, site.brokers)
        await caller.start()
        described = await _described(caller, replica_set, timeout_s)
        config = ReplicaSetConfig.model_validate_json(described.config)
        await site.advertise(log_type(replica_set))
        connections = DirectConnections(site, config, caller) if direct else None
        try:
            started = not described.not_started
            yield ReplicaSet(site, config, caller, prefer, timeout_s, started=started, direct=connections)
        finally:
            if connections is not None:
                await connections.close()


def connect_by_file(
    cluster: Cluster, replica_set: str, *, keys: Path | None = None, timeout_s: float = 10.0
) -> AbstractAsyncContextManager[ReplicaSet]:
    """`connect` to a set of this file, through any of its brokers."""
    insecure = cluster.config.cluster.insecure
    return connect(cluster.urls(), replica_set, keys=keys, insecure=insecure, timeout_s=timeout_s)


async def _described(caller: Caller, replica_set: str, timeout_s: float) -> Described:
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        try:
            response = await caller.request("*", Describe(), min(DESCRIBE_S, timeout_s))
        except NotReachable:
            if asyncio.get_running_loop().time() > deadline:
                raise NotReachable(
                    f"no replica of set {replica_set!r} answers: is the name right, and does an agent run?"
                ) from None
            continue
        return response
