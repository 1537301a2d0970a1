"""Where standing answers are left, renewed and withdrawn, and where it is judged which replicas are in sync."""

from collections.abc import Callable

from tops.core.epochs import EpochCoordinator
from tops.core.known_types import KnownTypes
from tops.core.log_opening import LogOpenings
from tops.core.open_transactions import RendezvousNode
from tops.digests import LogPoint
from tops.effects import Effect, Persist, Post, SetTimer
from tops.messages import Address, StandingAccepted, StandingAnswered, StandingWithdrawn
from tops.records import InSyncChanged
from tops.transactions import Scope

Lose = Callable[[tuple[str, ...], str], list[Effect]]


class StandingDesk:
    """The standing answers of all families; `lose` is what follows when one is gone."""

    def __init__(self, node: RendezvousNode, known: KnownTypes, openings: LogOpenings, lose: Lose) -> None:
        self._node, self._known, self._openings, self._lose = node, known, openings, lose

    def on_answered(self, m: StandingAnswered, sender: Address, incarnation: int, now: float) -> list[Effect]:
        family = self._known.families.get(m.event_type)
        if family is None:
            return []
        epochs = self._known.epochs[family]
        standing = epochs.standing
        new = standing.renew(m, sender, incarnation, now)
        effects = self._judge_position(epochs, m, new)
        answer = standing.answers[m.voter]
        in_sync = standing.counted(answer)
        accepted = StandingAccepted(voter=m.voter, incarnation=self._node.incarnation, in_sync=in_sync)
        effects.append(Post(sender, accepted))
        if new:
            if len(standing.answers) == 1:  # later ones must not put off the look at the earlier ones
                effects.append(SetTimer(("lease", family), self._node.options.lease_s))
            effects += epochs.start()
        return effects

    def _judge_position(self, epochs: EpochCoordinator, m: StandingAnswered, new: bool) -> list[Effect]:
        """A replica is in sync only with everything decided; it grows into the set while nothing is in flight."""
        log = epochs.log
        if log is None or m.position is None or m.identity is None or m.scope is not Scope.DISTRIBUTED:
            return []
        if log.opening is not None or m.identity in log.unheard:
            return []  # how far the log goes, or this replica went while it was silent, is not known yet
        point = LogPoint(m.history, m.position, m.digest)
        fits, problem = self._openings.judge(log, m.identity, point)
        if not fits:
            return problem
        in_sync = epochs.standing.in_sync
        if m.identity in in_sync and new and m.position < log.decided_upto:
            in_sync = in_sync - {m.identity}
        elif m.identity not in in_sync and m.position >= log.decided_upto and not epochs.in_flight:
            in_sync = in_sync | {m.identity}
        if in_sync == epochs.standing.in_sync:
            return []
        epochs.standing.in_sync = in_sync
        return [Persist(InSyncChanged(event_type=log.event_type, in_sync=in_sync))]

    def on_withdrawn(self, m: StandingWithdrawn, sender: Address, incarnation: int, now: float) -> list[Effect]:
        return self._lose((m.voter,), "the participant withdrew")

    def on_lease(self, event_type: str, now: float) -> list[Effect]:
        """Time to see which standing answers were not renewed."""
        epochs = self._known.epochs.get(event_type)
        if epochs is None:
            return []
        effects: list[Effect] = []
        for late in epochs.standing.expire(now):
            effects += self._lose((late.voter,), "the participant fell silent")
        if epochs.standing.answers:
            effects.append(SetTimer(("lease", event_type), self._node.options.lease_s))
        return effects
