"""Routing transactions in the hands of an application: what it begins, what it takes part in, static plans.

async with site.routing_transaction(isolated=True) as tx:
    await tx.send_tcm(invoke, {"process": "p1", "instance": "x1"})
    await tx.publish(update, {"process": "p1", "instance": "x1", "value": 1})
"""

import asyncio
import inspect
import logging
from typing import Any

from tops.client.collector import Collector
from tops.client.outgoing import Body, TypeOrName, checked_size, event_of, name_of
from tops.core.routing_tx.site_transactions import OWN_TURN
from tops.model.errors import ConfigError
from tops.model.event_types import EventType
from tops.model.filters import Filter
from tops.model.ids import TxId
from tops.model.rejections import Rejection, RejectionCode
from tops.model.routing import TREE, RouteKey, RouteKind, TxKind
from tops.protocol.effects import PlannedSubscription, TakeTcm
from tops.runtime.participant_driver import ParticipantDriver
from tops.runtime.participants import Participant, Received
from tops.runtime.site_node import SiteNode

log = logging.getLogger("tops.site")


class TreeSubscription:
    """A subscription to a type that is routed along the tree; without a participant of its own, iterate over it."""

    def __init__(self, node: SiteNode, number: int, event_type: str, participant: Participant) -> None:
        self._node, self.number, self.event_type, self.participant = node, number, event_type, participant

    @property
    def key(self) -> RouteKey:
        """What a static plan of another site calls it."""
        return self._node.core.tree.routes.key(self.number)

    def __aiter__(self) -> Collector:
        if not isinstance(self.participant, Collector):
            raise TypeError("this subscription has a participant, which receives its events")
        return self.participant

    async def unsubscribe(self) -> None:
        """End it now, outside of any transaction; UnknownRoute if a transaction is about to."""
        remove(self._node, self.number)


class TreeAdvertisement:
    """An advertisement of a type that is routed along the tree."""

    def __init__(self, node: SiteNode, number: int, event_type: str) -> None:
        self._node, self.number, self.event_type = node, number, event_type

    @property
    def key(self) -> RouteKey:
        """What a static plan of another site calls it."""
        return self._node.core.tree.routes.key(self.number)

    async def unadvertise(self) -> None:
        """End it now, outside of any transaction; UnknownRoute if a transaction is about to."""
        remove(self._node, self.number)


class Routing:
    """The tree's side of one site, for `Site`."""

    def __init__(self, node: SiteNode) -> None:
        self.node = node
        self._numbers = 0
        self._planned: Participant | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        node.on_routed = self._on_routed

    # ------------------------------------------------------------------------------------------------------- regular

    def number(self) -> int:
        """For one more route; negative, so that it is none of an ordinary subscription."""
        self._numbers -= 1
        return self._numbers

    def add(self, kind: RouteKind, event_type: EventType, where: Filter | None) -> int:
        """Advertise or subscribe."""
        number, core = self.number(), self.node.core
        wanted = checked_filter(event_type, where)
        self.node.act(core.routed(core.tree.add(number, kind, event_type.name, wanted)))
        return number

    def subscribe(
        self, event_type: EventType, where: Filter | None, participant: Participant | None
    ) -> TreeSubscription:
        """A regular subscription."""
        taker = participant or Collector()
        number = self.number()
        self.drive(number, taker, event_type.name)
        core, wanted = self.node.core, checked_filter(event_type, where)
        self.node.act(core.routed(core.tree.add(number, RouteKind.SUBSCRIPTION, event_type.name, wanted)))
        return TreeSubscription(self.node, number, event_type.name, taker)

    def drive(self, number: int, taker: Participant, key: str) -> None:
        """Hand the events of a subscription to its participant."""
        self.node.drivers[number] = ParticipantDriver(taker, self.node.call_done, key, None)

    def publish(self, event_type: str, body: Body) -> None:
        """A regular event; NotAdvertised if no advertisement of this site covers it."""
        core, event = self.node.core, event_of(event_type, body)
        problem = core.tree.routes.problem_with_publication(event)
        if problem is not None:
            raise problem
        self.node.act(core.routed(core.tree.publish(event)))

    def unadvertise(self, event_type: str) -> None:
        """End all regular advertisements of a type."""
        own = self.node.core.tree.routes.own
        for number in [n for n, o in own.items() if o.kind is RouteKind.ADVERTISEMENT and o.event_type == event_type]:
            remove(self.node, number)

    def accept_plans(self, participant: Participant) -> None:
        """Take part in static plans; their subscriptions are handed to the participant."""
        self._planned = participant
        self.node.core.tree.transactions.accepts_plans = True

    # -------------------------------------------------------------------------------------------------- transactions

    async def begin(self, kind: TxKind, timeout_s: float, attempt: int) -> "RoutingTransaction":
        """Begin a dynamic transaction."""
        core = self.node.core
        tx = await self.node.request(
            lambda request: core.routed(core.tree.transactions.begin(request, kind, timeout_s, attempt))
        )
        return RoutingTransaction(self, tx, OWN_TURN)

    def _on_routed(self, effect: TakeTcm | PlannedSubscription) -> None:
        if isinstance(effect, TakeTcm):
            task = asyncio.get_running_loop().create_task(self._take(effect))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif self._planned is not None:
            taker = self._planned
            self.drive(effect.subscription, taker, effect.event_type)
            made = TreeSubscription(self.node, effect.subscription, effect.event_type, taker)
            answer = taker.on_planned(made)
            if inspect.isawaitable(answer):
                planned = asyncio.ensure_future(_quietly(answer))
                self._tasks.add(planned)
                planned.add_done_callback(self._tasks.discard)

    async def _take(self, tcm: TakeTcm) -> None:
        """Let a participant act on a tcm; what it raises aborts the transaction."""
        driver, reason = self.node.drivers.get(tcm.subscription), None
        try:
            if driver is None:
                reason = "the subscription has ended"
            else:
                handle = RoutingTransaction(self, tcm.tx, tcm.op)
                answer = driver.participant.on_tcm(handle, Received(tcm.event.type, tcm.event.body, tcm.tx))
                if inspect.isawaitable(answer):
                    await answer
        except Exception as error:
            log.info("on_tcm raised", exc_info=error, extra={"node": self.node.name, "tx": tcm.tx})
            reason = f"{type(error).__name__}: {error}"
        self.node.act(self.node.core.call_done(tcm.call, reason))


class RoutingTransaction:
    """One routing transaction, seen from a site that issues operations in it.

    Each method returns when every broker that it concerns has processed the operation, and all that it triggered.
    TransactionAborted, TransactionConflict or NoReceiver: the transaction can't commit any more.
    """

    def __init__(self, routing: Routing, tx: TxId, turn: str) -> None:
        self._routing, self.id, self._turn = routing, tx, turn

    async def publish(self, event_type: TypeOrName, body: Body) -> None:
        """An event that subscribers get when the transaction has committed."""
        await self._publish(event_type, body, tcm=False)

    async def send_tcm(self, event_type: TypeOrName, body: Body) -> None:
        """An event that its receivers' `on_tcm` acts on now; NoReceiver if there is none."""
        await self._publish(event_type, body, tcm=True)

    async def _publish(self, event_type: TypeOrName, body: Body, *, tcm: bool) -> None:
        node = self._routing.node
        core, event = node.core, event_of(name_of(event_type), body)
        checked_size([event])
        await node.request(
            lambda request: core.routed(core.tree.transactions.publish(request, self.id, self._turn, event, tcm=tcm)),
            f"tx {self.id}",
        )

    async def subscribe(
        self, event_type: EventType, where: Filter | None = None, *, participant: Participant | None = None
    ) -> TreeSubscription:
        """A subscription; it is gone if the transaction aborts."""
        taker = participant or Collector()
        number = self._routing.number()
        self._routing.drive(number, taker, event_type.name)
        await self._add(number, RouteKind.SUBSCRIPTION, event_type, where)
        return TreeSubscription(self._routing.node, number, event_type.name, taker)

    async def unsubscribe(self, subscription: TreeSubscription) -> None:
        """The end of a subscription; events that were published before the commit may still come."""
        await self._change(subscription.number, added=False)

    async def advertise(self, event_type: EventType, where: Filter | None = None) -> TreeAdvertisement:
        """An advertisement; waiting subscriptions that it attracts are in place when this returns."""
        number = self._routing.number()
        await self._add(number, RouteKind.ADVERTISEMENT, event_type, where)
        return TreeAdvertisement(self._routing.node, number, event_type.name)

    async def unadvertise(self, advertisement: TreeAdvertisement) -> None:
        """The end of an advertisement."""
        await self._change(advertisement.number, added=False)

    async def _add(self, number: int, kind: RouteKind, event_type: EventType, where: Filter | None) -> None:
        wanted = checked_filter(event_type, where)
        self._routing.node.core.tree.routes.add(number, kind, event_type.name, wanted, self.id)
        await self._change(number, added=True)

    async def _change(self, number: int, *, added: bool) -> None:
        core = self._routing.node.core
        await self._routing.node.request(
            lambda request: core.routed(
                core.tree.transactions.change_route(request, self.id, self._turn, number, added=added)
            ),
            f"tx {self.id}",
        )

    async def end(self, reason: str | None = None) -> None:
        """Commit, or abort with a reason. For its initiator only."""
        core = self._routing.node.core
        rejection = None if reason is None else Rejection(RejectionCode.ABORTED, reason)
        await self._routing.node.request(
            lambda request: core.routed(core.tree.transactions.end(request, self.id, rejection)), f"tx {self.id}"
        )


def checked_filter(event_type: EventType, where: Filter | None) -> Filter:
    """The filter, if it fits a type that is routed along the tree."""
    if event_type.routing != TREE:
        raise ConfigError(
            f"event type {event_type.name!r} is not routed along the tree: declare it with routing='tree'"
        )
    wanted = where if where is not None else Filter()
    wanted.check_against(event_type)
    return wanted


def remove(node: SiteNode, number: int) -> None:
    """Unadvertise or unsubscribe."""
    core = node.core
    problem, effects = core.tree.remove(number)
    if problem is not None:
        raise problem
    node.act(core.routed(effects))
    driver = node.drivers.pop(number, None)
    if driver is not None:
        driver.close()


async def _quietly(answer: Any) -> None:
    try:
        await answer
    except Exception:
        log.exception("on_planned raised")
