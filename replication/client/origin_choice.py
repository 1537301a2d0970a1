"""A client's side of statements that are executed once: which need it, which replica is asked, what it responds."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

import msgspec

from adapters.changes import Change, Member, Statement, encode_member
from replication.model.config import ReplicaSetConfig
from replication.model.events import log_type
from replication.policies import Policy, Route
from replication.rpc.calls import Execute, ExecuteDone, ReplicaFailed, Where
from replication.rpc.conversation import Caller
from replication.rpc.rejections import (
    ChangeNotProved,
    Duplicate,
    WriteRejected,
    check_request,
    database_error,
    error_for,
)
from tops.client.site import Site
from tops.model.errors import NotReachable, OutcomeUnknown, Retry
from tops.model.ids import TxId
from tops.model.transactions import Scope

REMEMBERED_MAX = 10_000
CHOICE_S = 2.0  # how long a replica that was in sync is taken for one that is
RESPONSE_S = 2.0

Texts = tuple[str, ...]


class Fallback:
    """Executes at an origin what can't be shipped, and remembers which texts that are."""

    def __init__(
        self,
        site: Site,
        config: ReplicaSetConfig,
        policy: Policy,
        caller: Caller,
        by_nearness: Callable[[], list[str]],
        timeout_s: float,
    ) -> None:
        self._site, self._config, self._policy, self._caller = site, config, policy, caller
        self._by_nearness, self._timeout_s = by_nearness, timeout_s
        self._log_type = log_type(config.name)
        self._texts: OrderedDict[Texts, None] = OrderedDict()
        self._chosen: tuple[str, float] | None = None  # an origin, and until when it need not be looked for again
        self._choosing = asyncio.Lock()

    def is_needed(self, changes: tuple[Change, ...]) -> bool:
        """Whether changes with these texts were not proved before."""
        return bool(self._texts) and _texts(changes) in self._texts

    def wanted_by(self, rejected: WriteRejected, changes: tuple[Change, ...]) -> bool:
        """Whether the replicas have excluded the changes because they are not proved; such texts are remembered."""
        if not isinstance(rejected, ChangeNotProved):
            return False
        self.remember(changes)
        return True

    def remember(self, changes: tuple[Change, ...]) -> None:
        self._texts[_texts(changes)] = None
        if len(self._texts) > REMEMBERED_MAX:
            self._texts.popitem(last=False)

    async def execute(self, tx_at: Callable[[str], TxId], member: Member, reads: bytes, at_least: int) -> ExecuteDone:
        """Have the changes executed once and replicated; `tx_at` gives the id for a request to a replica.

        Raises WriteRejected (nothing happened) or OutcomeUnknown."""
        encoded = encode_member(member)
        check_request(encoded, reads)
        replica = await self._origin()
        tx = tx_at(replica)
        request = Execute(tx=tx, member=encoded, at_least=at_least, reads=reads)
        try:
            done = await self._caller.request(self._config.site_of(replica), request, self._timeout_s)
        except NotReachable:
            self._chosen = None
            raise OutcomeUnknown(tx, f"replica {replica}") from None
        except ReplicaFailed as failed:
            self._chosen = None
            if failed.retry is Retry.ASK_FIRST:
                raise OutcomeUnknown(tx, f"replica {replica}") from failed
            raise WriteRejected(tx, failed.code, str(failed), retry=failed.retry) from failed
        if done.error is not None:
            raise database_error(tx, done.error)
        if done.rejection is not None:
            error = error_for(tx, done.rejection)
            if isinstance(error, Duplicate):
                return msgspec.structs.replace(done, tx=error.tx, position=error.number, duplicate=True, rejection=None)
            raise error
        return done

    async def _origin(self) -> str:
        """Primary-site: the primary; local-first: the replica that this client writes to; else a voter in sync."""
        if self._policy.route is Route.PRIMARY:
            return self._config.primary or ""
        if self._policy.route is Route.REPLICA:
            return self._by_nearness()[0]
        async with self._choosing:
            if self._chosen is None or self._chosen[1] < time.monotonic():
                voters = [name for name in self._by_nearness() if self._policy.scope_of(name) is Scope.DISTRIBUTED]
                chosen = await self._in_sync(voters) if voters else await self._alive()
                self._chosen = (chosen, time.monotonic() + CHOICE_S)
            return self._chosen[0]

    async def _in_sync(self, voters: list[str]) -> str:
        response = await self._site.get_log_state(self._log_type, timeout_s=self._timeout_s)
        ready = {follower.name for follower in response.followers if follower.present} & set(response.in_sync)
        for name in voters:
            if self._config.site_of(name) in ready:
                return name
        raise NotReachable(f"no replica of {self._config.name!r} is in sync and could execute the statement")

    async def _alive(self) -> str:
        """Where nobody votes, the nearest replica that responds."""
        for name in self._by_nearness():
            with suppress(NotReachable, ReplicaFailed):
                await self._caller.request(self._config.site_of(name), Where(), RESPONSE_S)
                return name
        raise NotReachable(f"no replica of {self._config.name!r} responds and could execute the statement")


def _texts(changes: tuple[Change, ...]) -> Texts:
    return tuple(change.sql if isinstance(change, Statement) else _shape(change) for change in changes)


def _shape(change: Change) -> str:
    """A row change by what it leaves to the database: its table and columns."""
    assert not isinstance(change, Statement)
    values = getattr(change, "values", {})
    return f"{type(change).__name__} {change.table} {' '.join(values)}"
