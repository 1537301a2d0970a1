"""Reads: which replica answers, and how far it must have come before it may.

| consistency | the read waits for |
|---|---|
| any | the token it was given, if any; in a write-all set also for what its replica has promised |
| primary | nothing: the primary has every write first |
| current | what its coordinator says is committed at this moment |
| quorum | the furthest position, and the outcome of every promise, of enough replicas to meet every write |
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, Literal, TypeVar, get_args

import msgspec

from adapters.changes import Row
from adapters.sql import check_query
from replication.client.direct import ConnectionLost, DirectConnections
from replication.conflicts.read_locks import Lock
from replication.model.config import ReplicaSetConfig
from replication.model.events import log_type
from replication.model.values import pack_values, unpack_rows
from replication.policies import Policy
from replication.rpc.calls import (
    Denied,
    Failed,
    Located,
    LockedRead,
    R,
    Read,
    ReplicaFailed,
    ReplicaRequest,
    Where,
)
from replication.rpc.conversation import Caller
from replication.rpc.direct import CHOSEN, SETTLED
from replication.rpc.rejections import NotStarted
from tops.client.site import Site
from tops.model.errors import InvalidTransaction, NotReachable, OutcomeUnknown, ResourceRejected, TopsError, code_of
from tops.model.transactions import Scope

T = TypeVar("T")
Consistency = Literal["any", "primary", "quorum", "current"]
_CONSISTENCIES = frozenset(get_args(Consistency))
REQUEST_S = 2.0
# Of a replica that can't for now: another one may.
_NOT_STARTED = code_of(NotStarted)
_ELSEWHERE = frozenset([*map(code_of, (NotReachable, ResourceRejected, OutcomeUnknown)), _NOT_STARTED])
MARGIN_S = 2.0  # an answer may take this much longer than the wait that it was allowed


class ReadResult(msgspec.Struct, frozen=True):
    """`behind` are replicas that a quorum read found further back than the newest version."""

    rows: list[Row]
    replica: str
    position: int
    behind: tuple[str, ...] = ()


class Reader:
    """The reading half of a connected replica set."""

    def __init__(
        self,
        site: Site,
        config: ReplicaSetConfig,
        policy: Policy,
        caller: Caller,
        prefer: str | None,
        direct: DirectConnections | None = None,
    ) -> None:
        """Without `direct`, everything goes through brokers."""
        self._site, self._config, self._policy, self._caller = site, config, policy, caller
        self._prefer, self._direct = prefer, direct
        self._log_type = log_type(config.name)
        self._log_end = SharedAsk(lambda: site.get_log_state(self._log_type, timeout_s=config.wait_s))
        self._near: tuple[str, list[str]] = ("", [])  # of which broker, and which replicas

    async def rows(
        self,
        sql: str,
        args: Sequence[Any],
        consistency: Consistency,
        after: str,
        wait_s: float | None,
        max_lag_s: float | None,
        replica: str | None,
    ) -> list[Row]:
        """The rows of `read`, whose position nobody asks for: quick where that is possible."""
        if self._direct is not None and max_lag_s is None:
            self._check(consistency)
            found = await self._quick(self._direct, sql, args, consistency, after, wait_s, replica)
            if found is not None:
                return found
        return (await self.read(sql, args, consistency, after, wait_s, max_lag_s, replica)).rows

    async def _quick(
        self,
        direct: DirectConnections,
        sql: str,
        args: Sequence[Any],
        consistency: Consistency,
        after: str,
        wait_s: float | None,
        replica: str | None,
    ) -> list[Row] | None:
        """None: nothing speaks against asking as usual."""
        where, floor = _token(after) if after else ("", 0)
        if where and floor == 0:
            return None  # bound to the replica of a write that is not in the log yet
        names = [self._config.replica_named(replica).name] if replica is not None else self._nearest()
        match consistency:
            case "primary":
                names = [self._config.primary or ""]
            case "quorum":
                return None  # several replicas are asked
            case "current":
                if wait_s is not None:
                    return None
                response = await self._log_end.request()
                floor = max(floor, response.decided)
                if replica is None:
                    present = {follower.name for follower in response.followers if follower.present}
                    ready = [self._config.replica_of(site) for site in response.in_sync if site in present]
                    names = [name for name in names if name in ready] or ready
        if not names:
            return None
        name = random.choice(names)
        connection = direct.to(name)
        if connection is None:
            return None
        wait = self._config.wait_s if wait_s is None else wait_s
        timeout_s = wait + MARGIN_S if floor or replica is not None else REQUEST_S + MARGIN_S
        flags = (SETTLED if self._policy.reads_await_prepared else 0) | (CHOSEN if replica is not None else 0)
        try:
            return await connection.read(sql, args, floor, wait, timeout_s, flags)
        except ReplicaFailed as failed:
            if failed.code not in _ELSEWHERE or replica is not None:
                raise
        except ConnectionLost:
            pass
        except NotReachable:
            if replica is not None:
                raise
        return None  # another replica may be able to

    def _nearest(self) -> list[str]:
        """The preferred replica, else those at our broker, else all."""
        if self._prefer is not None:
            return [self._prefer]
        broker = self._site.broker
        if self._near[0] != broker or not self._near[1]:
            near = [r.name for r in self._config.replica if r.broker == broker] or self._config.names
            self._near = (broker, near)
        return self._near[1]

    async def read(
        self,
        sql: str,
        args: Sequence[Any],
        consistency: Consistency,
        after: str,
        wait_s: float | None,
        max_lag_s: float | None,
        replica: str | None,
    ) -> ReadResult:
        check_query(sql, any_dialect=True)
        self._check(consistency)
        where, floor = _token(after)
        wait = self._config.wait_s if wait_s is None else wait_s
        read = Read(
            sql=sql,
            args=pack_values(args),
            at_least=floor,
            wait_s=wait,
            max_lag_s=max_lag_s,
            settled=self._policy.reads_await_prepared,
            chosen=replica is not None,
        )
        chosen = [self._config.replica_named(replica).name] if replica is not None else None
        if where and floor == 0 and chosen not in (None, [where]):
            raise InvalidTransaction(f"the write of token {after!r} is not in the log yet: read it at {where}")
        match consistency:
            case "any":
                # A token of a local-first write binds to its replica until its position is known.
                bound = chosen or ([where] if where and floor == 0 else self._by_nearness())
                return await self._first(bound, read)
            case "primary":
                return await self._first([self._config.primary or ""], read)
            case "current":
                response = await self._site.get_log_state(self._log_type, timeout_s=wait)
                read = msgspec.structs.replace(read, at_least=max(floor, response.decided))
                # One that is gone counts as in sync until the next write misses it.
                present = {follower.name for follower in response.followers if follower.present}
                ready = [self._config.replica_of(site) for site in response.in_sync if site in present]
                order = sorted(self._by_nearness(), key=lambda name: name not in ready)
                return await self._first(chosen or order, read)
            case "quorum":
                return await self._quorum(read, floor, chosen)

    async def locked(self, sql: str, args: Sequence[Any], after: str) -> tuple[list[Row], list[Lock]]:
        """A read inside a serializable transaction that sees the write of that token, and what it depends on."""
        check_query(sql, any_dialect=True)
        _, floor = _token(after)
        read = LockedRead(sql=sql, args=pack_values(args), at_least=floor, wait_s=self._config.wait_s)
        replicas = self._by_nearness()
        done = await self._first_response(replicas, read, self._timeout_of(read, replicas))
        return unpack_rows(done.rows), [Lock(table, key, done.position) for table, key in done.locks]

    def _check(self, consistency: str) -> None:
        if consistency not in _CONSISTENCIES:
            raise InvalidTransaction(f"{consistency!r} is no consistency: any, primary, quorum or current")
        if consistency not in self._policy.consistencies():
            can = ", ".join(sorted(self._policy.consistencies()))
            raise InvalidTransaction(
                f"replica set {self._config.name!r} ({self._config.policy}) can't promise {consistency!r} reads; "
                f"it can: {can}"
            )

    def _by_nearness(self) -> list[str]:
        """The preferred replica, then those at our broker, then the others, in a new order each time."""
        replicas = random.sample(self._config.replica, len(self._config.replica))
        near = sorted(replicas, key=lambda r: (r.name != self._prefer, r.broker != self._site.broker))
        return [r.name for r in near]

    async def _first(self, replicas: Sequence[str], read: Read) -> ReadResult:
        done = await self._first_response(replicas, read, self._timeout_of(read, replicas))
        return ReadResult(unpack_rows(done.rows), done.replica, done.position)

    async def _first_response(self, replicas: Sequence[str], read: ReplicaRequest[R], wait_s: float) -> R:
        """Of the first replica that can; one that is away, too far behind, stopped or joining is passed over."""
        problems: list[str] = []
        not_started: list[ReplicaFailed] = []
        left, lost = list(replicas), set[str]()
        while left:
            name = left.pop(0)
            over = self._direct.to(name) if self._direct is not None and name not in lost else None
            try:
                return await self._caller.request(self._config.site_of(name), read, wait_s, over)
            except ConnectionLost:
                lost.add(name)
                left.append(name)  # through brokers, if no other replica can
            except NotReachable as error:
                problems.append(f"{name}: {error}")
            except ReplicaFailed as failed:
                if failed.code not in _ELSEWHERE:
                    raise
                problems.append(str(failed))
                if failed.code == _NOT_STARTED:
                    not_started.append(failed)
        if not_started and len(not_started) == len(problems):
            raise not_started[0]
        raise NotReachable(f"no replica of {self._config.name!r} could answer: {'; '.join(problems)}")

    @staticmethod
    def _timeout_of(read: Read | LockedRead, replicas: Sequence[str]) -> float:
        return read.wait_s + MARGIN_S if read.at_least or len(replicas) == 1 else REQUEST_S + MARGIN_S

    async def _quorum(self, read: Read, floor: int, chosen: list[str] | None) -> ReadResult:
        voters = [n for n in self._config.names if self._policy.scope_of(n) is Scope.DISTRIBUTED]
        needed = self._config.reads_needed

        def counts(response: Located | Failed | Denied) -> bool:
            return isinstance(response, Located) and response.replica in voters

        responses = await self._caller.request_all(Where(), min(REQUEST_S, read.wait_s), needed, counts)
        located = [a for a in responses if isinstance(a, Located) and a.replica in voters]
        if len(located) < needed:
            missing = sorted(set(voters) - {a.replica for a in located})
            raise TooFewReaders(self._config.name, len(located), needed, missing, _problems(responses))
        target = max([floor, *(a.position for a in located), *(n for a in located for n in a.prepared)])
        behind = tuple(sorted(a.replica for a in located if a.position < target))
        newest = sorted(located, key=lambda a: (a.position < target, a.replica != self._prefer, random.random()))
        read = msgspec.structs.replace(read, at_least=target)
        done = await self._first(chosen or [a.replica for a in newest], read)
        return msgspec.structs.replace(done, behind=behind)


class SharedAsk(Generic[T]):
    """A question whose answer serves everybody who has asked before it was sent. One is under way at a time, unless
    they may overlap: then those of one event-loop iteration share one."""

    def __init__(self, request: Callable[[], Awaitable[T]], *, overlapping: bool = False) -> None:
        self._request, self._overlapping = request, overlapping
        self._under_way: asyncio.Task[T] | None = None
        self._next: asyncio.Task[T] | None = None

    async def request(self) -> T:
        if self._next is None:
            self._next = asyncio.ensure_future(self._after(None if self._overlapping else self._under_way))
            self._next.add_done_callback(_retrieved)
        return await asyncio.shield(self._next)

    async def _after(self, former: "asyncio.Task[T] | None") -> T:
        if former is not None:
            await asyncio.wait([former])
        self._under_way, self._next = self._next, None
        return await self._request()


def _retrieved(task: "asyncio.Task[Any]") -> None:
    """All who have asked may have been cancelled: then nobody looks at the error."""
    if not task.cancelled():
        task.exception()


class TooFewReaders(TopsError):
    """Not enough replicas answered to be sure to have met the newest write; the text names the others."""

    def __init__(self, name: str, answered: int, needed: int, missing: Sequence[str], problems: str) -> None:
        self.answered, self.needed, self.missing = answered, needed, tuple(missing)
        super().__init__(
            f"replica set {name!r}: {answered} of at least {needed} replicas answered; "
            f"missing: {', '.join(missing)}{problems}"
        )


def _problems(responses: Sequence[object]) -> str:
    texts = [a.text for a in responses if isinstance(a, Failed)]
    return f" ({'; '.join(texts)})" if texts else ""


def _token(token: str) -> tuple[str, int]:
    """The replica and the position in a write's token; either may be missing."""
    replica, at, position = token.rpartition("@")
    text = position if at else token
    if text and not text.isdigit():
        raise InvalidTransaction(f"{token!r} is no token of a write")
    return replica, int(text or 0)
