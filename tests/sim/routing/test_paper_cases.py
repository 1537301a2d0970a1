"""The cases of the paper by name: figure 2, section III-C, dispatching and consolidation, abort with compensation, and
two concurrent transactions on overlapping event spaces."""

from collections.abc import Callable

import pytest

from tops.core.routing_tx.site_transactions import OWN_TURN
from tops.model.filters import Filter
from tops.model.ids import NodeId, TxId
from tops.model.rejections import Rejection, RejectionCode
from tops.model.routing import RouteKey, RouteKind, TxKind
from tops.protocol.messages import Event, EventStep
from tops.sim.routing.apps import Agent, Dispatcher, Environment, TreeApp, Work
from tops.sim.routing.checkers import tables_agree
from tops.sim.routing.world import RoutingFaults, RoutingWorld
from tops.sim.site_app import Script

ADVERTISEMENT, SUBSCRIPTION = RouteKind.ADVERTISEMENT, RouteKind.SUBSCRIPTION
CHAIN = {"b1": ["b2"], "b2": ["b3"], "b3": []}
ANY = Filter()
Snapshot = dict[tuple[NodeId, RouteKey], tuple[NodeId, frozenset[NodeId]]]


def at(k: int) -> Filter:
    return Filter.where("k", "=", k)


class Stage(RoutingWorld):
    """Three brokers in a row, and the clients that a test puts there; nothing goes wrong."""

    def __init__(self, kind: TxKind = TxKind.ISOLATED) -> None:
        super().__init__(0, kind, RoutingFaults(calm=1.0, undisturbed=1.0))

    def build(self) -> None:
        self.build_brokers({NodeId(b): [NodeId(n) for n in links] for b, links in CHAIN.items()})

    def set_up(self) -> None:
        self.start()
        self.advance(2.0)

    def play(self, app: TreeApp, script: Script, seconds: float = 1.0) -> None:
        app.run(script)
        self.advance(self.clock.now + seconds)

    def snapshot(self) -> Snapshot:
        return {
            (broker, key): (entry.hop, frozenset(entry.sent))
            for broker in self.brokers
            for key, entry in self.tree(broker).routes.tables.entries.items()
        }

    def receivers(self, mark: str) -> list[NodeId]:
        return [delivery.site for delivery in self.seen.deliveries if delivery.mark == mark]


class Client(TreeApp):
    """One whose routes and whose answer to a tcm a test writes down."""

    def __init__(self, world: Stage, *routes: tuple[RouteKind, str, Filter]) -> None:
        super().__init__(world)
        self._routes = list(routes)
        self.at_tcm: Callable[[TxId, str], Work] | None = None

    def routes(self) -> list[tuple[RouteKind, str, Filter]]:
        return self._routes

    def on_tcm(self, tx: TxId, turn: str, event: Event) -> Work:
        if self.at_tcm is not None:
            yield from self.at_tcm(tx, turn)


def test_figure_2_operations_are_processed_as_a1_s1_t1_s2_p1() -> None:
    stage = Stage()
    c1 = Client(stage, (ADVERTISEMENT, "ctl", ANY), (ADVERTISEMENT, "ev", at(2)))
    c2 = Client(stage, (SUBSCRIPTION, "ctl", ANY), (SUBSCRIPTION, "ev", at(1)))  # s1 waits at b2
    stage.place("c1", c1, "b1")
    stage.place("c2", c2, "b2")
    stage.set_up()
    c2.at_tcm = lambda tx, turn: c2.tx_add(tx, turn, SUBSCRIPTION, "ev", at(2))
    orders: dict[NodeId, list[str]] = {}

    def script() -> Script:
        tx = yield from c1.tx_begin(TxKind.ISOLATED, 0)
        yield from c1.tx_add(tx, OWN_TURN, ADVERTISEMENT, "ev", at(1))
        yield from c1.tx_publish(tx, OWN_TURN, "ctl", {"mark": "t1"}, tcm=True)
        yield from c1.tx_publish(tx, OWN_TURN, "ev", {"k": 2, "mark": "p1"})
        for broker in stage.brokers:
            executed = stage.tree(broker).termination.works[tx].executed
            orders[broker] = [name_of(done.message) for done in executed]
        yield from c1.tx_end(tx)

    stage.play(c1, script())

    assert orders[NodeId("b1")] == ["a1", "s1", "t1", "s2", "p1"]
    assert orders[NodeId("b2")] == ["a1", "t1", "s2", "p1"]
    assert orders[NodeId("b3")] == ["a1"]
    assert stage.receivers("p1") == ["c2"]
    assert tables_agree(stage) == []


def name_of(message: object) -> str:
    if isinstance(message, EventStep):
        return str(message.event.body["mark"])
    route = message.route  # type: ignore[attr-defined]
    if route.kind is ADVERTISEMENT:
        return "a1"
    return "s1" if route.filter == at(1) else "s2"


@pytest.mark.parametrize("delay_ms", range(0, 60, 3))
def test_section_3c_a_publication_reaches_the_old_or_the_new_subscriber_never_both_or_none(delay_ms: int) -> None:
    stage = Stage()
    c1 = Client(stage, (ADVERTISEMENT, "ev", ANY))
    c2 = Client(stage, (ADVERTISEMENT, "ctl", ANY))
    c3 = Client(stage, (SUBSCRIPTION, "ctl", ANY), (SUBSCRIPTION, "ev", at(1)))
    for name, app, broker in (("c1", c1, "b1"), ("c2", c2, "b2"), ("c3", c3, "b3")):
        stage.place(name, app, broker)
    stage.set_up()
    c3.at_tcm = lambda tx, turn: c3.tx_remove(tx, turn, 2)

    def moving() -> Script:
        tx = yield from c2.tx_begin(TxKind.ISOLATED, 0)
        yield from c2.tx_add(tx, OWN_TURN, SUBSCRIPTION, "ev", at(1))
        yield from c2.tx_publish(tx, OWN_TURN, "ctl", {"mark": "move"}, tcm=True)
        yield from c2.tx_end(tx)

    def publishing(tx: TxId) -> Work:
        yield from c1.tx_publish(tx, OWN_TURN, "ev", {"k": 1, "mark": "p1"})

    c2.run(moving())
    stage.advance(stage.clock.now + delay_ms / 1000)
    stage.play(c1, c1.repeated(TxKind.ISOLATED, publishing), 2.0)

    assert len(stage.receivers("p1")) == 1
    assert tables_agree(stage) == []


def group(stage: Stage, environments: int = 1) -> list[Environment]:
    """The clients of the dispatching scenario, E beside D and the agents at the far end."""
    found = [Environment(stage, 0, stage.items) for _ in range(environments)]
    stage.groups[0] = [stage.place(f"e{i}", app, "b1") for i, app in enumerate(found)]
    stage.dispatchers[0] = stage.place("d", Dispatcher(stage, 0, stage.items), "b2")
    stage.agents[0] = [stage.place(f"a{i}", Agent(stage, 0), "b3") for i in range(2)]
    stage.set_up()
    return found


@pytest.mark.parametrize("kind", TxKind)
def test_dispatching_and_consolidation_move_an_item_and_its_updates(kind: TxKind) -> None:
    stage = Stage(kind)
    (environment,) = group(stage)

    for wanted in ({"a0", "a1"}, {"d"}):  # dispatching, then consolidation
        stage.play(environment, environment.move(0))
        transaction = list(stage.seen.transactions.values())[-1]
        regular = environment.update(0)
        stage.advance(stage.clock.now + 0.5)

        (holder,) = [name for name, _ in stage.holders(0, 0)]
        assert holder in wanted
        assert stage.receivers(transaction.updates[0]) == [holder]
        assert stage.receivers(regular) == [holder]
    assert tables_agree(stage) == []


@pytest.mark.parametrize("kind", [TxKind.DYNAMIC, TxKind.ISOLATED])
def test_an_abort_restores_every_table_whatever_the_order_of_the_operations(kind: TxKind) -> None:
    stage = Stage(kind)
    c1 = Client(stage, (ADVERTISEMENT, "ev", ANY), (ADVERTISEMENT, "ev", at(2)))
    c2 = Client(stage, (SUBSCRIPTION, "ev", at(1)), (SUBSCRIPTION, "ev", at(2)), (ADVERTISEMENT, "ctl", ANY))
    stage.place("c1", c1, "b1")
    stage.place("c2", c2, "b3")
    stage.place("c3", Client(stage, (SUBSCRIPTION, "ctl", ANY)), "b1")
    stage.set_up()
    before = stage.snapshot()

    def script() -> Script:
        tx = yield from c1.tx_begin(kind, 0)
        yield from c1.tx_remove(tx, OWN_TURN, 1)  # unadvertise first: a compensation of what follows finds no way
        yield from c1.tx_add(tx, OWN_TURN, SUBSCRIPTION, "ctl", ANY)
        yield from c1.tx_add(tx, OWN_TURN, ADVERTISEMENT, "ev", at(1))
        yield from c1.tx_publish(tx, OWN_TURN, "ev", {"k": 1, "mark": "p1"})
        yield from c1.tx_remove(tx, OWN_TURN, 2)
        assert stage.snapshot() != before
        yield from c1.tx_end(tx, Rejection(RejectionCode.ABORTED, "on purpose"))

    stage.play(c1, script())

    assert stage.snapshot() == before
    assert stage.receivers("p1") == []
    assert tables_agree(stage) == []


@pytest.mark.parametrize("kind", TxKind)
def test_two_transactions_on_overlapping_spaces_converge_and_isolated_ones_are_serial(kind: TxKind) -> None:
    stage = Stage(kind)
    first, second = group(stage, environments=2)

    first.run(first.move(0))
    stage.play(second, second.move(0), 3.0)

    assert stage.open_work() == []
    assert tables_agree(stage) == []
    if kind is TxKind.ISOLATED:
        committed = [stage.seen.transactions[record.tx] for record in stage.commits()]
        assert len(committed) == 2
        assert len(stage.holders(0, 0)) == 1
        assert all(len(stage.receivers(t.updates[0])) == 1 for t in committed)
