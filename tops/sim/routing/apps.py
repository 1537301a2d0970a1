"""The applications of a simulated cluster with tree routing.

A *group* dispatches work: its environment E invokes items, its dispatcher D moves each item to an agent or takes it
back, and the updates of an item must reach whoever has it, and nobody else. *Free* clients do all operations at random.
"""

from collections.abc import Generator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tops.core.routing_tx.plan import StaticPlan
from tops.core.routing_tx.site_transactions import OWN_TURN
from tops.model.errors import NotAdvertised, TopsError
from tops.model.filters import Filter
from tops.model.ids import NodeId, TxId
from tops.model.rejections import Rejection, RejectionCode
from tops.model.routing import RouteKind, TxKind, route_key
from tops.protocol.effects import Call, Effect, TakeTcm
from tops.protocol.messages import Event
from tops.sim.routing.history import Delivery, Operation, Transaction
from tops.sim.site_app import MakeRequest, Script, SiteApp, Sleep

if TYPE_CHECKING:
    from tops.sim.nodes import SimSite
    from tops.sim.routing.world import RoutingWorld

ADVERTISEMENT, SUBSCRIPTION = RouteKind.ADVERTISEMENT, RouteKind.SUBSCRIPTION
INVOKE, ASSIGN, UPDATE, FREE, ASK = "invoke", "assign", "update", "free", "ask"
TIMEOUT_S = 2.0
KEYS = 3  # of the events of free clients
CHANGED_HIS_MIND = Rejection(RejectionCode.ABORTED, "the application aborts")
Work = Generator[MakeRequest | Sleep, Any, Any]


def of_item(group: int, item: int) -> Filter:
    """The updates of one item."""
    return Filter.where("group", "=", group).where("item", "=", item)


def of_group(group: int) -> Filter:
    """What belongs to a group."""
    return Filter.where("group", "=", group)


class TreeApp(SiteApp):
    """What all of them have in common."""

    def __init__(self, world: "RoutingWorld") -> None:
        super().__init__(world, ())
        self.tree_world = world
        self._numbers = 0
        self.busy = 0  # the incarnation of the site that is at a transaction of its own

    def start(self, site: "SimSite") -> None:
        self.site = site
        self._numbers = 0
        for kind, event_type, wanted in self.routes():
            self.add(kind, event_type, wanted)

    def routes(self) -> list[tuple[RouteKind, str, Filter]]:
        """What the application registers when it starts."""
        return []

    def crash(self) -> None:
        super().crash()
        self.tree_world.seen.crashed.add(self.site.name)

    # ------------------------------------------------------------------------------------------- regular operations

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def key(self, number: int) -> Any:
        return route_key(self.site.core.tree.routes.client, number)

    def add(self, kind: RouteKind, event_type: str, wanted: Filter) -> int:
        """A regular advertisement or subscription."""
        number = self.number()
        core = self.site.core
        self.site.act(lambda: core.routed(core.tree.add(number, kind, event_type, wanted)))
        return number

    def remove(self, number: int) -> None:
        core = self.site.core
        self.site.act(lambda: core.routed(core.tree.remove(number)[1]))

    def publish_routed(self, event_type: str, body: dict[str, Any]) -> None:
        core = self.site.core
        self.site.act(lambda: core.routed(core.tree.publish(Event(event_type, body))))

    def owned(self, event_type: str, wanted: Filter) -> int | None:
        """The committed subscription with this filter, by its number."""
        for number, own in self.site.core.tree.routes.own.items():
            mine = own.kind is SUBSCRIPTION and (own.event_type, own.filter) == (event_type, wanted)
            if mine and own.added_by is None and own.removed_by is None and not own.ending:
                return number
        return None

    def on_deliver(self, subscription: int, event: Event, tx: TxId | None) -> None:
        world = self.tree_world
        site, key = self.site, self.key(subscription)
        seen = Delivery(site.name, site.incarnation, key, event.body["mark"], tx, world.clock.now)
        world.seen.deliveries.append(seen)
        world.trace.add(world.clock.now, site.name, f"gets {seen.mark} for {key} in {tx}")

    def on_tx_ended(self, tx: TxId, committed: bool) -> None:
        super().on_tx_ended(tx, committed)
        known = self.tree_world.seen.transactions.get(tx)
        if known is not None:
            known.outcomes[f"{self.site.name}.{self.site.incarnation}"] = committed

    # ----------------------------------------------------------------------------------------- operations in a script

    def tx_add(self, tx: TxId, turn: str, kind: RouteKind, event_type: str, wanted: Filter) -> Work:
        number, core = self.number(), self.site.core

        def make(request: int) -> list[Effect]:
            core.tree.routes.add(number, kind, event_type, wanted, tx)
            return core.routed(core.tree.transactions.change_route(request, tx, turn, number, added=True))

        yield make
        self._note(tx, Operation(self.site.name, kind, True, self.key(number), event_type, wanted))

    def tx_remove(self, tx: TxId, turn: str, number: int) -> Work:
        core = self.site.core
        own = core.tree.routes.own.get(number)
        yield lambda request: core.routed(core.tree.transactions.change_route(request, tx, turn, number, added=False))
        if own is not None:
            self._note(tx, Operation(self.site.name, own.kind, False, self.key(number), own.event_type, own.filter))

    def tx_publish(self, tx: TxId, turn: str, event_type: str, body: dict[str, Any], *, tcm: bool = False) -> Work:
        core, event = self.site.core, Event(event_type, body)
        yield lambda request: core.routed(core.tree.transactions.publish(request, tx, turn, event, tcm=tcm))
        if not tcm:
            self._note(tx, Operation(self.site.name, None, event_type=event_type, body=body))

    def _note(self, tx: TxId, operation: Operation) -> None:
        known = self.tree_world.seen.transactions.get(tx)
        if known is not None:
            known.operations.append(operation)

    def tx_begin(self, kind: TxKind, attempt: int) -> Work:
        core = self.site.core
        tx = yield lambda request: core.routed(core.tree.transactions.begin(request, kind, TIMEOUT_S, attempt))
        self.tree_world.seen.transactions[tx] = Transaction(tx, kind, self.site.name)
        return tx

    def tx_end(self, tx: TxId, rejection: Rejection | None = None) -> Work:
        core = self.site.core
        yield lambda request: core.routed(core.tree.transactions.end(request, tx, rejection))

    def attempt(self, kind: TxKind, attempt: int, work: Any) -> Work:
        """One transaction; returns whether it committed."""
        try:
            tx = yield from self.tx_begin(kind, attempt)
        except TopsError:
            return False
        try:
            yield from work(tx)
            if self.world.rng.random() < self.tree_world.aborts:
                yield from self.tx_end(tx, CHANGED_HIS_MIND)
                return True
            yield from self.tx_end(tx)
            return True
        except TopsError:
            with suppress(TopsError):
                yield from self.tx_end(tx, CHANGED_HIS_MIND)
            return False

    def repeated(self, kind: TxKind, work: Any) -> Script:
        """A transaction that is run again when it failed, as an application would."""
        self.busy = self.site.incarnation
        for attempt in range(5):
            if (yield from self.attempt(kind, attempt, work)):
                break
            yield Sleep(self.world.rng.uniform(0.01, 0.2))
        self.busy = 0

    # ------------------------------------------------------------------------------------------------- participants

    def on_call(self, call: Call) -> None:
        if isinstance(call, TakeTcm):
            self.run(self._at_tcm(call))

    def _at_tcm(self, call: TakeTcm) -> Script:
        reason = None
        try:
            if self.world.rng.random() < self.tree_world.failures:
                reason = "it can't now"
            else:
                yield Sleep(self.world.rng.uniform(0.0, 0.004))
                yield from self.on_tcm(call.tx, call.op, call.event)
        except TopsError as error:
            reason = str(error)
        core = self.site.core
        self.site.act(lambda: core.call_done(call.call, reason))

    def on_tcm(self, tx: TxId, turn: str, event: Event) -> Work:
        yield from ()


class Environment(TreeApp):
    """E: invokes items, and publishes their updates."""

    def __init__(self, world: "RoutingWorld", group: int, items: int) -> None:
        super().__init__(world)
        self.group, self.items = group, items

    def routes(self) -> list[tuple[RouteKind, str, Filter]]:
        wanted = of_group(self.group)
        return [(ADVERTISEMENT, INVOKE, wanted), (ADVERTISEMENT, UPDATE, wanted)]

    def body(self, item: int) -> dict[str, Any]:
        return {"group": self.group, "item": item, "mark": self.tree_world.mark()}

    def update(self, item: int) -> str:
        """A regular update of an item."""
        body = self.body(item)
        self.tree_world.published(body["mark"], self.group, item)
        self.publish_routed(UPDATE, body)
        return str(body["mark"])

    def move(self, item: int) -> Script:
        """The dispatching scenario, of any kind."""
        if self.tree_world.wait_s is not None:
            return self._move_and_wait(item, self.tree_world.wait_s)
        if self.tree_world.kind is TxKind.STATIC:
            return self._move_by_plan(item)
        return self.repeated(self.tree_world.kind, lambda tx: self._move(tx, item))

    def _move_and_wait(self, item: int, wait_s: float) -> Script:
        self.busy = self.site.incarnation
        self.publish_routed(INVOKE, self.body(item))
        yield Sleep(wait_s)
        self.update(item)
        yield Sleep(1.0)  # whatever is late is not in the way of the next one
        self.busy = 0

    def _move(self, tx: TxId, item: int) -> Work:
        yield from self.tx_publish(tx, OWN_TURN, INVOKE, self.body(item), tcm=True)
        update = self.body(item)
        yield from self.tx_publish(tx, OWN_TURN, UPDATE, update)
        self.tree_world.seen.transactions[tx].updates.append(update["mark"])

    def _move_by_plan(self, item: int) -> Script:
        world, core = self.tree_world, self.site.core
        move = world.next_holder(self.group, item)
        if move is None or self.busy == self.site.incarnation:
            return
        self.busy = self.site.incarnation
        holder, key, target = move
        update = self.body(item)
        dispatcher = world.dispatchers[self.group]
        plan, me = StaticPlan(), self.site.name
        invoke = plan.tcm(me, INVOKE, self.body(item))
        agent = target if holder == dispatcher else holder
        assign = plan.tcm(dispatcher, ASSIGN, self.body(item) | {"agent": agent}, after=invoke)
        taken = plan.subscribe(target, UPDATE, of_item(self.group, item), after=assign)
        plan.unsubscribe(holder, UPDATE, key, after=taken)
        plan.publish(me, UPDATE, update)
        steps = plan.steps()

        def make(request: int) -> list[Effect]:
            known = set(core.tree.transactions.open)
            effects = core.tree.transactions.execute(request, steps, TIMEOUT_S)
            if not core.tree.transactions.open.keys() - known:
                return core.routed(effects)
            tx = next(reversed(core.tree.transactions.open))
            world.seen.transactions[tx] = Transaction(tx, TxKind.STATIC, me, updates=[update["mark"]])
            return core.routed(effects)

        with suppress(TopsError):
            yield make
        self.busy = 0


class Dispatcher(TreeApp):
    """D: has the items in the beginning, gives them to agents and takes them back."""

    def __init__(self, world: "RoutingWorld", group: int, items: int) -> None:
        super().__init__(world)
        self.group, self.items = group, items

    def routes(self) -> list[tuple[RouteKind, str, Filter]]:
        group = self.group
        found = [(ADVERTISEMENT, ASSIGN, of_group(group)), (SUBSCRIPTION, INVOKE, of_group(group))]
        # Like a process with a database: what it had is lost with it, and somebody else must see to the items.
        if self.site.incarnation == 1:
            found += [(SUBSCRIPTION, UPDATE, of_item(group, item)) for item in range(self.items)]
        return found

    def start(self, site: "SimSite") -> None:
        super().start(site)
        site.core.tree.transactions.accepts_plans = True

    def on_tcm(self, tx: TxId, turn: str, event: Event) -> Work:
        item, world = event.body["item"], self.tree_world
        move = world.next_holder(self.group, item)
        if move is None:
            raise NotAdvertised("nobody has the item")
        holder, _, target = move
        dispatches = holder == self.site.name
        agent = target if dispatches else holder
        assign = {"group": self.group, "item": item, "agent": agent, "take": dispatches, "mark": world.mark()}
        wanted = of_item(self.group, item)
        if not dispatches:
            yield from self.tx_add(tx, turn, SUBSCRIPTION, UPDATE, wanted)
        yield from self.tx_publish(tx, turn, ASSIGN, assign, tcm=True)
        if dispatches:
            yield from give_up(self, tx, turn, wanted)

    def on_deliver(self, subscription: int, event: Event, tx: TxId | None) -> None:
        super().on_deliver(subscription, event, tx)
        if event.type == INVOKE and self.tree_world.wait_s is not None:
            self._move_regularly(event.body["item"])

    def _move_regularly(self, item: int) -> None:
        move = self.tree_world.next_holder(self.group, item)
        if move is None:
            return
        holder, _, target = move
        dispatches, wanted = holder == self.site.name, of_item(self.group, item)
        agent = target if dispatches else holder
        assign = {"group": self.group, "item": item, "agent": agent, "take": dispatches}
        self.publish_routed(ASSIGN, assign | {"mark": self.tree_world.mark()})
        take_regularly(self, wanted, take=not dispatches)


class Agent(TreeApp):
    """A: takes items, and gives them back."""

    def __init__(self, world: "RoutingWorld", group: int) -> None:
        super().__init__(world)
        self.group = group

    def routes(self) -> list[tuple[RouteKind, str, Filter]]:
        return [(SUBSCRIPTION, ASSIGN, of_group(self.group).where("agent", "=", self.site.name))]

    def start(self, site: "SimSite") -> None:
        super().start(site)
        site.core.tree.transactions.accepts_plans = True

    def on_tcm(self, tx: TxId, turn: str, event: Event) -> Work:
        wanted = of_item(self.group, event.body["item"])
        if event.body["take"]:
            yield from self.tx_add(tx, turn, SUBSCRIPTION, UPDATE, wanted)
        else:
            yield from give_up(self, tx, turn, wanted)

    def on_deliver(self, subscription: int, event: Event, tx: TxId | None) -> None:
        super().on_deliver(subscription, event, tx)
        if event.type == ASSIGN and self.tree_world.wait_s is not None:
            take_regularly(self, of_item(self.group, event.body["item"]), take=event.body["take"])


def take_regularly(app: TreeApp, wanted: Filter, *, take: bool) -> None:
    """Subscribe to an item, or unsubscribe, without a transaction."""
    number = app.owned(UPDATE, wanted)
    if take and number is None:
        app.add(SUBSCRIPTION, UPDATE, wanted)
    elif not take and number is not None:
        app.remove(number)


def give_up(app: TreeApp, tx: TxId, turn: str, wanted: Filter) -> Work:
    """Unsubscribe from an item, which the client must have."""
    number = app.owned(UPDATE, wanted)
    if number is None:
        raise NotAdvertised("the client does not have the item")
    yield from app.tx_remove(tx, turn, number)


class Free(TreeApp):
    """A client that does everything at random, in transactions of its own and of others."""

    def __init__(self, world: "RoutingWorld", name: NodeId) -> None:
        super().__init__(world)
        self.name = name

    def routes(self) -> list[tuple[RouteKind, str, Filter]]:
        return [
            (ADVERTISEMENT, ASK, Filter()),
            (SUBSCRIPTION, ASK, Filter.where("to", "=", self.name)),
            (SUBSCRIPTION, FREE, self._range()),
        ]

    def _range(self) -> Filter:
        low = self.world.rng.randrange(KEYS)
        return Filter.where("k", "range", (low, low + self.world.rng.choice([0, 0, 1])))

    def script(self) -> Script:
        """One transaction."""
        return self.repeated(self.tree_world.kind, self._some)

    def _some(self, tx: TxId) -> Work:
        if self.world.rng.random() < 0.4:
            yield from self._attract(tx)
            return
        for _ in range(self.world.rng.randint(1, 4)):
            yield from self._one(tx, OWN_TURN, asks=True)

    def _attract(self, tx: TxId) -> Work:
        """Advertise something else than before, and publish to whoever waits for that."""
        k, routes = self.world.rng.randrange(KEYS), self.site.core.tree.routes
        for number in [n for n, own in routes.own.items() if own.event_type == FREE and own.kind is ADVERTISEMENT]:
            if routes.problem_with_removal(number, tx) is None:
                yield from self.tx_remove(tx, OWN_TURN, number)
        yield from self.tx_add(tx, OWN_TURN, ADVERTISEMENT, FREE, Filter.where("k", "=", k))
        yield from self.tx_publish(tx, OWN_TURN, FREE, {"k": k, "mark": self.tree_world.mark()})

    def _one(self, tx: TxId, turn: str, *, asks: bool) -> Work:
        rng, world = self.world.rng, self.tree_world
        what = rng.choice(["add", "add", "remove", "publish", "publish", "ask" if asks else "publish"])
        kind = SUBSCRIPTION if rng.random() < 0.8 else ADVERTISEMENT
        if what == "add":
            yield from self.tx_add(tx, turn, kind, FREE, self._range())
        elif what == "remove":
            routes = self.site.core.tree.routes
            mine = [n for n, own in routes.own.items() if own.event_type == FREE and own.kind is kind]
            mine = [n for n in mine if routes.problem_with_removal(n, tx) is None]
            if mine:
                yield from self.tx_remove(tx, turn, rng.choice(mine))
        elif what == "publish":
            body = {"k": rng.randrange(KEYS + 1), "mark": world.mark()}
            if self.site.core.tree.routes.problem_with_publication(Event(FREE, body), tx) is None:
                yield from self.tx_publish(tx, turn, FREE, body)
        else:
            to = rng.choice(world.free)
            yield from self.tx_publish(tx, turn, ASK, {"to": to, "mark": world.mark()}, tcm=True)

    def on_tcm(self, tx: TxId, turn: str, event: Event) -> Work:
        for _ in range(self.world.rng.randint(0, 2)):
            yield from self._one(tx, turn, asks=False)


class Observer(TreeApp):
    """Comes and goes with regular subscriptions and advertisements on the same events as the others."""

    def __init__(self, world: "RoutingWorld") -> None:
        super().__init__(world)
        self.mine: list[int] = []

    def start(self, site: "SimSite") -> None:
        super().start(site)
        self.mine = []

    def change(self) -> None:
        """One regular change."""
        rng = self.world.rng
        if self.mine and rng.random() < 0.5:
            self.remove(self.mine.pop(rng.randrange(len(self.mine))))
            return
        kind, event_type = rng.choice([ADVERTISEMENT, SUBSCRIPTION]), rng.choice([UPDATE, FREE])
        wanted = of_group(0) if event_type == UPDATE else Filter.where("k", "=", rng.randrange(KEYS))
        self.mine.append(self.add(kind, event_type, wanted))
