"""The tx coordinator of a distributed transaction, at the rendezvous broker of its event type.

    CENSUS -> ACTIVE -> COMMITTING -> removed
       |         |
       +---------+----> removed (unfulfilled, aborted)
                 +----> detached: the distributed part aborted by itself; the local subscribers still wait for the
                        publisher's commit or abort, which alone decides for them

The census is participant discovery: the coordinator announces the transaction, and subscribers reply with the scope in
which they take part. The coordinator opens the census, checks the sequence of events, tests the constraints when the
census closes and when a participant drops out, and submits the transaction to the epochs of its type when commit is
requested.
"""

from collections.abc import Iterable

import msgspec

from tops.core.commit.ballot import ReadyTx, shortfall
from tops.core.commit.census import Census, Member
from tops.core.coordinator.event_coordinator import EventCoordinator
from tops.model.constraints import deadline_of
from tops.model.ids import NodeId, TxId
from tops.model.rejections import Rejection, RejectionCode, over_limit
from tops.model.sizes import encoded_bytes, logged_bytes
from tops.model.transactions import LocalOutcome, ScopeLimit, TxState
from tops.protocol.effects import CancelTimer, Disseminate, Effect, SendTo, SetTimer
from tops.protocol.messages import (
    Address,
    CensusOpened,
    Event,
    LocalCommitOrdered,
    Sender,
    TxAbandoned,
    TxBegan,
    TxOpened,
    TxPublished,
    TxSpec,
)

# Read with every message, and access to a member of an enum through its class is slow.
CENSUS, CENSUS_UNFULFILLED, ACTIVE, COMMITTING, COMMITTED, ABORTED = TxState
INDEPENDENT, FOLLOWS = LocalOutcome
FOLLOWED = Rejection(RejectionCode.ABORTED, "the transaction aborted")  # for local subscribers that follow the outcome


def decided_within_s(spec: TxSpec) -> float:
    """How long after `begin` an undecided transaction is aborted; a deadline can only shorten this."""
    deadline = deadline_of(spec.constraints)
    return spec.decide_within_s if deadline is None else min(deadline, spec.decide_within_s)


class TxCoordinator(msgspec.Struct, eq=False):
    """One distributed transaction, from its census to its submission to an epoch.

    Methods that end the transaction set `failed` to the reason; the owner sends the outcome to the publishers.
    """

    tx: TxId
    spec: TxSpec
    begun_by: Sender
    initiator: Address
    census: Census
    keep_events: bool
    numbering: EventCoordinator | None = None  # where the event coordinator runs here: public and one-shot transactions
    one_shot: tuple[Event, ...] | None = None
    state: TxState = CENSUS
    events: list[Event] = []
    last_sequence: int = 0
    joined: frozenset[str] = frozenset()
    failed: Rejection | None = None
    detached: bool = False
    incarnation: int = 0  # of the broker that coordinates
    size: int = 0  # in bytes, with all its events

    def __post_init__(self) -> None:
        self.size = logged_bytes(self.tx, self.spec.event_type, self.spec.attributes)

    @property
    def members(self) -> dict[str, Member]:
        return self.census.members

    # ------------------------------------------------------------------------------------------------------ census

    def open(self, me: NodeId, incarnation: int, standing: Iterable[Member]) -> list[Effect]:
        """Announce the transaction; standing registrations count at once."""
        self.incarnation = incarnation
        for member in standing:
            self.census.add_reply(member)
        announced = CensusOpened(
            tx=self.tx, spec=self.spec, coordinator=me, incarnation=incarnation, initiator=self.initiator
        )
        effects: list[Effect] = [Disseminate(announced)]
        effects.append(SetTimer(("deadline", self.tx), decided_within_s(self.spec)))
        if self.census.may_close():
            return effects + self.close_census()
        policy = self.spec.census
        effects.append(SetTimer(("census", self.tx), policy.timeout_s if policy is not None else 0))
        return effects

    def on_replied(self, member: Member) -> list[Effect]:
        if self.state is not CENSUS:
            return []  # too late: the participant sees that the published list does not contain it
        self.census.add_reply(member)
        return self.close_census() if self.census.may_close() else []

    def close_census(self) -> list[Effect]:
        """The first test of the constraints."""
        if self.state is not CENSUS:
            return []
        effects: list[Effect] = [CancelTimer(("census", self.tx))]
        lacking = self.census.unfulfilled()
        if lacking is not None:
            rejection = Rejection(RejectionCode.CENSUS_UNFULFILLED, f"census: {lacking.text}")
            return effects + self._fail(rejection, CENSUS_UNFULFILLED)
        self.state = ACTIVE
        self.joined = frozenset(self.members)
        if self.numbering is not None:
            self.numbering.open()
        began = TxBegan(tx=self.tx, event_type=self.spec.event_type, members=self.census.hashed_members())
        effects.append(Disseminate(began))
        if self.one_shot is None:
            effects.append(SendTo(self.initiator, TxOpened(tx=self.tx, state=self.state, incarnation=self.incarnation)))
        return effects

    # --------------------------------------------------------------------------------------------------- execution

    def on_event(self, published: TxPublished) -> list[Effect]:
        """The sequence is checked here as well as at every participant."""
        if self.state is not ACTIVE and not self.detached:
            return []
        if published.sequence != self.last_sequence + 1:
            return self._incomplete(f"event {published.sequence} arrived after event {self.last_sequence}")
        self.last_sequence += 1
        self.size += encoded_bytes(published.event)
        if self.keep_events:
            self.events.append(published.event)
        if self.one_shot is None and (rejection := over_limit(self.size)) is not None:
            return self._fail(rejection)
        return []

    def on_participant_lost(self, voter: str, reason: str) -> list[Effect]:
        """A participant aborted or is unreachable: the second test of the constraints."""
        member = self.members.get(voter)
        if member is None or self.state not in (CENSUS, ACTIVE):
            return []
        del self.members[voter]
        if self.state is CENSUS:
            return []
        lacking = shortfall(self.ready(), self.joined, self.members, self.census.predicates)
        if lacking is None and not member.counts:
            lacking = Rejection(RejectionCode.OWN_RESOURCES, "the publisher's own resources failed")
        if lacking is not None:
            rejection = msgspec.structs.replace(lacking, text=f"{reason}: {lacking.text}")
            return self._fail(rejection, distributed_only=True)
        return []

    def abort(self, rejection: Rejection) -> list[Effect]:
        """A publisher aborted or is unreachable, or the time-out has passed: every participant that has not voted drops
        the transaction."""
        return self._fail(rejection)

    # -------------------------------------------------------------------------------------------------- commitment

    def commit(self, last_sequence: int | None) -> list[Effect]:
        """Commit is requested. If nothing is wrong, the state is COMMITTING afterwards, and the caller submits
        `ready()`."""
        if self.detached and last_sequence in (None, self.last_sequence):
            self.detached = False
            return [CancelTimer(("deadline", self.tx)), self._local_commit()]
        if self.state is not ACTIVE:
            return []
        if last_sequence is not None and last_sequence != self.last_sequence:
            return self._incomplete(f"{self.last_sequence} of {last_sequence} events arrived")
        self.state = COMMITTING
        if self.numbering is not None:
            self.numbering.close(self.state)
        if self.spec.local_outcome is INDEPENDENT:
            return [self._local_commit()]
        return []

    def ready(self) -> ReadyTx:
        """What the epochs need of this transaction."""
        return ReadyTx(
            tx=self.tx,
            spec=self.spec,
            publisher=self.initiator,
            last_sequence=self.last_sequence,
            events=tuple(self.events) if self.keep_events else None,  # replicas have no route that events would take
            logged_events=tuple(self.events),
            members=dict(self.members),
            who=self.begun_by.accountable,
            size=self.size,
        )

    def settled(self, committed: bool) -> list[Effect]:
        """The epoch is decided; local subscribers that follow get the outcome now."""
        self.state = COMMITTED if committed else ABORTED
        effects: list[Effect] = [CancelTimer(("deadline", self.tx))]
        if self.spec.local_outcome is FOLLOWS:
            effects.append(self._local_commit() if committed else self._abandoned(FOLLOWED, False))
        return effects

    def _has_independent_locals(self) -> bool:
        independent = self.spec.local_outcome is INDEPENDENT
        return independent and self.spec.limit is not ScopeLimit.DISTRIBUTED

    def _local_commit(self) -> Effect:
        order = LocalCommitOrdered(tx=self.tx, event_type=self.spec.event_type, last_sequence=self.last_sequence)
        return Disseminate(order)

    def _incomplete(self, text: str) -> list[Effect]:
        return self._fail(Rejection(RejectionCode.INCOMPLETE, text))

    def _fail(self, rejection: Rejection, state: TxState = ABORTED, *, distributed_only: bool = False) -> list[Effect]:
        distributed_only = distributed_only and self._has_independent_locals()
        self.state, self.failed, self.detached = state, rejection, distributed_only
        effects: list[Effect] = [CancelTimer(("census", self.tx)), self._abandoned(rejection, distributed_only)]
        if self.detached:
            return effects
        if self.numbering is not None:
            self.numbering.close(state)
        effects.append(CancelTimer(("deadline", self.tx)))
        if state is CENSUS_UNFULFILLED and self.one_shot is None:
            effects.append(SendTo(self.initiator, TxOpened(tx=self.tx, state=state, rejection=rejection)))
        return effects

    def _abandoned(self, rejection: Rejection, distributed_only: bool) -> Effect:
        abandoned = TxAbandoned(
            tx=self.tx, event_type=self.spec.event_type, rejection=rejection, distributed_only=distributed_only
        )
        return Disseminate(abandoned)
