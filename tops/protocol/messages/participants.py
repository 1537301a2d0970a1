"""Messages between a participant and the coordinator, and between participants in doubt: census, votes, decisions."""

import msgspec

from tops.model.filters import Filter
from tops.model.ids import Pseudonym, TxId
from tops.model.log_points import BEGINNING, NO_DIGEST, LogPoint
from tops.model.rejections import Rejection
from tops.model.transactions import Scope, TxState
from tops.protocol.messages.values import Address, EpochId, EpochMember, Message


class ParticipantLost(Message, frozen=True):
    """A broker has lost the site at this address, one of its own; a participant there that has not voted counts as a
    NO."""

    address: Address


class CensusReplied(Message, frozen=True):
    """A subscriber requests the distributed scope."""

    tx: TxId
    pseudonym: Pseudonym
    event_type: str


class StandingRegistered(Message, frozen=True):
    """A subscriber's standing reply to every census of that type, renewed as long as its link exists.

    Pseudonyms are derived from `secret`. `position` is the applied index of a replica; None: it is no replica. A newer
    registration for the same `subscription` of the same sender replaces the former one.
    """

    voter: str
    event_type: str
    filter: Filter
    scope: Scope
    secret: bytes
    position: int | None
    subscription: int = 0
    history: str = ""
    digest: str = NO_DIGEST  # at `position`


class StandingAccepted(Message, frozen=True):
    """From here on the registration counts; `incarnation` is the coordinator's, `in_sync` whether its votes count."""

    voter: str
    incarnation: int
    in_sync: bool


class StandingWithdrawn(Message, frozen=True):
    voter: str
    event_type: str


class ParticipantAborted(Message, frozen=True):
    """A participant aborts before the vote."""

    tx: TxId
    voter: str
    reason: str
    event_type: str


class GetMembership(Message, frozen=True):
    """A participant in the census or active state has received nothing for long, and requests the state."""

    tx: TxId
    event_type: str
    voter: str


class MembershipReported(Message, frozen=True):
    tx: TxId
    voter: str
    state: TxState
    members: frozenset[str] = frozenset()


class PrepareEpoch(Message, frozen=True):
    """Apply these transactions in this order and prepare to commit them; this replaces earlier attempts at the number.

    It also contains a `FinishNoted` for all epochs of this incarnation of the coordinator with a number below `noted`.
    """

    epoch: EpochId
    digest: str
    voter: str
    members: tuple[EpochMember, ...]
    noted: int = 0
    before: LogPoint = BEGINNING  # on a log: the point that a replica must hold to prepare this


class EpochVoted(Message, frozen=True):
    """A voter's response to `PrepareEpoch`. All members but `excluded` are prepared, which survives a crash.

    `rows` has, per member in order, the rows that each of its changes affected: voters that differ have diverged.
    `results` is what the members return to their publishers, opaque; the first voter's is sent to them.
    """

    epoch: EpochId
    digest: str
    voter: str
    excluded: dict[TxId, Rejection]
    rows: tuple[tuple[int, ...], ...] = ()
    results: tuple[bytes, ...] = ()


class EpochDecided(Message, frozen=True):
    """The decision on an attempt. A voter that is not in the committing set rolls back what is prepared or running.

    The set holds hashed keys: a voter finds itself and can relay the decision to a peer in doubt, and the set reveals
    no names.
    """

    epoch: EpochId
    digest: str
    voter: str
    committing: frozenset[str]
    log_digest: str = ""  # on a log, of a commit: at the epoch's index, with what is committed under it
    proof: bytes = b""  # with keys: the coordinator's signature; empty if the decision can't be relayed


class EpochFinished(Message, frozen=True):
    """The commit is carried out, durably. `note`: repeated until the coordinator has noted it."""

    epoch: EpochId
    voter: str
    note: bool


class FinishNoted(Message, frozen=True):
    """The coordinator has noted the finish on disk: the voter may delete its memo.

    Sent only in response to a repeated `EpochFinished`: most voters get the confirmation with their next prepare.
    """

    epoch: EpochId
    voter: str


class GetEpochOutcome(Message, frozen=True):
    """A voter has prepared, has received no decision, and requests it."""

    epoch: EpochId
    digest: str
    voter: str


class QueryPeers(Message, frozen=True):
    """A voter in doubt, whose coordinator is silent, requests the decision from its peers: brokers forward this to
    their own subscribers of the type."""

    epoch: EpochId
    digest: str
    voter: str


class DecisionRelayed(Message, frozen=True):
    """A peer relays the decision that it received. A peer without the decision stays silent: absence is no decision.

    In a cluster with keys it counts only with the coordinator's own `proof`.
    """

    epoch: EpochId
    digest: str
    committing: frozenset[str]
    log_digest: str = ""
    proof: bytes = b""

    @property
    def text(self) -> bytes:
        """The text that the coordinator has signed, if it has decided so."""
        return decision_text(self.epoch, self.digest, self.committing, self.log_digest)


def decision_text(epoch: EpochId, digest: str, committing: frozenset[str], log_digest: str) -> bytes:
    """The text that a coordinator signs when it has decided; an empty committing set is an abort.

    Two decisions have equal bytes only if they are equal, and nothing else that a node signs begins like this.
    """
    return msgspec.msgpack.encode(("TOPS decision", 1, epoch, digest, sorted(committing), log_digest))
