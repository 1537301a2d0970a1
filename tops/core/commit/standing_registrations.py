"""Standing answers to the census of one event type, and which replicas are in sync.

A subscriber that always gives the same answer leaves it with the coordinator and renews it while it lives; the
coordinator then asks nobody. A subscriber that also tells its position in the log is a replica: its vote counts only
while it is *in sync*, and the in-sync set is journaled before the first commit without a former member.
"""

from collections.abc import Callable, Collection

import msgspec

from tops.core.commit.census import Member
from tops.model.constraints import only_from
from tops.model.filters import Filter
from tops.model.ids import Pseudonym, TxId, standing_pseudonym, voter_key
from tops.model.transactions import Scope, ScopeLimit, TxType, granted_scope
from tops.protocol.messages import Address, Sender, StandingRegistered, TxSpec

EVERYTHING = Filter.everything()
Kind = tuple[str, ScopeLimit, TxType, frozenset[str] | None]  # of transactions that have the same voters


class StandingRegistration(msgspec.Struct):
    """One standing answer."""

    key: str  # what it votes under, bound to its identity
    event_type: str  # itself and its descendants are meant
    subscription: int
    sender: Sender
    address: Address
    filter: Filter
    scope: Scope
    secret: bytes
    position: int | None
    history: str
    digest: str  # at `position`
    renewed_at: float

    @property
    def replica(self) -> bool:
        return self.position is not None

    @property
    def identity(self) -> str:
        return self.sender.identity

    @property
    def owner(self) -> tuple[str, int]:
        """Whose answer it is: there is one for each subscription of a session, and one for a replica altogether."""
        return (self.sender.identity if self.replica else self.sender.node, self.subscription)


class StandingRegistrations:
    """The standing answers of one event type."""

    def __init__(self, lease_s: float, lineage: Callable[[str], tuple[str, ...]]) -> None:
        self.lease_s, self.lineage = lease_s, lineage
        self.registrations: dict[str, StandingRegistration] = {}  # by key
        self._in_sync: frozenset[str] = frozenset()
        self._near: frozenset[str] = frozenset()
        self._voters: dict[Kind, dict[str, Member]] = {}  # while nothing changes

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

    def renew(
        self, registered: StandingRegistered, sender: Sender, at: Address, now: float
    ) -> tuple[StandingRegistration, bool]:
        """Take or renew an answer; True when it is new, so that its position is to be believed as it is."""
        key = voter_key(sender.identity, registered.voter)
        known = self.registrations.get(key)
        self._voters.clear()
        standing = StandingRegistration(
            key=key,
            event_type=registered.event_type,
            subscription=registered.subscription,
            sender=sender,
            address=at,
            filter=registered.filter,
            scope=registered.scope,
            secret=registered.secret,
            position=registered.position,
            history=registered.history,
            digest=registered.digest,
            renewed_at=now,
        )
        if known is None:
            self._near -= {sender.identity}  # its position tells how near it is
            # An agent that came back under a new name replaces its former self; one site may have several.
            self.registrations = {k: s for k, s in self.registrations.items() if s.owner != standing.owner}
        self.registrations[key] = standing
        return standing, known is None

    def withdraw(self, key: str) -> StandingRegistration | None:
        self._voters.clear()
        return self.registrations.pop(key, None)

    def expire(self, now: float) -> list[StandingRegistration]:
        """Answers that were not renewed in time no longer count."""
        late = [s for s in self.registrations.values() if now - s.renewed_at > self.lease_s]
        for s in late:
            self.withdraw(s.key)
        return late

    def counted(self, standing: StandingRegistration) -> bool:
        """Whether its vote counts: a replica's only while it is in sync, or as good as."""
        return not standing.replica or standing.identity in self._in_sync or standing.identity in self._near

    def voters(self, spec: TxSpec) -> dict[str, Member]:
        """Those who take part in a distributed transaction with these attributes, and whose votes count.

        The pseudonym is left empty: only a published membership list needs it, see `pseudonymous`."""
        kind = (spec.event_type, spec.limit, spec.tx_type, only_from(spec.constraints))
        known = self._voters.get(kind)
        if known is None:
            taking = [s for s in self.registrations.values() if self.counted(s) and self._takes_part(s, spec)]
            known = {s.key: _member(s) for s in taking}
            if all(s.filter == EVERYTHING for s in self.registrations.values()):
                self._voters[kind] = known  # the attributes make no difference
        return known

    def joiners(self, spec: TxSpec, number: int, gap_max: int, barred: Collection[str]) -> dict[str, Member]:
        """Replicas that have nearly caught up: they get prepares too, and are in sync with their first timely YES.
        `barred`: whose position means nothing yet."""
        return {
            s.key: _member(s)
            for s in self.registrations.values()
            if s.replica and not self.counted(s) and number - 1 - gap_max <= (s.position or 0) < number
            if s.identity not in barred and self._takes_part(s, spec)
        }

    def pseudonymous(self, member: Member, tx: TxId) -> Member:
        """The same member with the pseudonym that belongs to this transaction."""
        pseudonym = standing_pseudonym(self.registrations[member.key].secret, tx)
        return msgspec.structs.replace(member, pseudonym=pseudonym)

    def identities(self, voters: frozenset[str]) -> frozenset[str]:
        """Which replicas stand behind these voters."""
        return frozenset(s.identity for v in voters if (s := self.registrations.get(v)) is not None and s.replica)

    def _takes_part(self, standing: StandingRegistration, spec: TxSpec) -> bool:
        if standing.event_type not in self.lineage(spec.event_type):
            return False
        allowed = only_from(spec.constraints)
        if allowed is not None and standing.identity not in allowed:
            return False  # it is not on the list: it is not asked, and nobody fails because of it
        granted = granted_scope(standing.scope, spec.limit, spec.tx_type)
        return granted is Scope.DISTRIBUTED and standing.filter.matches(spec.attributes)


def _member(s: StandingRegistration) -> Member:
    return Member(s.key, Pseudonym(""), s.identity, s.address, s.sender.incarnation, standing=True)
