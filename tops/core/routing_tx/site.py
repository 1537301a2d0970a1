"""Tree routing at a site: its advertisements and subscriptions, and the events that reach it.

The site is the one that remembers its routes. Whenever it is connected to a broker that knows nothing of it, it
registers all that are committed under a new generation; while the outcome of a transaction that it voted for is not
known, it registers nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

from tops.core.overlay.topology import rendezvous_of
from tops.core.participant.calls import Calls
from tops.core.routing_tx.broker import DOMAIN
from tops.core.routing_tx.site_routes import SiteRoutes
from tops.core.routing_tx.site_transactions import ASK_AGAIN_S, TIMER, SiteTransactions
from tops.model.errors import TopsError
from tops.model.filters import Filter
from tops.model.ids import NodeId, TxId
from tops.model.routing import RouteKind
from tops.protocol.effects import Deliver, Effect, SendOnLink, SetTimer
from tops.protocol.messages import (
    Event,
    EventStep,
    PlanStarted,
    PrepareRoutingTx,
    RouteChanged,
    RouteEnded,
    RoutingTxBegan,
    RoutingTxDecided,
    RoutingTxEnded,
    StepDone,
    TreeDelivered,
    TreeMessage,
    TreePublished,
)

ASK: Final = (TIMER, "ask")
NOWHERE: Final = NodeId("")  # what is sent without a link is lost: `SiteCore` leaves it out


class TreeSite:
    """The tree's side of one site."""

    def __init__(self, name: NodeId, incarnation: int, brokers: Sequence[NodeId], calls: Calls) -> None:
        self.link: NodeId | None = None
        self.routes = SiteRoutes(name, incarnation)
        coordinator = rendezvous_of(tuple(sorted(brokers)), DOMAIN)
        self.transactions = SiteTransactions(name, coordinator, self.routes, calls, self._send)
        self._asking = False
        transactions = self.transactions
        self._handlers: dict[type, Callable[[Any], list[Effect]]] = {
            TreeDelivered: self._on_delivered,
            RouteEnded: self._on_route_ended,
            EventStep: transactions.on_event,
            StepDone: transactions.on_done,
            PlanStarted: transactions.on_plan,
            PrepareRoutingTx: transactions.on_prepare,
            RoutingTxDecided: self.on_ended,
        }

    def _send(self, message: TreeMessage) -> Effect:
        return SendOnLink(self.link or NOWHERE, message)

    # --------------------------------------------------------------------------------------------------------- link

    def link_up(self, broker: NodeId) -> list[Effect]:
        """A broker that knows nothing of this site."""
        self.link = broker
        self.routes.reconnected()
        return self.transactions.reconnected() + self._register()

    def _register(self) -> list[Effect]:
        """Everything that is committed, once that is known."""
        self.routes.registered = not self.transactions.doubts()
        if self.routes.registered:
            return [self._send(changed) for changed in self.routes.registrations()]
        if self._asking:
            return []
        self._asking = True
        return [SetTimer(ASK, ASK_AGAIN_S)]

    def timer(self, key: tuple[str, ...]) -> list[Effect]:
        """A timer that this part of the site has set."""
        if key != ASK:
            return self.transactions.on_timer(TxId(key[1]))
        self._asking = False
        if not self.transactions.doubts():
            return []
        self._asking = True
        return [*self.transactions.ask(), SetTimer(ASK, ASK_AGAIN_S)]

    # ------------------------------------------------------------------------------------------------------ messages

    def receive(self, message: TreeMessage) -> list[Effect]:
        """A message of the site's broker."""
        handler = self._handlers.get(type(message))
        return handler(message) if handler is not None else []

    def on_ended(self, ended: RoutingTxEnded | RoutingTxDecided) -> list[Effect]:
        """The coordinator has decided: from the broker, or because this site asked."""
        effects = self.transactions.on_decided(ended)
        if not self.routes.registered and not self.transactions.doubts():
            effects += self._register()
        return effects

    def on_began(self, began: RoutingTxBegan) -> list[Effect]:
        """The coordinator knows of a transaction."""
        return self.transactions.on_began(began)

    def _on_delivered(self, delivered: TreeDelivered) -> list[Effect]:
        return [Deliver(number, delivered.event) for number in delivered.subscriptions if number in self.routes.own]

    def _on_route_ended(self, ended: RouteEnded) -> list[Effect]:
        for number, own in list(self.routes.own.items()):
            if own.ending and self.routes.key(number) == ended.key:
                del self.routes.own[number]
        return []

    # ------------------------------------------------------------------------------------------- regular operations

    def add(self, number: int, kind: RouteKind, event_type: str, wanted: Filter) -> list[Effect]:
        """Advertise, or subscribe."""
        own = self.routes.add(number, kind, event_type, wanted)
        return [self._send(RouteChanged(route=self.routes.route(own), added=True))]

    def remove(self, number: int) -> tuple[TopsError | None, list[Effect]]:
        """Unadvertise, or unsubscribe; or why that can't be done now."""
        problem = self.routes.problem_with_removal(number, None)
        if problem is not None:
            return problem, []
        own = self.routes.own.pop(number)
        return None, [self._send(RouteChanged(route=self.routes.route(own), added=False))]

    def publish(self, event: Event) -> list[Effect]:
        """A regular event, which the caller has checked."""
        return [self._send(TreePublished(event=event))]
