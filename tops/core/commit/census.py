"""The census (participant discovery): which subscribers take part in a transaction.

Replies arrive with a fresh pseudonym each, or come from standing registrations; the census closes by time, by number of
replies or as soon as the constraints are met. Afterwards the list of hashed pseudonyms is published, so that a member
finds itself and can't find the others.
"""

from collections.abc import Mapping

import msgspec

from tops.model.constraints import Predicate, admits, constrains_participants, unmet
from tops.model.ids import Pseudonym, TxId, hashed, voter_of
from tops.model.rejections import Rejection, RejectionCode
from tops.protocol.messages import Address, TxSpec


class Member(msgspec.Struct):
    """A distributed participant, as the coordinator knows it.

    `key` is the name that it votes under, bound to its identity: its pseudonym, or the name of its standing
    registration. `identity` is None where no constraint needs it. `counts` is False for the initiator's own resources:
    they must commit, but constraints do not count them as participants.
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
        """The participant's own name for itself: messages to it contain no other."""
        return voter_of(self.key)


class Census(msgspec.Struct, eq=False):
    """Collects the replies for one transaction."""

    tx: TxId
    spec: TxSpec
    predicates: Mapping[str, Predicate]
    members: dict[str, Member] = {}

    def add_reply(self, member: Member) -> bool:
        """Whether the reply was accepted: a repeated one changes nothing, one that constraints forbid is rejected."""
        if member.key in self.members:
            return False
        constraints = self.spec.constraints
        if constraints and member.counts and not admits(constraints, member.identity, self._counted()):
            return False
        self.members[member.key] = member
        return True

    def may_close(self) -> bool:
        """Whether the census may close before its time-out."""
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
        """Why the transaction can't begin with the participants that replied, or None."""
        counted = [m.identity for m in self.members.values() if m.counts]
        if not counted and not constrains_participants(self.spec.constraints):
            return Rejection(RejectionCode.CONSTRAINTS_UNMET, "no participant joined")
        return unmet(self.spec.constraints, counted, self.predicates)

    def hashed_members(self) -> frozenset[str]:
        """The list that is published when the census closes."""
        return frozenset([hashed(m.pseudonym) for m in self.members.values()])
