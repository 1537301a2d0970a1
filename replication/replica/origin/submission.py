"""How an origin's write set goes through the policy of its set: the agent submits it as a client submits a write."""

from typing import Protocol

import msgspec

from adapters.changes import Member, encode_member, own_key
from replication.model.events import write_body
from replication.policies import Policy
from replication.replica.apply.checks import AtReplica
from replication.replica.apply.local_writes import LocalWrites
from replication.replica.apply.participant import ReplicaParticipant
from replication.replica.origin.repeats import Repeats
from replication.rpc.calls import Failed, ReplicaFailed, Write
from tops.client.site import Site
from tops.model.errors import EventTooLarge, NotReachable, OutcomeUnknown, TransactionAborted
from tops.model.event_types import EventType
from tops.model.ids import TxId
from tops.model.rejections import Rejection, RejectionCode
from tops.model.transactions import TxType

VERDICT_S = 10.0


class Submitted(msgspec.Struct, frozen=True):
    """What became of a write set; `rejection`: why it is nowhere."""

    tx: str
    position: int | None = None
    pending: tuple[str, ...] = ()
    duplicate: bool = False
    rejection: Rejection | None = None


class Submission(Protocol):
    async def submit(self, member: Member, reads: bytes) -> Submitted:
        """Commit under the member's idempotency key. Raises OutcomeUnknown or NotReachable."""


class AtCoordinator:
    """Voting policies, and those that log first: the write set is a transaction at the set's coordinator."""

    def __init__(self, site: Site, log_type: EventType, policy: Policy, participant: ReplicaParticipant) -> None:
        self._site, self._participant = site, participant
        self._spec = policy.plan().spec(log_type.name)
        self._repeats = Repeats(participant.resource, log_type.name)

    async def submit(self, member: Member, reads: bytes) -> Submitted:
        written = msgspec.structs.replace(member, tx=TxId(""))
        try:
            outcome = await self._site.run(self._spec, [write_body(written, reads)])
        except TransactionAborted as aborted:
            return Submitted(aborted.tx, rejection=aborted.rejection)
        except EventTooLarge as error:
            return Submitted(member.tx, rejection=Rejection(RejectionCode.TOO_LARGE, str(error)))
        number = outcome.log_number or 0
        if self._spec.tx_type is TxType.LOCAL:
            # What is logged first is applied then, and may be refused then, by every replica alike.
            try:
                await self._participant.wait_for(number, VERDICT_S)
            except NotReachable as error:
                raise OutcomeUnknown(outcome.tx, str(error)) from error
            rejected = (await self._participant.verdicts.of([(number, outcome.tx)])).get(outcome.tx)
            first = (await self._repeats.of([member])).get(member.idempotency_key)
            if rejected is None and first is not None and first.tx != outcome.tx:
                return Submitted(first.tx, first.number, duplicate=True)
            return Submitted(outcome.tx, number, rejection=rejected)
        return Submitted(outcome.tx, number, tuple(outcome.pending))


class AtThisReplica:
    """Policies that commit at one replica first: the write set is a local write here."""

    def __init__(self, replica: str, writes: LocalWrites, visitor: AtReplica) -> None:
        self._replica, self._writes, self._visitor = replica, writes, visitor

    async def submit(self, member: Member, reads: bytes) -> Submitted:
        if member.idempotency_key == own_key(member.tx):  # a local write is known by its id anyway
            member = msgspec.structs.replace(member, idempotency_key="", content="")
        write = Write(tx=member.tx, member=encode_member(member))
        (done,) = await self._writes.write([write], self._visitor, captured=True)
        if isinstance(done, Failed):
            raise ReplicaFailed(self._replica, done)
        return Submitted(done.tx, done.position, duplicate=done.duplicate, rejection=done.rejection)
