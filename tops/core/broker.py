"""A broker without its sockets: links in, effects out.

Three things meet here and nowhere else: hop-by-hop routing (`RoutingTable`), the sites at this edge (`Edge`), and the
coordinator's duties for the types that meet here (`Rendezvous`). The broker turns what the latter wants done (`Post`,
`Disseminate`) into messages on links.
"""

from collections import OrderedDict
from collections.abc import Mapping

import msgspec

from tops.constraints import Predicate
from tops.core.edge import Edge, SiteLink
from tops.core.rendezvous import Rendezvous, RendezvousOptions
from tops.core.routing import RoutingTable, Topology
from tops.effects import Disseminate, Effect, Post, Send
from tops.errors import InvalidEventType
from tops.filters import Filter
from tops.ids import NodeId, TxId
from tops.messages import (
    Address,
    CensusOpened,
    CensusReplied,
    Definitions,
    Dissemination,
    Envelope,
    EventsPublished,
    Letter,
    LinkMessage,
    LocalCommitOrdered,
    LogEntry,
    ParticipantLost,
    PeersAsked,
    Publication,
    Published,
    PublisherLost,
    RouteAdded,
    RouteRemoved,
    RoutesReset,
    ScopeChosen,
    SubscriptionChanged,
    TxAbandoned,
    TypeAnswered,
    decode_body,
)
from tops.records import AnyRecord

TX_ROUTES_MAX = 100_000


class BrokerCore:
    """One broker of the overlay."""

    def __init__(
        self,
        name: NodeId,
        incarnation: int,
        topology: Topology,
        predicates: Mapping[str, Predicate] | None = None,
        options: RendezvousOptions | None = None,
    ) -> None:
        self.name, self.incarnation, self.topology = name, incarnation, topology
        self.table = RoutingTable()
        self.edge = Edge()
        self.rendezvous = Rendezvous(name, incarnation, predicates or {}, options or RendezvousOptions())
        self.neighbours: dict[NodeId, int] = {}  # neighbouring brokers -> their incarnation
        self.tx_routes: OrderedDict[TxId, list[NodeId]] = OrderedDict()  # where a transaction was announced

    # --------------------------------------------------------------------------------------------- links come and go

    def broker_up(self, neighbour: NodeId, incarnation: int, now: float) -> list[Effect]:
        """A neighbouring broker is there; it is told everything that it must know of this side of the link."""
        self.neighbours[neighbour] = incarnation
        routes = tuple(
            RouteAdded(definitions=self.table.types.definitions(event_type), filter=interest)
            for event_type, interest in self.table.announced_to(neighbour)
        )
        return [Send(neighbour, RoutesReset(routes=routes))]

    def site_up(self, site: NodeId, incarnation: int, now: float) -> list[Effect]:
        """A site is there. If it is a new life of a known one, the old one is gone for good."""
        known = self.edge.sites.get(site)
        effects: list[Effect] = []
        if known is not None and known.incarnation != incarnation:
            effects = self.site_lost(site, now)
        self.edge.connect(site, incarnation)
        return effects

    def site_lost(self, name: NodeId, now: float) -> list[Effect]:
        """A site is gone for good, or for longer than anybody waits: its transactions must not wait either."""
        site = self.edge.forget(name)
        if site is None:
            return []
        effects = self._announce_changes(self.table.forget_link(name))
        for broker, handles in sorted(site.contacts.items()):
            lost = ParticipantLost(handles=tuple(sorted(handles)))
            died = PublisherLost(site=name, incarnation=site.incarnation)
            effects += self._post(Address(broker), lost, now) + self._post(Address(broker), died, now)
        return effects

    # ------------------------------------------------------------------------------------------------------ messages

    def receive(self, link: NodeId, message: LinkMessage, now: float) -> list[Effect]:
        """Whatever a neighbour says, in the order in which it said it."""
        site = self.edge.sites.get(link)
        if site is not None:
            return self._from_site(site, message, now)
        match message:
            case Envelope():
                return self._route(message, now)
            case Dissemination(upward=True):
                return self._ascend(message, link, now)
            case Dissemination():
                return self._descend(message.publication, message.rendezvous, exclude=link)
            case RouteAdded() | RouteRemoved() | RoutesReset():
                return self._routes_changed(link, message)
        return []

    def _from_site(self, site: SiteLink, message: LinkMessage, now: float) -> list[Effect]:
        match message:
            case Envelope(to=to, sender=sender, body=body):
                if not self.edge.claim(site, sender.handle):
                    return []
                site.contacts.setdefault(to.broker, set()).add(sender.handle)
                if isinstance(body, CensusReplied):
                    self.edge.remember_pseudonym(site, body.tx, body.pseudonym)
                stamped = Envelope(
                    to=to,
                    sender=Address(self.name, sender.handle, site.incarnation),
                    incarnation=site.incarnation,
                    body=body,
                )
                return self._route(stamped, now)
            case Dissemination(rendezvous=rendezvous, early=early, publication=publication):
                site.contacts.setdefault(rendezvous, set()).add(site.name)
                stamped_publication = Dissemination(
                    rendezvous=rendezvous,
                    upward=True,
                    early=early,
                    sender=Address(self.name, site.name, site.incarnation),
                    incarnation=site.incarnation,
                    publication=publication,
                )
                return self._ascend(stamped_publication, site.name, now)
            case SubscriptionChanged():
                return self._subscribed(site, message, now)
            case ScopeChosen():
                rendezvous = self.name
                return [
                    self._to_site(site.name, publication, rendezvous) for publication in self.edge.chosen(site, message)
                ]
        return []

    # ---------------------------------------------------------------------------------------------------- letters

    def _route(self, envelope: Envelope, now: float) -> list[Effect]:
        to = envelope.to
        if to.broker != self.name:
            hop = self.topology.next_hop(self.name, to.broker)
            return [] if hop is None else [Send(hop, envelope)]
        if to.handle:
            owner = self.edge.owners.get(to.handle)
            if owner is None or to.incarnation not in (0, self.edge.sites[owner].incarnation):
                return []
            return [Send(owner, envelope)]
        if isinstance(envelope.body, PeersAsked):
            return [Send(s, envelope) for s in self.edge.subscribers_of(envelope.body.epoch.event_type)]
        effects = self.rendezvous.on_letter(envelope.body, envelope.sender, envelope.incarnation, now)
        return self._carry_out(effects, now)

    def _post(self, to: Address, letter: Letter, now: float) -> list[Effect]:
        envelope = Envelope(to=to, sender=Address(self.name), incarnation=self.incarnation, body=letter)
        return self._route(envelope, now)

    def _carry_out(
        self, effects: list[Effect], now: float, done: Publication | None = None, exclude: NodeId | None = None
    ) -> list[Effect]:
        """Turn the coordinator's wishes into messages. `done` has been passed to the subtree behind `exclude`."""
        carried: list[Effect] = []
        for effect in effects:
            if isinstance(effect, Post):
                carried += self._post(effect.to, effect.letter, now)
            elif isinstance(effect, Disseminate):
                skip = exclude if effect.publication is done else None
                carried += self._descend(effect.publication, self.name, skip)
            else:
                carried.append(effect)
        return carried

    # ----------------------------------------------------------------------------------------------- publications

    def _ascend(self, dissemination: Dissemination, link: NodeId, now: float) -> list[Effect]:
        publication = dissemination.publication
        # A broker behind the link has passed it to its own subtree; a site gets its own events back from here.
        passed = link if dissemination.early and link not in self.edge.sites else None
        if dissemination.rendezvous == self.name:
            effects = self.rendezvous.on_publication(publication, dissemination.sender, dissemination.incarnation, now)
            return self._carry_out(effects, now, publication, passed)
        hop = self.topology.next_hop(self.name, dissemination.rendezvous)
        up: list[Effect] = [] if hop is None else [Send(hop, dissemination)]
        if dissemination.early:
            return self._descend(publication, dissemination.rendezvous, exclude=passed) + up
        return up

    def _descend(self, publication: Publication, rendezvous: NodeId, exclude: NodeId | None) -> list[Effect]:
        if isinstance(publication, EventsPublished):
            return self._descend_events(publication, rendezvous, exclude)
        parent = self.topology.next_hop(self.name, rendezvous)
        # One message for all links: whoever carries out the effects encodes it once.
        downward = _downward(publication, rendezvous, self.name, self.incarnation)
        effects: list[Effect] = [
            Send(link, downward)
            for link in self._links_for(publication)
            if link != exclude and link != parent and (link not in self.edge.sites or self._passes(link, publication))
        ]
        if isinstance(publication, LocalCommitOrdered) or (
            isinstance(publication, TxAbandoned) and not publication.distributed_only
        ):
            self.tx_routes.pop(publication.tx, None)
            self.edge.end(publication.tx)
        return effects

    def _descend_events(self, published: EventsPublished, rendezvous: NodeId, exclude: NodeId | None) -> list[Effect]:
        """Several events at once; they are looked into only where somebody wants a part of them."""
        skip = (exclude, self.topology.next_hop(self.name, rendezvous))
        whole = _downward(published, rendezvous, self.name, self.incarnation)
        links = self.table.interested_in_all(published.event_type)
        if links is not None:
            return [Send(link, whole) for link in links if link not in skip]
        wanted: dict[NodeId, list[msgspec.Raw]] = {}
        for encoded in published.bodies:
            body = decode_body(encoded)
            if body is not None:
                for link in self.table.interested(published.event_type, body):
                    wanted.setdefault(link, []).append(encoded)
        effects: list[Effect] = []
        for link, bodies in wanted.items():
            if link in skip:
                continue
            message = whole
            if len(bodies) < len(published.bodies):
                part = msgspec.structs.replace(published, bodies=tuple(bodies))
                message = _downward(part, rendezvous, self.name, self.incarnation)
            effects.append(Send(link, message))
        return effects

    def _links_for(self, publication: Publication) -> list[NodeId]:
        match publication:
            case Published(event=event):
                return self.table.interested(event.type, event.body)
            case CensusOpened(tx=tx, spec=spec):
                links = self.table.interested(spec.event_type, spec.attributes)
                self.tx_routes[tx] = links
                if len(self.tx_routes) > TX_ROUTES_MAX:
                    self.tx_routes.popitem(last=False)
                return links
            case EventsPublished():
                return []  # each of its events has its own
        return self.tx_routes.get(publication.tx, [])

    def _passes(self, site: NodeId, publication: Publication) -> bool:
        if isinstance(publication, Published | EventsPublished):
            return True
        types: frozenset[str] = frozenset()
        if isinstance(publication, CensusOpened):
            types = frozenset(self.table.types.lineage(publication.spec.event_type))
        return self.edge.pass_on(site, publication.tx, publication, types)

    def _to_site(self, site: NodeId, publication: Publication, rendezvous: NodeId) -> Effect:
        return Send(site, _downward(publication, rendezvous, self.name, self.incarnation))

    # ------------------------------------------------------------------------------------------------ subscriptions

    def _subscribed(self, site: SiteLink, changed: SubscriptionChanged, now: float) -> list[Effect]:
        former = self.edge.subscribe(site, changed)
        touched: set[str] = set()
        if former is not None:
            self.table.remove(site.name, *former)
            touched.add(former[0])
        if changed.filter is not None and not changed.durable:
            name = changed.definitions[-1].name
            refusal = self._add_route(site.name, changed.definitions, changed.filter)
            if refusal is not None:
                refused = TypeAnswered(event_type=name, refusal=refusal)
                return self._post(Address(self.name, site.name), refused, now)
            touched.add(name)
        return self._announce_changes(touched)

    def _add_route(self, link: NodeId, definitions: Definitions, interest: Filter) -> str | None:
        try:
            self.table.add(link, definitions, interest)
        except InvalidEventType as refusal:
            return str(refusal)
        return None

    def _routes_changed(self, link: NodeId, message: RouteAdded | RouteRemoved | RoutesReset) -> list[Effect]:
        touched: set[str] = set()
        match message:
            case RouteAdded(definitions=definitions, filter=interest):
                self._add_route(link, definitions, interest)
                touched.add(definitions[-1].name)
            case RouteRemoved(event_type=name, filter=interest):
                self.table.remove(link, name, interest)
                touched.add(name)
            case RoutesReset(routes=routes):
                touched = self.table.forget_link(link)
                for route in routes:
                    self._add_route(link, route.definitions, route.filter)
                    touched.add(route.definitions[-1].name)
        return self._announce_changes(touched)

    def _announce_changes(self, event_types: set[str]) -> list[Effect]:
        """Tell the next hop towards each type's rendezvous what this side of the tree now wants."""
        effects: list[Effect] = []
        for name in sorted(t for t in event_types if t in self.table.types):
            parent = self.topology.next_hop(self.name, self.topology.rendezvous(self.table.types.family(name)))
            if parent is None:
                continue
            added, removed = self.table.changes_for(parent, name)
            definitions = self.table.types.definitions(name)
            effects += [Send(parent, RouteAdded(definitions=definitions, filter=f)) for f in added]
            effects += [Send(parent, RouteRemoved(event_type=name, filter=f)) for f in removed]
        return effects

    # -------------------------------------------------------------------------------------- timers, disk, recovery

    def timer(self, key: tuple[str, ...], now: float) -> list[Effect]:
        return self._carry_out(self.rendezvous.on_timer(key, now), now)

    def log_read(self, event_type: str, feed: str, entries: tuple[LogEntry, ...], now: float) -> list[Effect]:
        """The answer to a `ReadLog`."""
        return self._carry_out(self.rendezvous.log_read(event_type, feed, entries), now)

    def recover(self, record: AnyRecord) -> None:
        """One record of the journal, in order, before anything else."""
        self.rendezvous.recover(record)

    def recovered(self, now: float) -> list[Effect]:
        """The journal has been read to its end."""
        return self._carry_out(self.rendezvous.recovered(), now)


def _downward(publication: Publication, rendezvous: NodeId, me: NodeId, incarnation: int) -> Dissemination:
    return Dissemination(
        rendezvous=rendezvous,
        upward=False,
        early=False,
        sender=Address(me),
        incarnation=incarnation,
        publication=publication,
    )
