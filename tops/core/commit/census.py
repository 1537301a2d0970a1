"""The census: who takes part in a transaction.

Answers arrive with a fresh pseudonym each, or stand from before; the census closes by time, by number of replies or
as soon as the constraints are met. What is published afterwards is the list of hashed pseudonyms, so that a member
finds itself and nobody finds the others.
"""

from collections.abc import Mapping

import msgspec

from tops.model.constraints import Predicate, admits, constrains_participants, unmet
from tops.model.ids import Pseudonym, TxId, hashed, voter_of
from tops.model.rejections import Rejection, RejectionCode
from tops.protocol.messages import Address, TxSpec


class Member(msgspec.Struct):
    """A distributed participant, as the coordinator knows it.

    `key` is what it votes under, bound to its identity: its pseudonym, or the name of its standing answer. `identity`
    is None where no constraint needs it. `counts` is False for the initiator's own resources: they must commit, but
    they are no participant that a constraint counts.
    """

    key: str
    pseudonym: Pseudonym
    identity: str | None
    address: Address
    incarnation: int
    counts: bool = True
    standing: bool = False

    @property
    def voter(self) -> str:
        """Its own name for itself, which is all that it learns."""
        return voter_of(self.key)


class Census(msgspec.Struct, eq=False):
    """Collects the answers for one transaction."""

    tx: TxId
    spec: TxSpec
    predicates: Mapping[str, Predicate]
    members: dict[str, Member] = {}

    def add_reply(self, member: Member) -> bool:
        """Whether the answer was taken: a repeated one changes nothing, one that constraints forbid is turned away."""
        if member.key in self.members:
            return False
        constraints = self.spec.constraints
        if constraints and member.counts and not admits(constraints, member.identity, self._counted()):
            return False
        self.members[member.key] = member
        return True

    def may_close(self) -> bool:
        """Whether there is no reason to wait for the census's time to pass."""
        policy = self.spec.census
        if policy is None:
            return True
        replies = policy.replies
        if replies is not None and len(self.members) >= replies and self._counted() >= replies:
            return True
        return policy.when_met and self._counted() > 0 and self.unfulfilled() is None

    def _counted(self) -> int:
        return sum([m.counts for m in self.members.values()])

    def unfulfilled(self) -> Rejection | None:
        """Why the transaction can't begin with those who answered, or None."""
        counted = [m.identity for m in self.members.values() if m.counts]
        if not counted and not constrains_participants(self.spec.constraints):
            return Rejection(RejectionCode.CONSTRAINTS_UNMET, "nobody joined")
        return unmet(self.spec.constraints, counted, self.predicates)

    def hashed_members(self) -> frozenset[str]:
        """What is published when the census closes."""
        return frozenset([hashed(m.pseudonym) for m in self.members.values()])
