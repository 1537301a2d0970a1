"""Why a replica refuses a member, as a sentence that travels through the protocol and is understood again."""

import re

from adapters.changes import NotDeterministic
from adapters.resource import Exclusion, Why
from replication.rpc.calls import DatabaseError
from tops.model.constraints import NOT_ALLOWED
from tops.model.errors import Retry, TopsError
from tops.model.sizes import LOCAL_TX_BYTES_MAX

_SAID = re.compile(
    r"(?P<why>[a-z-]+)(?: \[(?P<sqlstate>\w{5})\])?(?: of (?P<tx>\S+) at (?P<number>\d+))?: (?P<text>.*)", re.DOTALL
)


SERIALIZATION, UNAVAILABLE = "serialization", "unavailable"
# As the coordinator says it.
PLAN_UNKNOWN, AGAINST_PLAN, NOT_LISTED = "plan-unknown", "against-plan", "not-listed"
_KNOWN = frozenset({*(why.value for why in Why), SERIALIZATION, UNAVAILABLE, PLAN_UNKNOWN, AGAINST_PLAN, NOT_LISTED})
_TRANSIENT = frozenset(
    {UNAVAILABLE, PLAN_UNKNOWN, AGAINST_PLAN, NOT_LISTED, Why.CONFLICT.value}
)  # nothing happened, and it may succeed later


class WriteRefused(TopsError):
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


class ChangeNotProved(WriteRefused):
    """The change is not proved to do the same on every replica; `reason` is the proof's code, the text says what to do.

    Nothing but another statement, or another schema, helps.
    """

    def __init__(self, tx: str, reason: str, text: str, sqlstate: str) -> None:
        self.reason = reason
        super().__init__(tx, "not-deterministic", text, sqlstate)


class WriteTooLarge(WriteRefused):
    """The transaction is longer than a message or the log takes: split it."""

    def __init__(self, tx: str, text: str) -> None:
        super().__init__(tx, Why.TOO_LARGE.value, text)


class VersionConflict(WriteRefused):
    """A row is not the one that the writer had seen: read it again, then decide."""


class SerializationFailure(WriteRefused):
    """Something that the transaction had read was changed before it committed: run it again from its first read."""


class TooFewReplicas(WriteRefused):
    """Not enough replicas are in sync to keep the policy's promise; the text names who is missing."""


class NotStarted(WriteRefused):
    """The set has not started: its databases are being compared, or differ. Nothing happened."""

    def __init__(self, text: str, tx: str = "") -> None:
        super().__init__(tx, "not-started", text, retry=Retry.SAFE)


class Duplicate(TopsError):
    """The idempotency key was committed before, with the same content, by `tx` under `number`."""

    def __init__(self, tx: str, number: int) -> None:
        self.tx, self.number = tx, number
        super().__init__(f"committed already by transaction {tx}")


def describe(exclusion: Exclusion) -> str:
    code = f" [{exclusion.sqlstate}]" if exclusion.sqlstate else ""
    first = f" of {exclusion.first_tx} at {exclusion.first_number}" if exclusion.first_tx is not None else ""
    return f"{exclusion.why.value}{code}{first}: {exclusion.message}"


def check_request(*parts: bytes) -> None:
    """Raises WriteTooLarge if a request that holds these does not fit into a message to a replica."""
    size = sum(map(len, parts))
    if size > LOCAL_TX_BYTES_MAX:
        text = f"it takes {size} bytes, over the limit of {LOCAL_TX_BYTES_MAX} for a request to a replica: split it"
        raise WriteTooLarge("", text)


def understand(tx: str, reason: str) -> TopsError:
    """The error that a transaction's abort with that reason means."""
    said = _SAID.fullmatch(reason)
    if said is None or said["why"] not in _KNOWN:
        if NOT_ALLOWED in reason:
            cure = "agents of the set run with different files: stop them all and start them with the same one"
            return WriteRefused(tx, "unknown-replica", f"{reason}; {cure}", retry=Retry.SAFE)
        if "participant" in reason:
            return TooFewReplicas(tx, "too-few-replicas", reason, retry=Retry.SAFE)
        return WriteRefused(tx, "aborted", reason, retry=Retry.SAFE)
    why, text, sqlstate = said["why"], said["text"], said["sqlstate"] or ""
    if why == Why.DUPLICATE.value and said["tx"]:
        return Duplicate(said["tx"], int(said["number"]))
    if why == SERIALIZATION:
        return SerializationFailure(tx, why, text, retry=Retry.SAFE)
    if why == Why.TOO_LARGE.value:
        return WriteTooLarge(tx, text)
    if why == Why.VERSION.value:
        return VersionConflict(tx, why, text, sqlstate, retry=Retry.SAFE)
    if (not_proved := NotDeterministic.SAID.match(text)) is not None:
        return ChangeNotProved(tx, not_proved["reason"], text, sqlstate)
    return WriteRefused(tx, why, text, sqlstate, retry=Retry.SAFE if why in _TRANSIENT else Retry.NEVER)


def database_error(tx: str, error: DatabaseError) -> WriteRefused:
    """What PostgreSQL has said about a transaction that was executed once."""
    if error.sqlstate.startswith("40"):
        return SerializationFailure(tx, SERIALIZATION, error.message, error.sqlstate, retry=Retry.SAFE, database=error)
    why = Why.CONSTRAINT if error.sqlstate.startswith("23") else Why.ERROR
    return WriteRefused(tx, why.value, error.message, error.sqlstate, database=error)
