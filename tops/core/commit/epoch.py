"""One epoch as its coordinator knows it, and what a vote and a decision on it are about."""

import hashlib
from collections.abc import Iterable, Mapping
from enum import Enum
from itertools import repeat

import msgspec

from tops.core.commit.ballot import ReadyTx, suffice
from tops.core.commit.census import Member
from tops.model.constraints import Predicate
from tops.model.ids import TxId, hashed_voter
from tops.model.transactions import Outcome
from tops.protocol.messages import Address, EpochId, EpochVoted, TxOutcome

COMMITTED = Outcome.COMMITTED  # an enum's members take long to find by their class


class EpochOptions(msgspec.Struct, frozen=True):
    """`sync_window_s`: how long a vote on a durable type may take; `finish_window_s`: how long the client waits for
    the committing set to confirm; `join_gap`: how close to the end of the log a replica joins."""

    members_max: int = 64
    attempts_max: int = 3
    sync_window_s: float = 2.0
    finish_window_s: float = 2.0
    join_gap: int = 64
    note_after_s: float = 0.2


class Stage(Enum):
    VOTING = "voting"  # ends when everyone has voted, is gone, or the time is up
    FINISHING = "finishing"  # decided and durable; ends when the committing set has finished, or the time is up


class Epoch(msgspec.Struct):
    """One epoch, from its first prepare until nobody is waited for."""

    id: EpochId
    digest: str
    members: list[ReadyTx]
    voters: dict[str, Member]  # asked to prepare, joiners included
    counted: frozenset[str]  # those whose votes are waited for
    stage: Stage = Stage.VOTING
    votes: dict[str, EpochVoted] = {}
    lost: dict[str, str] = {}
    committing: frozenset[str] = frozenset()
    committed: tuple[TxId, ...] = ()
    decided: frozenset[str] = frozenset()  # the committing set as it was decided
    finished: set[str] = set()
    outcomes: list[tuple[TxOutcome, Address]] = []
    unchecked: bool = False  # the publisher was told that votes are missing

    def everyone_voted(self) -> bool:
        missing = self.counted - self.votes.keys()
        return not missing or missing <= self.lost.keys()

    def awaits(self, key: str) -> bool:
        """Whether this voter may still vote."""
        return key not in self.votes and key not in self.lost

    def is_prompt(self) -> bool:
        """Whether all its members are to be decided as soon as their constraints are met."""
        return all(m.spec.decide_when_met for m in self.members)

    def late(self) -> frozenset[str]:
        """Who has not voted and may still do so, if a decision does not wait for them."""
        if not self.is_prompt():
            return frozenset()
        return frozenset(self.voters.keys() - self.votes.keys() - self.lost.keys())

    def first_vote(self, committing: frozenset[str]) -> EpochVoted:
        """The vote whose rows and results count: the first of those that tell any."""
        keys = sorted(committing)
        for key in keys:
            if self.votes[key].rows:
                return self.votes[key]
        return self.votes[keys[0]]


def fits(voted: EpochVoted, members: list[ReadyTx]) -> bool:
    """Whether a vote speaks of these members; what else a confused voter says is no vote."""
    per_member = (0, len(members))
    if len(voted.rows) not in per_member or len(voted.results) not in per_member:
        return False
    return not voted.excluded or voted.excluded.keys() <= {m.tx for m in members}


def is_enough(epoch: Epoch, in_sync: frozenset[str], predicates: Mapping[str, Predicate]) -> bool:
    """Whether those who have voted may commit all members by themselves, and no more is wanted.

    A joiner's vote is as good as any: it has applied everything before, or it would not have voted. But one of those
    whom the journal names as in sync must be among them: they are asked if the journal loses this decision."""
    votes = epoch.votes.values()
    if not epoch.is_prompt() or any(v.excluded for v in votes) or len({v.rows for v in votes if v.rows}) > 1:
        return False
    committing = {key: epoch.voters[key] for key in epoch.votes}
    if in_sync.isdisjoint([m.identity for m in committing.values()]):
        return False
    return suffice(epoch.members, epoch.counted, committing, predicates)


def outcomes_of(epoch: Epoch, log_number: int | None) -> list[tuple[TxOutcome, Address]]:
    """What each publisher is going to be told when the committing set has finished."""
    first = epoch.first_vote(epoch.decided)  # the others' rows are the same, their results may differ
    rows = first.rows or repeat(())
    results = first.results or repeat(b"")
    commits = set(epoch.committed)
    return [
        (TxOutcome(tx=r.tx, outcome=COMMITTED, log_number=log_number, rows=row, result=result), r.publisher)
        for r, row, result in zip(epoch.members, rows, results, strict=False)
        if r.tx in commits
    ]


def hashed_all(keys: frozenset[str]) -> frozenset[str]:
    """A committing set as it is shown to voters."""
    return frozenset(map(hashed_voter, keys))


def member_digest(transactions: Iterable[TxId]) -> str:
    """What a vote is a vote on: these transactions in this order."""
    return hashlib.sha256("\n".join(transactions).encode()).hexdigest()[:16]
