"""The verbs of the core's scenarios (`tests/scenarios/cluster.py`) over real broker processes and the client library.

Scenarios are plain functions: they run in a thread beside the test's event loop, and everything that waits runs there.
Where simulated time would pass, this waits for what must have happened by then.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from tests.integration.overlay.cluster import Cluster
from tests.scenarios.cluster import ATTRIBUTES, tx_spec
from tests.support.polling import eventually
from tops import EventType, Participant, Received, Scope, Site, Subscription, TxType
from tops.client.transactions import Transaction
from tops.core.participant.sub_tx_executor import SubTxExecutor
from tops.model.constraints import AnyConstraint, AtLeast, Deadline, OnlyFrom, Required
from tops.model.errors import InvalidTransaction, TopsError
from tops.model.ids import TxId, tx_id
from tops.model.transactions import granted_scope
from tops.protocol.messages import CensusPolicy, TxOutcome, TxSpec

WAIT_S = 60.0
SLOWER = 8.0  # times of a scenario, when something ends by itself, are so much longer on a machine that may be busy
PATIENCE = 20.0  # and what must happen within some time may take so much longer


class Pending:
    """A request that a site has made and that may be answered already."""

    def __init__(self, future: "Future[Any]") -> None:
        self._future = future

    @property
    def done(self) -> bool:
        return self._future.done()

    @property
    def error(self) -> BaseException | None:
        return self._future.exception(WAIT_S)

    def wait(self) -> None:
        self._future.exception(WAIT_S)

    def result(self) -> Any:
        return self._future.result(WAIT_S)

    def failure(self) -> BaseException:
        error = self._future.exception(WAIT_S)
        assert error is not None, f"answered {self._future.result()!r} where an error was due"
        return error


class Actor(Participant):
    """A participant that does as it is told and writes down what happens; by the names of the simulator's calls."""

    def __init__(
        self, site: str, scope: Scope, compensatable: bool, standing: bool, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__()
        self.site, self.scope, self.compensatable, self.standing = site, scope, compensatable, standing
        self._loop = loop
        self.rejects: set[str] = set()
        self.rejects_prepare = False
        self.holds: set[str] = set()
        self.calls: list[tuple[str, TxId | None]] = []
        self.joined: dict[TxId, Scope] = {}
        self.ended: dict[TxId, bool] = {}
        self._seen: list[tuple[TxId | None, str]] = []
        self._undone: dict[TxId, list[str]] = {}
        self._released = asyncio.Event()
        self._scopes: dict[TxId, Scope] = {}  # which the machine behind it had when it prepared
        self.subscription: Subscription

    async def on_join(self, tx: TxId, spec: TxSpec) -> Scope:
        self.calls.append(("JoinTx", tx))
        await self._held("JoinTx")
        rejected = spec.tx_type is TxType.LOCAL and self.scope is Scope.DISTRIBUTED  # only a standing answer is lowered
        self.joined[tx] = Scope.NONE if rejected else granted_scope(self.scope, spec.limit, spec.tx_type)
        return self.scope

    def on_notify(self, event: Received) -> None:
        self._seen.append((event.tx, event.body["mark"]))

    def on_notify_tx(self, event: Received) -> None:
        self.calls.append(("NotifyTx", event.tx))
        self._seen.append((event.tx, event.body["mark"]))
        if event.body["mark"] in self.rejects:
            raise ValueError(f"{event.body['mark']} can't be processed")

    async def on_prepare(self, tx: TxId) -> None:
        self.calls.append(("PrepareTx", tx))
        executor = self._executor(tx)
        assert executor is not None
        self._scopes[tx] = executor.scope
        await self._held("PrepareTx")
        if self.rejects_prepare:
            raise ValueError("the resource can't prepare")

    def on_commit(self, tx: TxId) -> None:
        self.calls.append(("CommitTxCall", tx))
        self.ended[tx] = True

    def on_abort(self, tx: TxId, reason: str) -> None:
        self.calls.append(("AbortTxCall", tx))
        self.ended[tx] = False

    def on_compensate(self, event: Received) -> None:
        assert event.tx is not None
        self._undone.setdefault(event.tx, []).append(event.body["mark"])

    async def _held(self, kind: str) -> None:
        if kind in self.holds:
            await self._released.wait()

    def asked(self, kind: str, tx: TxId | None = None) -> int:
        return sum(k == kind and (tx is None or t == tx) for k, t in self.calls)

    def seen(self, tx: TxId | None = None) -> list[str]:
        return [mark for t, mark in list(self._seen) if t == tx]

    def committed(self, tx: TxId) -> tuple[str, ...] | None:
        return tuple(self.seen(tx)) if self.ended.get(tx) else None

    def compensated(self, tx: TxId) -> tuple[str, ...] | None:
        return tuple(self._undone[tx]) if tx in self._undone else None

    def taken(self, tx: TxId) -> Scope:
        """The scope that it really had, judged by what it was called for."""
        if self.committed(tx) is None:
            return Scope.NON_TRANSACTIONAL if self.seen(tx) else Scope.NONE
        return self._scopes[tx]

    def takes_part(self, tx: TxId) -> bool:
        """Whether it waits for something of this transaction."""
        return self._executor(tx) is not None

    def _executor(self, tx: TxId) -> SubTxExecutor | None:
        core = self.subscription._node.core
        return core.participation.executors.get(tx, {}).get(self.subscription.number)

    def prepared(self) -> bool:
        return any(kind == "PrepareTx" and tx not in self.ended for kind, tx in self.calls)

    def release(self) -> None:
        self.holds.clear()
        self._loop.call_soon_threadsafe(self._released.set)


class Client:
    """One site, by the verbs of the client library."""

    def __init__(self, cluster: "ProcessCluster", name: str, site: Site, outcomes: list[tuple[TxId, bool]]) -> None:
        self.cluster, self.name, self.site, self.outcomes = cluster, name, site, outcomes

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.cluster.run_to_end(work)

    def advertise(self, *event_types: str) -> None:
        for name in event_types:
            self._run(self.site.advertise(self.cluster.type(name)))

    def subscribe(
        self, event_type: str, scope: Scope = Scope.DISTRIBUTED, *, standing: bool = False, compensatable: bool = False
    ) -> Actor:
        actor = Actor(self.name, scope, compensatable, standing, self.cluster.loop)
        wanted = self.cluster.type(event_type)
        actor.subscription = self._run(
            self.site.subscribe(wanted, participant=actor, scope=scope if standing else None)
        )
        self.cluster.actors.append((event_type, actor))
        return actor

    def publish(self, event_type: str, mark: str, *, tx: TxId | None = None) -> Any:
        wanted, body = self.cluster.type(event_type), {"mark": mark, "key": "a"}
        if tx is not None:
            self.cluster.marks.setdefault(tx, []).append(mark)
            return self._run(self.cluster.transactions[self.name, tx].publish(wanted, body))
        takers = [actor for name, actor in self.cluster.actors if name == event_type]
        self.cluster.ordinary += [(actor, mark) for actor in takers]
        return self._run(self.site.publish(wanted, body))

    def begin_soon(self, event_type: str, tx_type: TxType = TxType.DISTRIBUTED, **properties: Any) -> Pending:
        limits = [each.ids for each in properties.get("constraints", ()) if isinstance(each, OnlyFrom)]
        joining = [
            actor
            for name, actor in self.cluster.actors
            if name == event_type and actor.scope is Scope.DISTRIBUTED and all(actor.site in ids for ids in limits)
        ]
        # As short as in the simulator would be too short for a machine under load: the last answer closes it.
        wanted = CensusPolicy(timeout_s=20.0 if joining else 0.3, replies=len(joining) or None)
        if "census" in properties:
            wanted = msgspec.structs.replace(properties["census"], timeout_s=properties["census"].timeout_s * SLOWER)
        properties["census"] = wanted
        properties["vote_timeout_s"] = properties.get("vote_timeout_s", 5.0) * SLOWER
        properties["constraints"] = self.cluster.constraints(properties.get("constraints", ()))
        spec = msgspec.structs.replace(
            tx_spec(event_type, tx_type, **properties), event_type=self.cluster.type(event_type).name
        )

        asked = {a: a.asked("JoinTx") for name, a in self.cluster.actors if name == event_type and not a.standing}

        def all_asked() -> bool:
            return all(actor.asked("JoinTx") > before for actor, before in asked.items())

        async def begin() -> TxId:
            try:
                transaction = await self.site.begin(spec)
            except InvalidTransaction:  # nobody hears of it
                raise
            except TopsError:
                await eventually(all_asked)
                raise
            await eventually(all_asked)  # whom the census did not wait for hears of it all the same
            self.cluster.transactions[self.name, transaction.id] = transaction
            return transaction.id

        return Pending(self.cluster.start(begin()))

    def begin(self, event_type: str, tx_type: TxType = TxType.DISTRIBUTED, **properties: Any) -> TxId:
        tx: TxId = self.begin_soon(event_type, tx_type, **properties).result()
        return tx

    def contribute(self, tx: TxId) -> None:
        spec = next(t.spec for (_, known), t in self.cluster.transactions.items() if known == tx)

        async def contribute() -> Transaction:
            return self.site.contribute(tx, spec)

        self.cluster.transactions[self.name, tx] = self._run(contribute())

    def done(self, tx: TxId) -> None:
        self.cluster.loop.call_soon_threadsafe(self.cluster.transactions[self.name, tx].done)

    def commit_soon(self, tx: TxId) -> Pending:
        return Pending(self.cluster.start(self.cluster.transactions[self.name, tx].commit()))

    def commit(self, tx: TxId) -> TxOutcome:
        outcome: TxOutcome = self.commit_soon(tx).result()
        return outcome

    def wait(self, tx: TxId) -> TxOutcome:
        return self.commit(tx)

    def give_up(self, participant: Actor, tx: TxId, reason: str = "gave up") -> None:
        self.cluster.loop.call_soon_threadsafe(participant.subscription.abort, tx, reason)

    def abort(self, tx: TxId, reason: str = "changed its mind") -> TxOutcome:
        outcome: TxOutcome = self._run(self.cluster.transactions[self.name, tx].abort(reason))
        return outcome

    def told(self, tx: TxId) -> list[bool]:
        return [committed for t, committed in self.outcomes if t == tx]

    def last_tx(self) -> TxId:
        return tx_id(self.site._node.name, self.site.incarnation, self.site._node.core.counter)


class ProcessCluster:
    """The sites of one scenario at brokers that run already; its event types are its own."""

    def __init__(self, loop: asyncio.AbstractEventLoop, brokers: Cluster, *sites: str) -> None:
        """To be called in a thread beside the loop's."""
        self.loop, self._run_name = loop, secrets.token_hex(4)
        self.actors: list[tuple[str, Actor]] = []
        self.ordinary: list[tuple[Actor, str]] = []  # who must have got which ordinary event
        self.transactions: dict[tuple[str, TxId], Transaction] = {}
        self.marks: dict[TxId, list[str]] = {}
        self._stack = AsyncExitStack()
        self._clients: dict[str, Client] = {}
        for place, name in enumerate(sites):
            self._clients[name] = self.run_to_end(self._connect(brokers, name, place))

    async def _connect(self, brokers: Cluster, name: str, place: int) -> Client:
        ended: list[tuple[TxId, bool]] = []
        site = await self._stack.enter_async_context(
            brokers.site(
                f"{name}-{self._run_name}",
                place,
                on_ended=lambda tx, committed, reason: ended.append((tx, committed)),
            )
        )
        return Client(self, name, site, ended)

    def start(self, work: Coroutine[Any, Any, Any]) -> "Future[Any]":
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run_to_end(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.start(work).result(WAIT_S)

    def __getitem__(self, name: str) -> Client:
        return self._clients[name]

    def define(self, name: str) -> None:
        """Every type of a scenario has the usual attributes."""

    def constraints(self, wanted: Sequence[AnyConstraint]) -> tuple[AnyConstraint, ...]:
        """With the names that the scenario's sites have here, and deadlines for this machine."""
        return tuple([self._constraint(each) for each in wanted])

    def _constraint(self, wanted: AnyConstraint) -> AnyConstraint:
        match wanted:
            case Required(ids=ids) | OnlyFrom(ids=ids) | AtLeast(ids=ids):
                return msgspec.structs.replace(wanted, ids=frozenset(f"{name}-{self._run_name}" for name in ids))
            case Deadline(seconds=seconds):
                return Deadline(seconds * 1.5)
        return wanted

    def within(self, seconds: float, condition: Callable[[], bool], otherwise: str) -> None:
        end = time.monotonic() + seconds * PATIENCE
        while not condition():
            assert time.monotonic() < end, otherwise
            time.sleep(0.02)

    def type(self, name: str) -> EventType:
        return EventType(f"{name}-{self._run_name}", ATTRIBUTES, optional=("key", "bad"))

    def settle(self) -> None:
        """Until whoever takes part in something has heard its end, and ordinary events are where they belong."""
        end = time.monotonic() + WAIT_S
        while not self._settled():
            assert time.monotonic() < end, "something stays open"
            time.sleep(0.02)

    def _settled(self) -> bool:
        begun = {tx for _, tx in self.transactions}
        outcomes = {t: c for client in self._clients.values() for t, c in list(client.outcomes) if t in begun}
        return all(mark in actor.seen() for actor, mark in self.ordinary) and all(
            self._over(actor, self._scope(name, actor, transaction), tx, outcomes[tx])
            for name, actor in self.actors
            for (_, tx), transaction in self.transactions.items()
            if tx in outcomes
        )

    def _scope(self, type_name: str, actor: Actor, transaction: Transaction) -> Scope:
        """How much of a transaction a participant takes."""
        spec = transaction.spec
        if not actor.standing or spec.event_type != self.type(type_name).name:
            return actor.joined.get(transaction.id, Scope.NONE)
        return granted_scope(actor.scope, spec.limit, spec.tx_type)

    def _over(self, actor: Actor, scope: Scope, tx: TxId, committed: bool) -> bool:
        match scope:
            case Scope.LOCAL | Scope.DISTRIBUTED:
                if not actor.standing and not actor.takes_part(tx):  # it has ended there, or was turned away
                    return True
                # What was committed early is undone first.
                return tx in actor.ended and (committed or scope is Scope.LOCAL or not actor.ended[tx])
            case Scope.NON_TRANSACTIONAL if committed:
                return len(actor.seen(tx)) == len(self.marks[tx])
        return True

    def check(self) -> None:
        """Nothing stays open, and nobody has a part of a transaction only."""
        self.settle()
        for _, actor in self.actors:
            assert not actor.prepared()
            for tx, committed in actor.ended.items():
                assert not committed or actor.seen(tx) == self.marks.get(tx, [])

    async def close(self) -> None:
        await self._stack.aclose()
