"""A broker without its sockets: links in, effects out.

Three things meet here and nowhere else: hop-by-hop routing (`RoutingTable`), the sites at this edge (`Edge`), and the
coordinator's duties for the types that meet here (`Rendezvous`). The broker turns what the latter wants done (`Post`,
`Disseminate`) into messages on links.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import msgspec

from tops.core.broker.edge import Edge, SiteLink
from tops.core.broker.routing import RoutingTable
from tops.core.commit.decision_teller import CheckProof, Sign
from tops.core.coordinator.rendezvous import BROKER_ROLE, Rendezvous, RendezvousOptions
from tops.core.log.event_log import Feed
from tops.core.overlay.topology import Topology
from tops.core.routing_tx.broker import TreeBroker
from tops.core.routing_tx.coordinator import TIMER as ROUTING_TIMER
from tops.model.constraints import Predicate
from tops.model.errors import InvalidEventType
from tops.model.event_types import set_of_log
from tops.model.filters import Filter
from tops.model.ids import NodeId, TxId
from tops.model.sizes import bundles, encoded_bytes
from tops.model.transactions import TxState
from tops.protocol.effects import Disseminate, Effect, Post, Reject, Send
from tops.protocol.messages import (
    Address,
    BeginRoutingTx,
    BeginTx,
    CensusOpened,
    CensusReplied,
    Definitions,
    Dissemination,
    EndRoutingTx,
    Envelope,
    EventsPublished,
    Letter,
    LinkMessage,
    LocalCommitOrdered,
    LogEntry,
    MembershipAnswered,
    ParticipantLost,
    PeerKnows,
    PeersAsked,
    Publication,
    Published,
    PublisherLost,
    RouteAdded,
    RouteRemoved,
    RoutesReset,
    RunOneShot,
    RunOneShots,
    ScopeChosen,
    Sender,
    StandingAnswered,
    SubscriptionChanged,
    TreeMessage,
    TxAbandoned,
    TxPublication,
    TxPublished,
    TypeAnswered,
    decode_body,
)
from tops.protocol.records import AnyRecord, RoutingTxCommitted, RoutingTxRefused

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
        """`entropy` gives as many random bytes as it is asked for. `sign` and `check_proof` are for decisions that
        participants pass on to each other; without keys there are none."""
        self.name, self.incarnation, self.topology = name, incarnation, topology
        self.address = Address(name)
        self.sender = Sender(name, BROKER_ROLE, incarnation=incarnation)
        self.table = RoutingTable()
        self.edge = Edge(name, entropy(32))
        known = {} if predicates is None else predicates  # kept as it is: more may be registered later
        self.rendezvous = Rendezvous(name, incarnation, known, options or RendezvousOptions(), entropy, sign)
        self.tree = TreeBroker(name, incarnation, topology)
        self.rendezvous.letters.update(self.tree.letters(self.rendezvous.letters[PublisherLost]))
        self._check_proof = check_proof
        self._letters = self.rendezvous.letters
        self.neighbours: dict[NodeId, int] = {}  # neighbouring brokers -> their incarnation
        self.tx_routes: OrderedDict[TxId, Sequence[NodeId]] = OrderedDict()  # where a transaction was announced

    # --------------------------------------------------------------------------------------------- links come and go

    def broker_up(self, neighbour: NodeId, incarnation: int, now: float) -> list[Effect]:
        """A neighbouring broker is there; it is told everything that it must know of this side of the link."""
        self.neighbours[neighbour] = incarnation
        routes = [
            RouteAdded(definitions=self.table.types.definitions(event_type), filter=interest)
            for event_type, interest in self.table.announced_to(neighbour)
        ]
        first = next(bundles(routes, encoded_bytes), [])
        added = [Send(neighbour, route) for route in routes[len(first) :]]
        tree = self._carry_out(self.tree.broker_up(neighbour), now)
        return [Send(neighbour, RoutesReset(routes=tuple(first))), *added, *tree]

    def site_up(self, sender: Sender, now: float) -> list[Effect]:
        """A site is there; all its messages are stamped with `sender`. If it is a new incarnation of a known one, the
        old one is gone for good."""
        known = self.edge.sites.get(sender.node)
        effects: list[Effect] = []
        if known is not None and known.incarnation != sender.incarnation:
            effects = self.site_lost(known.name, now)
        self.edge.connect(sender)
        return effects + self._carry_out(self.tree.site_up(sender.node, sender.incarnation), now)

    def site_lost(self, name: NodeId, now: float) -> list[Effect]:
        """A site is gone for good, or for longer than anybody waits: its transactions must not wait either."""
        site = self.edge.forget(name)
        if site is None:
            return []
        effects = self._announce_changes(self.table.forget_link(name))
        effects += self._carry_out(self.tree.site_lost(name), now)
        lost = ParticipantLost(address=site.address)
        died = PublisherLost(site=name, incarnation=site.incarnation)
        for broker in sorted(site.contacts):
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
            return self._descend(message.publication, message.lineage, message.rendezvous, message.sender, exclude=link)
        if isinstance(message, RouteAdded | RouteRemoved | RoutesReset):
            return self._routes_changed(link, message)
        if isinstance(message, TreeMessage):
            return self._carry_out(self.tree.receive(link, message), now)
        return []

    def _from_site(self, site: SiteLink, message: LinkMessage, now: float) -> list[Effect]:
        if type(message) is Dissemination:
            publication = _stamped(site, message.publication)
            if publication is None:
                return []
            site.contacts.add(message.rendezvous)
            if message.rendezvous == self.name:
                effects = self.rendezvous.on_publication(publication, site.sender, site.address, now)
                return self._carry_out(effects, now, sender=site.sender)  # its publisher may subscribe to it, too
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
        if isinstance(message, TreeMessage):
            return self._carry_out(self.tree.receive(site.name, message), now)
        return []

    def _letter_from_site(self, site: SiteLink, envelope: Envelope, now: float) -> list[Effect]:
        """With this broker's word for who the sender is and where it is reached; what the site claims is not read."""
        to, body = envelope.to, envelope.body
        if (foreign := _begun_for_another(site, body)) is not None:
            return [foreign]
        site.contacts.add(to.broker)
        released: list[Effect] = []
        if type(body) is StandingAnswered:
            self.edge.on_standing(site, body)
        elif type(body) is CensusReplied:
            held = self.edge.on_replied(site, body.tx, body.pseudonym)
            released = self._release(site.name, held) if held else released
        handler = self._letters.get(type(body)) if to == self.address else None
        if handler is None:
            stamped = Envelope(to=to, body=body, reply_to=site.address, sender=site.sender)
            return released + self._route(stamped, now)
        effects = handler(body, site.sender, site.address, now)
        carried = self._carry_out(effects, now) if effects else effects
        return released + carried if released else carried

    def _release(self, site: NodeId, held: list[Publication]) -> list[Effect]:
        """What was held back until it was known what the site takes."""
        return [Send(site, self._downward(p, (), self.name, None)) for p in held]

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
            asked = Envelope(to=to, body=envelope.body, reply_to=envelope.reply_to)  # sites do not learn who asks
            return [Send(s, asked) for s in self.edge.subscribers_of(envelope.body.epoch.event_type)]
        if envelope.sender is None:
            return []
        effects = self.rendezvous.on_letter(envelope.body, envelope.sender, envelope.reply_to, now)
        return self._carry_out(effects, now)

    def _deliver(self, envelope: Envelope) -> Effect | None:
        """To whoever goes by the handle here, if it is still the life that is meant."""
        to, body = envelope.to, envelope.body
        site = self.edge.owners.get(to.handle)
        if site is None or (to.incarnation and to.incarnation != site.incarnation):
            return None
        if type(body) is MembershipAnswered and body.state is TxState.ABORTED:
            self.edge.dropped_out(site, body.tx)
        sender = envelope.sender
        if type(body) is PeerKnows:
            if sender is None:
                return None
            if reason := self._unfounded(sender, body):
                return Reject(sender, "participate", body.epoch.event_type, reason)
        if sender is not None:
            envelope = Envelope(to=to, body=body, reply_to=envelope.reply_to)  # sites do not learn who writes to them
        return Send(site.name, envelope)

    def _unfounded(self, sender: Sender, known: PeerKnows) -> str:
        """Why a decision that this sender passes on does not count, or empty: in a set's log only its replicas may do
        so, and with keys they need the coordinator's signature."""
        epoch = known.epoch
        members = set_of_log(epoch.event_type)
        if members and sender.replica_set != members:
            return f"{sender.node} passes on a decision on {epoch}, and is no replica of that set"
        if self._check_proof is not None and (why := self._check_proof(known.text, epoch.coordinator, known.proof)):
            return f"{sender.node} passes on a decision on {epoch} that is not signed by its coordinator: {why}"
        return ""

    def post(self, to: Address, letter: Letter, now: float) -> list[Effect]:
        """A letter of the broker itself, not of a coordinator."""
        return self._post(to, letter, now)

    def _post(self, to: Address, letter: Letter, now: float) -> list[Effect]:
        return self._route(Envelope(to=to, body=letter, reply_to=self.address, sender=self.sender), now)

    def _carry_out(
        self,
        effects: list[Effect],
        now: float,
        done: Publication | None = None,
        exclude: NodeId | None = None,
        sender: Sender | None = None,
    ) -> list[Effect]:
        """Turn the coordinator's wishes into messages. `done` has been passed to the subtree behind `exclude`; what is
        to be disseminated comes from `sender`."""
        carried: list[Effect] = []
        for effect in effects:
            if type(effect) is Post:
                to = effect.to
                if to.broker != self.name or not to.handle:
                    carried += self._post(to, effect.letter, now)
                elif (delivered := self._deliver(Envelope(to=to, body=effect.letter))) is not None:
                    carried.append(delivered)
            elif type(effect) is Disseminate:
                publication = effect.publication
                lineage = self._lineage(publication.event_type)
                passed = exclude if publication is done else None
                carried += self._descend(publication, lineage, self.name, sender, passed)
            else:
                carried.append(effect)
        return carried

    # ----------------------------------------------------------------------------------------------- publications

    def _ascend(self, dissemination: Dissemination, link: NodeId | None, now: float) -> list[Effect]:
        publication = dissemination.publication
        # A broker behind the link has passed it to its own subtree.
        passed = link if dissemination.early else None
        if dissemination.rendezvous == self.name:
            sender = dissemination.sender
            if sender is None:
                return []
            effects = self.rendezvous.on_publication(publication, sender, dissemination.reply_to, now)
            return self._carry_out(effects, now, publication, passed, sender)
        down: list[Effect] = []
        if dissemination.early:
            rendezvous, name = dissemination.rendezvous, publication.event_type
            if self._may_pass_early(name):
                down = self._descend(publication, (name,), rendezvous, dissemination.sender, exclude=passed)
            else:
                # Nobody behind the link subscribes to the type, or the broker there would know the same of it.
                dissemination = msgspec.structs.replace(dissemination, early=False)
        hop = self.topology.next_hop(self.name, dissemination.rendezvous)
        return down if hop is None else [*down, Send(hop, dissemination)]

    def _may_pass_early(self, event_type: str) -> bool:
        """Whether subscribers may get events of a type before its rendezvous, which knows its ancestors and its log.

        Only of a type that has neither. A publisher's word for its ancestors counts for nothing: it would reach the
        subscribers of any type, without the right to publish it. A subscriber's definition can only rule it out."""
        known = self.table.types.whole_if_known(event_type)
        if known is not None and (known.durable or known.parent is not None):
            return False
        return not set_of_log(event_type)

    def _lineage(self, event_type: str) -> tuple[str, ...]:
        """The type and its ancestors, as far as this broker may say: anybody may have defined here what meets
        elsewhere."""
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
        if type(publication) is not Published:
            return self._descend_in_tx(publication, lineage, rendezvous, exclude)
        links = self.table.interested(lineage, publication.event.body)
        skip = (exclude, self.topology.next_hop(self.name, rendezvous))
        downward = self._downward(publication, lineage, rendezvous, sender)
        return [Send(link, downward) for link in links if link not in skip]

    def _descend_in_tx(
        self, publication: TxPublication, lineage: tuple[str, ...], rendezvous: NodeId, exclude: NodeId | None
    ) -> list[Effect]:
        """Where the transaction was announced, to whoever takes it there; its events are not matched again."""
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
        self,
        published: EventsPublished,
        lineage: tuple[str, ...],
        rendezvous: NodeId,
        sender: Sender | None,
        exclude: NodeId | None,
    ) -> list[Effect]:
        """Several events at once; they are looked into only where somebody wants a part of them."""
        skip = (exclude, self.topology.next_hop(self.name, rendezvous))
        whole = self._downward(published, lineage, rendezvous, sender)
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
                message = self._downward(part, lineage, rendezvous, sender)
            effects.append(Send(link, message))
        return effects

    def _downward(
        self, publication: Publication, lineage: tuple[str, ...], rendezvous: NodeId, sender: Sender | None
    ) -> Dissemination:
        """Publishers are anonymous to subscribers unless the type says otherwise."""
        return Dissemination(
            rendezvous=rendezvous,
            upward=False,
            early=False,
            publication=publication,
            lineage=lineage,
            sender=sender if sender is not None and self.table.discloses_sender(lineage) else None,
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
            refusal = self._add_route(site.name, changed.definitions, changed.filter)
            if refusal is not None:
                refused = TypeAnswered(event_type=name, refusal=refusal)
                return self._post(site.address, refused, now)
            touched.add(name)
        return self._announce_changes(touched)

    def _beyond_quota(self, site: SiteLink, changed: SubscriptionChanged) -> str | None:
        quotas, who = self.rendezvous.node.options.quotas, site.sender.accountable
        if self.edge.is_beyond(quotas.subscriptions, site, changed.subscription):
            return f"{who} has {quotas.subscriptions} subscriptions here, which is the quota: end some first"
        if self.edge.is_beyond_bytes(quotas.filter_bytes, site, changed):
            return (
                f"the filters of the subscriptions of {who} here take over {quotas.filter_bytes} bytes with this one, "
                "which is the quota: use shorter ones, or end some first"
            )
        return None

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
            added, removed = self.table.changes_for(parent, name)
            if parent is None:
                continue
            definitions = self.table.types.definitions(name)
            effects += [Send(parent, RouteAdded(definitions=definitions, filter=f)) for f in added]
            effects += [Send(parent, RouteRemoved(event_type=name, filter=f)) for f in removed]
        return effects

    # -------------------------------------------------------------------------------------- timers, disk, recovery

    def timer(self, key: tuple[str, ...], now: float) -> list[Effect]:
        if key[0] == ROUTING_TIMER:
            return self._carry_out(self.tree.timer(key), now)
        return self._carry_out(self.rendezvous.on_timer(key, now), now)

    def log_read(self, event_type: str, feed: str, entries: tuple[LogEntry, ...], now: float) -> list[Effect]:
        """The answer to a `ReadLog`."""
        return self._carry_out(self.rendezvous.log_read(event_type, feed, entries), now)

    def drop_followers(self, event_type: str, before: int, now: float) -> tuple[list[Feed], list[Effect]]:
        """See `LogKeeper.drop_followers`."""
        rendezvous = self.rendezvous
        dropped, effects = rendezvous.log_keeper.drop_followers(rendezvous.logs[event_type], before)
        return dropped, self._carry_out(effects, now)

    def recover(self, record: AnyRecord) -> None:
        """One record of the journal, in order, before anything else."""
        if isinstance(record, RoutingTxCommitted | RoutingTxRefused):
            self.tree.recover(record)
        else:
            self.rendezvous.recover(record)

    def recovered(self, now: float) -> list[Effect]:
        """The journal has been read to its end."""
        return self._carry_out(self.rendezvous.recovered() + self.tree.started(), now)


def _begun_for_another(site: SiteLink, body: Letter) -> Reject | None:
    """A transaction that a site wants to begin under an id that is not its own."""
    if type(body) is RunOneShots:
        foreign = next((one.tx for one in body.transactions if not site.begins(one.tx)), None)
    elif type(body) is BeginTx or type(body) is RunOneShot:
        foreign = None if site.begins(body.tx) else body.tx
    elif type(body) is BeginRoutingTx or type(body) is EndRoutingTx:
        if site.begins(body.tx):
            return None
        reason = f"{site.name} can't begin or end {body.tx!r}: ids of its transactions begin with its name"
        return Reject(site.sender, "begin", "", reason, f"tx {body.tx}")
    else:
        return None
    if foreign is None:
        return None
    reason = f"{site.name} can't begin {foreign!r}: ids of its transactions begin with {site.own_transactions!r}"
    return Reject(site.sender, "begin", body.spec.event_type, reason, f"tx {foreign}")


def _stamped(site: SiteLink, publication: Publication) -> Publication | None:
    """Sites publish events, and announce and fill transactions of their own incarnation; the rest comes from
    coordinators. Events get a pseudonym of the site, under which they are counted."""
    if type(publication) is Published:
        return Published(event=publication.event, origin=site.origin(publication.origin))
    if type(publication) is EventsPublished:
        origin = site.origin(publication.origin)
        return EventsPublished(event_type=publication.event_type, bodies=publication.bodies, origin=origin)
    if type(publication) is TxPublished or type(publication) is CensusOpened:
        return publication if site.begins(publication.tx) else None
    return None
