"""The routes of one site: advertisements and subscriptions of its own, committed or part of a transaction."""

import msgspec

from tops.model.errors import NotAdvertised, TopsError, UnknownRoute
from tops.model.filters import Filter
from tops.model.ids import NodeId, TxId
from tops.model.routing import RouteKey, RouteKind, client_id, route_key
from tops.protocol.messages import Event, Route, RouteChanged


class Own(msgspec.Struct):
    """One route, and what a transaction is about to make of it."""

    number: int
    kind: RouteKind
    event_type: str
    filter: Filter
    added_by: TxId | None = None
    removed_by: TxId | None = None
    ending: bool = False  # removed by a commit; events that were published before it may still come

    def published_by(self, tx: TxId | None) -> bool:
        """Whether it counts for a publication, which may be one of a transaction."""
        return self.added_by in (None, tx) and self.removed_by is None and not self.ending


class SiteRoutes:
    """What a site has advertised and subscribed to."""

    def __init__(self, name: NodeId, incarnation: int) -> None:
        self.client = client_id(name, incarnation)
        self.generation = 0  # how often the site has been connected to a broker that knew nothing of it
        self.own: dict[int, Own] = {}
        self.registered = True  # False: at a broker that knows of no route of this site yet

    def key(self, number: int) -> RouteKey:
        """What brokers know a route by."""
        return route_key(self.client, number)

    def route(self, own: Own) -> Route:
        """A route as it is registered now."""
        return Route(self.key(own.number), own.kind, own.event_type, own.filter, self.generation)

    def add(self, number: int, kind: RouteKind, event_type: str, wanted: Filter, tx: TxId | None = None) -> Own:
        """One more route, of a transaction or regular."""
        own = self.own[number] = Own(number, kind, event_type, wanted, added_by=tx)
        return own

    def problem_with_removal(self, number: int, tx: TxId | None) -> TopsError | None:
        """Why a route can't be withdrawn, now or in this transaction."""
        own = self.own.get(number)
        if own is None or own.ending:
            return UnknownRoute(self.key(number), "the site has no such advertisement or subscription")
        if own.removed_by is not None or own.added_by not in (None, tx):
            holder = own.removed_by or own.added_by
            return UnknownRoute(self.key(number), f"transaction {holder} is about to change it")
        return None

    def problem_with_publication(self, event: Event, tx: TxId | None = None) -> TopsError | None:
        """Why an event can't be published: no advertisement of the site's covers it."""
        covered = any(
            own.kind is RouteKind.ADVERTISEMENT
            and own.event_type == event.type
            and own.published_by(tx)
            and own.filter.matches(event.body)
            for own in self.own.values()
        )
        return None if covered else NotAdvertised(event.type)

    def registrations(self) -> list[RouteChanged]:
        """Everything that is committed, for a broker that knows nothing of it."""
        return [
            RouteChanged(route=self.route(own), added=True)
            for own in self.own.values()
            if own.added_by is None and not own.ending
        ]

    def committed(self, tx: TxId, *, versions: bool) -> None:
        """A transaction has changed these routes. With `versions` a broker says when the last event has come."""
        for number, own in list(self.own.items()):
            if own.added_by == tx:
                own.added_by = None
            if own.removed_by == tx:
                own.removed_by, own.ending = None, True
                if own.kind is RouteKind.ADVERTISEMENT or not versions:
                    del self.own[number]

    def aborted(self, tx: TxId) -> None:
        """A transaction has changed nothing."""
        for number, own in list(self.own.items()):
            if own.added_by == tx:
                del self.own[number]
            elif own.removed_by == tx:
                own.removed_by = None

    def reconnected(self) -> None:
        """No event can come any more for what has ended."""
        self.generation += 1
        for number in [n for n, own in self.own.items() if own.ending]:
            del self.own[number]
