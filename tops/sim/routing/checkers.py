"""What must hold in every run; each checker names what does not."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

from tops.model.filters import Filter
from tops.model.ids import NodeId, TxId
from tops.model.routing import RouteKey, RouteKind, TxKind
from tops.sim.routing.history import Operation, Transaction
from tops.sim.routing.world import RoutingWorld

Checker = Callable[[RoutingWorld], list[str]]
Subscriptions = dict[RouteKey, tuple[NodeId, str, Filter]]
SEARCHED_MAX = 6  # transactions whose orders are all tried


def machines_do_not_fail(world: RoutingWorld) -> list[str]:
    """No input makes a machine raise."""
    return world.history.broken


def everything_ends(world: RoutingWorld) -> list[str]:
    """Once faults have stopped, nothing stays open; and nothing is ever open past its time-out."""
    return [*world.seen.late, *(f"at the end {what}" for what in world.open_work())]


def outcomes_agree(world: RoutingWorld) -> list[str]:
    """Whatever a site was told is what the coordinator's journal says."""
    committed = {record.tx for record in world.commits()}
    return [
        f"{site} was told that {tx} committed={told}, and the journal says the opposite"
        for tx, transaction in world.seen.transactions.items()
        for site, told in transaction.outcomes.items()
        if told != (tx in committed)
    ]


def tables_agree(world: RoutingWorld) -> list[str]:
    """Every broker has exactly the entries that follow from the committed routes of the sites, without any marks."""
    registered = _registered(world)
    found: list[str] = []
    for broker in world.brokers:
        routes = world.tree(broker).routes
        wanted = _expected(world, broker, registered)
        entries = routes.tables.entries
        found += [f"{broker} lacks {key}" for key in sorted(wanted.keys() - entries.keys())]
        found += [f"{broker} still has {key}" for key in sorted(entries.keys() - wanted.keys())]
        for key in sorted(wanted.keys() & entries.keys()):
            entry = entries[key]
            if not entry.base or entry.marks:
                found.append(f"{broker} has marks on {key}")
            if (entry.hop, frozenset(entry.sent)) != wanted[key]:
                found.append(f"{broker} has {key} from {entry.hop} for {sorted(entry.sent)}, not {wanted[key]}")
    return found


Registered = dict[RouteKey, tuple[NodeId, NodeId, RouteKind, str, Filter]]


def _registered(world: RoutingWorld) -> Registered:
    """Site, its broker, and what it is, by key."""
    registered: Registered = {}
    for name, site in world.sites.items():
        for number, own in site.core.tree.routes.own.items():
            if own.added_by is None and not own.ending:
                key = world.app(name).key(number)
                registered[key] = (name, world.network.homes[name], own.kind, own.event_type, own.filter)
    return registered


def _expected(
    world: RoutingWorld, broker: NodeId, registered: Registered
) -> dict[RouteKey, tuple[NodeId, frozenset[NodeId]]]:
    """By key: where an entry comes from at a broker, and which neighbours have it from there."""
    neighbours = world.tree(broker).routes.neighbours
    expected: dict[RouteKey, tuple[NodeId, frozenset[NodeId]]] = {}
    for key, (site, home, kind, event_type, wanted) in registered.items():
        hop = site if home == broker else _towards(world, broker, home)
        if kind is RouteKind.ADVERTISEMENT:
            expected[key] = (hop, frozenset(neighbours) - {hop})
            continue
        homes = [
            other_home
            for _, other_home, other_kind, other_type, other in registered.values()
            if other_kind is RouteKind.ADVERTISEMENT and other_type == event_type and other.overlaps(wanted)
        ]
        if home != broker and not any(broker in _path(world, home, other) for other in homes):
            continue
        onward = {_towards(world, broker, other) for other in homes if other != broker}
        expected[key] = (hop, frozenset(onward) - {hop})
    return expected


def _towards(world: RoutingWorld, here: NodeId, there: NodeId) -> NodeId:
    return _path(world, here, there)[1]


def _path(world: RoutingWorld, here: NodeId, there: NodeId) -> list[NodeId]:
    """The only way through the tree."""

    def search(way: list[NodeId]) -> list[NodeId]:
        if way[-1] == there:
            return way
        for neighbour in world.tree(way[-1]).routes.neighbours:
            if neighbour not in way and (found := search([*way, neighbour])):
                return found
        return []

    return search([here])


def each_update_of_a_transaction_reaches_one_agent(world: RoutingWorld) -> list[str]:
    """Of a committed one exactly one of the group's dispatcher and agents; of others nobody gets anything."""
    committed = {record.tx for record in world.commits()}
    receivers: dict[str, list[NodeId]] = defaultdict(list)
    found: list[str] = []
    members = _members(world)
    for delivery in world.seen.deliveries:
        if delivery.tx is not None:
            if delivery.tx not in committed:
                found.append(f"{delivery.site} got {delivery.mark} of {delivery.tx}, which did not commit")
            if delivery.site in members:
                receivers[delivery.mark].append(delivery.site)
    whole = not world.seen.crashed  # whoever crashes after its vote loses what it was about to be shown
    for tx, transaction in world.seen.transactions.items():
        for mark in transaction.updates if tx in committed else ():
            count = len(receivers[mark])
            if world.kind is not TxKind.ISOLATED and transaction.initiator in world.seen.crashed:
                continue  # its next incarnation does not wait for the transactions of the last one
            if count > 1 or (whole and count == 0):
                found.append(f"update {mark} of {tx} reached {sorted(receivers[mark])}")
    return found


def each_regular_update_reaches_one_agent(world: RoutingWorld) -> list[str]:
    """In calm runs with isolated transactions: no commit loses or doubles one. When all is quiet: those who have the
    item, in every run."""
    receivers: dict[str, list[NodeId]] = defaultdict(list)
    members = _members(world)
    for delivery in world.seen.deliveries:
        if delivery.tx is None and delivery.site in members:
            receivers[delivery.mark].append(delivery.site)
    found: list[str] = []
    exactly = world.kind is TxKind.ISOLATED or world.wait_s is not None
    for update in world.seen.updates:
        got = sorted(receivers[update.mark])
        if update.at >= world.seen.quiet_since:
            holders = sorted(name for name, _ in world.holders(update.group, update.item))
            crashed = world.seen.crashed & set(members)
            if got != holders or (not crashed and len(got) != 1):
                found.append(f"in the end update {update.mark} reached {got}, and {holders} have the item")
        elif world.calm and exactly and len(got) != 1:
            found.append(f"regular update {update.mark} reached {got}")
    return found


def _members(world: RoutingWorld) -> set[NodeId]:
    return {*world.dispatchers.values(), *(a for agents in world.agents.values() for a in agents)}


def nothing_is_delivered_twice(world: RoutingWorld) -> list[str]:
    """No subscription gets an event twice. A regular one that a site has got may wait for it at another broker, too, if
    it moves there."""
    deliveries = [d for d in world.seen.deliveries if world.calm or d.tx is not None]
    counted = Counter((d.site, d.incarnation, d.key, d.mark) for d in deliveries)
    return [
        f"{site} got {mark} {count} times for {key}" for (site, _, key, mark), count in counted.items() if count > 1
    ]


def isolated_histories_are_serializable(world: RoutingWorld) -> list[str]:
    """In calm runs: some serial order of the committed transactions explains who got which publication, and who has
    which subscription in the end."""
    if world.kind is not TxKind.ISOLATED or not world.calm or world.wait_s is not None:
        return []
    records = sorted(world.commits(), key=lambda record: record.number)
    transactions = [world.seen.transactions[record.tx] for record in records if record.tx in world.seen.transactions]
    receivers = _receivers(world)
    final = _final(world)
    if _explains(world, transactions, receivers, final):
        return []
    if len(transactions) <= SEARCHED_MAX and any(
        _explains(world, list(order), receivers, final) for order in permutations(transactions)
    ):
        return []
    wrong = next(_contradictions(world, transactions, receivers, final), "")
    return [f"no serial order explains the run; by the commits' numbers {wrong}"]


def _receivers(world: RoutingWorld) -> dict[tuple[TxId, str], frozenset[RouteKey]]:
    """Who got the publications of transactions, observers aside: they change their routes outside of any."""
    found: dict[tuple[TxId, str], set[RouteKey]] = defaultdict(set)
    for delivery in world.seen.deliveries:
        if delivery.tx is not None and delivery.site not in world.observers:
            found[delivery.tx, delivery.mark].add(delivery.key)
    return {key: frozenset(keys) for key, keys in found.items()}


def _final(world: RoutingWorld) -> frozenset[RouteKey]:
    registered = _registered(world)
    return frozenset(
        key
        for key, (site, _, kind, _, _) in registered.items()
        if kind is RouteKind.SUBSCRIPTION and site not in world.observers
    )


def _explains(world: RoutingWorld, order: list[Transaction], receivers: Any, final: frozenset[RouteKey]) -> bool:
    return next(_contradictions(world, order, receivers, final), None) is None


def _contradictions(
    world: RoutingWorld,
    order: list[Transaction],
    receivers: dict[tuple[TxId, str], frozenset[RouteKey]],
    final: frozenset[RouteKey],
) -> Iterator[str]:
    state: Subscriptions = {k: s for k, s in world.seen.initial.items() if s[0] not in world.observers}
    for transaction in order:
        for operation in transaction.operations:
            yield from _contradiction(transaction.tx, operation, state, receivers)
    if frozenset(state) != final:
        yield f"the subscriptions {sorted(frozenset(state) ^ final)} differ in the end"


def _contradiction(
    tx: TxId,
    operation: Operation,
    state: Subscriptions,
    receivers: dict[tuple[TxId, str], frozenset[RouteKey]],
) -> Iterator[str]:
    if operation.kind is RouteKind.SUBSCRIPTION:
        if operation.added:
            state[operation.key] = (operation.site, operation.event_type, operation.filter)
        elif state.pop(operation.key, None) is None:
            yield f"{tx} removed {operation.key}, which was not there"
    elif operation.kind is None:
        wanted = frozenset(
            key
            for key, (_, event_type, wanted) in state.items()
            if event_type == operation.event_type and wanted.matches(operation.body)
        )
        got = receivers.get((tx, operation.body["mark"]), frozenset())
        if wanted != got:
            yield f"{operation.body['mark']} of {tx} would have gone to {sorted(wanted)} and went to {sorted(got)}"


def undisturbed_transactions_commit(world: RoutingWorld) -> list[str]:
    """Where nothing is in the way of a transaction it commits at the first attempt."""
    if not world.undisturbed:
        return []
    committed = {record.tx for record in world.commits()}
    return [f"{tx} did not commit, and nothing was in its way" for tx in world.seen.transactions if tx not in committed]


CHECKERS: tuple[Checker, ...] = (
    machines_do_not_fail,
    everything_ends,
    outcomes_agree,
    tables_agree,
    each_update_of_a_transaction_reaches_one_agent,
    each_regular_update_reaches_one_agent,
    nothing_is_delivered_twice,
    isolated_histories_are_serializable,
    undisturbed_transactions_commit,
)


def violations(world: RoutingWorld) -> list[str]:
    """Everything that is wrong with a run that is over."""
    return [f"{checker.__name__}: {found}" for checker in CHECKERS for found in checker(world)]
