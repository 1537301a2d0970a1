"""Planted bugs of tree routing and its transactions: builds that are broken on purpose, one way each."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tops.core.routing_tx import termination
from tops.core.routing_tx.conflicts import Executed, result_of
from tops.core.routing_tx.coordinator import RoutingCoordinator
from tops.core.routing_tx.settlement import Settlement
from tops.core.routing_tx.site_transactions import SiteTransactions
from tops.core.routing_tx.steps import Pending, Steps, TxStep, Work
from tops.core.routing_tx.tables import Entry, Tables, View
from tops.core.routing_tx.termination import Applied, Termination
from tops.core.routing_tx.tree_routes import ADVERTISEMENT, TreeRoutes
from tops.model.ids import NodeId, TxId
from tops.model.routing import RouteKey
from tops.protocol.effects import Effect, Persist, SendOnLink
from tops.protocol.messages import (
    NOT_PLANNED,
    EventStep,
    Route,
    RouteStep,
    RoutingTxDecided,
    StepDone,
    TreePublished,
)

SABOTAGES: dict[str, Callable[[], Any]] = {}


@contextmanager
def _patched(*patches: tuple[Any, str, Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, replacement in patches:
            original = owner.__dict__[name]
            setattr(owner, name, replacement)
            stack.callback(setattr, owner, name, original)
        yield


def _sabotage(function: Callable[[], Any]) -> Callable[[], Any]:
    SABOTAGES[function.__name__] = function
    return function


@_sabotage
def advertisements_are_not_tested() -> Any:
    def lenient(routes: TreeRoutes, tx: TxId, executed: list[Executed]) -> str:
        for place, done in enumerate(executed):
            if isinstance(done.message, RouteStep) and done.message.route.kind is ADVERTISEMENT:
                continue
            if result_of(routes, done.message, done.link, View(routes.number, tx, place)) != done.result:
                return "conflict"
        return ""

    return _patched((termination, "conflict_in", lenient))


def _tested_with(before: Callable[[int], int]) -> Any:
    def test(routes: TreeRoutes, tx: TxId, executed: list[Executed]) -> str:
        for place, done in enumerate(executed):
            view = View(routes.number, tx, before(place))
            if result_of(routes, done.message, done.link, view) != done.result:
                return "conflict"
        return ""

    return _patched((termination, "conflict_in", test))


@_sabotage
def the_test_sees_all_own_changes() -> Any:
    return _tested_with(lambda place: 2**62)


@_sabotage
def the_test_sees_no_own_changes() -> Any:
    return _tested_with(lambda place: 0)


@_sabotage
def there_is_no_test_at_all() -> Any:
    return _patched((termination, "conflict_in", lambda routes, tx, executed: ""))


@_sabotage
def an_operation_is_acknowledged_before_others_have_processed_it() -> Any:
    def hasty(self: Steps, work: Work, link: NodeId, message: TxStep) -> list[Effect]:
        triggered, onward = self.execute(work, link, message)
        pending = Pending(message.step, link, reached=1)
        return [*(SendOnLink(to, sent) for to, sent in [*triggered, *onward]), *self._done(work, pending)]

    return _patched((Steps, "process", hasty))


@_sabotage
def a_tcm_is_acknowledged_before_what_it_triggered() -> Any:
    honest = SiteTransactions.on_event

    def hasty(self: SiteTransactions, message: EventStep) -> list[Effect]:
        effects, step = honest(self, message), message.step
        if not message.tcm or step.planned != NOT_PLANNED:
            return effects
        return [self._send(StepDone(tx=step.tx, op=step.op, reached=1)), *effects]

    return _patched((SiteTransactions, "on_event", hasty))


@_sabotage
def a_leaver_is_not_acknowledged_for() -> Any:
    return _patched((Steps, "link_lost", lambda self, work, link, rejection: []))


@_sabotage
def an_abort_undoes_without_marks() -> Any:
    """Entries that were removed are gone, as if compensation had to bring them back and found no way."""
    honest = Settlement.abort

    def forgetful(self: Settlement, work: Work) -> list[Effect]:
        for key in sorted(work.routes):
            entry = self.routes.tables.entries.get(key)
            marks = entry.marks.get(work.tx, []) if entry is not None else []
            if entry is not None and marks and not marks[-1].present:
                self.routes.tables.drop(key)
        return honest(self, work)

    return _patched((Settlement, "abort", forgetful))


@_sabotage
def publications_are_routed_without_the_commit_number() -> Any:
    honest = TreeRoutes.publish

    def current(self: TreeRoutes, published: TreePublished, origin: NodeId) -> list[Effect]:
        return honest(self, TreePublished(event=published.event, stamp=self.number), origin)

    return _patched((TreeRoutes, "publish", current))


@_sabotage
def tables_are_dropped_before_every_neighbour_has_flipped() -> Any:
    honest = Settlement.commit

    def hasty(self: Settlement, work: Work, number: int) -> list[Effect]:
        effects = honest(self, work, number)
        return effects + self.collapse(work)

    return _patched((Settlement, "commit", hasty))


@_sabotage
def a_flip_is_sent_for_this_broker_alone() -> Any:
    """Without waiting for the brokers further away: they may still stamp publications with the former commit."""

    def alone(self: Termination, applied: Applied, link: NodeId) -> bool:
        return True

    return _patched((Termination, "_may_flip", alone))


@_sabotage
def covering_is_switched_on() -> Any:
    honest = Tables.wants

    def covered(
        self: Tables, route: Route, hop: NodeId, link: NodeId, view: View, without: RouteKey | None = None
    ) -> bool:
        if not honest(self, route, hop, link, view, without):
            return False
        others: list[Entry] = [
            e for e in self.of_kind(route.kind, route.event_type) if e.route.key < route.key and e.visible(view)
        ]
        return not any(e.hop != link and e.route.filter.covers(route.filter) for e in others)

    return _patched((Tables, "wants", covered))


@_sabotage
def a_commit_is_sent_before_it_is_on_disk() -> Any:
    honest = RoutingCoordinator._commit

    def hasty(self: Any, one: Any, participants: tuple[str, ...]) -> list[Effect]:
        effects = honest(self, one, participants)
        return [e for e in effects if not isinstance(e, Persist)] + [e for e in effects if isinstance(e, Persist)]

    return _patched((RoutingCoordinator, "_commit", hasty))


@_sabotage
def a_site_is_told_before_its_broker_has_applied() -> Any:
    """Its next publication is routed by the tables before the commit that it knows of."""
    honest = Termination._settle

    def hasty(self: Termination, work: Work, decided: RoutingTxDecided) -> list[Effect]:
        number = self.routes.number
        effects = honest(self, work, decided)
        if decided.committed and decided.number:
            self.routes.number = number
        return effects

    return _patched((Termination, "_settle", hasty))
