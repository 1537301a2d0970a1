"""Links between simulated nodes: in order and without loss while both incarnations last, over connections that break.

The failure detector is an input here, not traffic: a broker is informed that a site is lost when it has been
unreachable for longer than the grace period.
"""

from math import log
from random import Random
from typing import TYPE_CHECKING

import msgspec

from tops.core.link.flow import Acknowledge, FlowLimits, LinkFlow
from tops.core.link.session import Frame
from tops.model.ids import NodeId
from tops.protocol.messages import Envelope, LinkMessage, Sender
from tops.sim.nodes import SimBroker, SimNode, SimSite

if TYPE_CHECKING:
    from tops.sim.world import World

Pair = tuple[NodeId, NodeId]
SITE_ROLE = "writer"
MESSAGE_BYTES = 1  # what a message counts in a window; a frame carries one, so that each has a latency of its own
ACKNOWLEDGE_AFTER_S = 0.2


class End(msgspec.Struct):
    """One end of a link, in the memory of the node that owns it."""

    node: SimNode
    flow: LinkFlow
    peer_incarnation: int
    connection: int = 0  # the number of the connection that is up
    late_delivery: int = 0  # the connection on which messages of a crashed peer still arrive
    last_arrival: float = 0.0
    acknowledging: bool = False  # an acknowledgement is due soon


class Network:
    """All links of a world."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.ends: dict[Pair, End] = {}  # (owner, peer)
        self.connections: dict[Pair, int] = {}  # sorted pair -> number of the connection that is up
        self.blocked: set[Pair] = set()  # sorted pairs that can't connect: partitions
        self.homes: dict[NodeId, NodeId] = {}  # site -> its broker
        self._count = 0
        windows = Random(f"{world.seed} windows")  # apart from the rest: a run with wide windows is not changed by it
        self._narrow = windows.random() < world.faults.narrow_windows
        window_bytes = windows.randint(4, 32) if self._narrow else FlowLimits().window_bytes
        self._limits = FlowLimits(window_bytes, MESSAGE_BYTES, acknowledge_bytes=window_bytes // 4)

    # ---------------------------------------------------------------------------------------------------- connections

    def node_up(self, name: NodeId) -> None:
        for peer in self._peers(name):
            self._try_connect(name, peer)

    def node_down(self, name: NodeId) -> None:
        for pair in [p for p in self.ends if p[0] == name]:
            del self.ends[pair]
        for pair in [p for p in self.connections if name in p]:
            other = self.ends.get((pair[1], pair[0]) if pair[0] == name else pair)
            if other is not None and self.world.rng.random() < self.world.faults.late_delivery:
                other.late_delivery = other.connection
            self.cut(*pair, reconnect=True)

    def _peers(self, name: NodeId) -> list[NodeId]:
        world = self.world
        if name in world.sites:
            return [self.homes[name]]
        return [*world.topology.neighbours[name], *sorted(s for s, b in self.homes.items() if b == name)]

    def cut(self, a: NodeId, b: NodeId, *, reconnect: bool = True) -> None:
        """The connection breaks; what was in flight is lost."""
        pair = _pair(a, b)
        if self.connections.pop(pair, None) is None:
            return
        self.world.trace.add(self.world.clock.now, "network", f"{a} -x- {b}")
        for ends in ((a, b), (b, a)):
            if ends in self.ends:
                self.ends[ends].connection = 0
        for site, broker in ((a, b), (b, a)):
            node = self.world.sites.get(site)
            if node is not None:
                self._site_cut(node, broker)
        if reconnect:
            self._retry(a, b)

    def _site_cut(self, site: SimSite, broker: NodeId) -> None:
        """The broker waits for the site for a while; the site waits for the broker for a while, then tries another."""
        world = self.world
        site_incarnation, broker_incarnation = site.incarnation, world.brokers[broker].incarnation

        def lost() -> None:
            node = world.brokers[broker]
            back = _pair(site.name, broker) in self.connections
            known = node.up and node.core.edge.sites.get(site.name)
            if not back and known and known.incarnation == site_incarnation and node.incarnation == broker_incarnation:
                self.ends.pop((broker, site.name), None)
                node.act(lambda: node.core.site_lost(site.name, world.clock.now))

        def fail_over() -> None:
            if site.up and site.incarnation == site_incarnation and self.homes[site.name] == broker:
                others = [b for b in world.topology.brokers if b != broker]
                if _pair(site.name, broker) not in self.connections and others:
                    self.settle_at(site.name, world.rng.choice(others))

        world.clock.after(world.site_grace_s, lost)
        world.clock.after(world.site_grace_s * world.rng.uniform(0.5, 3), fail_over)

    def settle_at(self, site: NodeId, broker: NodeId) -> None:
        """Set the site's broker; a site keeps no session with a broker that it has left."""
        if self.homes[site] != broker:
            self.ends.pop((site, self.homes[site]), None)
        self.homes[site] = broker
        self._try_connect(site, broker)

    def _retry(self, a: NodeId, b: NodeId) -> None:
        self.world.clock.after(self.world.rng.uniform(0.01, 0.3), lambda: self._try_connect(a, b))

    def _try_connect(self, a: NodeId, b: NodeId) -> None:
        world, pair = self.world, _pair(a, b)
        if pair in self.connections or not self._wanted(a, b):
            return
        one, other = world.node(a), world.node(b)
        if not one.up or not other.up:
            return  # retried when the node is back
        if pair in self.blocked:
            self._retry(a, b)
            return
        self._count += 1
        self.connections[pair] = self._count
        world.trace.add(world.clock.now, "network", f"{a} --- {b}")
        mine, theirs = self.ends.get((a, b)), self.ends.get((b, a))
        same = (
            mine is not None
            and theirs is not None
            and mine.peer_incarnation == other.incarnation
            and theirs.peer_incarnation == one.incarnation
        )
        if same and mine is not None and theirs is not None:
            mine.connection = theirs.connection = self._count
            self._resume(a, b, mine, theirs)
            self._resume(b, a, theirs, mine)
            return
        self.ends[a, b] = End(one, LinkFlow(self._limits), other.incarnation, self._count)
        self.ends[b, a] = End(other, LinkFlow(self._limits), one.incarnation, self._count)
        self._greet(a, b)
        self._greet(b, a)

    def _wanted(self, a: NodeId, b: NodeId) -> bool:
        for site, broker in ((a, b), (b, a)):
            if site in self.homes:
                return self.homes[site] == broker
        return True

    def _greet(self, owner: NodeId, peer: NodeId) -> None:
        """Inform the owner that a peer without a common session is connected."""
        world, node = self.world, self.world.node(owner)
        peer_incarnation = world.node(peer).incarnation
        now = world.clock.now
        if isinstance(node, SimSite):
            node.act(node.core.link_up, peer, now)
        elif isinstance(node, SimBroker) and peer in world.sites:
            node.act(node.core.site_up, Sender(peer, SITE_ROLE, incarnation=peer_incarnation), now)
        elif isinstance(node, SimBroker):
            node.act(node.core.broker_up, peer, peer_incarnation, now)

    def _resume(self, owner: NodeId, peer: NodeId, mine: End, theirs: End) -> None:
        mine.flow.connected(theirs.flow.session.received)
        while (frame := mine.flow.next_frame()) is not None:
            self._transmit(owner, peer, mine, frame)
            if self.world.rng.random() < self.world.faults.duplicate:
                self._transmit(owner, peer, mine, frame)

    # -------------------------------------------------------------------------------------------------------- traffic

    def send(self, owner: NodeId, peer: NodeId, message: LinkMessage) -> None:
        end = self.ends.get((owner, peer))
        if end is None:
            return  # the peer is disconnected: requests are repeated
        what = message.body if type(message) is Envelope else message
        self.world.trace.add(self.world.clock.now, owner, type(what).__name__, message, peer)
        end.flow.queue(message, MESSAGE_BYTES)
        self._transmit_queued(owner, peer, end)

    def _transmit_queued(self, owner: NodeId, peer: NodeId, end: End) -> None:
        """As much as the window takes; without a connection everything stays queued."""
        while end.connection and (frame := end.flow.next_frame()) is not None:
            self._transmit(owner, peer, end, frame)

    def _transmit(self, owner: NodeId, peer: NodeId, end: End, frame: Frame) -> None:
        world = self.world
        arrival = world.clock.now - log(1.0 - world.rng.random()) * world.faults.latency_s
        if arrival < end.last_arrival:
            arrival = end.last_arrival
        end.last_arrival = arrival
        world.clock.at(arrival, self._arrive, owner, peer, frame, end.connection)

    def _arrive(self, owner: NodeId, peer: NodeId, frame: Frame, connection: int) -> None:
        end = self.ends.get((peer, owner))
        if end is None or (end.connection != connection and end.late_delivery != connection):
            return
        node = end.node
        end.flow.confirm(frame.received)
        for message in end.flow.session.unpack(frame):
            node.receive(owner, message)
        if frame.number:
            due = end.flow.received(MESSAGE_BYTES)
            if due is Acknowledge.NOW:
                end.flow.acknowledge()
            elif due is Acknowledge.SOON and self._narrow and not end.acknowledging:
                # In a wide window nothing ever waits for this one.
                end.acknowledging = True
                self.world.clock.after(ACKNOWLEDGE_AFTER_S, self._acknowledge, peer, owner, end)
        self._transmit_queued(peer, owner, end)

    def _acknowledge(self, owner: NodeId, peer: NodeId, end: End) -> None:
        end.acknowledging = False
        if self.ends.get((owner, peer)) is end and end.flow.owes_acknowledgement:
            end.flow.acknowledge()
            self._transmit_queued(owner, peer, end)

    # ------------------------------------------------------------------------------------------------------ partitions

    def partition(self, side: set[NodeId]) -> None:
        """No node inside can connect to a node outside until `heal`."""
        for a, b in self._all_pairs():
            if (a in side) != (b in side):
                self.blocked.add(_pair(a, b))
                self.cut(a, b)

    def heal(self) -> None:
        self.blocked.clear()

    def _all_pairs(self) -> list[Pair]:
        world = self.world
        brokers = [(a, b) for a in world.topology.brokers for b in world.topology.neighbours[a] if a < b]
        every = [(s, b) for s in sorted(world.sites) for b in world.topology.brokers]
        return brokers + every


def _pair(a: NodeId, b: NodeId) -> Pair:
    return (a, b) if a < b else (b, a)
