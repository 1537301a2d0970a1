"""Why a transaction, a vote or a write is rejected: a code for programs, and a text for people.

A rejection travels from the node that rejects (a participant, a coordinator, a replica's database) to the publisher.
Nothing on the way reads its text; to reword a text changes no behaviour.
"""

from enum import Enum
from typing import Final

import msgspec

from tops.model.ids import TxId
from tops.model.sizes import TEXT_MAX, TX_BYTES_MAX


class RejectionCode(Enum):
    """The kind of a rejection. The values are stable: they are stored, and applications see them."""

    # By its publisher, its coordinator or a participant.
    ABORTED = "aborted"  # its publisher or an operator aborted it
    PUBLISHER_LOST = "publisher-lost"  # a publisher is unreachable
    TIMED_OUT = "timed-out"  # it was not decided in time
    RESTARTED = "restarted"  # its coordinator was restarted
    NOT_TAKEN = "not-taken"  # its coordinator does not accept it: its specification, a quota, a late repetition
    INCOMPLETE = "incomplete"  # events are missing, or came out of sequence
    CENSUS_UNFULFILLED = "census-unfulfilled"  # too few or the wrong participants replied to the census
    CONSTRAINTS_UNMET = "constraints-unmet"  # the participants that are left are not enough
    PARTICIPANT_NOT_ALLOWED = "participant-not-allowed"  # a participant is not on the list
    OWN_RESOURCES = "own-resources"  # the publisher's own resources failed
    PARTICIPANT_FAILED = "participant-failed"  # a participant raised an error, or does not know the transaction
    BUSY = "busy"  # a participant has other work in progress
    PAUSED = "paused"  # a replica was stopped
    ROWS_DIFFER = "rows-differ"  # it changed another number of rows at some replicas than at others
    JOURNAL_STALE = "journal-stale"  # the coordinator assigns no index
    NO_RECORD = "no-record"  # there is no record of it (any more)
    NO_RECEIVER = "no-receiver"  # a tcm of a routing transaction reached no client
    # By the coordinator of a replica set's log.
    PLAN_UNKNOWN = "plan-unknown"
    AGAINST_PLAN = "against-plan"
    NOT_LISTED = "not-listed"
    TOO_LARGE = "too-large"
    # By a replica.
    INVALID = "invalid"  # unknown table or column, no primary key, not deterministic (with `proof`)
    CONSTRAINT = "constraint"  # check, unique, foreign key, not null, exclusion
    VERSION = "version"  # the row is not the version that the writer had read
    DUPLICATE = "duplicate"  # its idempotency key has been committed with the same content, by `first_tx`
    KEY_REUSED = "key-reused"  # its idempotency key has been committed with other content
    CONFLICT = "conflict"  # another transaction committed in between: execute again
    SERIALIZATION = "serialization"  # what the transaction has read was changed
    UNAVAILABLE = "unavailable"  # the replica can't at the moment
    ERROR = "error"  # any other error of the database


# Codes that are part of the text.
_SHOWN = frozenset(
    [
        RejectionCode.PLAN_UNKNOWN,
        RejectionCode.AGAINST_PLAN,
        RejectionCode.NOT_LISTED,
        RejectionCode.TOO_LARGE,
        RejectionCode.INVALID,
        RejectionCode.CONSTRAINT,
        RejectionCode.VERSION,
        RejectionCode.DUPLICATE,
        RejectionCode.KEY_REUSED,
        RejectionCode.CONFLICT,
        RejectionCode.SERIALIZATION,
        RejectionCode.UNAVAILABLE,
        RejectionCode.ERROR,
    ]
)
REJECTION_TEXT_MAX: Final = TEXT_MAX  # of all texts of a rejection in a message of a site, in characters


class Rejection(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Why something is rejected. `str()` gives the whole text for people; programs use only the other fields.

    `proof`: the code of why a change is not proved to be deterministic. `first_tx`, `first_number`: of a duplicate, the
    transaction that was committed with the key, and its log index.
    """

    code: RejectionCode
    text: str = ""
    sqlstate: str = ""
    proof: str = ""
    first_tx: TxId | None = None
    first_number: int | None = None

    def __str__(self) -> str:
        if self.code not in _SHOWN:
            return self.text
        code = f" [{self.sqlstate}]" if self.sqlstate else ""
        first = f" of {self.first_tx} at {self.first_number}" if self.first_tx is not None else ""
        return f"{self.code.value}{code}{first}: {self.text}"

    @property
    def text_length(self) -> int:
        """The characters of all its texts, which are bounded together."""
        return len(self.text) + len(self.sqlstate) + len(self.proof) + len(self.first_tx or "")

    def bounded(self) -> "Rejection":
        """The same rejection with a text that fits into a message of a site."""
        over = self.text_length - REJECTION_TEXT_MAX
        if over <= 0:
            return self
        return msgspec.structs.replace(self, text=self.text[: max(len(self.text) - over, 0)])


def sentence(rejection: Rejection | None) -> str:
    """The text for people; empty if nothing was rejected."""
    return "" if rejection is None else str(rejection)


def over_limit(size: int) -> Rejection | None:
    """Why a transaction of that size is rejected, or None."""
    if size <= TX_BYTES_MAX:
        return None
    text = f"with this event it takes over {TX_BYTES_MAX} bytes, the limit of a transaction: split it"
    return Rejection(RejectionCode.TOO_LARGE, text)
