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

COMMITTED = Outcome.COMMITTED  # access to a member of an enum through its class is slow


class EpochOptions(msgspec.Struct, frozen=True):
    """`sync_window_s`: how long a vote on a durable type may take; `finish_window_s`: how long the client waits for
    the confirmations of the committing set; `join_gap`: how close to the end of the log a replica joins."""

    members_max: int = 64
    attempts_max: int = 3
    sync_window_s: float = 2.0
    finish_window_s: float = 2.0
    join_gap: int = 64
    note_after_s: float = 0.2


class Stage(Enum):
    VOTING = "voting"  # ends when every voter has voted or is lost, or at the time-out
    FINISHING = "finishing"  # decided and durable; ends when the committing set has finished, or at the time-out


class Epoch(msgspec.Struct):
    """One attempt of an epoch, from its prepare until the coordinator waits for no voter any more."""

    id: EpochId
    digest: str
    members: list[ReadyTx]
    voters: dict[str, Member]  # to which the prepare was sent, joiners included
    counted: frozenset[str]  # whose votes the coordinator waits for
    stage: Stage = Stage.VOTING
    votes: dict[str, EpochVoted] = {}
    lost: dict[str, str] = {}
    committing: frozenset[str] = frozenset()
    committed: tuple[TxId, ...] = ()
    decided: frozenset[str] = frozenset()  # the committing set as it was decided
    finished: set[str] = set()
    outcomes: list[tuple[TxOutcome, Address]] = []
    unchecked: bool = False  # the publisher got `VotesMissing` and has not chosen yet

    def everyone_voted(self) -> bool:
        missing = self.counted - self.votes.keys()
        return not missing or missing <= self.lost.keys()

    def awaits(self, key: str) -> bool:
        """Whether this voter may still vote."""
        return key not in self.votes and key not in self.lost

    def is_prompt(self) -> bool:
        """Whether all its members are decided as soon as their constraints are met."""
        return all(m.spec.decide_when_met for m in self.members)

    def late(self) -> frozenset[str]:
        """Voters that may still vote after a decision that does not wait for them."""
        if not self.is_prompt():
            return frozenset()
        return frozenset(self.voters.keys() - self.votes.keys() - self.lost.keys())

    def first_vote(self, committing: frozenset[str]) -> EpochVoted:
        """The vote whose rows and results count: the first one that has any."""
        keys = sorted(committing)
        for key in keys:
            if self.votes[key].rows:
                return self.votes[key]
        return self.votes[keys[0]]


def fits(voted: EpochVoted, members: list[ReadyTx]) -> bool:
    """Whether a vote has one element per member; a malformed vote from a faulty voter does not count."""
    per_member = (0, len(members))
    if len(voted.rows) not in per_member or len(voted.results) not in per_member:
        return False
    return not voted.excluded or voted.excluded.keys() <= {m.tx for m in members}


def is_enough(epoch: Epoch, in_sync: frozenset[str], predicates: Mapping[str, Predicate]) -> bool:
    """Whether the replicas that have voted may commit all members without the others.

    A joiner's vote counts like any other: the joiner has applied everything before, or it would not have voted. But the
    voters must include a replica that the journal names as in sync: if the journal loses this decision, only those
    replicas have to report their applied index after a restart, so one of them must have the commit."""
    votes = epoch.votes.values()
    if not epoch.is_prompt() or any(v.excluded for v in votes) or len({v.rows for v in votes if v.rows}) > 1:
        return False
    committing = {key: epoch.voters[key] for key in epoch.votes}
    if in_sync.isdisjoint([m.identity for m in committing.values()]):
        return False
    return suffice(epoch.members, epoch.counted, committing, predicates)


def outcomes_of(epoch: Epoch, log_number: int | None) -> list[tuple[TxOutcome, Address]]:
    """The outcome that each publisher gets when the committing set has finished."""
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
    """A committing set in the form that voters receive: it reveals no names."""
    return frozenset(map(hashed_voter, keys))


def member_digest(transactions: Iterable[TxId]) -> str:
    """Identifies what a voter votes on: these transactions in this order."""
    return hashlib.sha256("\n".join(transactions).encode()).hexdigest()[:16]
