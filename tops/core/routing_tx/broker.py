"""Tree routing at one broker: what arrives from sites, neighbours and the coordinator, and who takes it.

All brokers compute the same tree from the configured links: the shortest paths towards the coordinator's broker, which
hashing chooses. Everything here is memory. A broker that begins anew gets its sites' routes from the sites and all
others from its neighbours, and takes part in transactions once the coordinator has opened a new epoch.
"""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from tops.core.overlay.topology import Topology
from tops.core.routing_tx.conflicts import touches
from tops.core.routing_tx.coordinator import TIMER, RoutingCoordinator
from tops.core.routing_tx.static_plans import StaticPlans
from tops.core.routing_tx.steps import Pending, Steps, TxStep, Work
from tops.core.routing_tx.termination import ITSELF, RESTARTED, UNKNOWN_HERE, Termination
from tops.core.routing_tx.tree_routes import TreeRoutes
from tops.model.ids import NodeId, TxId
from tops.model.rejections import Rejection, RejectionCode
from tops.model.routing import TxKind, client_id, client_of
from tops.protocol.effects import Effect, SendOnLink, SendTo, SetTimer
from tops.protocol.messages import (
    NO_EPOCH,
    NOT_PLANNED,
    Address,
    AskRoutingTx,
    BeginRoutingTx,
    BrokerJoins,
    DomainOpened,
    EndRoutingTx,
    EventStep,
    Flip,
    PlanStarted,
    PrepareRoutingTx,
    PublisherLost,
    RouteChanged,
    RouteStep,
    RoutingTxDecided,
    RoutingTxVoted,
    Sender,
    StepDone,
    StepProcessed,
    TreeMessage,
    TreePublished,
)
from tops.protocol.records import RoutingTxCommitted, RoutingTxRefused

DOMAIN: Final = "tops.routing"  # what the coordinator's broker is chosen by
JOIN_TIMER: Final = (TIMER, "join")
JOIN_AGAIN_S: Final = 1.0
Letters = Callable[[Any, Sender, Address, float], list[Effect]]  # what a coordinator does with a letter
ROOT: Final = NodeId("")  # where the coordinator's own messages come from
PARTICIPANT_LOST: Final = Rejection(RejectionCode.PARTICIPANT_FAILED, "a participant has left")
INITIATOR_LOST: Final = Rejection(RejectionCode.PUBLISHER_LOST, "its initiator is gone")


class TreeBroker:
    """The tree's side of one broker."""

    def __init__(self, name: NodeId, incarnation: int, topology: Topology) -> None:
        self.name, self.incarnation = name, incarnation
        self.root = topology.rendezvous(DOMAIN)
        parent = topology.next_hop(name, self.root)
        children = [b for b in topology.brokers if topology.next_hop(b, self.root) == name]
        self.routes = TreeRoutes([*children, *([parent] if parent is not None else [])])
        self.sites: dict[NodeId, int] = {}  # connected here, with their incarnations
        self.coordinator = RoutingCoordinator(incarnation, self._from_root) if self.root == name else None
        self.termination = Termination(
            self.routes, parent, self._initiator_here, self._at_root, self._applied_everywhere
        )
        self.steps = Steps(self.routes, self._step_done)
        self.plans = StaticPlans(self.steps, self._plan_completed)
        self.joined = False
        self._sessions = 0  # links in the tree that this incarnation has begun
        self._opened: DomainOpened | None = None
        self._early: list[tuple[NodeId, TxStep]] = []  # of transactions that began behind a commit not applied here
        self._held: list[tuple[NodeId, RouteChanged]] = []
        self._handlers: dict[type, Callable[[NodeId, Any], list[Effect]]] = {
            RouteChanged: self._on_change,
            TreePublished: self._on_published,
            RouteStep: self._on_step,
            EventStep: self._on_step,
            StepDone: self._on_done,
            StepProcessed: lambda link, m: self.plans.on_processed(link, m),
            PlanStarted: self._on_plan,
            PrepareRoutingTx: lambda link, m: self.termination.on_prepare(m),
            RoutingTxVoted: lambda link, m: self.termination.on_voted(link, m),
            RoutingTxDecided: self._on_decided,
            Flip: lambda link, m: self.termination.on_flip(link, m),
            DomainOpened: self._on_domain,
        }

    # ------------------------------------------------------------------------------------------------- links, start

    def started(self) -> list[Effect]:
        """The broker runs: the coordinator, if it is here, aborts what it has no commit of."""
        if self.coordinator is None:
            return self._join()
        self.coordinator.joined[self.name] = (self.incarnation, 0)
        return self.coordinator.recovered()

    def _join(self) -> list[Effect]:
        if self.root == self.name:
            return []
        return [
            SendTo(Address(self.root), self._joins()),
            SetTimer(JOIN_TIMER, JOIN_AGAIN_S),
        ]

    def _joins(self) -> BrokerJoins:
        return BrokerJoins(incarnation=self.incarnation, session=self._sessions)

    def broker_up(self, neighbour: NodeId) -> list[Effect]:
        """A neighbour begins a session: neither side has anything of the other, and messages may be lost."""
        if neighbour not in self.routes.neighbours:
            return []
        self._sessions += 1
        for work in self.termination.works.values():
            work.link_reset(neighbour)
        effects = self.routes.remove_link(neighbour)
        if self._opened is not None:
            effects.append(SendOnLink(neighbour, self._opened))
        effects += self.routes.meet(neighbour)
        if self.coordinator is not None:
            sender = Sender(self.name, "broker", incarnation=self.incarnation)
            return effects + self.coordinator.on_joins(self._joins(), sender, Address(self.name), 0.0)
        return effects + self._join()

    def site_up(self, site: NodeId, incarnation: int) -> list[Effect]:
        """A site begins a session, and is going to register what it has; of an earlier session nothing is left."""
        effects = self.site_lost(site) if site in self.sites else []
        self.sites[site] = incarnation
        return effects

    def site_lost(self, site: NodeId) -> list[Effect]:
        """A site left, failed, or is at another broker: whatever it had to do in transactions has failed."""
        incarnation = self.sites.pop(site, 0)
        prefix = f"{site}.{incarnation}."
        effects: list[Effect] = []
        self._held = [(link, changed) for link, changed in self._held if link != site]
        for tx in sorted(self.termination.works):
            work = self.termination.works.get(tx)
            if work is None:
                continue
            if tx.startswith(prefix):
                end = EndRoutingTx(tx=tx, commit=False, rejection=INITIATOR_LOST)
                effects.append(SendTo(Address(self.root), end))
            effects += self.steps.link_lost(work, site, PARTICIPANT_LOST)
            effects += self.termination.site_lost(work, site, PARTICIPANT_LOST)
        return effects + self.routes.remove_link(site)

    def _initiator_here(self, tx: TxId) -> NodeId | None:
        site, _, _ = tx.rpartition(".")
        name = NodeId(site.rpartition(".")[0])
        return name if tx.startswith(f"{name}.{self.sites.get(name, -1)}.") else None

    # ------------------------------------------------------------------------------------------------------ messages

    def receive(self, link: NodeId, message: TreeMessage) -> list[Effect]:
        """A message along the tree, from a site or a neighbour."""
        if link not in self.routes.neighbours and link not in self.sites:
            return []
        handler = self._handlers.get(type(message))
        return handler(link, message) if handler is not None else []

    def _from_root(self, message: TreeMessage) -> list[Effect]:
        """The coordinator is here, and floods a message."""
        return self._handlers[type(message)](ROOT, message)

    def _at_root(self, voted: RoutingTxVoted) -> list[Effect]:
        return [] if self.coordinator is None else self.coordinator.on_voted(voted)

    def _applied_everywhere(self, tx: TxId) -> list[Effect]:
        return [] if self.coordinator is None else self.coordinator.applied_everywhere(tx)

    def _owns(self, site: NodeId, changed: RouteChanged | RouteStep) -> bool:
        """Whether a route is the site's own, and what it is known as already."""
        route = changed.route
        if client_of(route.key) != client_id(site, self.sites[site]):
            return False
        known = self.routes.tables.entries.get(route.key)
        if known is None:
            return True
        same = (known.route.kind, known.route.event_type, known.route.filter)
        return same == (route.kind, route.event_type, route.filter)

    def _on_change(self, link: NodeId, changed: RouteChanged) -> list[Effect]:
        if link in self.sites:
            if not self._owns(link, changed):
                return []
            works = self.termination.works.values()
            if any(work.hold and touches(work.executed, changed.route) for work in works):
                self._held.append((link, changed))  # until a transaction that failed too often has ended
                return []
        return self.routes.change(link, changed)

    def _on_published(self, link: NodeId, published: TreePublished) -> list[Effect]:
        if link in self.sites:
            published = TreePublished(event=published.event, stamp=self.routes.number)
        return self.routes.publish(published, link)

    # ----------------------------------------------------------------------------------------- steps of transactions

    def _on_step(self, link: NodeId, message: TxStep) -> list[Effect]:
        step = message.step
        if link in self.sites:
            if isinstance(message, RouteStep) and not self._owns(link, message):
                return self._reject(link, message, Rejection(RejectionCode.INVALID, "the route is not the sender's"))
            step = msgspec.structs.replace(step, epoch=self.termination.epoch)
            message = msgspec.structs.replace(message, step=step)
        if step.tx in self.termination.ended:
            return self._reject(link, message, UNKNOWN_HERE)
        if step.epoch != self.termination.epoch or step.epoch == NO_EPOCH:
            return self._reject(link, message, RESTARTED)
        if step.base > self.routes.number:
            self._early.append((link, message))
            return []
        return self._process(link, message)

    def _process(self, link: NodeId, message: TxStep) -> list[Effect]:
        step = message.step
        if step.kind is TxKind.STATIC and step.tx not in self.plans.plans:
            return self._reject(link, message, UNKNOWN_HERE)
        work = self.termination.work(step.tx, step.kind, step.hold)
        if link in self.sites:
            work.sites.add(link)
        if step.planned != NOT_PLANNED:
            return self.plans.on_step(link, message)
        return self.steps.process(work, link, message)

    def _reject(self, link: NodeId, message: TxStep, rejection: Rejection) -> list[Effect]:
        return [SendOnLink(link, StepDone(tx=message.step.tx, op=message.step.op, rejection=rejection))]

    def _on_done(self, link: NodeId, done: StepDone) -> list[Effect]:
        work = self.termination.works.get(done.tx)
        if work is None:
            return []
        effects = self.steps.on_done(work, link, done)
        if done.rejection is not None and link in work.sites:
            work.rejection = work.rejection or done.rejection
            effects += self.termination.count(work)
        return effects

    def _step_done(self, work: Work, pending: Pending) -> list[Effect]:
        if pending.step.planned != NOT_PLANNED:
            return self.plans.on_done(work, pending)
        done = StepDone(tx=work.tx, op=pending.step.op, reached=pending.reached, rejection=pending.rejection)
        return [SendOnLink(pending.link, done)]

    def _on_plan(self, link: NodeId, started: PlanStarted) -> list[Effect]:
        effects: list[Effect] = [SendOnLink(child, started) for child in self.termination.children]
        if started.epoch != self.termination.epoch or started.tx in self.termination.ended:
            return effects
        work = self.termination.work(started.tx, TxKind.STATIC)
        issuers = sorted({NodeId(step.issuer) for step in started.steps} & self.sites.keys())
        work.sites.update(issuers)
        self.termination.open_ballot(work)
        effects += [SendOnLink(site, started) for site in issuers]
        return effects + self.plans.start(work, started.epoch, started.steps)

    def _plan_completed(self, work: Work) -> list[Effect]:
        ballot = self.termination.ballots.get(work.tx)
        if ballot is None or ITSELF not in ballot.waiting:
            return []
        for done in work.executed:
            message = done.message
            if isinstance(message, EventStep) and any(isinstance(to, tuple) for to in done.result):
                ballot.reached.add(message.step.planned)
        return self.termination.ready(work)

    # ----------------------------------------------------------------------------------------------------- decisions

    def _on_decided(self, link: NodeId, decided: RoutingTxDecided) -> list[Effect]:
        return self.termination.on_decided(decided) + self._go_on()

    def _on_domain(self, link: NodeId, opened: DomainOpened) -> list[Effect]:
        if self._opened is not None and opened.epoch <= self._opened.epoch:
            return []
        self._opened = opened
        effects: list[Effect] = [SendOnLink(n, opened) for n in self.routes.neighbours if n != link]
        if not self.joined and opened.joined.get(self.name) != self.incarnation:
            return effects  # of an epoch in which an earlier incarnation of this broker took part
        self.joined = True
        return effects + self.termination.on_domain(opened) + self._go_on()

    def _go_on(self) -> list[Effect]:
        """A transaction has ended: what waited for that goes on."""
        for tx in [tx for tx in self.plans.plans if tx not in self.termination.works]:
            self.plans.end(tx)
        effects: list[Effect] = []
        early, self._early = self._early, []
        for link, message in early:
            effects += self._on_step_again(link, message)
        held, self._held = self._held, []
        for link, changed in held:
            effects += self._on_change(link, changed)
        return effects

    def _on_step_again(self, link: NodeId, message: TxStep) -> list[Effect]:
        if link not in self.sites and link not in self.routes.neighbours:
            return []
        return self._on_step(link, message)

    # ---------------------------------------------------------------------------- letters to the coordinator, timers

    def handlers(self, publisher_lost: Letters) -> dict[type, Letters]:
        """What the coordinator at this broker answers. `publisher_lost` is what else is done when a site is gone."""
        coordinator = self.coordinator
        if coordinator is None:
            return {}

        def lost(message: PublisherLost, sender: Sender, at: Address, now: float) -> list[Effect]:
            effects = publisher_lost(message, sender, at, now)
            return effects + coordinator.on_publisher_lost(message, sender)

        return {
            PublisherLost: lost,
            BeginRoutingTx: coordinator.on_begin,
            EndRoutingTx: coordinator.on_end,
            AskRoutingTx: coordinator.on_asked,
            BrokerJoins: coordinator.on_joins,
        }

    def timer(self, key: tuple[str, ...]) -> list[Effect]:
        """A timer that this part of the broker has set."""
        if key == JOIN_TIMER:
            return [] if self.joined else self._join()
        return [] if self.coordinator is None else self.coordinator.on_timer(TxId(key[1]))

    def recover(self, record: RoutingTxCommitted | RoutingTxRefused) -> None:
        """What the coordinator wrote to the journal."""
        if self.coordinator is not None:
            self.coordinator.recover(record)
