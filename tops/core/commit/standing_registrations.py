"""Standing registrations for the census of one event type, and which replicas are in sync.

A subscriber that always replies alike registers its reply with the coordinator and renews the registration while its
link exists; the coordinator then needs no census. A subscriber that also reports its position in the log is a replica:
its vote counts only while it is *in sync*, and the in-sync set is journaled before the first commit without a former
member.
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
    """One standing registration."""

    key: str  # the name that it votes under, bound to its identity
    event_type: str  # the registration holds for it and its descendants
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
        """What has one registration: each subscription of a session, and each replica as a whole."""
        return (self.sender.identity if self.replica else self.sender.node, self.subscription)


class StandingRegistrations:
    """The standing registrations of one event type."""

    def __init__(self, lease_s: float, lineage: Callable[[str], tuple[str, ...]]) -> None:
        self.lease_s, self.lineage = lease_s, lineage
        self.registrations: dict[str, StandingRegistration] = {}  # by key
        self._in_sync: frozenset[str] = frozenset()
        self._near: frozenset[str] = frozenset()
        self._voters: dict[Kind, dict[str, Member]] = {}  # a cache, cleared by every change

    @property
    def in_sync(self) -> frozenset[str]:
        """The identities of the replicas whose votes count; as journaled."""
        return self._in_sync

    @in_sync.setter
    def in_sync(self, identities: frozenset[str]) -> None:
        self._in_sync = identities
        self._near -= identities
        self._voters.clear()

    @property
    def near(self) -> frozenset[str]:
        """Replicas that were in sync until a decision did not wait for them. They get prepares like those in sync, and
        their votes count alike: a replica votes only when it has applied everything before."""
        return self._near

    @near.setter
    def near(self, identities: frozenset[str]) -> None:
        self._near = identities - self._in_sync
        self._voters.clear()

    def renew(
        self, registered: StandingRegistered, sender: Sender, at: Address, now: float
    ) -> tuple[StandingRegistration, bool]:
        """Add or renew a registration. True when it is new: its position replaces what was known of the replica."""
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
            self._near -= {sender.identity}  # from now on its position decides
            # A restarted agent votes under a new name, which replaces the old one; one site may have several agents.
            self.registrations = {k: s for k, s in self.registrations.items() if s.owner != standing.owner}
        self.registrations[key] = standing
        return standing, known is None

    def withdraw(self, key: str) -> StandingRegistration | None:
        self._voters.clear()
        return self.registrations.pop(key, None)

    def expire(self, now: float) -> list[StandingRegistration]:
        """Withdraw and return the registrations that were not renewed in time."""
        expired = [s for s in self.registrations.values() if now - s.renewed_at > self.lease_s]
        for s in expired:
            self.withdraw(s.key)
        return expired

    def counted(self, standing: StandingRegistration) -> bool:
        """Whether its vote counts: a replica's only while it is in sync or near."""
        return not standing.replica or standing.identity in self._in_sync or standing.identity in self._near

    def voters(self, spec: TxSpec) -> dict[str, Member]:
        """The participants of a distributed transaction with these attributes whose votes count.

        The pseudonym is empty: only a published membership list needs it, see `pseudonymous`."""
        kind = (spec.event_type, spec.limit, spec.tx_type, only_from(spec.constraints))
        known = self._voters.get(kind)
        if known is None:
            taking = [s for s in self.registrations.values() if self.counted(s) and self._takes_part(s, spec)]
            known = {s.key: _member(s) for s in taking}
            if all(s.filter == EVERYTHING for s in self.registrations.values()):
                self._voters[kind] = known  # the attributes make no difference
        return known

    def joiners(self, spec: TxSpec, number: int, gap_max: int, barred: Collection[str]) -> dict[str, Member]:
        """Replicas that have nearly caught up: they get prepares, too, and are in sync with their first timely YES.
        `barred`: replicas whose position can't be trusted yet."""
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
        """The identities of the replicas among these voters."""
        return frozenset(s.identity for v in voters if (s := self.registrations.get(v)) is not None and s.replica)

    def _takes_part(self, standing: StandingRegistration, spec: TxSpec) -> bool:
        if standing.event_type not in self.lineage(spec.event_type):
            return False
        allowed = only_from(spec.constraints)
        if allowed is not None and standing.identity not in allowed:
            return False  # not on the list: it gets no prepare, and its absence fails no constraint
        granted = granted_scope(standing.scope, spec.limit, spec.tx_type)
        return granted is Scope.DISTRIBUTED and standing.filter.matches(spec.attributes)


def _member(s: StandingRegistration) -> Member:
    return Member(s.key, Pseudonym(""), s.identity, s.address, s.sender.incarnation, standing=True)
