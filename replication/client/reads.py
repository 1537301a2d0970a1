"""Reads: which replica answers, and how far it must have come before it may.

| consistency | the read waits for |
|---|---|
| any | the token it was given, if any; in a write-all set also for what its replica has promised |
| primary | nothing: the primary has every write first |
| current | what its coordinator says is committed at this moment |
| quorum | the furthest position, and the outcome of every promise, of enough replicas to meet every write |
"""

import random
from collections.abc import Sequence
from typing import Any, Literal, get_args

import msgspec

from adapters.changes import Row
from adapters.sql import check_query
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
from replication.rpc.rejections import NotStarted
from tops.client.site import Site
from tops.model.errors import InvalidTransaction, NotReachable, OutcomeUnknown, ResourceRejected, TopsError, code_of
from tops.model.transactions import Scope

Consistency = Literal["any", "primary", "quorum", "current"]
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
        self, site: Site, config: ReplicaSetConfig, policy: Policy, caller: Caller, prefer: str | None
    ) -> None:
        self._site, self._config, self._policy, self._caller = site, config, policy, caller
        self._prefer = prefer
        self._log_type = log_type(config.name)

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
        if consistency not in get_args(Consistency):
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
        for name in replicas:
            try:
                return await self._caller.request(self._config.site_of(name), read, wait_s)
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
