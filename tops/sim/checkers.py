"""One small function per guarantee. Each compares databases with what applications observed.

The journals of the brokers are read only for the decisions, which are defined by the journals. A checker returns the
violations that it found, as texts.
"""

from collections.abc import Callable, Iterator

import msgspec

from tops.core.commit.epoch import hashed_all
from tops.model.constraints import constrains_participants, unmet
from tops.model.ids import NodeId, TxId, hashed
from tops.model.rejections import RejectionCode
from tops.model.transactions import LocalOutcome, Scope, TxState, TxType
from tops.protocol.messages import EpochId, LogEntry
from tops.protocol.records import EpochCommitted, LogAppended
from tops.sim.databases import CallbackDatabase, ReplicaDatabase, marks
from tops.sim.site_app import SimSubscription
from tops.sim.workload import DEFINITIONS
from tops.sim.world import World

ENDS_LOST_MAX = 30  # a crash may lose the message with a transaction's outcome

Checker = Callable[[World], list[str]]


class Decision(msgspec.Struct):
    """A commit decision in a broker's journal."""

    epoch: EpochId | None
    committing: frozenset[str]


def subscriptions(world: World) -> Iterator[tuple[NodeId, SimSubscription]]:
    for name, site in world.sites.items():
        for s in site.app.subscriptions.values():
            yield name, s


def decisions(world: World) -> dict[TxId, list[Decision]]:
    """Every commit decision on disk, by transaction."""
    found: dict[TxId, list[Decision]] = {}
    for broker in world.brokers.values():
        for record in broker.disk.records:
            if isinstance(record, EpochCommitted):
                for tx in record.transactions:
                    found.setdefault(tx, []).append(Decision(record.epoch, hashed_all(record.committing)))
            elif isinstance(record, LogAppended) and record.entry.epoch is not None:
                for logged in record.entry.transactions:
                    found.setdefault(logged.tx, []).append(Decision(record.entry.epoch, record.entry.committing))
    return found


def committed_at(world: World) -> dict[TxId, dict[NodeId, tuple[str, ...]]]:
    """Distributed transactions in the participants' databases: site -> marks in order. Early commits count, too."""
    found: dict[TxId, dict[NodeId, tuple[str, ...]]] = {}
    for name, s in subscriptions(world):
        if isinstance(s.database, CallbackDatabase):
            for done in s.database.committed.values():
                if done.tx not in s.database.early:
                    found.setdefault(done.tx, {})[name] = done.events
    return found


# -------------------------------------------------------------------------------------------------------------- safety


def check_nothing_was_broken(world: World) -> list[str]:
    """No participant got a call that no correct machine makes (commit twice, compensate twice, skip a number)."""
    return list(world.history.broken)


def check_decided_once(world: World) -> list[str]:
    """One decision per transaction, on all brokers and across restarts."""
    return [
        f"{tx} was decided {len(found)} times: {[str(d.epoch) for d in found]}"
        for tx, found in decisions(world).items()
        if len(found) > 1
    ]


def check_no_commit_without_decision(world: World) -> list[str]:
    """No participant commits what the coordinator did not decide to commit (decision stability, no ghost commit)."""
    decided = decisions(world)
    return [
        f"{sorted(sites)} committed {tx} without a decision to commit"
        for tx, sites in committed_at(world).items()
        if tx not in decided
    ]


def check_responses_were_true(world: World) -> list[str]:
    """The outcomes that publishers got are the true ones, at any time."""
    decided, found = decisions(world), []
    locals_of = _local_commits(world)
    for tx, outcomes in world.history.outcomes.items():
        if {"committed", "aborted"} <= outcomes:
            found.append(f"{tx}: one publisher got committed, another aborted")
        known = world.history.transactions.get(tx)
        if known is None:
            continue
        distributed = known.spec.tx_type is TxType.DISTRIBUTED
        if "committed" in outcomes and distributed and tx not in decided:
            found.append(f"{tx}: the outcome was committed, and no decision to commit is on any disk")
        if "aborted" in outcomes and tx in decided:
            found.append(f"{tx}: the outcome was aborted, and a decision to commit is on disk")
        if "aborted" in outcomes and not distributed and locals_of.get(tx):
            found.append(f"{tx}: the outcome was aborted, and {sorted(locals_of[tx])} committed it")
    return found


def check_complete(world: World) -> list[str]:
    """A committed participant applied every event of the transaction, in sequence order, once."""
    found = []
    whole: dict[TxId, tuple[str, ...]] = {}
    for tx, sites in [*committed_at(world).items(), *_local_commits(world).items()]:
        known = world.history.transactions.get(tx)
        for site, applied in sites.items():
            reference = whole.setdefault(tx, applied)
            if applied != reference:
                found.append(f"{tx}: {site} applied {applied}, others {reference}")
            own = tuple(m for m in applied if known is None or m in known.marks)
            if known is not None and own != tuple(known.marks)[: len(own)]:
                found.append(f"{tx}: {site} applied {applied}, published was {known.marks}")
            if known is not None and known.outcome == "committed" and len(own) < len(known.marks):
                found.append(f"{tx}: {site} applied {applied} of {known.marks}")
    return found


def check_constraints_held(world: World) -> list[str]:
    """The constraints hold for the committing set of each decision."""
    found = []
    for tx, taken in decisions(world).items():
        known = world.history.transactions.get(tx)
        if known is None or taken[0].epoch is None:
            continue
        identities = _identities(world, taken[0].committing)
        if identities is None:
            continue
        lacking = unmet(known.spec.constraints, identities, world.predicates)
        if lacking is not None:
            found.append(f"{tx} committed at {identities} although {lacking}")
    return found


def check_every_participant_commits(world: World) -> list[str]:
    """Without participant constraints all participants that joined commit, or none does."""
    found = []
    for tx in decisions(world):
        known = world.history.transactions.get(tx)
        if known is None or constrains_participants(known.spec.constraints):
            continue
        committed = {(name, s.number) for name, s in subscriptions(world) if _holds(s, tx)}
        left_out = world.history.prepared_work.get(tx, set()) - committed
        if left_out:
            names = sorted(f"{site}/{number}" for site, number in left_out)
            found.append(f"{tx}: {names} prepared and did not commit")
    return found


def check_scope_none_saw_nothing(world: World) -> list[str]:
    """A site that chose the scope none gets no event of the transaction in that incarnation."""
    found = []
    for (tx, site, subscription, incarnation), scope in world.history.scopes.items():
        if scope is Scope.NONE:
            seen = [mark for t, mark in world.history.seen.get((site, subscription, incarnation), []) if t == tx]
            if seen:
                found.append(f"{site} chose none of {tx} and got {seen}")
    return found


def check_locals_are_independent(world: World) -> list[str]:
    """A local subscriber is never undone because the distributed part failed, unless it follows that part."""
    found = []
    for tx, site, rejection in world.history.local_aborts:
        known = world.history.transactions.get(tx)
        independent = known is not None and known.spec.local_outcome is LocalOutcome.INDEPENDENT
        if independent and rejection.code is RejectionCode.CONSTRAINTS_UNMET:
            found.append(f"{site} is a local subscriber of {tx} and was undone because: {rejection}")
    return found


def check_compensation(world: World) -> list[str]:
    """Compensation was in reverse order, and what it undid is no longer committed."""
    found = []
    for name, s in subscriptions(world):
        if not isinstance(s.database, CallbackDatabase):
            continue
        for tx, undone in s.database.compensated.items():
            known = world.history.transactions.get(tx)
            if tx in s.database.committed:
                found.append(f"{tx} is both compensated and committed at {name}")
            own = [m for m in undone if known is not None and m in known.marks]
            if known is not None and own != list(reversed(known.marks))[-len(own) :][: len(own)] and own:
                found.append(f"{tx}: {name} undid {undone}, consumed was {known.marks}")
    return found


def check_replicas_agree(world: World) -> list[str]:
    """All replicas hold the same data at equal positions, and each is a prefix of the log."""
    found = []
    reference: dict[int, tuple[NodeId, str]] = {}
    for name, s in subscriptions(world):
        if isinstance(s.database, ReplicaDatabase):
            for position, digest in s.database.hashes.items():
                other, known = reference.setdefault(position, (name, digest))
                if known != digest:
                    found.append(f"{name} and {other} differ at position {position}")
                    break
    return found


def check_acknowledged_is_logged(world: World) -> list[str]:
    """On a durable type, transactions with the outcome committed are in the log, and aborted ones are not."""
    logged = {t.tx for name in ("set", "log") for entry in _log(world, name).values() for t in entry.transactions}
    found = []
    for tx, known in world.history.transactions.items():
        outcomes = world.history.outcomes.get(tx, set())
        if known.spec.event_type in ("set", "log"):
            if "committed" in outcomes and tx not in logged:
                found.append(f"{tx}: the outcome was committed, and it is not in the log")
            if "aborted" in outcomes and tx in logged:
                found.append(f"{tx}: the outcome was aborted, and it is in the log")
    return found


def check_only_matching_events(world: World) -> list[str]:
    """An ordinary event reaches only subscriptions of its type, or an ancestor's, whose filter it matches."""
    found = []
    for (site, number, _), seen in world.history.seen.items():
        subscription = world.sites[site].app.subscriptions[number]
        wish = subscription.wish
        for tx, mark in () if subscription.own else seen:
            event = world.history.events.get(mark)
            if event is None:
                continue  # not a published event
            lineage = [d.name for d in DEFINITIONS.get(event.type, ())] or [event.type]
            if tx is None and (wish.definitions[-1].name not in lineage or not wish.filter.matches(event.body)):
                found.append(f"{site} got {mark} of {event.type} under its subscription {number}")
    return found


def check_scopes_were_honoured(world: World) -> list[str]:
    """Events of a transaction reach only subscriptions of the transaction's type."""
    found = []
    for (site, number, _), seen in world.history.seen.items():
        subscription = world.sites[site].app.subscriptions[number]
        wish = subscription.wish
        for tx, mark in () if subscription.own else seen:
            known = world.history.transactions.get(tx) if tx is not None else None
            if known is None:
                continue
            name = known.spec.event_type
            lineage = [d.name for d in DEFINITIONS.get(name, ())] or [name]
            if wish.definitions[-1].name not in lineage or not wish.filter.matches(known.spec.attributes):
                found.append(f"{site} got {mark} of {tx} under its subscription {number}")
    return found


def check_replicas_hold_the_log(world: World) -> list[str]:
    """A replica holds every transaction that the log has up to its position, with its events, and no other."""
    found = []
    logged = {
        t.tx: (record.entry.number, marks(t.events))
        for broker in world.brokers.values()
        for record in broker.disk.records
        if isinstance(record, LogAppended) and record.event_type == "set"
        for t in record.entry.transactions
    }
    for name, s in subscriptions(world):
        if isinstance(s.database, ReplicaDatabase):
            due = {tx: events for tx, (number, events) in logged.items() if number <= s.database.position}
            for tx in sorted(due.keys() | s.database.applied.keys()):
                applied, expected = s.database.applied.get(tx), due.get(tx)
                if applied != expected:
                    found.append(f"{name} at {s.database.position} holds {applied} of {tx}, the log has {expected}")
    return found


def check_log_delivery(world: World) -> list[str]:
    """Every confirmed event is in the log once, and a durable reader gets entries in order, none twice."""
    found = []
    logged: dict[str, list[str]] = {}
    for broker in world.brokers.values():
        for record in broker.disk.records:
            if isinstance(record, LogAppended) and record.entry.event is not None:
                logged.setdefault(record.event_type, []).append(record.entry.event.body["mark"])
    for event_type, confirmed in world.history.confirmed.items():
        on_disk = logged.get(event_type, [])
        for number, mark in confirmed:
            if on_disk.count(mark) != 1:
                found.append(
                    f"{mark} was confirmed as {event_type}#{number} and is {on_disk.count(mark)} times on disk"
                )
    for name, s in subscriptions(world):
        if isinstance(s.database, CallbackDatabase) and s.database.taken != sorted(set(s.database.taken)):
            found.append(f"{name} got {s.database.taken}")
    return found


SAFETY: tuple[Checker, ...] = (
    check_nothing_was_broken,
    check_decided_once,
    check_no_commit_without_decision,
    check_responses_were_true,
    check_complete,
    check_constraints_held,
    check_every_participant_commits,
    check_scope_none_saw_nothing,
    check_locals_are_independent,
    check_compensation,
    check_replicas_agree,
    check_acknowledged_is_logged,
    check_only_matching_events,
    check_scopes_were_honoured,
    check_replicas_hold_the_log,
    check_log_delivery,
)

# ------------------------------------------------------------------------------------- liveness: once faults are over


def check_everything_ended(world: World) -> list[str]:
    """Nothing is undecided, in doubt, without a response or lagging once all nodes have been up and connected for
    long."""
    return world.open_work()


def check_no_orphans(world: World) -> list[str]:
    """Nothing stays prepared in a database, or committed early without an end."""
    found = []
    for name, s in subscriptions(world):
        found += [f"{name} still holds {memo.epoch}" for memo in s.database.memos()]
        if isinstance(s.database, CallbackDatabase):
            found += [f"{name} still runs {tx}" for tx in s.database.running]
    return found


def check_all_committed(world: World) -> list[str]:
    """Every member of a decision's committing set has committed."""
    found = []
    at: dict[TxId, list[str]] = {}
    for name, s in subscriptions(world):
        if isinstance(s.database, CallbackDatabase):
            for tx in s.database.committed:
                if tx not in s.database.early:
                    at.setdefault(tx, []).append(f"{name}/{s.number}")
    for tx, taken in decisions(world).items():
        if taken[0].epoch is not None and taken[0].epoch.event_type != "set":
            committed = at.get(tx, [])
            if len(committed) != len(taken[0].committing):
                found.append(f"{tx}: decided for {len(taken[0].committing)}, committed at {committed}")
    return found


def check_log_reached_everyone(world: World) -> list[str]:
    """Replicas and readers have everything."""
    found = []
    for name, s in subscriptions(world):
        if isinstance(s.database, CallbackDatabase) and s.wish.durable is not None:
            expected = _log_numbers(world, s.wish.definitions[0].name)
            missing = expected - set(s.database.taken)
            if missing:
                found.append(f"{name} never got {sorted(missing)} of {s.wish.definitions[0].name}")
    return found


def check_state_is_removed(world: World) -> list[str]:
    """Once everything has ended, the state about it is removed."""
    found = []
    for broker in world.brokers.values():
        rendezvous = broker.core.rendezvous
        found += [f"{broker.name} knows the publisher of {tx}" for tx in rendezvous.publishers]
        found += [f"{broker.name} has requesters waiting for {tx}" for tx in rendezvous.outcomes.requesters]
        for name, epochs in rendezvous.epochs.items():
            found += [f"{broker.name} has an open request about {name}#{n}" for n in epochs.queries]
        for site in broker.core.edge.sites.values():
            if len(site.transactions) > ENDS_LOST_MAX:
                found.append(f"{broker.name} holds {len(site.transactions)} transactions for {site.name}")
    for node in world.sites.values():
        # An application that did not get the outcome may still use a transaction that has begun.
        open_ones = node.core.transactions.values()
        closed = [
            t.tx
            for t in open_ones
            if t.state is TxState.CENSUS or (t.outcome is not None and not t.outcome.locals_wait)
        ]
        found += [f"{node.name} still publishes {tx}" for tx in closed]
        for s in node.core.participation.subscriptions.values():
            if s.replica is not None:
                found += [f"{node.name} keeps events of {tx}" for tx in s.replica.collected]
    return found


LIVENESS: tuple[Checker, ...] = (
    check_everything_ended,
    check_no_orphans,
    check_all_committed,
    check_log_reached_everyone,
    check_state_is_removed,
)


def violations(world: World, *, live: bool) -> list[str]:
    """Everything that is wrong with a run; `live`: its liveness phase is over."""
    checkers = SAFETY + LIVENESS if live else SAFETY
    return [f"{c.__name__}: {v}" for c in checkers for v in c(world)]


# -------------------------------------------------------------------------------------------------------------- helpers


def _local_commits(world: World) -> dict[TxId, dict[NodeId, tuple[str, ...]]]:
    found: dict[TxId, dict[NodeId, tuple[str, ...]]] = {}
    for name, s in subscriptions(world):
        if isinstance(s.database, CallbackDatabase):
            for done in s.database.local.values():
                found.setdefault(done.tx, {})[name] = done.events
    return found


def _holds(s: SimSubscription, tx: TxId) -> bool:
    """Whether a participant has committed it, or still has it prepared."""
    database = s.database
    return isinstance(database, CallbackDatabase) and (tx in database.committed or tx in database.prepared)


def _identities(world: World, committing: frozenset[str]) -> list[str | None] | None:
    """The identities behind these keys, as recorded by the voters; None if one is no longer known."""
    owners = {hashed(voter): owner for voter, owner in world.voter_owners().items()}
    if not committing <= owners.keys():
        return None
    return [owner for key in sorted(committing) if (owner := owners[key]) is not None]


def _log(world: World, event_type: str) -> dict[int, LogEntry]:
    return {
        record.entry.number: record.entry
        for broker in world.brokers.values()
        for record in broker.disk.records
        if isinstance(record, LogAppended) and record.event_type == event_type
    }


def _log_numbers(world: World, event_type: str) -> set[int]:
    return {
        record.entry.number
        for broker in world.brokers.values()
        for record in broker.disk.records
        if isinstance(record, LogAppended) and record.event_type == event_type and record.entry.event is not None
    }
