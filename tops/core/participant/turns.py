"""Compensatable participants take one epoch at a time.

Such a participant has committed in its database what it has prepared. Compensation requires that nothing later is
committed there, so the next epoch waits until the one before has ended here. Two participants that wait for each
other's epochs would deadlock; therefore an epoch waits only for one that precedes it in an order that is the same at
all participants, and an epoch that finds a later one in progress is declined. The coordinator does not see any of this:
it gets a vote, sooner or later.

A new attempt prepares the members of the one before again. If it excludes a member, later members may depend on that
one, so the whole earlier attempt is undone first, the latest member first, and the new attempt waits for that as for
another epoch.
"""

from collections.abc import Mapping
from enum import Enum

from tops.core.participant.callback_epoch import FINISHING, CallbackEpoch, EpochKey
from tops.core.participant.voters import Voters
from tops.protocol.messages import EpochId, PrepareEpoch


class Turn(Enum):
    NOW = "now"
    LATER = "later"  # held until the epochs before it have ended
    NEVER = "never"


class Turns:
    """The epoch that each compensatable participant of a site has in progress, and the prepares that wait."""

    def __init__(self, epochs: Mapping[EpochKey, CallbackEpoch], voters: Voters) -> None:
        self._epochs, self._voters = epochs, voters
        self.waiting: dict[int, dict[tuple[str, str, int, int], PrepareEpoch]] = {}  # by participant, in their order

    def admit(self, participant: int, prepare: PrepareEpoch) -> Turn:
        """Whether this epoch may be prepared. A new attempt at the epoch in progress may, unless that is being
        undone."""
        mine = _order(prepare.epoch)
        in_progress = {_order(epoch.memo.epoch): epoch.stage for epoch in self._in_progress(participant)}
        if not in_progress or in_progress.get(mine, FINISHING) is not FINISHING:
            return Turn.NOW
        if mine < max(in_progress):
            return Turn.NEVER
        self.wait(participant, prepare)
        return Turn.LATER

    def wait(self, participant: int, prepare: PrepareEpoch) -> None:
        """Hold a prepare until the epoch in progress has ended; a newer attempt replaces an older one."""
        mine = _order(prepare.epoch)
        waiting = self.waiting.setdefault(participant, {})
        known = waiting.get(mine)
        if known is None:
            self._voters.retain(prepare.voter)  # the name is needed when the turn comes
        if known is None or known.epoch.attempt < prepare.epoch.attempt:
            waiting[mine] = prepare

    def next(self, participant: int) -> PrepareEpoch | None:
        """The first prepare that waits, if no epoch is in progress."""
        waiting = self.waiting.get(participant)
        if not waiting or self._in_progress(participant):
            return None
        return self._take(participant, min(waiting))

    def withdraw(self, participant: int, epoch: EpochId) -> PrepareEpoch | None:
        """Remove a prepare whose epoch was decided while it waited."""
        waiting = self.waiting.get(participant)
        known = waiting.get(_order(epoch)) if waiting else None
        return self._take(participant, _order(epoch)) if known is not None and known.epoch == epoch else None

    def _in_progress(self, participant: int) -> list[CallbackEpoch]:
        return [e for e in self._epochs.values() if e.subscription == participant and not e.settled]

    def _take(self, participant: int, order: tuple[str, str, int, int]) -> PrepareEpoch:
        waiting = self.waiting[participant]
        prepare = waiting.pop(order)
        if not waiting:
            del self.waiting[participant]
        return prepare


def _order(epoch: EpochId) -> tuple[str, str, int, int]:
    return (epoch.event_type, epoch.coordinator, epoch.incarnation, epoch.number)
