"""From why a replica leaves a member out, to a rejection that travels, to the error that its writer gets."""

from adapters.resource import Exclusion, Why
from replication.rpc.calls import DatabaseError
from tops.model.errors import Retry, TopsError
from tops.model.rejections import Rejection, RejectionCode
from tops.model.sizes import LOCAL_TX_BYTES_MAX

# Nothing happened, and it may succeed later.
_TRANSIENT = frozenset(
    [
        RejectionCode.UNAVAILABLE,
        RejectionCode.PLAN_UNKNOWN,
        RejectionCode.AGAINST_PLAN,
        RejectionCode.NOT_LISTED,
        RejectionCode.CONFLICT,
    ]
)
_FINAL = frozenset([RejectionCode.INVALID, RejectionCode.CONSTRAINT, RejectionCode.KEY_REUSED, RejectionCode.ERROR])


class WriteRejected(TopsError):
    """The transaction is nowhere; `why` is the kind of refusal, `sqlstate` the database's code if it was its.

    `database` is all that PostgreSQL has said, where the transaction was executed once and PostgreSQL rejected it."""

    def __init__(
        self,
        tx: str,
        why: str,
        text: str,
        sqlstate: str = "",
        *,
        retry: Retry = Retry.NEVER,
        database: DatabaseError | None = None,
    ) -> None:
        self.tx, self.why, self.text, self.sqlstate, self.retry = tx, why, text, sqlstate, retry
        self.database = database
        what = f"transaction {tx}" if tx else "the write"
        super().__init__(f"{what} was refused ({why}): {text}")


class ChangeNotProved(WriteRejected):
    """The change is not proved to do the same on every replica; `reason` is the proof's code, the text says what to do.

    Nothing but another statement, or another schema, helps.
    """

    def __init__(
        self, tx: str, reason: str, text: str, sqlstate: str, *, database: DatabaseError | None = None
    ) -> None:
        self.reason = reason
        super().__init__(tx, "not-deterministic", text, sqlstate, database=database)


class WriteTooLarge(WriteRejected):
    """The transaction is longer than a message or the log takes: split it."""

    def __init__(self, tx: str, text: str) -> None:
        super().__init__(tx, Why.TOO_LARGE.value, text)


class VersionConflict(WriteRejected):
    """A row is not the one that the writer had seen: read it again, then decide."""


class SerializationFailure(WriteRejected):
    """Something that the transaction had read was changed before it committed: run it again from its first read."""


class TooFewReplicas(WriteRejected):
    """Not enough replicas are in sync to keep the policy's promise; the text names who is missing."""


class NotStarted(WriteRejected):
    """The set has not started: its databases are being compared, or differ. Nothing happened."""

    def __init__(self, text: str, tx: str = "") -> None:
        super().__init__(tx, "not-started", text, retry=Retry.SAFE)


class Duplicate(TopsError):
    """The idempotency key was committed before, with the same content, by `tx` under `number`."""

    def __init__(self, tx: str, number: int) -> None:
        self.tx, self.number = tx, number
        super().__init__(f"committed already by transaction {tx}")


def rejection(exclusion: Exclusion) -> Rejection:
    """Why a replica has left a member out, as it travels."""
    return Rejection(
        RejectionCode(exclusion.why.value),
        exclusion.message,
        exclusion.sqlstate,
        exclusion.proof,
        exclusion.first_tx,
        exclusion.first_number,
    )


def check_request(*parts: bytes) -> None:
    """Raises WriteTooLarge if a request that holds these does not fit into a message to a replica."""
    size = sum(map(len, parts))
    if size > LOCAL_TX_BYTES_MAX:
        text = f"it takes {size} bytes, over the limit of {LOCAL_TX_BYTES_MAX} for a request to a replica: split it"
        raise WriteTooLarge("", text)


def error_for(tx: str, rejected: Rejection) -> TopsError:
    """The error that the rejection of a transaction means for its writer."""
    code, text, sqlstate = rejected.code, rejected.text, rejected.sqlstate
    match code:
        case RejectionCode.PARTICIPANT_NOT_ALLOWED:
            cure = "agents of the set run with different files: stop them all and start them with the same one"
            return WriteRejected(tx, "unknown-replica", f"{text}; {cure}", retry=Retry.SAFE)
        case RejectionCode.CONSTRAINTS_UNMET | RejectionCode.CENSUS_UNFULFILLED:
            return TooFewReplicas(tx, "too-few-replicas", text, retry=Retry.SAFE)
        case RejectionCode.DUPLICATE if rejected.first_tx is not None:
            return Duplicate(rejected.first_tx, rejected.first_number or 0)
        case RejectionCode.SERIALIZATION:
            return SerializationFailure(tx, code.value, text, retry=Retry.SAFE)
        case RejectionCode.TOO_LARGE:
            return WriteTooLarge(tx, text)
        case RejectionCode.VERSION:
            return VersionConflict(tx, code.value, text, sqlstate, retry=Retry.SAFE)
    if rejected.proof:
        return ChangeNotProved(tx, rejected.proof, text, sqlstate)
    if code in _TRANSIENT:
        return WriteRejected(tx, code.value, text, sqlstate, retry=Retry.SAFE)
    if code in _FINAL or code is RejectionCode.DUPLICATE:
        return WriteRejected(tx, code.value, text, sqlstate)
    return WriteRejected(tx, "aborted", text, retry=Retry.SAFE)


def database_error(tx: str, error: DatabaseError) -> WriteRejected:
    """The error of a transaction that was executed once, and rejected there."""
    if error.proof:
        return ChangeNotProved(tx, error.proof, error.message, error.sqlstate, database=error)
    if error.sqlstate.startswith("40"):
        why = RejectionCode.SERIALIZATION.value
        return SerializationFailure(tx, why, error.message, error.sqlstate, retry=Retry.SAFE, database=error)
    why = (RejectionCode.CONSTRAINT if error.sqlstate.startswith("23") else RejectionCode.ERROR).value
    return WriteRejected(tx, why, error.message, error.sqlstate, database=error)
