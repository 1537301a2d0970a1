"""A broker without its sockets: messages from links in, effects out.

It combines hop-by-hop routing (`RoutingTable`), the sites at this edge (`Edge`), and the coordinator of the types whose
rendezvous is this broker (`Rendezvous`). The broker turns the effects of the latter (`SendTo`, `Disseminate`) into
messages on links.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from tops.core.broker.edge import Edge, SiteLink
from tops.core.broker.routing import RoutingTable, Topology
from tops.core.commit.decision_sender import CheckProof, Sign
from tops.core.coordinator.rendezvous import BROKER_ROLE, Rendezvous, RendezvousOptions
from tops.core.log.event_log import Feed
from tops.core.ordering.broker import OrderingBroker, OrderingRecord
from tops.model.constraints import Predicate
from tops.model.errors import InvalidEventType
from tops.model.event_types import SetPart, set_of_log, set_part
from tops.model.filters import Filter
from tops.model.ids import NodeId, TxId
from tops.model.sizes import bundles, encoded_bytes
from tops.model.transactions import TxState
from tops.protocol.effects import Disseminate, Effect, Reject, SendOnLink, SendTo
from tops.protocol.messages import (
    Address,
    AddressedMessage,
    AdvertisementHandled,
    BeginTx,
    CensusOpened,
    CensusReplied,
    DecisionRelayed,
    Definitions,
    Dissemination,
    Envelope,
    EventsPublished,
    FollowLog,
    IndexesSkipped,
    LinkMessage,
    LocalCommitOrdered,
    LogEntry,
    MembershipReported,
    OrderedPublished,
    ParticipantLost,
    Publication,
    Published,
    PublisherLost,
    QueryPeers,
    RouteAdded,
    RouteRemoved,
    RoutesReset,
    RunOneShot,
    RunOneShots,
    ScopeChosen,
    Sender,
    StandingRegistered,
    SubscriptionChanged,
    TxAbandoned,
    TxPublication,
    TxPublished,
    TypeAdvertised,
    decode_body,
)
from tops.protocol.records import AnyRecord, LogAppended

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
        sign: Sign | None = None,
        check_proof: CheckProof | None = None,
    ) -> None:
        """`entropy` returns the requested number of random bytes. `sign` and `check_proof` are for decisions that
        participants relay to each other; None in a cluster without keys."""
        self.name, self.incarnation, self.topology = name, incarnation, topology
        self.address = Address(name)
        self.sender = Sender(name, BROKER_ROLE, incarnation=incarnation)
        self.table = RoutingTable()
        self.edge = Edge(name, entropy(32))
        known = {} if predicates is None else predicates  # not copied: more may be registered later
        self.rendezvous = Rendezvous(name, incarnation, known, options or RendezvousOptions(), entropy, sign)
        self._check_proof = check_proof
        ordering = self.ordering = OrderingBroker(
            name, incarnation, topology.domains, topology.rendezvous, topology.brokers, self.rendezvous.logs
        )
        self.rendezvous.order_with(ordering)
        self._message_handlers = self.rendezvous.handlers
        self.neighbours: dict[NodeId, int] = {}  # neighbouring brokers -> their incarnation
        self.tx_routes: OrderedDict[TxId, Sequence[NodeId]] = OrderedDict()  # where a transaction was announced

    # --------------------------------------------------------------------------------------------------------- links

    def broker_up(self, neighbour: NodeId, incarnation: int, now: float) -> list[Effect]:
        """A neighbouring broker is connected: send it the complete interest of this side of the link."""
        self.neighbours[neighbour] = incarnation
        routes = [
            RouteAdded(definitions=self.table.types.definitions(event_type), filter=interest)
            for event_type, interest in self.table.announced_to(neighbour)
        ]
        first = next(bundles(routes, encoded_bytes), [])
        added = [SendOnLink(neighbour, route) for route in routes[len(first) :]]
        return [SendOnLink(neighbour, RoutesReset(routes=tuple(first))), *added]

    def site_up(self, sender: Sender, now: float) -> list[Effect]:
        """A site is connected; all its messages are stamped with `sender`. A new incarnation of a known site replaces
        the old one, which is lost."""
        known = self.edge.sites.get(sender.node)
        effects: list[Effect] = []
        if known is not None and known.incarnation != sender.incarnation:
            effects = self.site_lost(known.name, now)
        self.edge.connect(sender)
        return effects

    def site_lost(self, name: NodeId, now: float) -> list[Effect]:
        """A site has left, or is unreachable for longer than the grace period: end what waits for it."""
        site = self.edge.forget(name)
        if site is None:
            return []
        effects = self._announce_changes(self.table.remove_link(name))
        lost = ParticipantLost(address=site.address)
        publisher_lost = PublisherLost(site=name, incarnation=site.incarnation)
        for broker in sorted(site.contacts):
            effects += self._send_to(Address(broker), lost, now) + self._send_to(Address(broker), publisher_lost, now)
        return effects + self._carry_out(self.ordering.site_lost(site.address), now)

    # ------------------------------------------------------------------------------------------------------ messages

    def receive(self, link: NodeId, message: LinkMessage, now: float) -> list[Effect]:
        """A message of a neighbour; messages of one link arrive in the order in which they were sent."""
        site = self.edge.sites.get(link)
        if site is not None:
            if type(message) is Envelope:
                return self._envelope_from_site(site, message, now)
            return self._from_site(site, message, now)
        if link not in self.neighbours:
            return []  # neither a site that is connected here nor a connected broker
        if type(message) is Envelope:
            return self._route(message, now)
        if type(message) is Dissemination:
            if message.upward:
                return self._ascend(message, link, now)
            return self._descend(message.publication, message.lineage, message.rendezvous, message.sender, exclude=link)
        if isinstance(message, RouteAdded | RouteRemoved | RoutesReset):
            return self._routes_changed(link, message)
        return []

    def _from_site(self, site: SiteLink, message: LinkMessage, now: float) -> list[Effect]:
        if type(message) is Dissemination:
            publication = _stamped(site, message.publication)
            if publication is None:
                return []
            self._note_contact(site, message.rendezvous)
            if message.rendezvous == self.name:
                if (misplaced := self._misplaced(publication.event_type, site.sender)) is not None:
                    return [misplaced]
                effects = self.rendezvous.on_publication(publication, site.sender, site.address, now)
                return self._carry_out(effects, now, sender=site.sender)  # the publisher may be a subscriber, too
            stamped = Dissemination(
                rendezvous=message.rendezvous,
                upward=True,
                early=message.early and message.lineage == (publication.event_type,),
                publication=publication,
                reply_to=site.address,
                sender=site.sender,
            )
            return self._ascend(stamped, None, now)
        if isinstance(message, ScopeChosen):
            return self._release(site.name, self.edge.chosen(site, message))
        if isinstance(message, SubscriptionChanged):
            return self._subscribed(site, message, now)
        return []

    def _envelope_from_site(self, site: SiteLink, envelope: Envelope, now: float) -> list[Effect]:
        """Stamp a message with its sender and its reply address, as this broker knows them from the handshake. What the
        site claims about itself is never read."""
        to, body = envelope.to, envelope.body
        if (foreign := _begun_for_another(site, body)) is not None:
            return [foreign]
        if to == self.address and (misplaced := self._misplaced_definition(body, site.sender)) is not None:
            return [misplaced]
        self._note_contact(site, to.broker)
        released: list[Effect] = []
        if type(body) is StandingRegistered:
            self.edge.on_standing(site, body)
        elif type(body) is CensusReplied:
            held = self.edge.on_replied(site, body.tx, body.pseudonym)
            released = self._release(site.name, held) if held else released
        handler = self._message_handlers.get(type(body)) if to == self.address else None
        if handler is None:
            stamped = Envelope(to=to, body=body, reply_to=site.address, sender=site.sender)
            return released + self._route(stamped, now)
        effects = handler(body, site.sender, site.address, now)
        carried = self._carry_out(effects, now) if effects else effects
        return released + carried if released else carried

    def _note_contact(self, site: SiteLink, broker: NodeId) -> None:
        # Only neighbours receive notices about contacts, and a site can make up any name: others are not stored.
        if broker in self.topology.neighbours:
            site.contacts.add(broker)

    def _release(self, site: NodeId, held: list[Publication]) -> list[Effect]:
        """Send what was withheld until the site had chosen its scope."""
        return [SendOnLink(site, self._downward(p, (), self.name, None)) for p in held]

    # --------------------------------------------------------------------------------------- addressed messages

    def _route(self, envelope: Envelope, now: float) -> list[Effect]:
        to = envelope.to
        if to.broker != self.name:
            hop = self.topology.next_hop(self.name, to.broker)
            return [] if hop is None else [SendOnLink(hop, envelope)]
        if to.handle:
            delivered = self._deliver(envelope)
            return [] if delivered is None else [delivered]
        if type(envelope.body) is QueryPeers:
            query = Envelope(
                to=to, body=envelope.body, reply_to=envelope.reply_to
            )  # without the sender, which sites must not learn
            return [SendOnLink(s, query) for s in self.edge.subscribers_of(envelope.body.epoch.event_type)]
        if envelope.sender is None:
            return []
        if (misplaced := self._misplaced_definition(envelope.body, envelope.sender)) is not None:
            return [misplaced]
        effects = self.rendezvous.on_message(envelope.body, envelope.sender, envelope.reply_to, now)
        return self._carry_out(effects, now)

    def _deliver(self, envelope: Envelope) -> Effect | None:
        """Deliver to the site with this handle, if it still is the incarnation that the address names."""
        to, body = envelope.to, envelope.body
        site = self.edge.owners.get(to.handle)
        if site is None or (to.incarnation and to.incarnation != site.incarnation):
            return None
        if type(body) is MembershipReported and body.state is TxState.ABORTED:
            self.edge.dropped_out(site, body.tx)
        sender = envelope.sender
        if type(body) is DecisionRelayed:
            if sender is None:
                return None
            if reason := self._unfounded(sender, body):
                return Reject(sender, "participate", body.epoch.event_type, reason)
        if sender is not None:
            envelope = Envelope(to=to, body=body, reply_to=envelope.reply_to)  # without the sender
        return SendOnLink(site.name, envelope)

    def _unfounded(self, sender: Sender, known: DecisionRelayed) -> str:
        """Why a relayed decision of this sender does not count, or empty: only the replicas of a set relay decisions on
        its log, and in a cluster with keys they need the coordinator's signature."""
        epoch = known.epoch
        members = set_of_log(epoch.event_type)
        if members and sender.replica_set != members:
            return f"{sender.node} relayed a decision on {epoch}, and is no replica of that set"
        if self._check_proof is not None and (why := self._check_proof(known.text, epoch.coordinator, known.proof)):
            return f"{sender.node} relayed a decision on {epoch} that is not signed by its coordinator: {why}"
        return ""

    def send_to(self, to: Address, message: AddressedMessage, now: float) -> list[Effect]:
        """Send a message of the broker itself, not of a coordinator."""
        return self._send_to(to, message, now)

    def _send_to(self, to: Address, message: AddressedMessage, now: float) -> list[Effect]:
        return self._route(Envelope(to=to, body=message, reply_to=self.address, sender=self.sender), now)

    def _carry_out(
        self,
        effects: list[Effect],
        now: float,
        done: Publication | None = None,
        exclude: NodeId | None = None,
        sender: Sender | None = None,
    ) -> list[Effect]:
        """Turn the coordinator's effects into messages, in order. `done` is a publication that the subtree behind
        `exclude` has got already; publications come from `sender`."""
        carried: list[Effect] = []
        for effect in effects:
            if type(effect) is SendTo:
                to = effect.to
                if to.broker != self.name or not to.handle:
                    carried += self._send_to(to, effect.message, now)
                elif (delivered := self._deliver(Envelope(to=to, body=effect.message))) is not None:
                    carried.append(delivered)
            elif type(effect) is Disseminate:
                publication = effect.publication
                lineage = self._lineage(publication.event_type)
                if type(publication) is OrderedPublished:
                    sender, publication = publication.sender, msgspec.structs.replace(publication, sender=None)
                passed = exclude if publication is done else None
                shown = sender if sender is not None and self._discloses_sender(lineage) else None
                carried += self._descend(publication, lineage, self.name, shown, passed)
            else:
                carried.append(effect)
        return carried

    # ----------------------------------------------------------------------------------------------- publications

    def _ascend(self, dissemination: Dissemination, link: NodeId | None, now: float) -> list[Effect]:
        publication = dissemination.publication
        # A broker behind the link has disseminated it to its own subtree.
        passed = link if dissemination.early else None
        if dissemination.rendezvous == self.name:
            sender = dissemination.sender
            if sender is None:
                return []
            if (misplaced := self._misplaced(publication.event_type, sender)) is not None:
                return [misplaced]
            effects = self.rendezvous.on_publication(publication, sender, dissemination.reply_to, now)
            return self._carry_out(effects, now, publication, passed, sender)
        down: list[Effect] = []
        if dissemination.early:
            rendezvous, name = dissemination.rendezvous, publication.event_type
            if self._may_pass_early(name):
                shown = dissemination.sender if set_part(name) is not SetPart.NONE else None
                down = self._descend(publication, (name,), rendezvous, shown, exclude=passed)
            else:
                # No subscriber of the type is behind the link: otherwise the broker there would know the type as well.
                dissemination = msgspec.structs.replace(dissemination, early=False)
        hop = self.topology.next_hop(self.name, dissemination.rendezvous)
        return down if hop is None else [*down, SendOnLink(hop, dissemination)]

    def _misplaced(self, event_type: str, sender: Sender) -> Reject | None:
        """The rejection of a publication whose type has its rendezvous at another broker.

        Only the rendezvous knows the definition and owns the log. An unknown type with ancestors belongs to the
        rendezvous of its family, which is not this broker."""
        family = self.rendezvous.families.get(event_type, event_type)
        home = self.topology.rendezvous(family)
        if home == self.name:
            return None
        reason = f"events of {event_type!r} go to {home}, the rendezvous of the type, and not to {self.name}"
        return Reject(sender, "publish", event_type, reason, f"events {event_type}", code="invalid")

    def _misplaced_definition(self, body: AddressedMessage, sender: Sender) -> Reject | None:
        """The same rejection for a message that may define a type."""
        if type(body) is TypeAdvertised or type(body) is FollowLog:
            return self._misplaced(body.definitions[0].name, sender)
        return None

    def _may_pass_early(self, event_type: str) -> bool:
        """Whether subscribers may get events of a type before its rendezvous, which knows its ancestors and its log.

        This is allowed only for a type that has neither. The ancestors that a publisher claims are not used: with them
        it could reach the subscribers of any type without the right to publish it. A subscriber's definition can only
        rule it out."""
        if event_type in self.ordering.topics:
            return False
        if set_part(event_type) is not SetPart.NONE:
            # The name of a replica set's type says what it is. Requests must reach a replica while the rendezvous of
            # its set is down.
            return not set_of_log(event_type)
        return self.table.types.may_pass_early(event_type)

    def _discloses_sender(self, lineage: tuple[str, ...]) -> bool:
        """Whether subscribers receive the sender of an event, by the definition of its publishers.

        The type has its rendezvous here. A subscriber's own definition does not count."""
        for name in lineage:
            whole = self.rendezvous.types.whole_if_known(name)
            if whole is not None and whole.discloses_sender:
                return True
        return False

    def _lineage(self, event_type: str) -> tuple[str, ...]:
        """The type and its ancestors, if this broker is their rendezvous. Of other types it knows only definitions that
        any site may have sent, which do not count."""
        lineage = self.rendezvous.types.lineage_as_known(event_type)
        return lineage if self.topology.rendezvous(lineage[-1]) == self.name else (event_type,)

    def _descend(
        self,
        publication: Publication,
        lineage: tuple[str, ...],
        rendezvous: NodeId,
        sender: Sender | None,
        exclude: NodeId | None,
    ) -> list[Effect]:
        if type(publication) is EventsPublished:
            return self._descend_events(publication, lineage, rendezvous, sender, exclude)
        if isinstance(publication, OrderedPublished | IndexesSkipped):
            return self._descend_ordered(publication, lineage, rendezvous, sender)
        if type(publication) is not Published:
            return self._descend_in_tx(publication, lineage, rendezvous, exclude)
        links = self.table.interested(lineage, publication.event.body)
        skip = (exclude, self.topology.next_hop(self.name, rendezvous))
        downward = self._downward(publication, lineage, rendezvous, sender)
        return [SendOnLink(link, downward) for link in links if link not in skip]

    def _descend_ordered(
        self,
        publication: OrderedPublished | IndexesSkipped,
        lineage: tuple[str, ...],
        rendezvous: NodeId,
        sender: Sender | None,
    ) -> list[Effect]:
        """On each link with a subscription to some type of the family: the event, or that its index is skipped there.
        Neither a filter nor another type of the subscription makes a gap."""
        links = self.table.links_of_family(lineage[-1])
        skip = self.topology.next_hop(self.name, rendezvous)
        whole = self._downward(publication, lineage, rendezvous, sender)
        if type(publication) is IndexesSkipped:
            return [SendOnLink(link, whole) for link in links if link != skip]
        assert type(publication) is OrderedPublished
        wanted = set(self.table.interested(lineage, publication.event.body))
        skipped = whole
        if len(wanted) < len(links):
            index = publication.index
            part = IndexesSkipped(
                domain=publication.domain,
                topic=publication.topic,
                event_type=lineage[-1],
                after=index - 1,
                upto=index,
            )
            skipped = self._downward(part, lineage[-1:], rendezvous, None)
        return [SendOnLink(link, whole if link in wanted else skipped) for link in links if link != skip]

    def _mark(self, link: NodeId, names: Iterable[str]) -> list[Effect]:
        """Types of ordering domains are wanted anew on this link: what was sent before is lost to whoever is behind."""
        types, topics = self.table.types, self.ordering.topics
        families = sorted({types.lineage(name)[-1] for name in names if name in types} & topics.keys())
        markers = [marker for family in families if (marker := self.ordering.marker(family)) is not None]
        return [SendOnLink(link, self._downward(m, (m.event_type,), self.name, None)) for m in markers]

    def _descend_in_tx(
        self, publication: TxPublication, lineage: tuple[str, ...], rendezvous: NodeId, exclude: NodeId | None
    ) -> list[Effect]:
        """Send to the links where the transaction was announced; its events are not matched again."""
        tx, edge = publication.tx, self.edge
        links = self._announce(publication, lineage) if type(publication) is CensusOpened else self.tx_routes.get(tx)
        if not links:
            return []
        downward = self._downward(publication, lineage, rendezvous, None)
        effects: list[Effect] = []
        sites, pass_on = edge.sites, edge.pass_on
        for link in links:
            site = sites.get(link)
            if site is not None:
                if pass_on(site, tx, publication, lineage):
                    effects.append(SendOnLink(link, downward))
            elif link != exclude and link != self.topology.next_hop(self.name, rendezvous):
                effects.append(SendOnLink(link, downward))
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
        self,
        published: EventsPublished,
        lineage: tuple[str, ...],
        rendezvous: NodeId,
        sender: Sender | None,
        exclude: NodeId | None,
    ) -> list[Effect]:
        """Disseminate several events; their bodies are decoded only if a link wants a part of them."""
        skip = (exclude, self.topology.next_hop(self.name, rendezvous))
        whole = self._downward(published, lineage, rendezvous, sender)
        links = self.table.interested_in_all(lineage)
        if links is not None:
            return [SendOnLink(link, whole) for link in links if link not in skip]
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
                message = self._downward(part, lineage, rendezvous, sender)
            effects.append(SendOnLink(link, message))
        return effects

    def _downward(
        self, publication: Publication, lineage: tuple[str, ...], rendezvous: NodeId, sender: Sender | None
    ) -> Dissemination:
        """The message for subscribers; it names the publisher only if the type discloses it."""
        return Dissemination(
            rendezvous=rendezvous,
            upward=False,
            early=False,
            publication=publication,
            lineage=lineage,
            sender=sender,
        )

    # ------------------------------------------------------------------------------------------------ subscriptions

    def _subscribed(self, site: SiteLink, changed: SubscriptionChanged, now: float) -> list[Effect]:
        if changed.filter is not None and (reason := self._beyond_quota(site, changed)) is not None:
            name = changed.definitions[-1].name
            subject = f"subscription {changed.subscription}"
            return [Reject(site.sender, "subscribe", name, reason, subject, code="quota")]
        former = self.edge.subscribe(site, changed)
        touched: set[str] = set()
        if former is not None:
            self.table.remove(site.name, *former)
            touched.add(former[0])
        if changed.filter is not None and not changed.durable:
            name = changed.definitions[-1].name
            rejection = self._add_route(site.name, changed.definitions, changed.filter)
            if rejection is not None:
                rejected = AdvertisementHandled(event_type=name, rejection=rejection)
                return self._send_to(site.address, rejected, now)
            touched.add(name)
        return self._announce_changes(touched) + self._mark(site.name, touched)

    def _beyond_quota(self, site: SiteLink, changed: SubscriptionChanged) -> str | None:
        quotas, identity = self.rendezvous.node.options.quotas, site.sender.accountable
        if self.edge.is_beyond(quotas.subscriptions, site, changed.subscription):
            return f"{identity} has {quotas.subscriptions} subscriptions here, which is the quota: end some first"
        if self.edge.is_beyond_bytes(quotas.filter_bytes, site, changed):
            return (
                f"the filters of the subscriptions of {identity} here take over {quotas.filter_bytes} bytes with this "
                "one, which is the quota: use shorter ones, or end some first"
            )
        return None

    def _add_route(self, link: NodeId, definitions: Definitions, interest: Filter) -> str | None:
        try:
            self.table.add(link, definitions, interest)
        except InvalidEventType as error:
            return str(error)
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
                touched = self.table.remove_link(link)
                for route in routes:
                    self._add_route(link, route.definitions, route.filter)
                    touched.add(route.definitions[-1].name)
        return self._announce_changes(touched) + self._mark(link, touched)

    def _announce_changes(self, event_types: set[str]) -> list[Effect]:
        """Send the changes of interest to the next hop towards each type's rendezvous."""
        effects: list[Effect] = []
        for name in sorted(t for t in event_types if t in self.table.types):
            family = self.table.types.lineage(name)[-1]
            parent = self.topology.next_hop(self.name, self.topology.rendezvous(family))
            added, removed = self.table.changes_for(parent, name)
            if parent is not None:
                definitions = self.table.types.definitions(name)
                effects += [SendOnLink(parent, RouteAdded(definitions=definitions, filter=f)) for f in added]
                effects += [SendOnLink(parent, RouteRemoved(event_type=name, filter=f)) for f in removed]
            self.table.drop_idle(name)
        return effects

    # -------------------------------------------------------------------------------------- timers, disk, recovery

    def timer(self, key: tuple[str, ...], now: float) -> list[Effect]:
        if key[0] == "ordering":
            return self._carry_out(self.ordering.on_timer(key[1], key[2]), now)
        return self._carry_out(self.rendezvous.on_timer(key, now), now)

    def log_read(self, event_type: str, feed: str, entries: tuple[LogEntry, ...], now: float) -> list[Effect]:
        """The result of a `ReadLog`."""
        return self._carry_out(self.rendezvous.log_read(event_type, feed, entries), now)

    def drop_followers(self, event_type: str, before: int, now: float) -> tuple[list[Feed], list[Effect]]:
        """See `LogService.drop_followers`."""
        rendezvous = self.rendezvous
        dropped, effects = rendezvous.log_service.drop_followers(rendezvous.logs[event_type], before)
        return dropped, self._carry_out(effects, now)

    def recover(self, record: AnyRecord) -> None:
        """Replay one record of the journal, in order, before any message."""
        if isinstance(record, OrderingRecord):
            self.ordering.recover(record)
            return
        self.rendezvous.recover(record)
        if type(record) is LogAppended:
            self.ordering.recover_appended(record)

    def recovered(self, now: float) -> list[Effect]:
        """The journal has been read to its end."""
        return self._carry_out(self.rendezvous.recovered() + self.ordering.recovered(), now)


def _begun_for_another(site: SiteLink, body: AddressedMessage) -> Reject | None:
    """The rejection of a transaction that a site begins under an id of another site, or None."""
    if type(body) is RunOneShots:
        foreign = next((one.tx for one in body.transactions if not site.begins(one.tx)), None)
    elif type(body) is BeginTx or type(body) is RunOneShot:
        foreign = None if site.begins(body.tx) else body.tx
    else:
        return None
    if foreign is None:
        return None
    reason = f"{site.name} can't begin {foreign!r}: ids of its transactions begin with {site.own_transactions!r}"
    return Reject(site.sender, "begin", body.spec.event_type, reason, f"tx {foreign}")


def _stamped(site: SiteLink, publication: Publication) -> Publication | None:
    """The publication as this broker forwards it, or None. Sites may publish events, and announce and fill transactions
    of their own incarnation; everything else comes from coordinators. Events get a pseudonym of the site, which
    identifies their origin."""
    if type(publication) is Published:
        return Published(event=publication.event, origin=site.origin(publication.origin))
    if type(publication) is EventsPublished:
        origin = site.origin(publication.origin)
        return EventsPublished(event_type=publication.event_type, bodies=publication.bodies, origin=origin)
    if type(publication) is TxPublished or type(publication) is CensusOpened:
        return publication if site.begins(publication.tx) else None
    return None
