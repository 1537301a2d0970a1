"""Compensatable participants take one epoch at a time.

What such a participant has promised is committed already. If it has to be undone nothing later may lie on top of it,
so the next epoch waits until the one before is settled here. Two participants that wait for each other's epochs would
wait for ever, so an epoch waits only for one that comes before it in an order on which everybody agrees; one that finds
a later one at work is declined. The coordinator learns nothing of all this: it gets a vote, sooner or later.

A new attempt renews what the one before it has promised. If it leaves a member out, that one may lie under others, so
the whole attempt is undone first, the latest first, and the new one waits for that like for an epoch of its own.
"""

from collections.abc import Mapping
from enum import Enum

from tops.core.participant.callback_epoch import FINISHING, CallbackEpoch, EpochKey
from tops.core.participant.voters import Voters
from tops.protocol.messages import EpochId, PrepareEpoch


class Turn(Enum):
    NOW = "now"
    LATER = "later"  # kept until the epochs before it are settled
    NEVER = "never"


class Turns:
    """Which epoch each compensatable participant of a site is at, and what waits."""

    def __init__(self, epochs: Mapping[EpochKey, CallbackEpoch], voters: Voters) -> None:
        self._epochs, self._voters = epochs, voters
        self.waiting: dict[int, dict[tuple[str, str, int, int], PrepareEpoch]] = {}  # by participant, in their order

    def admit(self, participant: int, prepare: PrepareEpoch) -> Turn:
        """Whether this one may be prepared; a new attempt at what is at work may, unless that is being undone."""
        mine = _order(prepare.epoch)
        at_work = {_order(epoch.memo.epoch): epoch.stage for epoch in self._at_work(participant)}
        if not at_work or at_work.get(mine, FINISHING) is not FINISHING:
            return Turn.NOW
        if mine < max(at_work):
            return Turn.NEVER
        self.wait(participant, prepare)
        return Turn.LATER

    def wait(self, participant: int, prepare: PrepareEpoch) -> None:
        """Keep it until what is at work is settled; a newer attempt replaces an older one."""
        mine = _order(prepare.epoch)
        waiting = self.waiting.setdefault(participant, {})
        known = waiting.get(mine)
        if known is None:
            self._voters.retain(prepare.voter)  # the name is needed when the turn comes
        if known is None or known.epoch.attempt < prepare.epoch.attempt:
            waiting[mine] = prepare

    def next(self, participant: int) -> PrepareEpoch | None:
        """The first of those that wait, if nothing is at work."""
        waiting = self.waiting.get(participant)
        if not waiting or self._at_work(participant):
            return None
        return self._take(participant, min(waiting))

    def withdraw(self, participant: int, epoch: EpochId) -> PrepareEpoch | None:
        """It was decided while it waited."""
        waiting = self.waiting.get(participant)
        known = waiting.get(_order(epoch)) if waiting else None
        return self._take(participant, _order(epoch)) if known is not None and known.epoch == epoch else None

    def _at_work(self, participant: int) -> list[CallbackEpoch]:
        return [e for e in self._epochs.values() if e.subscription == participant and not e.settled]

    def _take(self, participant: int, order: tuple[str, str, int, int]) -> PrepareEpoch:
        waiting = self.waiting[participant]
        prepare = waiting.pop(order)
        if not waiting:
            del self.waiting[participant]
        return prepare


def _order(epoch: EpochId) -> tuple[str, str, int, int]:
    return (epoch.event_type, epoch.coordinator, epoch.incarnation, epoch.number)
