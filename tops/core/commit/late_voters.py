"""Voters that a decision did not wait for, and what becomes of their prepared work.

A transaction may request to be decided as soon as the votes suffice (`decide_when_met`). A replica that votes later and
has prepared exactly the same work commits it then, which is a quick way to apply the log's next entry; until it has
committed, its feed holds that entry back. Correctness does not depend on this: the decision on disk does not name the
late voter, so any peer that it queries responds that it must roll back, and then it applies the entry from the log like
any follower.
"""

import msgspec

from tops.core.commit.decision_sender import DecisionSender
from tops.core.commit.epoch import Epoch, fits, hashed_all
from tops.core.commit.standing_registrations import StandingRegistrations
from tops.core.log.event_log import EventLog
from tops.protocol.effects import Alarm, Effect
from tops.protocol.messages import EpochFinished, EpochId, EpochVoted


class Late(msgspec.Struct):
    """A voter of a decided epoch. `notified`: the decision to commit was sent to it; else it has not voted yet."""

    epoch: Epoch
    notified: bool = False


class LateVoters:
    """The late voters of one event type's epochs. Each is late for one epoch, and until then gets another prepare only
    if its vote is needed."""

    def __init__(self, log: EventLog | None, standing: StandingRegistrations, decision_sender: DecisionSender) -> None:
        self._log, self._standing, self._decision_sender = log, standing, decision_sender
        self._late: dict[str, Late] = {}

    def __contains__(self, voter: str) -> bool:
        return voter in self._late

    def any_of(self, number: int) -> bool:
        """Whether a voter is late for this number."""
        return any(late.epoch.id.number == number for late in self._late.values())

    def begin(self, epoch: Epoch, voters: frozenset[str]) -> None:
        """The epoch is decided without the votes of these voters."""
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
            identity = epoch.voters[key].identity
            text = f"{identity} changed other numbers of rows in {voted.epoch} than the replicas that committed it"
            effects.append(Alarm("rows-differ", text))
        return effects

    def on_finished(self, finished: EpochFinished, key: str) -> list[Effect]:
        """The voter has committed: its feed continues behind the entry."""
        late = self._late.get(key)
        if late is None or late.epoch.id != finished.epoch:
            return []
        return self._release(key, holds=True)

    def on_outcome_requested(self, epoch: EpochId, voter: str) -> list[Effect]:
        """The response to this voter is about to be an abort: its feed must deliver the entry."""
        late = self._late.get(voter)
        return self._release(voter) if late is not None and late.epoch.id == epoch else []

    def give_up(self, number: int) -> list[Effect]:
        """The time-out for the late voters of this number has passed: they follow the log."""
        late = sorted(voter for voter, late in self._late.items() if late.epoch.id.number == number)
        return [effect for voter in late for effect in self._undo(voter)]

    def drop(self, voter: str) -> list[Effect]:
        """The voter is lost."""
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
