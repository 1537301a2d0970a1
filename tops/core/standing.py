"""Standing answers to the census of one event type, and which replicas are in sync.

A subscriber that always gives the same answer leaves it with the coordinator and renews it while it lives; the
coordinator then asks nobody. A subscriber that also tells its position in the log is a replica: its vote counts only
while it is *in sync*, and the in-sync set is journaled before the first commit without a former member.
"""

from collections.abc import Callable, Collection

import msgspec

from tops.core.census import Member
from tops.filters import Filter
from tops.ids import Pseudonym, TxId, standing_pseudonym
from tops.messages import Address, StandingAnswered, TxSpec
from tops.transactions import Scope, ScopeLimit, TxType, granted_scope

EVERYTHING = Filter.everything()


class Standing(msgspec.Struct):
    """One standing answer."""

    voter: str
    event_type: str  # itself and its descendants are meant
    subscription: int
    address: Address
    incarnation: int
    filter: Filter
    scope: Scope
    secret: bytes
    identity: str | None
    position: int | None
    renewed_at: float

    @property
    def replica(self) -> bool:
        return self.position is not None and self.identity is not None


class StandingAnswers:
    """The standing answers of one event type."""

    def __init__(self, lease_s: float, lineage: Callable[[str], tuple[str, ...]]) -> None:
        self.lease_s, self.lineage = lease_s, lineage
        self.answers: dict[str, Standing] = {}
        self._in_sync: frozenset[str] = frozenset()
        self._near: frozenset[str] = frozenset()
        self._voters: dict[tuple[str, ScopeLimit, TxType], dict[str, Member]] = {}  # while nothing changes

    @property
    def in_sync(self) -> frozenset[str]:
        """Which replicas' votes count, by identity; as journaled."""
        return self._in_sync

    @in_sync.setter
    def in_sync(self, identities: frozenset[str]) -> None:
        self._in_sync = identities
        self._near -= identities
        self._voters.clear()

    @property
    def near(self) -> frozenset[str]:
        """Replicas that were in sync until a decision did not wait for them. They are asked as those in sync are, and
        a vote of theirs is as good: it is given with everything before applied."""
        return self._near

    @near.setter
    def near(self, identities: frozenset[str]) -> None:
        self._near = identities - self._in_sync
        self._voters.clear()

    def renew(self, answered: StandingAnswered, sender: Address, incarnation: int, now: float) -> bool:
        """Take or renew an answer; True when it is new, so that its position is to be believed as it is."""
        known = self.answers.get(answered.voter)
        self._voters.clear()
        standing = Standing(
            voter=answered.voter,
            event_type=answered.event_type,
            subscription=answered.subscription,
            address=sender,
            incarnation=incarnation,
            filter=answered.filter,
            scope=answered.scope,
            secret=answered.secret,
            identity=answered.identity,
            position=answered.position,
            renewed_at=now,
        )
        if known is None and answered.identity is not None:
            self._near -= {answered.identity}  # its position tells how near it is
            # An agent that came back under a new name replaces its former self; one site may have several.
            former = (answered.identity, answered.subscription)
            self.answers = {k: s for k, s in self.answers.items() if (s.identity, s.subscription) != former}
        self.answers[answered.voter] = standing
        return known is None

    def withdraw(self, voter: str) -> Standing | None:
        self._voters.clear()
        return self.answers.pop(voter, None)

    def expire(self, now: float) -> list[Standing]:
        """Answers that were not renewed in time no longer count."""
        late = [s for s in self.answers.values() if now - s.renewed_at > self.lease_s]
        for s in late:
            self.withdraw(s.voter)
        return late

    def counted(self, standing: Standing) -> bool:
        """Whether its vote counts: a replica's only while it is in sync, or as good as."""
        return not standing.replica or standing.identity in self._in_sync or standing.identity in self._near

    def voters(self, spec: TxSpec) -> dict[str, Member]:
        """Those who take part in a distributed transaction with these attributes, and whose votes count.

        The pseudonym is left empty: only a published membership list needs it, see `pseudonymous`."""
        kind = (spec.event_type, spec.limit, spec.tx_type)
        known = self._voters.get(kind)
        if known is None:
            taking = [s for s in self.answers.values() if self.counted(s) and self._takes_part(s, spec)]
            known = {s.voter: _member(s) for s in taking}
            if all(s.filter == EVERYTHING for s in self.answers.values()):
                self._voters[kind] = known  # the attributes make no difference
        return known

    def joiners(self, spec: TxSpec, number: int, gap_max: int, barred: Collection[str]) -> dict[str, Member]:
        """Replicas that have nearly caught up: they get prepares too, and are in sync with their first timely YES.
        `barred`: whose position means nothing yet."""
        return {
            s.voter: _member(s)
            for s in self.answers.values()
            if s.replica and not self.counted(s) and number - 1 - gap_max <= (s.position or 0) < number
            if s.identity not in barred and self._takes_part(s, spec)
        }

    def pseudonymous(self, member: Member, tx: TxId) -> Member:
        """The same member with the pseudonym that belongs to this transaction."""
        pseudonym = standing_pseudonym(self.answers[member.key].secret, tx)
        return msgspec.structs.replace(member, pseudonym=pseudonym)

    def identities(self, voters: frozenset[str]) -> frozenset[str]:
        """Which replicas stand behind these voters."""
        return frozenset(
            s.identity for v in voters if (s := self.answers.get(v)) is not None and s.replica and s.identity
        )

    def _takes_part(self, standing: Standing, spec: TxSpec) -> bool:
        if standing.event_type not in self.lineage(spec.event_type):
            return False
        granted = granted_scope(standing.scope, spec.limit, spec.tx_type)
        return granted is Scope.DISTRIBUTED and standing.filter.matches(spec.attributes)


def _member(s: Standing) -> Member:
    return Member(s.voter, Pseudonym(""), s.identity, s.address, s.incarnation, standing=True)
