"""Letters between a participant and the coordinator, and between participants in doubt: census, votes, decisions."""

import msgspec

from tops.model.filters import Filter
from tops.model.ids import Pseudonym, TxId
from tops.model.log_points import BEGINNING, NO_DIGEST, LogPoint
from tops.model.rejections import Rejection
from tops.model.transactions import Scope, TxState
from tops.protocol.messages.values import Address, EpochId, EpochMember, Message


class ParticipantLost(Message, frozen=True):
    """A broker saw the site at this address, one of its own, go; who has not voted counts as a NO."""

    address: Address


class CensusReplied(Message, frozen=True):
    """A subscriber asks for the distributed scope."""

    tx: TxId
    pseudonym: Pseudonym
    event_type: str


class StandingRegistered(Message, frozen=True):
    """A subscriber's answer to every census of that type, renewed while its link lives.

    Pseudonyms are derived from `secret`. `position` is what a replica has applied of the log; None: it keeps none.
    A newer answer for the same `subscription` of the same sender replaces the former one.
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
    """From here on the answer counts; `incarnation` is the coordinator's, `in_sync` whether its votes count."""

    voter: str
    incarnation: int
    in_sync: bool


class StandingWithdrawn(Message, frozen=True):
    voter: str
    event_type: str


class ParticipantAborted(Message, frozen=True):
    """A participant gives up before the vote."""

    tx: TxId
    voter: str
    reason: str
    event_type: str


class GetMembership(Message, frozen=True):
    """A participant in the census or active state has heard nothing for long."""

    tx: TxId
    event_type: str
    voter: str


class MembershipReported(Message, frozen=True):
    tx: TxId
    voter: str
    state: TxState
    members: frozenset[str] = frozenset()


class PrepareEpoch(Message, frozen=True):
    """Apply these transactions in this order and promise to commit them; other attempts of the number are void.

    It also tells what a `FinishNoted` would, for all epochs of this life of the coordinator with a number below
    `noted`.
    """

    epoch: EpochId
    digest: str
    voter: str
    members: tuple[EpochMember, ...]
    noted: int = 0
    before: LogPoint = BEGINNING  # on a log: what a replica must hold to prepare this


class EpochVoted(Message, frozen=True):
    """A promise that survives a crash, for all members but `excluded`.

    `rows` has, per member in order, the rows that each of its changes affected: voters that differ have diverged.
    `results` is what the members return to their publishers, opaque; the first voter's is passed on.
    """

    epoch: EpochId
    digest: str
    voter: str
    excluded: dict[TxId, Rejection]
    rows: tuple[tuple[int, ...], ...] = ()
    results: tuple[bytes, ...] = ()


class EpochDecided(Message, frozen=True):
    """The end of an attempt. Who is not in the committing set rolls back whatever is prepared or running.

    The set holds hashed keys: a voter finds itself, can pass the decision on to a peer in doubt, and learns no name.
    """

    epoch: EpochId
    digest: str
    voter: str
    committing: frozenset[str]
    log_digest: str = ""  # on a log, of a commit: at the epoch's index, with what is committed under it
    proof: bytes = b""  # with keys: the coordinator's signature; empty if the decision can't be passed on


class EpochFinished(Message, frozen=True):
    """The commit is carried out, durably. `note`: said again until the coordinator has noted it."""

    epoch: EpochId
    voter: str
    note: bool


class FinishNoted(Message, frozen=True):
    """The coordinator is not going to be asked by this voter any more, and the voter may forget its promise.

    Said only to a voter that asks for it by repeating its `EpochFinished`: most hear it with their next prepare.
    """

    epoch: EpochId
    voter: str


class GetEpochOutcome(Message, frozen=True):
    """A voter has promised and waits for the decision."""

    epoch: EpochId
    digest: str
    voter: str


class QueryPeers(Message, frozen=True):
    """In doubt and the coordinator is silent: brokers pass this to their own subscribers of the type."""

    epoch: EpochId
    digest: str
    voter: str


class DecisionRelayed(Message, frozen=True):
    """A peer passes on the decision that it heard; who does not know stays silent, nobody guesses.

    With keys it counts only with the coordinator's own `proof`.
    """

    epoch: EpochId
    digest: str
    committing: frozenset[str]
    log_digest: str = ""
    proof: bytes = b""

    @property
    def text(self) -> bytes:
        """What the coordinator has signed, if it has decided so."""
        return decision_text(self.epoch, self.digest, self.committing, self.log_digest)


def decision_text(epoch: EpochId, digest: str, committing: frozenset[str], log_digest: str) -> bytes:
    """What a coordinator signs when it has decided; an empty committing set is an abort.

    Equal decisions have equal bytes, different ones never, and nothing else that a node signs begins like this.
    """
    return msgspec.msgpack.encode(("TOPS decision", 1, epoch, digest, sorted(committing), log_digest))
