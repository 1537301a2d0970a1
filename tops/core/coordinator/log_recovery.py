"""A stale journal whose log an operator continues: a new history begins behind what the replicas hold.

The entries that the journal lost can't be restored: replicas hold rows, not entries. The replicas at the most advanced
point continue at once; any other replica lacks something that the log no longer has, and must be copied from one of
them.
"""

from collections.abc import Mapping

from tops.core.commit.outcomes import Outcomes
from tops.core.coordinator.known_types import KnownTypes
from tops.core.coordinator.log_opening import names
from tops.core.coordinator.open_transactions import RendezvousNode
from tops.core.log.event_log import EventLog, Opening
from tops.model.log_points import BEGINNING, LogPoint
from tops.model.transactions import Outcome
from tops.protocol.effects import Alarm, Effect, Persist, SendTo
from tops.protocol.messages import Address, AppliedIndexReported, LogRecovered, RecoverLog, Sender, TxOutcome
from tops.protocol.records import HistoryBegun, InSyncChanged


class LogRecovery:
    """Begins new histories of the logs of one rendezvous."""

    def __init__(self, node: RendezvousNode, known: KnownTypes, outcomes: Outcomes) -> None:
        self._node, self._known, self._outcomes = node, known, outcomes

    def on_recover(self, m: RecoverLog, sender: Sender, at: Address, now: float) -> list[Effect]:
        log = self._known.logs_of.get(m.event_type)
        if log is None or log.opening is None or log.stale is None:
            problem = f"the journal of {m.event_type!r} at broker {self._node.me!r} is not stale: nothing to recover"
            return [SendTo(at, LogRecovered(request=m.request, problem=problem, point=BEGINNING))]
        reported = {site: t for site, t in log.opening.reported.items() if site in m.replicas}
        silent = tuple(sorted(set(m.replicas) - reported.keys()))
        problem = _problem(log, m, reported)
        if problem:
            rejected = LogRecovered(request=m.request, problem=problem, point=log.chain.end, silent=silent)
            return [SendTo(at, rejected)]
        furthest = _furthest(reported)
        point = LogPoint(self._node.entropy(16).hex(), furthest.index, furthest.digest)
        at_point = frozenset(site for site, t in reported.items() if _same(t.point, point))
        effects = self._begin(log, log.opening, point, at_point)
        recovered = LogRecovered(
            request=m.request,
            problem="",
            point=point,
            following=tuple(sorted(at_point)),
            behind=tuple(sorted(reported.keys() - at_point)),
            silent=silent,
        )
        return [*effects, SendTo(at, recovered)]

    def _begin(self, log: EventLog, opening: Opening, point: LogPoint, at_point: frozenset[str]) -> list[Effect]:
        epochs, end = self._known.epochs[log.event_type], log.chain.end.index
        log.begin_history(point, end, self._node.incarnation)
        voters = frozenset(s.identity for s in epochs.standing.registrations.values() if s.replica and s.identity)
        epochs.standing.in_sync = in_sync = at_point & voters
        text = (
            f"{log.event_type} continues in a new history behind index {point.index}, with {names(at_point)}; the "
            f"journal ended at {end}, and every other follower of the log must be copied from one of them"
        )
        effects: list[Effect] = [
            Persist(HistoryBegun(event_type=log.event_type, point=point, end=end, incarnation=self._node.incarnation)),
            Persist(InSyncChanged(event_type=log.event_type, in_sync=in_sync)),
            Alarm("history-begun", text),
        ]
        # Commits in the lost part that the replicas still know: a `GetOutcome` for one of them gets its true outcome.
        for reported in opening.reported.values():
            for tx in reported.transactions if _same(reported.point, point) else ():
                effects += self._outcomes.settle(TxOutcome(tx=tx, outcome=Outcome.COMMITTED), None)
        for feed in opening.feeds.values():
            effects += log.want(feed)
        return effects + epochs.start()


def _problem(log: EventLog, m: RecoverLog, reported: Mapping[str, AppliedIndexReported]) -> str:
    """Why the log can't continue from what these replicas reported; empty if it can."""
    silent = frozenset(m.replicas) - reported.keys()
    if not reported:
        return f"no replica has reported its applied index: start at least one of {names(silent)}"
    furthest = _furthest(reported)
    differing = {t.point.digest for t in reported.values() if t.point.index == furthest.index}
    if len(differing) > 1:
        equal = frozenset(site for site, t in reported.items() if t.point.index == furthest.index)
        return (
            f"{names(equal)} are all at index {furthest.index} and hold different data: compare them, and end the "
            f"durable subscriptions of the wrong ones"
        )
    if furthest.index < log.chain.end.index:
        return (
            f"the journal ends at index {log.chain.end.index}, behind every replica, and belongs to another log: move "
            f"its directory elsewhere, start the broker without it, and recover again"
        )
    decided = max(t.decided for t in reported.values())
    if m.accept_loss or (len(reported) >= m.needed and decided <= furthest.index):
        return ""
    return (
        f"{len(reported)} of the {m.needed} replicas that are needed have reported, and the furthest is at index "
        f"{furthest.index}{f' although {decided} was decided' if decided > furthest.index else ''}: acknowledged "
        f"transactions may be at {names(silent)} alone; start them, or accept the loss of what only they hold"
    )


def _furthest(reported: Mapping[str, AppliedIndexReported]) -> LogPoint:
    return max((t.point for t in reported.values()), key=lambda point: (point.index, point.digest))


def _same(point: LogPoint, other: LogPoint) -> bool:
    return (point.index, point.digest) == (other.index, other.digest)
