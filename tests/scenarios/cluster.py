"""Clusters for scenarios: the verbs that a scenario is written in, carried out by the real machines in a simulation.

A scenario uses `Cluster`, `Client` and `Participant` and never the world behind them, so that the same functions can be
run over real processes: there the verbs become calls of the client library, and `Participant` an application object.
Only tests of one machine's inside may reach for `Cluster.world`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tops.core.commit.epochs import EpochOptions
from tops.core.coordinator.rendezvous import RendezvousOptions
from tops.core.participant.participation import Wish
from tops.model.errors import OutcomeUnknown, TopsError, TransactionAborted
from tops.model.event_types import EventType
from tops.model.filters import Filter
from tops.model.ids import NodeId, TxId, tx_id
from tops.model.log_points import BEGINNING
from tops.model.transactions import Outcome, Scope, TxType, granted_scope
from tops.protocol.effects import Call, Effect, NotifyTx, PrepareTx
from tops.protocol.messages import (
    Address,
    CensusPolicy,
    Definitions,
    Envelope,
    Event,
    GetOutcome,
    LinkMessage,
    TxOutcome,
    TxSpec,
)
from tops.sim.checkers import violations
from tops.sim.databases import CallbackDatabase, ReplicaDatabase
from tops.sim.faults import Faults
from tops.sim.history import TxHistory
from tops.sim.nodes import SimBroker, SimNode, SimSite
from tops.sim.site_app import MakeRequest, Script, SimSubscription, SiteApp
from tops.sim.workload import DEFINITIONS
from tops.sim.world import World

RESPONSE_WITHIN_S = 60.0
TICK_S = 0.05

ATTRIBUTES: dict[str, type] = {"mark": str, "key": str, "bad": bool}


class Participant:
    """The application behind one subscription: how it behaves, and what happened to it."""

    def __init__(
        self, app: "ScriptedApp", number: int, scope: Scope, database: CallbackDatabase | ReplicaDatabase
    ) -> None:
        self.app, self.number, self.database = app, number, database
        self.scope = scope  # its answer when it is asked
        self.rejects: set[str] = set()  # marks of events that it can't process
        self.rejects_prepare = False
        self.holds: set[str] = set()  # kinds of calls that it leaves unanswered until `release`
        self.calls: list[tuple[str, TxId | None]] = []  # in order: what it was asked for
        self._held: list[Call] = []

    def release(self) -> None:
        """Answer what was left unanswered, and everything from now on."""
        self.holds.clear()
        held, self._held = self._held, []
        for call in held:
            self.app.answer(call)

    def hold(self, call: Call) -> bool:
        if type(call).__name__ not in self.holds:
            return False
        self._held.append(call)
        return True

    def asked(self, kind: str, tx: TxId | None = None) -> int:
        """How often it was called for this."""
        return sum(k == kind and (tx is None or t == tx) for k, t in self.calls)

    def seen(self, tx: TxId | None = None) -> list[str]:
        """Marks of the events that it was shown, inside this transaction or outside of all."""
        shown = self.app.world.history.seen.items()
        here = (self.app.site.name, self.number)
        return [m for (site, number, _), seen in shown if (site, number) == here for t, m in seen if t == tx]

    def committed(self, tx: TxId) -> tuple[str, ...] | None:
        """The events that its database holds of a committed transaction, whatever the scope."""
        if isinstance(self.database, ReplicaDatabase):
            return self.database.applied.get(tx)
        done = self.database.committed.get(tx) or self.database.local.get(tx)
        return None if done is None else done.events

    def compensated(self, tx: TxId) -> tuple[str, ...] | None:
        return self.database.compensated.get(tx) if isinstance(self.database, CallbackDatabase) else None

    def prepared(self) -> bool:
        """Whether its database holds an open promise."""
        return bool(self.database.memos())

    def taken(self, tx: TxId) -> Scope:
        """The scope that it really had, judged by what its database and its application got."""
        if self.committed(tx) is None:
            return Scope.NON_TRANSACTIONAL if self.seen(tx) else Scope.NONE
        assert isinstance(self.database, CallbackDatabase)
        return Scope.DISTRIBUTED if tx in self.database.committed else Scope.LOCAL


class ScriptedApp(SiteApp):
    """An application that does what its participants are told to do, and nothing at random."""

    def __init__(self, world: World) -> None:
        super().__init__(world, ())
        self.participants: dict[int, Participant] = {}
        self.told: list[tuple[TxId, bool]] = []  # outcome callbacks as a publisher

    def on_call(self, call: Call) -> None:
        participant = self.participants[call.subscription]
        participant.calls.append((type(call).__name__, getattr(call, "tx", None)))
        if not participant.hold(call):
            self.answer(call)

    def answer(self, call: Call) -> None:
        super().on_call(call)

    def on_tx_ended(self, tx: TxId, committed: bool) -> None:
        self.told.append((tx, committed))
        super().on_tx_ended(tx, committed)

    def _callback(self, s: SimSubscription, database: CallbackDatabase, call: Call) -> Any:
        participant = self.participants[s.number]
        match call:
            case NotifyTx(tx=tx, event=event) if event.body["mark"] in participant.rejects:
                self._saw(s.number, tx, event)
                return f"{event.body['mark']} can't be processed"
            case PrepareTx() if participant.rejects_prepare:
                return "the resource can't prepare"
        return super()._callback(s, database, call)

    def _join(self, s: SimSubscription, tx: TxId, spec: TxSpec) -> Scope:
        asked = self.participants[s.number].scope
        granted = granted_scope(asked, spec.limit, spec.tx_type)
        self.world.history.scopes[tx, self.site.name, s.number, self.site.incarnation] = granted
        return asked


class Pending:
    """A request that a site has made and that may be answered already."""

    def __init__(self, cluster: "Cluster") -> None:
        self.cluster = cluster
        self.done = False
        self.value: Any = None
        self.error: TopsError | None = None

    def wait(self) -> None:
        """Wait for the answer, whatever it is."""
        self.cluster.until(lambda: self.done, "a request was not answered")

    def result(self) -> Any:
        """Wait for the answer; errors are raised."""
        self.wait()
        if self.error is not None:
            raise self.error
        return self.value

    def failure(self) -> TopsError:
        """Wait for the error that this must end in."""
        self.wait()
        assert self.error is not None, f"answered {self.value!r} where an error was due"
        return self.error


class Client:
    """One site, by the verbs of the client library."""

    def __init__(self, cluster: "Cluster", name: NodeId, app: ScriptedApp) -> None:
        self.cluster, self.name, self.app = cluster, name, app

    @property
    def node(self) -> SimSite:
        return self.cluster.world.sites[self.name]

    def request(self, request: MakeRequest) -> Pending:
        pending = Pending(self.cluster)

        def script() -> Script:
            try:
                pending.value = yield request
            except TopsError as error:
                pending.error = error
            pending.done = True

        self.app.run(script())
        return pending

    # ----------------------------------------------------------------------------------------------- types and events

    def advertise(self, *event_types: str) -> None:
        for name in event_types:
            definitions = self.cluster.types[name]
            self.request(lambda request, d=definitions: self.node.core.advertise(request, d)).result()  # type: ignore[misc]
            self.app.advertises = (*self.app.advertises, definitions)

    def subscribe(
        self,
        event_type: str,
        scope: Scope = Scope.DISTRIBUTED,
        *,
        standing: bool = False,
        where: Filter | None = None,
        durable: str | None = None,
        start: str = "now",
        compensatable: bool = False,
    ) -> Participant:
        """`scope` is what it answers when it is asked, or its standing answer to every census."""
        interest = where if where is not None else Filter.everything()
        wish = Wish(
            self.cluster.types[event_type],
            interest,
            scope if standing else None,
            durable,
            start,
            compensatable=compensatable,
        )
        return self._subscribe(wish, CallbackDatabase(compensatable), scope)

    def replicate(self, event_type: str) -> Participant:
        """Become a replica: a batch participant of a durable type."""
        database = ReplicaDatabase()
        durable = f"replica-{self.name}"
        wish = Wish(self.cluster.types[event_type], Filter.everything(), Scope.DISTRIBUTED, durable, replica=BEGINNING)
        return self._subscribe(wish, database, Scope.DISTRIBUTED)

    def _subscribe(self, wish: Wish, database: CallbackDatabase | ReplicaDatabase, scope: Scope) -> Participant:
        app = self.app
        number = self.cluster.world.subscribe(app, wish, database, (scope,))
        participant = app.participants[number] = Participant(app, number, scope, database)
        pending = self.request(lambda request: self.node.core.subscribe(request, number, wish))
        try:
            pending.result()
        except TopsError:
            del app.subscriptions[number]
            raise
        self.cluster.run(TICK_S)
        return participant

    def enlist(self, *, compensatable: bool = False) -> Participant:
        """Resources of the site's own, for transactions that it begins."""
        database = CallbackDatabase(compensatable)
        number = self.cluster.world.enlist(self.app, database)
        participant = self.app.participants[number] = Participant(self.app, number, Scope.DISTRIBUTED, database)
        self.node.act(self.node.core.enlist, number, (), (), compensatable)
        return participant

    def unsubscribe(self, participant: Participant) -> None:
        self.node.act(lambda: self.node.core.unsubscribe(participant.number))
        self.cluster.run(TICK_S)
        del self.app.subscriptions[participant.number]

    def publish(self, event_type: str, mark: str, *, tx: TxId | None = None, **attributes: Any) -> Any:
        return self.publish_soon(event_type, mark, tx=tx, **attributes).result()

    def publish_soon(self, event_type: str, mark: str, *, tx: TxId | None = None, **attributes: Any) -> Pending:
        event = self.cluster.event(event_type, mark, attributes)
        if tx is None:
            return self.request(lambda request: self.node.core.publish(request, event))
        known = self.cluster.world.history.transactions.get(tx)
        if known is not None and mark not in known.marks:
            known.marks.append(mark)
        return self.request(lambda request: self.node.core.tx_publish(request, tx, event))

    # ----------------------------------------------------------------------------------------------------- transactions

    def begin_soon(
        self,
        event_type: str,
        tx_type: TxType = TxType.DISTRIBUTED,
        *,
        own: Participant | None = None,
        **properties: Any,
    ) -> Pending:
        spec = tx_spec(event_type, tx_type, **properties)
        number = None if own is None else own.number
        return self.request(lambda request: self.node.core.begin(request, spec, number))

    def begin(
        self,
        event_type: str,
        tx_type: TxType = TxType.DISTRIBUTED,
        *,
        own: Participant | None = None,
        **properties: Any,
    ) -> TxId:
        tx: TxId = self.begin_soon(event_type, tx_type, own=own, **properties).result()
        self.remember(tx, tx_spec(event_type, tx_type, **properties))
        return tx

    def remember(self, tx: TxId, spec: TxSpec, marks: Sequence[str] = ()) -> None:
        """What the checkers are to know of a transaction."""
        self.cluster.world.history.transactions[tx] = TxHistory(tx, spec, self.name, list(marks))

    def contribute(self, tx: TxId) -> None:
        """Publish in somebody else's public transaction from now on."""
        self.node.core.contribute(tx, self.cluster.world.history.transactions[tx].spec)

    def done(self, tx: TxId) -> None:
        """This site has published all that it wants in somebody's public transaction."""
        self.node.act(lambda: self.node.core.done(tx))
        self.cluster.run(TICK_S)

    def commit_soon(self, tx: TxId) -> Pending:
        return self.request(lambda request: self.node.core.commit(request, tx))

    def commit(self, tx: TxId) -> TxOutcome:
        return self._told(tx, self.commit_soon(tx))

    def wait(self, tx: TxId) -> TxOutcome:
        """After `UncheckedTransaction`: give the voters more time."""
        return self.commit(tx)

    def abort(self, tx: TxId, reason: str = "changed its mind") -> TxOutcome:
        return self._told(tx, self.request(lambda request: self.node.core.abort(request, tx, reason)))

    def execute_soon(
        self, event_type: str, marks: Sequence[str], tx_type: TxType = TxType.DISTRIBUTED, **properties: Any
    ) -> Pending:
        attributes = properties.pop("with_body", {})
        spec = tx_spec(event_type, tx_type, **properties)
        events = tuple(self.cluster.event(event_type, mark, attributes) for mark in marks)

        def make(request: int) -> list[Effect]:
            effects = self.node.core.execute(request, spec, events)
            tx = self.last_tx()
            if tx in self.node.core.transactions:
                self.remember(tx, spec, marks)
            return effects

        return self.request(make)

    def execute(
        self, event_type: str, marks: Sequence[str], tx_type: TxType = TxType.DISTRIBUTED, **properties: Any
    ) -> TxOutcome:
        pending = self.execute_soon(event_type, marks, tx_type, **properties)
        return self._told(self.last_tx(), pending)

    def last_tx(self) -> TxId:
        """The id that this site gave to its latest transaction."""
        return tx_id(self.name, self.node.incarnation, self.node.core.counter)

    def outcome(self, tx: TxId, event_type: str | None = None, tx_type: TxType = TxType.DISTRIBUTED) -> TxOutcome:
        """What became of a transaction; also one that nobody knows."""
        known = self.cluster.world.history.transactions.get(tx)
        if known is not None:
            event_type, tx_type = known.spec.event_type, known.spec.tx_type
        assert event_type is not None
        query = GetOutcome(tx=tx, tx_type=tx_type, event_type=event_type)
        answer: TxOutcome = self.request(lambda request: self.node.core.get_outcome(request, query)).result()
        return answer

    def _told(self, tx: TxId, pending: Pending) -> TxOutcome:
        history = self.cluster.world.history
        try:
            outcome: TxOutcome = pending.result()
        except TransactionAborted:
            history.record_outcome(tx, "aborted")
            raise
        except OutcomeUnknown:
            history.record_outcome(tx, "unknown")
            raise
        history.record_outcome(tx, "committed" if outcome.outcome is Outcome.COMMITTED else "aborted")
        return outcome

    def give_up(self, participant: Participant, tx: TxId, reason: str = "gave up") -> None:
        """A participant's own abort."""
        self.node.act(lambda: self.node.core.participant_abort(participant.number, tx, reason))
        self.cluster.run(TICK_S)

    def told(self, tx: TxId) -> list[bool]:
        """The outcome callbacks that this site got as a publisher: committed or not."""
        return [committed for t, committed in self.app.told if t == tx]


class Cluster:
    """Named sites and brokers without faults, but for those that a scenario asks for."""

    def __init__(self, *sites: str, brokers: int = 3, shape: str = "chain", seed: int = 1) -> None:
        self.world = World(seed, Faults.none(), empty=True)
        self.world.broker_options = RendezvousOptions(
            epochs=EpochOptions(members_max=8, sync_window_s=1.0, finish_window_s=1.0, join_gap=4),
            lease_s=3.0,
            keep_outcomes=10_000,
            log_tail=64,
        )
        self.types: dict[str, Definitions] = dict(DEFINITIONS)
        self.clients: dict[str, Client] = {}
        self._lost: list[Callable[[NodeId, NodeId, LinkMessage], bool]] = []
        self._copies = 1
        self.world.build_brokers(links(shape, brokers))
        self._send = self.world.network.send
        self.world.network.send = self._filtered_send  # type: ignore[method-assign]
        names = list(self.world.brokers)
        for i, name in enumerate(sites):
            self._add(NodeId(name), names[i % len(names)])
        self.world.start()
        self.run(1.0)

    def _add(self, name: NodeId, home: NodeId) -> Client:
        app = ScriptedApp(self.world)
        self.world.sites[name] = SimSite(self.world, name, app)
        self.world.network.homes[name] = home
        client = self.clients[name] = Client(self, name, app)
        return client

    def join(self, name: str, broker: str) -> Client:
        """One more site, while the others run."""
        client = self._add(NodeId(name), NodeId(broker))
        self.world.sites[NodeId(name)].start()
        self.run(TICK_S)
        return client

    def __getitem__(self, name: str) -> Client:
        return self.clients[name]

    def define(self, name: str, *, parent: str | None = None, durable: bool = False) -> None:
        """An event type of the scenario's own, with the usual attributes."""
        if parent is None:
            self.types[name] = (EventType(name, ATTRIBUTES, durable=durable, optional=("key", "bad")),)
        else:
            self.types[name] = (*self.types[parent], EventType(name, {}, parent=parent, durable=durable))

    def event(self, event_type: str, mark: str, attributes: dict[str, Any]) -> Event:
        """An event that the checkers recognise by its mark."""
        event = Event(event_type, {"mark": mark, "key": "a", **attributes})
        vars(self.world.history).setdefault("events", {})[mark] = event
        return event

    def rendezvous(self, event_type: str) -> str:
        """The broker that coordinates transactions of this type."""
        return self.world.topology.rendezvous(self.types[event_type][0].name)

    # ------------------------------------------------------------------------------------------------------------- time

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end = self.world.clock.now + seconds
        while self.world.clock.step(end):
            pass

    def until(self, condition: Callable[[], bool], otherwise: str) -> None:
        self.within(RESPONSE_WITHIN_S, condition, otherwise)

    def within(self, seconds: float, condition: Callable[[], bool], otherwise: str) -> None:
        """Let time pass until the condition holds, which must not take longer than this."""
        end = self.world.clock.now + seconds
        while not condition():
            if not self.world.clock.step(end):
                raise AssertionError(f"{otherwise} within {seconds} simulated seconds")

    def settle(self) -> None:
        """Until nothing is open."""
        self.world.settle(RESPONSE_WITHIN_S)

    # --------------------------------------------------------------------------------------------------------- faults

    def node(self, name: str) -> SimNode:
        return self.world.node(NodeId(name))

    def broker(self, name: str) -> SimBroker:
        return self.world.brokers[NodeId(name)]

    def kill(self, name: str) -> None:
        self.node(name).crash()

    def restart(self, name: str) -> None:
        self.node(name).start()
        self.run(0.5)

    def kill_when(self, name: str, condition: Callable[[Effect], bool]) -> None:
        """Kill the node right before it carries out the first effect that meets the condition."""

        def strike(node: SimNode, effect: Effect) -> None:
            if node.name == name and condition(effect):
                self.world.on_effect = lambda node, effect: None
                node.crash()

        self.world.on_effect = strike

    def lose(self, condition: Callable[[NodeId, NodeId, LinkMessage], bool]) -> None:
        """Messages from one node to another that meet the condition vanish, until `lose_nothing`."""
        self._lost.append(condition)

    def lose_nothing(self) -> None:
        self._lost.clear()

    def repeat(self, copies: int) -> None:
        """Every letter is handed over to its receiver so many times."""
        self._copies = copies

    def _filtered_send(self, owner: NodeId, peer: NodeId, message: LinkMessage) -> None:
        if any(lost(owner, peer, message) for lost in self._lost):
            return
        arrives = isinstance(message, Envelope) and (peer in self.world.sites or message.to == Address(peer))
        for _ in range(self._copies if arrives else 1):
            self._send(owner, peer, message)

    # -------------------------------------------------------------------------------------------------------- judging

    def check(self) -> None:
        """Once all has ended, every promise of the simulator's checkers holds."""
        self.lose_nothing()
        self.settle()
        own = {name: definitions for name, definitions in self.types.items() if name not in DEFINITIONS}
        DEFINITIONS.update(own)  # the checkers look types up there
        try:
            assert violations(self.world, live=True) == []
        finally:
            for name in own:
                del DEFINITIONS[name]


def content_of(message: LinkMessage) -> object:
    """What a message carries: a letter, a publication, or itself."""
    return getattr(message, "body", None) or getattr(message, "publication", None) or message


def tx_spec(event_type: str, tx_type: TxType, **properties: Any) -> TxSpec:
    """The properties of `begin`, with a census that does not take long."""
    census = properties.pop("census", CensusPolicy(timeout_s=0.3))
    properties.setdefault("attributes", {"mark": "", "key": "a"})
    return msgspec.structs.replace(TxSpec(event_type, tx_type), census=census, **properties)


def links(shape: str, count: int) -> dict[NodeId, list[NodeId]]:
    """Brokers b1, b2, … in a chain, a star or a mesh."""
    names = [NodeId(f"b{i}") for i in range(1, count + 1)]
    match shape:
        case "chain":
            return {n: names[i - 1 : i] if i else [] for i, n in enumerate(names)}
        case "star":
            return {n: names[:1] if i else [] for i, n in enumerate(names)}
        case _:
            return {n: names[:i] for i, n in enumerate(names)}
