"""The conflict test of isolated transactions: what a step did at a broker, and what it would do there now.

A transaction is serializable if each of its steps would do the same in the state in which it commits. That state is the
current one plus those changes of the transaction that this broker had applied before it processed the step: with all of
its changes, or with none, a transaction that subscribes and then publishes would always be in conflict with itself.
"""

import msgspec

from tops.core.routing_tx.tables import Tables, View
from tops.core.routing_tx.tree_routes import ADVERTISEMENT, SUBSCRIPTION, TreeRoutes
from tops.model.ids import NodeId, TxId
from tops.protocol.messages import EventStep, Route, RouteStep

Result = frozenset[object]
ABSENT: Result = frozenset(["absent"])  # what is to be withdrawn is not there


class Executed(msgspec.Struct, frozen=True):
    """One step, as this broker has processed it."""

    message: RouteStep | EventStep
    link: NodeId
    result: Result


def result_of(routes: TreeRoutes, message: RouteStep | EventStep, link: NodeId, view: View) -> Result:
    """What a step from `link` does in a state: where a publication or a subscription goes, and which subscriptions an
    advertisement attracts or releases."""
    if isinstance(message, EventStep):
        links, sites = routes.destinations(message.event.type, message.event.body, view, link)
        return frozenset([*links, *((site, number) for site, numbers in sites.items() for number in numbers)])
    route, tables = message.route, routes.tables
    if not message.added:
        known = tables.entries.get(route.key)
        if known is None or known.hop != link or not known.visible(view):
            return ABSENT
    if route.kind is SUBSCRIPTION:
        return frozenset(n for n in routes.neighbours if tables.wants(route, link, n, view))
    return _attracted(tables, route, link, view)


def _attracted(tables: Tables, route: Route, link: NodeId, view: View) -> Result:
    """The subscriptions that go to `link` because of this advertisement and of no other one."""
    found = tables.overlapping(SUBSCRIPTION, route.event_type, route.filter, view)
    return frozenset(
        entry.route.key
        for entry in found
        if entry.hop != link and not tables.wants(entry.route, entry.hop, link, view, without=route.key)
    )


def conflict_in(routes: TreeRoutes, tx: TxId, executed: list[Executed]) -> str:
    """The first step that would do something else now, in words; empty if there is none."""
    for place, done in enumerate(executed):
        view = View(routes.number, tx, place)
        if result_of(routes, done.message, done.link, view) != done.result:
            return f"operation {done.message.step.op} would be routed in another way now"
    return ""


def touches(executed: list[Executed], route: Route) -> bool:
    """Whether a regular change of this route may be in conflict with one of these steps."""
    return any(_touches(done.message, route) for done in executed)


def _touches(message: RouteStep | EventStep, route: Route) -> bool:
    if isinstance(message, EventStep):
        is_subscription = route.kind is SUBSCRIPTION and route.event_type == message.event.type
        return is_subscription and route.filter.matches(message.event.body)
    known = message.route
    if known.event_type != route.event_type or not known.filter.overlaps(route.filter):
        return False
    return ADVERTISEMENT in (known.kind, route.kind)
