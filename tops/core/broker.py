"""A broker without its sockets: links in, effects out.

Three things meet here and nowhere else: hop-by-hop routing (`RoutingTable`), the sites at this edge (`Edge`), and the
coordinator's duties for the types that meet here (`Rendezvous`). The broker turns what the latter wants done (`Post`,
`Disseminate`) into messages on links.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

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
    MembershipAnswered,
    ParticipantLost,
    PeersAsked,
    Publication,
    Published,
    PublisherLost,
    RouteAdded,
    RouteRemoved,
    RoutesReset,
    ScopeChosen,
    StandingAnswered,
    SubscriptionChanged,
    TxAbandoned,
    TxPublication,
    TxPublished,
    TypeAnswered,
    decode_body,
)
from tops.records import AnyRecord
from tops.transactions import TxState

TX_ROUTES_MAX = 100_000


class BrokerCore:
    """One broker of the overlay."""

    def __init__(
        self,
        name: NodeId,
        incarnation: int,
        topology: Topology,
        entropy: Callable[[int], bytes],
        predicates: Mapping[str, Predicate] | None = None,
        options: RendezvousOptions | None = None,
    ) -> None:
        self.name, self.incarnation, self.topology = name, incarnation, topology
        self.address = Address(name)
        self.table = RoutingTable()
        self.edge = Edge(name)
        known = {} if predicates is None else predicates  # kept as it is: more may be registered later
        self.rendezvous = Rendezvous(name, incarnation, known, options or RendezvousOptions(), entropy)
        self._letters = self.rendezvous.letters
        self.neighbours: dict[NodeId, int] = {}  # neighbouring brokers -> their incarnation
        self.tx_routes: OrderedDict[TxId, Sequence[NodeId]] = OrderedDict()  # where a transaction was announced

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
            if type(message) is Envelope:
                return self._letter_from_site(site, message, now)
            return self._from_site(site, message, now)
        if link not in self.neighbours:
            return []  # neither a site that is connected here nor a broker that we have met
        if type(message) is Envelope:
            return self._route(message, now)
        if type(message) is Dissemination:
            if message.upward:
                return self._ascend(message, link, now)
            return self._descend(message.publication, message.lineage, message.rendezvous, exclude=link)
        if isinstance(message, RouteAdded | RouteRemoved | RoutesReset):
            return self._routes_changed(link, message)
        return []

    def _from_site(self, site: SiteLink, message: LinkMessage, now: float) -> list[Effect]:
        if type(message) is Dissemination:
            if not _may_publish(site, message.publication):
                return []
            self.edge.claim(site, site.name, message.rendezvous)
            if message.rendezvous == self.name:
                effects = self.rendezvous.on_publication(message.publication, site.address, site.incarnation, now)
                return self._carry_out(effects, now)  # its publisher may subscribe to it, too
            stamped = Dissemination(
                rendezvous=message.rendezvous,
                upward=True,
                early=message.early,
                sender=site.address,
                incarnation=site.incarnation,
                publication=message.publication,
                lineage=message.lineage,
            )
            return self._ascend(stamped, None, now)
        if isinstance(message, ScopeChosen):
            return self._release(site.name, self.edge.chosen(site, message))
        if isinstance(message, SubscriptionChanged):
            return self._subscribed(site, message, now)
        return []

    def _letter_from_site(self, site: SiteLink, envelope: Envelope, now: float) -> list[Effect]:
        """Only under a name of its own, and with this broker's word for where the sender is."""
        to, body = envelope.to, envelope.body
        sender = self.edge.claim(site, envelope.sender.handle, to.broker)
        if sender is None:
            return []
        released: list[Effect] = []
        if type(body) is StandingAnswered:
            self.edge.on_standing(site, body)
        elif type(body) is CensusReplied:
            held = self.edge.on_replied(site, body.tx, body.pseudonym)
            released = self._release(site.name, held) if held else released
        handler = self._letters.get(type(body)) if to == self.address else None
        if handler is None:
            stamped = Envelope(to=to, sender=sender, incarnation=site.incarnation, body=body)
            return released + self._route(stamped, now)
        effects = handler(body, sender, site.incarnation, now)
        carried = self._carry_out(effects, now) if effects else effects
        return released + carried if released else carried

    def _release(self, site: NodeId, held: list[Publication]) -> list[Effect]:
        """What was held back until it was known what the site takes."""
        return [Send(site, self._downward(p, (), self.name)) for p in held]

    # ---------------------------------------------------------------------------------------------------- letters

    def _route(self, envelope: Envelope, now: float) -> list[Effect]:
        to = envelope.to
        if to.broker != self.name:
            hop = self.topology.next_hop(self.name, to.broker)
            return [] if hop is None else [Send(hop, envelope)]
        if to.handle:
            delivered = self._deliver(envelope)
            return [] if delivered is None else [delivered]
        if type(envelope.body) is PeersAsked:
            return [Send(s, envelope) for s in self.edge.subscribers_of(envelope.body.epoch.event_type)]
        effects = self.rendezvous.on_letter(envelope.body, envelope.sender, envelope.incarnation, now)
        return self._carry_out(effects, now)

    def _deliver(self, envelope: Envelope) -> Effect | None:
        """To whoever goes by the handle here, if it is still the life that is meant."""
        to, body = envelope.to, envelope.body
        site = self.edge.owners.get(to.handle)
        if site is None or (to.incarnation and to.incarnation != site.incarnation):
            return None
        if type(body) is MembershipAnswered and body.state is TxState.ABORTED:
            self.edge.dropped_out(site, body.tx)
        return Send(site.name, envelope)

    def post(self, to: Address, letter: Letter, now: float) -> list[Effect]:
        """A letter of the broker itself, not of a coordinator."""
        return self._post(to, letter, now)

    def _post(self, to: Address, letter: Letter, now: float) -> list[Effect]:
        return self._route(Envelope(to=to, sender=self.address, incarnation=self.incarnation, body=letter), now)

    def _carry_out(
        self, effects: list[Effect], now: float, done: Publication | None = None, exclude: NodeId | None = None
    ) -> list[Effect]:
        """Turn the coordinator's wishes into messages. `done` has been passed to the subtree behind `exclude`."""
        carried: list[Effect] = []
        for effect in effects:
            if type(effect) is Post:
                to = effect.to
                envelope = Envelope(to=to, sender=self.address, incarnation=self.incarnation, body=effect.letter)
                if to.broker != self.name or not to.handle:
                    carried += self._route(envelope, now)
                elif (delivered := self._deliver(envelope)) is not None:
                    carried.append(delivered)
            elif type(effect) is Disseminate:
                publication = effect.publication
                lineage = self.rendezvous.types.lineage_as_known(publication.event_type)
                carried += self._descend(publication, lineage, self.name, exclude if publication is done else None)
            else:
                carried.append(effect)
        return carried

    # ----------------------------------------------------------------------------------------------- publications

    def _ascend(self, dissemination: Dissemination, link: NodeId | None, now: float) -> list[Effect]:
        publication = dissemination.publication
        # A broker behind the link has passed it to its own subtree.
        passed = link if dissemination.early else None
        if dissemination.rendezvous == self.name:
            effects = self.rendezvous.on_publication(publication, dissemination.sender, dissemination.incarnation, now)
            return self._carry_out(effects, now, publication, passed)
        hop = self.topology.next_hop(self.name, dissemination.rendezvous)
        up: list[Effect] = [] if hop is None else [Send(hop, dissemination)]
        if dissemination.early:
            return self._descend(publication, dissemination.lineage, dissemination.rendezvous, exclude=passed) + up
        return up

    def _descend(
        self, publication: Publication, lineage: tuple[str, ...], rendezvous: NodeId, exclude: NodeId | None
    ) -> list[Effect]:
        if type(publication) is EventsPublished:
            return self._descend_events(publication, lineage, rendezvous, exclude)
        if type(publication) is not Published:
            return self._descend_in_tx(publication, lineage, rendezvous, exclude)
        links = self.table.interested(lineage, publication.event.body)
        skip = (exclude, self.topology.next_hop(self.name, rendezvous))
        downward = self._downward(publication, lineage, rendezvous)
        return [Send(link, downward) for link in links if link not in skip]

    def _descend_in_tx(
        self, publication: TxPublication, lineage: tuple[str, ...], rendezvous: NodeId, exclude: NodeId | None
    ) -> list[Effect]:
        """Where the transaction was announced, to whoever takes it there; its events are not matched again."""
        tx, edge = publication.tx, self.edge
        links = self._announce(publication, lineage) if type(publication) is CensusOpened else self.tx_routes.get(tx)
        if not links:
            return []
        downward = self._downward(publication, lineage, rendezvous)
        effects: list[Effect] = []
        sites, pass_on = edge.sites, edge.pass_on
        for link in links:
            site = sites.get(link)
            if site is not None:
                if pass_on(site, tx, publication, lineage):
                    effects.append(Send(link, downward))
            elif link != exclude and link != self.topology.next_hop(self.name, rendezvous):
                effects.append(Send(link, downward))
        if type(publication) is LocalCommitOrdered or (
            type(publication) is TxAbandoned and not publication.distributed_only
        ):
            edge.end(tx, self.tx_routes.pop(tx, ()))
        return effects

    def _announce(self, census: CensusOpened, lineage: tuple[str, ...]) -> Sequence[NodeId]:
        links = self.table.interested(lineage, census.spec.attributes)
        if links:
            self.tx_routes[census.tx] = links
            if len(self.tx_routes) > TX_ROUTES_MAX:
                self.tx_routes.popitem(last=False)
        return links

    def _descend_events(
        self, published: EventsPublished, lineage: tuple[str, ...], rendezvous: NodeId, exclude: NodeId | None
    ) -> list[Effect]:
        """Several events at once; they are looked into only where somebody wants a part of them."""
        skip = (exclude, self.topology.next_hop(self.name, rendezvous))
        whole = self._downward(published, lineage, rendezvous)
        links = self.table.interested_in_all(lineage)
        if links is not None:
            return [Send(link, whole) for link in links if link not in skip]
        wanted: dict[NodeId, list[msgspec.Raw]] = {}
        for encoded in published.bodies:
            body = decode_body(encoded)
            if body is not None:
                for link in self.table.interested(lineage, body):
                    wanted.setdefault(link, []).append(encoded)
        effects: list[Effect] = []
        for link, bodies in wanted.items():
            if link in skip:
                continue
            message = whole
            if len(bodies) < len(published.bodies):
                part = msgspec.structs.replace(published, bodies=tuple(bodies))
                message = self._downward(part, lineage, rendezvous)
            effects.append(Send(link, message))
        return effects

    def _downward(self, publication: Publication, lineage: tuple[str, ...], rendezvous: NodeId) -> Dissemination:
        return Dissemination(
            rendezvous=rendezvous,
            upward=False,
            early=False,
            sender=self.address,
            incarnation=self.incarnation,
            publication=publication,
            lineage=lineage,
        )

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


def _may_publish(site: SiteLink, publication: Publication) -> bool:
    """Sites publish events, and announce and fill transactions of their own life; the rest comes from coordinators."""
    if type(publication) is Published or type(publication) is EventsPublished:
        return True
    if type(publication) is not TxPublished and type(publication) is not CensusOpened:
        return False
    return publication.tx.startswith(site.own_transactions)
