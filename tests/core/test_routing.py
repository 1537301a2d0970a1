"""Routing: one rendezvous per family, trees towards it, merged interests, and early dissemination."""

import os
from collections import Counter
from random import Random

import pytest

from tests.core.machines import sender
from tests.scenarios.cluster import Cluster, links
from tops.core.broker.broker import BrokerCore
from tops.core.broker.routing import RoutingTable
from tops.core.overlay.topology import Topology, rendezvous_of
from tops.model.errors import ConfigError
from tops.model.event_types import EventType
from tops.model.filters import Filter
from tops.model.ids import NodeId, TxId
from tops.protocol.effects import Effect, SendOnLink
from tops.protocol.messages import (
    Address,
    Dissemination,
    Envelope,
    Event,
    LinkMessage,
    Origin,
    Published,
    PublisherDone,
    RouteAdded,
    RouteRemoved,
    RoutesReset,
    SubscriptionChanged,
    TypeAdvertised,
)
from tops.sim.world import random_links

BROKERS = tuple(NodeId(f"b{i}") for i in range(1, 9))
FAMILIES = [f"type {i}" for i in range(800)]
PLAIN = (EventType("plain", {"mark": str, "key": str, "size": int}, optional=("key", "size")),)


# -------------------------------------------------------------------------------------------------------- rendezvous


def test_the_rendezvous_depends_on_names_alone_not_on_their_order() -> None:
    shuffled = tuple(Random(1).sample(BROKERS, len(BROKERS)))

    assert all(rendezvous_of(BROKERS, f) == rendezvous_of(shuffled, f) for f in FAMILIES)


def test_families_are_spread_evenly() -> None:
    counts = Counter(rendezvous_of(BROKERS, f) for f in FAMILIES)

    assert set(counts) == set(BROKERS)
    assert max(counts.values()) < 2 * min(counts.values())


def test_one_broker_more_or_less_moves_only_its_own_families() -> None:
    before = {f: rendezvous_of(BROKERS, f) for f in FAMILIES}

    fewer = {f: rendezvous_of(BROKERS[:-1], f) for f in FAMILIES}
    more = {f: rendezvous_of((*BROKERS, NodeId("b9")), f) for f in FAMILIES}

    assert all(fewer[f] == home for f, home in before.items() if home != BROKERS[-1])
    assert all(more[f] in (home, "b9") for f, home in before.items())


# ---------------------------------------------------------------------------------------------------------- topology


def topologies() -> dict[str, Topology]:
    named = {shape: Topology(links(shape, 7)) for shape in ("chain", "star", "mesh")}
    return named | {f"random {seed}": Topology(random_links(Random(seed), 9)) for seed in range(6)}


@pytest.mark.parametrize("name", topologies())
def test_next_hops_towards_any_broker_form_a_tree_of_shortest_paths(name: str) -> None:
    topology = topologies()[name]

    for target in topology.brokers:
        for broker in topology.brokers:
            path = [broker]
            while path[-1] != target:
                hop = topology.next_hop(path[-1], target)
                assert hop in topology.neighbours[path[-1]]
                path.append(hop)
            assert len(path) == len(set(path)) == _distance(topology, broker, target) + 1


def _distance(topology: Topology, start: NodeId, target: NodeId) -> int:
    reached, steps = {start}, 0
    while target not in reached:
        reached |= {n for b in reached for n in topology.neighbours[b]}
        steps += 1
    return steps


def test_where_there_is_no_way_there_is_no_hop() -> None:
    split = Topology({NodeId("a"): [], NodeId("b"): []})

    assert split.next_hop(NodeId("a"), NodeId("b")) is None
    assert split.next_hop(NodeId("a"), NodeId("a")) is None


def test_a_link_to_nobody_is_a_configuration_error_that_names_both_ends() -> None:
    with pytest.raises(ConfigError, match=r"'b1'.*'b7'"):
        Topology({NodeId("b1"): [NodeId("b7")]})


# ---------------------------------------------------------------------------------------------------------- covering

UP, LEFT, RIGHT = NodeId("up"), NodeId("left"), NodeId("right")
BROAD, NARROW = Filter.where("size", ">", 0), Filter.where("size", ">", 10)


def test_a_covered_filter_is_not_announced_and_removing_the_cover_uncovers_it() -> None:
    table = RoutingTable()
    table.add(LEFT, PLAIN, BROAD)
    assert table.changes_for(UP, "plain") == ([BROAD], [])

    table.add(RIGHT, PLAIN, NARROW)
    assert table.changes_for(UP, "plain") == ([], [])
    table.remove(LEFT, "plain", BROAD)

    assert table.changes_for(UP, "plain") == ([NARROW], [BROAD])


def test_a_broader_filter_replaces_what_it_covers() -> None:
    table = RoutingTable()
    table.add(LEFT, PLAIN, NARROW)
    table.changes_for(UP, "plain")

    table.add(RIGHT, PLAIN, BROAD)

    assert table.changes_for(UP, "plain") == ([BROAD], [NARROW])


def test_the_same_filter_asked_for_twice_stays_until_it_is_removed_twice() -> None:
    table = RoutingTable()
    table.add(LEFT, PLAIN, NARROW)
    table.add(LEFT, PLAIN, NARROW)
    table.changes_for(UP, "plain")

    table.remove(LEFT, "plain", NARROW)
    assert table.changes_for(UP, "plain") == ([], [])
    table.remove(LEFT, "plain", NARROW)

    assert table.changes_for(UP, "plain") == ([], [NARROW])


def test_a_neighbours_own_interest_is_not_sent_back_to_it() -> None:
    table = RoutingTable()
    table.add(UP, PLAIN, BROAD)
    table.add(LEFT, PLAIN, NARROW)

    assert table.changes_for(UP, "plain") == ([NARROW], [])


def test_a_link_that_is_gone_takes_its_interest_with_it() -> None:
    table = RoutingTable()
    table.add(LEFT, PLAIN, BROAD)
    table.add(RIGHT, PLAIN, NARROW)
    table.changes_for(UP, "plain")

    assert table.remove_link(LEFT) == {"plain"}
    assert table.changes_for(UP, "plain") == ([NARROW], [BROAD])


# ----------------------------------------------------------------------------------------- one broker, links in and out

NAMED = (EventType("plain"),)  # what brokers tell each other of a type: its name and its ancestors'


def broker(name: str = "b2", shape: str = "chain") -> BrokerCore:
    """The middle one of three brokers in a chain."""
    core = BrokerCore(NodeId(name), 1, Topology(links(shape, 3)), bytes)
    for neighbour in core.topology.neighbours[core.name]:
        core.broker_up(neighbour, 1, 0.0)
    return core


def subscribed(core: BrokerCore, site: str, interest: Filter) -> list[Effect]:
    core.site_up(sender(site), 0.0)
    changed = SubscriptionChanged(subscription=1, definitions=PLAIN, filter=interest, scope=None, durable=False)
    return core.receive(NodeId(site), changed, 0.0)


def sent(effects: list[Effect]) -> list[tuple[str, LinkMessage]]:
    return [(e.link, e.message) for e in effects if isinstance(e, SendOnLink)]


def test_a_broker_tells_the_next_hop_only_what_it_does_not_know_yet() -> None:
    core = broker()
    up = core.topology.next_hop(core.name, core.topology.rendezvous("plain"))
    assert up is not None

    first = sent(subscribed(core, "s1", BROAD))
    second = sent(subscribed(core, "s2", NARROW))
    lost = sent(core.site_lost(NodeId("s1"), 0.0))

    assert first == [(up, RouteAdded(definitions=NAMED, filter=BROAD))]
    assert second == []
    assert lost == [
        (up, RouteAdded(definitions=NAMED, filter=NARROW)),
        (up, RouteRemoved(event_type="plain", filter=BROAD)),
    ]


def test_a_neighbour_that_comes_back_is_told_the_whole_interest_in_place_of_the_old() -> None:
    core = broker()
    up = core.topology.next_hop(core.name, core.topology.rendezvous("plain"))
    assert up is not None
    subscribed(core, "s1", NARROW)

    again = sent(core.broker_up(up, 2, 1.0))
    again = [(link, message) for link, message in again if not isinstance(message, Envelope)]  # of the tree

    assert again == [(up, RoutesReset(routes=(RouteAdded(definitions=NAMED, filter=NARROW),)))]


def test_what_a_site_claims_about_the_sender_is_replaced_by_the_stamp_of_its_broker() -> None:
    core = broker()
    elsewhere = next(b for b in core.topology.brokers if b != core.name)
    for name in ("s1", "s2"):
        core.site_up(sender(name), 0.0)
    victim = core.edge.sites[NodeId("s1")].address
    forged = Envelope(to=Address(elsewhere), body=PublisherDone(tx=TxId("t")), reply_to=victim, sender=sender("s1"))

    ((_, passed),) = sent(core.receive(NodeId("s2"), forged, 0.0))

    assert isinstance(passed, Envelope)
    assert passed.sender == sender("s2")
    assert passed.reply_to == core.edge.sites[NodeId("s2")].address != victim


def test_a_handle_tells_no_name_and_is_another_one_for_every_broker_secret() -> None:
    cores = [BrokerCore(NodeId("b1"), 1, Topology({NodeId("b1"): []}), secret) for secret in (bytes, os.urandom)]
    handles = []
    for core in cores:
        core.site_up(sender("victim"), 0.0)
        handles.append(core.edge.sites[NodeId("victim")].address.handle)

    assert handles[0] != handles[1]
    assert not any("victim" in handle for handle in handles)


def test_events_are_counted_under_a_pseudonym_of_the_site_that_published_them() -> None:
    core = broker()
    home = core.topology.rendezvous("plain")
    core.site_up(sender("s1"), 0.0)
    core.site_up(sender("s2"), 0.0)
    handles = {name: core.edge.sites[NodeId(name)].address.handle for name in ("s1", "s2")}
    forged = Origin("plain", 7, handles["s1"], 99)

    event = Published(event=Event("plain", {"mark": "m"}), origin=forged)
    upward = Dissemination(rendezvous=home, upward=True, early=False, publication=event, lineage=("plain",))
    ((_, passed),) = sent(core.receive(NodeId("s2"), upward, 0.0))

    assert isinstance(passed, Dissemination)
    assert isinstance(passed.publication, Published)
    assert passed.publication.origin == Origin("plain", 7, handles["s2"], 1)
    assert passed.sender == sender("s2")


def named_at(core: BrokerCore, home: NodeId, stem: str) -> str:
    """A name of an event type whose rendezvous is `home`."""
    return next(name for n in range(1000) if core.topology.rendezvous(name := f"{stem}{n}") == home)


def receivers(effects: list[Effect]) -> set[str]:
    return {link for link, message in sent(effects) if isinstance(message, Dissemination) and not message.upward}


@pytest.mark.parametrize("claimed", [("plain",), ("evil", "plain"), ("plain", "evil")])
def test_a_publishers_word_for_the_lineage_of_its_type_reaches_no_subscriber_of_another(
    claimed: tuple[str, ...],
) -> None:
    core = broker()
    evil = named_at(core, NodeId("b1"), "evil")
    subscribed(core, "s1", BROAD)
    core.site_up(sender("mallory"), 0.0)
    lineage = tuple(evil if name == "evil" else name for name in claimed)
    event = Published(event=Event(evil, {"mark": "m", "size": 9}), origin=Origin(evil, 1))
    lie = Dissemination(rendezvous=NodeId("b1"), upward=True, early=True, publication=event, lineage=lineage)

    effects = core.receive(NodeId("mallory"), lie, 0.0)

    assert receivers(effects) == set()
    ((link, upward),) = sent(effects)
    assert link == "b1" and isinstance(upward, Dissemination)
    assert not upward.early and not upward.lineage, "what the rendezvous knows counts"


def test_a_type_that_is_defined_where_its_family_does_not_meet_has_no_ancestors_there() -> None:
    core = broker()
    parent = named_at(core, NodeId("b1"), "orders")
    theirs, child = EventType(parent, {}), EventType("evil", {"mark": str}, parent=parent)
    core.site_up(sender("s1"), 0.0)
    wish = SubscriptionChanged(
        subscription=1, definitions=(theirs,), filter=Filter.everything(), scope=None, durable=False
    )
    core.receive(NodeId("s1"), wish, 0.0)
    core.site_up(sender("mallory"), 0.0)
    advertised = Envelope(to=core.address, body=TypeAdvertised(definitions=(theirs, child)))
    core.receive(NodeId("mallory"), advertised, 0.0)
    event = Published(event=Event("evil", {"mark": "m"}), origin=Origin("evil", 1))

    effects = core.receive(
        NodeId("mallory"), Dissemination(rendezvous=core.name, upward=True, early=False, publication=event), 0.0
    )

    assert receivers(effects) == set()


@pytest.mark.parametrize("durable", [False, True])
def test_events_of_a_durable_type_are_not_passed_on_before_its_log_has_them(durable: bool) -> None:
    core = broker()
    name = named_at(core, NodeId("b1"), "kept")
    core.site_up(sender("s1"), 0.0)
    kept = (EventType(name, {"mark": str}, durable=durable),)
    core.receive(
        NodeId("s1"),
        SubscriptionChanged(subscription=1, definitions=kept, filter=Filter.everything(), scope=None, durable=False),
        0.0,
    )
    core.site_up(sender("mallory"), 0.0)
    event = Published(event=Event(name, {"mark": "m"}), origin=Origin(name, 1))
    early = Dissemination(rendezvous=NodeId("b1"), upward=True, early=True, publication=event, lineage=(name,))

    effects = core.receive(NodeId("mallory"), early, 0.0)

    assert receivers(effects) == (set() if durable else {"s1"})


# ---------------------------------------------------------------------------------- whole overlays, event by event


def crossing(cluster: Cluster) -> list[tuple[str, str]]:
    """The links that publications cross from here on."""
    found: list[tuple[str, str]] = []

    def look(owner: NodeId, peer: NodeId, message: LinkMessage) -> bool:
        if isinstance(message, Dissemination):
            found.append((owner, peer))
        return False

    cluster.lose(look)
    return found


@pytest.mark.parametrize("shape", ["chain", "star", "mesh"])
@pytest.mark.parametrize("durable", [False, True])
def test_every_subscriber_gets_every_event_once_from_wherever_it_is_published(shape: str, durable: bool) -> None:
    cluster = Cluster(*(f"s{i}" for i in range(1, 7)), brokers=6, shape=shape)
    cluster.define("news", durable=durable)
    at = []
    for name, client in cluster.clients.items():
        client.advertise("news")
        at.append((name, client.subscribe("news")))
    traffic = crossing(cluster)

    for name, client in cluster.clients.items():
        client.publish("news", f"from {name}")
    cluster.run(1.0)

    for _, participant in at:
        assert sorted(participant.seen()) == [f"from s{i}" for i in range(1, 7)]
    for name in cluster.clients:
        assert sum(peer == name for _, peer in traffic) == 6


def test_an_event_published_below_a_branch_reaches_it_while_the_rendezvous_is_cut_off() -> None:
    """Without early dissemination it would reach nobody before the rendezvous has seen it."""
    cluster = Cluster(brokers=4)
    rendezvous = cluster.rendezvous("plain")
    order = list(cluster.world.topology.brokers)
    far = order[-1] if rendezvous != order[-1] else order[0]
    publisher, neighbour = cluster.join("P", far), cluster.join("N", far)
    distant = cluster.join("D", rendezvous)
    publisher.advertise("plain")
    near, beyond = neighbour.subscribe("plain"), distant.subscribe("plain")
    cluster.lose(lambda owner, peer, message: peer == rendezvous and isinstance(message, Dissemination))

    publisher.publish("plain", "one")
    cluster.run(1.0)

    assert near.seen() == ["one"]
    assert beyond.seen() == []


def test_an_event_does_not_enter_branches_where_nobody_wants_it() -> None:
    cluster = Cluster(brokers=3, shape="star")
    cluster.define("news")
    rendezvous = cluster.rendezvous("news")
    first, second = (b for b in cluster.world.topology.brokers if b != "b1")
    publisher, reader, other = cluster.join("P", "b1"), cluster.join("R", first), cluster.join("O", second)
    publisher.advertise("news")
    reader.subscribe("news", where=Filter.where("key", "=", "a"))
    other.subscribe("news", where=Filter.where("key", "=", "b"))
    traffic = crossing(cluster)

    publisher.publish("news", "one", key="a")
    cluster.run(1.0)

    assert ("b1", first) in traffic or rendezvous == first
    assert not [peer for _, peer in traffic if peer == "O"]
    if rendezvous != second:
        assert not [peer for _, peer in traffic if peer == second]


def test_a_removed_subscription_stops_its_events_and_uncovers_narrower_ones() -> None:
    cluster = Cluster("P", "A", "B", brokers=4)
    cluster["P"].advertise("plain")
    broad = cluster["A"].subscribe("plain")
    narrow = cluster["B"].subscribe("plain", where=Filter.where("key", "=", "b"))

    cluster["P"].publish("plain", "one", key="b")
    cluster.run(0.5)
    cluster["A"].unsubscribe(broad)
    cluster["P"].publish("plain", "two", key="a")
    cluster["P"].publish("plain", "three", key="b")
    cluster.run(0.5)

    assert broad.seen() == ["one"]
    assert narrow.seen() == ["one", "three"]


def test_interest_in_a_parent_is_interest_in_its_children_and_not_the_reverse() -> None:
    cluster = Cluster("P", "A", "B", brokers=4)
    cluster["P"].advertise("plain", "plain.child")
    parent, child = cluster["A"].subscribe("plain"), cluster["B"].subscribe("plain.child")

    cluster["P"].publish("plain", "one")
    cluster["P"].publish("plain.child", "two")
    cluster.run(0.5)

    assert parent.seen() == ["one", "two"]
    assert child.seen() == ["two"]


def test_events_of_one_publisher_and_type_arrive_in_order() -> None:
    cluster = Cluster("P", "A", brokers=5)
    cluster["P"].advertise("plain")
    reader = cluster["A"].subscribe("plain")

    pending = [cluster["P"].publish_soon("plain", f"m{i}") for i in range(30)]
    cluster.run(1.0)

    assert all(p.done for p in pending)
    assert reader.seen() == [f"m{i}" for i in range(30)]
