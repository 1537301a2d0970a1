"""Guarantees that hold although journals and databases are restored to an earlier time.

Most others do not hold: a restored journal lacks decisions, and an operator who could fix that is not part of a run.
What must hold is that no failure stays unnoticed: replicas that count as in sync are equal and have what was
acknowledged, or an alarm was raised.
"""

from collections.abc import Iterator

from tops.model.ids import NodeId
from tops.model.transactions import TxType
from tops.sim.databases import ReplicaDatabase
from tops.sim.world import World

ALARMS = frozenset({"journal-stale", "other-history", "ahead-of-log", "replicas-silent"})


def check_machines_survive_time_travel(world: World) -> list[str]:
    """No machine raises, and no replica is to apply what does not continue its state."""
    return list(world.history.machine_faults)


def check_in_sync_replicas_are_equal(world: World) -> list[str]:
    """No index holds two different entries at two replicas that count as in sync."""
    found = []
    reference: dict[int, tuple[NodeId, str]] = {}
    for name, database in in_sync(world):
        for position, digest in database.hashes.items():
            other, known = reference.setdefault(position, (name, digest))
            if known != digest:
                found.append(f"{name} and {other} are in sync and differ at index {position}")
                break
    return found


def check_differing_replicas_are_named(world: World) -> list[str]:
    """Wherever two replicas hold different entries under one index, an alarm was raised."""
    if any(kind in ALARMS for _, kind, _ in world.alarms):
        return []
    found = []
    reference: dict[int, tuple[NodeId, str]] = {}
    for name, database in replicas(world):
        for position, digest in database.hashes.items():
            other, known = reference.setdefault(position, (name, digest))
            if known != digest:
                found.append(f"{name} and {other} differ at index {position}, without an alarm")
                break
    return found


def check_acknowledged_is_not_lost_silently(world: World) -> list[str]:
    """An in-sync replica at the end of an open log has every acknowledged write, or an alarm was raised."""
    if any(kind in ALARMS for _, kind, _ in world.alarms):
        return []
    acknowledged = [
        tx
        for tx, known in world.history.transactions.items()
        if known.spec.event_type == "set"
        and known.spec.tx_type is TxType.DISTRIBUTED
        and "committed" in world.history.outcomes.get(tx, set())
    ]
    return [
        f"{tx} was acknowledged and {name}, which is in sync, does not have it"
        for name, database in in_sync(world)
        for tx in acknowledged
        if tx not in database.applied
    ]


TRAVEL = (
    check_machines_survive_time_travel,
    check_in_sync_replicas_are_equal,
    check_differing_replicas_are_named,
    check_acknowledged_is_not_lost_silently,
)


def replicas(world: World) -> Iterator[tuple[NodeId, ReplicaDatabase]]:
    for name, site in world.sites.items():
        for s in site.app.subscriptions.values():
            if isinstance(s.database, ReplicaDatabase):
                yield name, s.database


def in_sync(world: World) -> Iterator[tuple[NodeId, ReplicaDatabase]]:
    """Replicas that the coordinator of an open log counts as in sync."""
    for name, database in replicas(world):
        coordinator = world.brokers[world.sites[name].core.rendezvous("set")].core.rendezvous
        log = coordinator.logs.get("set")
        if log is not None and log.opening is None and name in coordinator.epochs["set"].standing.in_sync:
            yield name, database
