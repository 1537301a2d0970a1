"""Voters that a decision did not wait for, and what becomes of their promises.

A transaction may ask to be decided as soon as those who have voted are enough. A replica that votes later and has
prepared the very same work commits it then, which is a quick way to apply the log's next entry; until it has, its feed
keeps that entry back. Nothing depends on it: the decision on disk does not name the late one, so whoever else it asks
tells it to undo its work, and then it takes the entry from the log like any follower.
"""

import msgspec

from tops.core.commit.decision_sender import DecisionSender
from tops.core.commit.epoch import Epoch, fits, hashed_all
from tops.core.commit.standing_registrations import StandingRegistrations
from tops.core.log.event_log import EventLog
from tops.protocol.effects import Alarm, Effect
from tops.protocol.messages import EpochFinished, EpochId, EpochVoted


class Late(msgspec.Struct):
    """A voter of a decided epoch; `told` that it may commit, or still without a vote."""

    epoch: Epoch
    notified: bool = False


class LateVoters:
    """The late voters of one event type's epochs. Each is late for one epoch, and asked for another meanwhile only if
    that one can't be done without it."""

    def __init__(self, log: EventLog | None, standing: StandingRegistrations, decision_sender: DecisionSender) -> None:
        self._log, self._standing, self._decision_sender = log, standing, decision_sender
        self._late: dict[str, Late] = {}

    def __contains__(self, voter: str) -> bool:
        return voter in self._late

    def any_of(self, number: int) -> bool:
        """Whether somebody is late for this number."""
        return any(late.epoch.id.number == number for late in self._late.values())

    def begin(self, epoch: Epoch, voters: frozenset[str]) -> None:
        """The epoch is decided without a word of these."""
        for voter in voters:
            self._late[voter] = Late(epoch)
            if self._log is not None:
                self._log.held_back[voter] = epoch.id.number

    def on_voted(self, voted: EpochVoted, key: str, incarnation: int) -> list[Effect]:
        late = self._late.get(key)
        if late is None or late.notified or late.epoch.id != voted.epoch or late.epoch.digest != voted.digest:
            return []
        epoch = late.epoch
        if epoch.voters[key].incarnation != incarnation or not fits(voted, epoch.members):
            return []
        rows = epoch.first_vote(epoch.decided).rows
        excluded = {m.tx for m in epoch.members} - set(epoch.committed)
        if voted.excluded.keys() == excluded and (not voted.rows or not rows or voted.rows == rows):
            late.notified = True
            return [self._decided(key, epoch, epoch.decided | {key})]
        effects = self._undo(key)
        if voted.excluded.keys() == excluded:
            who = epoch.voters[key].identity
            text = f"{who} changed other numbers of rows in {voted.epoch} than those who committed it"
            effects.append(Alarm("rows-differ", text))
        return effects

    def on_finished(self, finished: EpochFinished, key: str) -> list[Effect]:
        """It has committed: its feed goes on behind the entry."""
        late = self._late.get(key)
        if late is None or late.epoch.id != finished.epoch:
            return []
        return self._release(key, holds=True)

    def on_outcome_requested(self, epoch: EpochId, voter: str) -> list[Effect]:
        """It is about to be told that it is not among those who commit."""
        late = self._late.get(voter)
        return self._release(voter) if late is not None and late.epoch.id == epoch else []

    def give_up(self, number: int) -> list[Effect]:
        """These have taken too long: they follow the log."""
        late = sorted(voter for voter, late in self._late.items() if late.epoch.id.number == number)
        return [effect for voter in late for effect in self._undo(voter)]

    def drop(self, voter: str) -> list[Effect]:
        """It is gone."""
        return self._release(voter) if voter in self._late else []

    def _undo(self, voter: str) -> list[Effect]:
        late = self._late[voter]
        undo = [] if late.notified else [self._decided(voter, late.epoch, late.epoch.decided)]
        return undo + self._release(voter)

    def _release(self, voter: str, *, holds: bool = False) -> list[Effect]:
        epoch = self._late.pop(voter).epoch
        identity = epoch.voters[voter].identity
        if not holds and identity is not None:
            self._standing.near -= {identity}  # from here on it follows the log until it has caught up
        return [] if self._log is None else self._log.release(voter, epoch.id.number if holds else None)

    def _decided(self, voter: str, epoch: Epoch, committing: frozenset[str]) -> Effect:
        member = epoch.voters[voter]
        return self._decision_sender.decided(
            epoch.id, epoch.digest, member.voter, hashed_all(committing), member.address
        )
