"""Everything TOPS raises on purpose, as one family.

Each class states what happened, keeps the ids as attributes, and `retry` states what the caller may do next.
A bug in TOPS itself raises `InvariantBroken`, which is outside the family so that no retry hides it.
"""

import re
from enum import Enum

from tops.model.rejections import Rejection


class Retry(Enum):
    """What a caller may do after an error."""

    SAFE = "safe"  # nothing happened
    ASK_FIRST = "ask-first"  # it may have happened: look the transaction up, then decide
    NEVER = "never"  # it would fail again


class InvariantBroken(Exception):
    """TOPS found one of its own invariants violated: a bug, never the caller's fault."""


class TopsError(Exception):
    """Everything TOPS raises on purpose; `retry` is part of the contract."""

    retry = Retry.NEVER


def error_code(kind: str) -> str:
    """The code of an error that has no other, from the name of its class."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", kind).lower()


def code_of(error: TopsError | type[TopsError]) -> str:
    """The code of an error, which identifies it on the wire and over HTTP."""
    kind = error if isinstance(error, type) else type(error)
    return str(vars(kind).get("code", "")) or error_code(kind.__name__)


class ConfigError(TopsError):
    """The configuration can't be used; the message names the file, the key and the remedy."""


class MissingExtra(ConfigError):
    """An optional part of the product is needed and not installed."""

    def __init__(self, extra: str, module: str, otherwise: str = "") -> None:
        self.extra, self.module = extra, module
        super().__init__(
            f"the extra {extra!r} is not installed ({error_code(type(self).__name__)}: there is no module {module!r}): "
            f"pip install 'tops-replication[{extra}]'{otherwise}"
        )


class InvalidEvent(TopsError):
    """An event does not fit its type."""

    def __init__(self, event_type: str, attribute: str, problem: str) -> None:
        self.event_type, self.attribute = event_type, attribute
        super().__init__(f"event of type {event_type!r}: attribute {attribute!r} {problem}")


class InvalidEventType(TopsError):
    """An event type's definition is not usable, or differs from the one already known by that name."""


class InvalidFilter(TopsError):
    """A filter can't be evaluated on the type that it is meant for."""


class NotAdvertised(TopsError):
    """A site publishes an event type that it has not advertised."""

    def __init__(self, event_type: str) -> None:
        self.event_type = event_type
        super().__init__(f"event type {event_type!r} is not advertised by this site: call advertise() first")


class UnknownRoute(TopsError):
    """An advertisement or a subscription can't be withdrawn, now or at all."""

    def __init__(self, key: str, problem: str) -> None:
        self.key = key
        super().__init__(f"route {key!r}: {problem}")


class InvalidTransaction(TopsError):
    """The properties given to `begin` contradict each other; nothing was started."""


class TransactionClosed(TopsError):
    """The transaction no longer accepts events or requests: a commit or an abort is in progress or done."""

    def __init__(self, tx: str, state: str) -> None:
        self.tx, self.state = tx, state
        super().__init__(f"transaction {tx} is {state} and accepts no more events or requests")


class UnknownTransaction(TopsError):
    """No transaction by that id is known here."""

    def __init__(self, tx: str) -> None:
        self.tx = tx
        super().__init__(f"no transaction {tx} is known here")


class TransactionAborted(TopsError):
    """The transaction ended without effect."""

    retry = Retry.SAFE

    def __init__(self, tx: str, rejection: Rejection) -> None:
        self.tx, self.rejection = tx, rejection
        super().__init__(f"transaction {tx} aborted: {rejection}")

    @property
    def reason(self) -> str:
        """Why, as a text; programs decide by `rejection`."""
        return str(self.rejection)


class NoReceiver(TransactionAborted):
    """A tcm of a routing transaction reached no client."""


class TransactionConflict(TransactionAborted):
    """Another routing transaction, or a regular change of routes, came in between: run it again."""


class JournalStale(TransactionAborted):
    """The coordinator's journal is older than what a replica holds, so it assigns no index: an operator is needed."""

    code = "journal-stale"
    retry = Retry.NEVER

    def __init__(
        self, tx: str, rejection: Rejection, event_type: str, index: int, replica: str, replica_index: int
    ) -> None:
        super().__init__(tx, rejection)
        self.event_type, self.index, self.replica, self.replica_index = event_type, index, replica, replica_index


class CensusUnfulfilled(TransactionAborted):
    """Too few or the wrong participants replied to the census; no event was sent."""


class UncheckedTransaction(TopsError):
    """Votes are missing after the time-out: wait again, or abort."""

    retry = Retry.ASK_FIRST

    def __init__(self, tx: str, missing: int) -> None:
        self.tx, self.missing = tx, missing
        super().__init__(f"transaction {tx}: {missing} participant(s) have not voted yet; wait() again or abort()")


class OutcomeUnknown(TopsError):
    """A node became unreachable between a request and its response: the request may have been carried out."""

    retry = Retry.ASK_FIRST

    def __init__(self, tx: str, node: str) -> None:
        self.tx, self.node = tx, node
        super().__init__(f"{tx}: no response from {node}; request the outcome of {tx} before retrying")


class NotReachable(TopsError):
    """No process responds at that address, or the node that must decide is unreachable."""

    retry = Retry.SAFE


class PermissionDenied(TopsError):
    """The identity lacks the right for that verb on that event type; the attempt is audited."""

    code = "permission-denied"

    def __init__(self, message: str, *, who: str = "", verb: str = "", event_type: str = "") -> None:
        self.who, self.verb, self.event_type = who, verb, event_type
        super().__init__(message)


class NotListed(PermissionDenied):
    """A replica with a certificate of the set is not in the set's list of replicas, and requests more than to join."""

    code = "not-listed"


class NotAuthenticated(TopsError):
    """The other side did not prove its identity, or may not connect at all; nothing of it was acted on."""


class LimitExceeded(TopsError):
    """Too many connections or requests; the caller may try again after `wait_s` seconds."""

    retry = Retry.SAFE

    def __init__(self, message: str, wait_s: float = 0.0) -> None:
        self.wait_s = wait_s
        super().__init__(message)


class TransactionTooLarge(LimitExceeded):
    """An event was not added to its transaction, which would exceed the limit; the transaction stays open."""

    code = "too-large"
    retry = Retry.NEVER

    def __init__(self, tx: str, rejection: Rejection) -> None:
        self.tx, self.rejection = tx, rejection
        super().__init__(f"transaction {tx}: {rejection}")


class ResultTooLarge(LimitExceeded):
    """The result of a query does not fit into a response; the query was cancelled."""

    retry = Retry.NEVER

    def __init__(self, where: str, bytes_max: int) -> None:
        self.where, self.bytes_max = where, bytes_max
        super().__init__(
            f"{where}: the result is larger than {bytes_max / 2**20:g} MiB: add LIMIT and read it in parts, or read it "
            "directly from the database"
        )


class AuditBroken(TopsError):
    """An audit log does not verify: a record was changed, removed or inserted."""


class ProtocolError(TopsError):
    """The other side violated the protocol: undecodable bytes, an unknown type, an oversized frame."""


class EventTooLarge(ProtocolError):
    """The events to be published do not fit into a message; nothing was sent."""

    def __init__(self, size: int, size_max: int) -> None:
        self.size, self.size_max = size, size_max
        super().__init__(f"{size} bytes of events are over the limit of {size_max} for a message: split it")


class Undecodable(ProtocolError):
    """A frame holds no message of this version. A repetition would have the same bytes."""


class JournalCorrupt(TopsError):
    """The content of a journal is not what was written; nothing was opened, served or changed."""

    def __init__(self, file: str, offset: int, problem: str) -> None:
        self.file, self.offset, self.problem = file, offset, problem
        super().__init__(
            f"{file}, byte {offset}: {problem}. Nothing was opened or changed: keep the directory as evidence and "
            "restore it from a copy, or rebuild this node from the others; editing or deleting files loses "
            "acknowledged records"
        )


class JournalFailed(TopsError):
    """A write or a sync failed; whether the records that were under way survived shows at the next open."""

    retry = Retry.ASK_FIRST

    def __init__(self, directory: str, problem: str) -> None:
        self.directory, self.problem = directory, problem
        super().__init__(
            f"journal {directory}: {problem}. Nothing more is written or acknowledged: stop this process, fix the disk "
            "or free space on it, and start the process again"
        )


class JournalClosed(TopsError):
    """The journal was closed; what was appended before is on disk."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        super().__init__(f"journal {directory} is closed and accepts no more records")


class JournalLocked(TopsError):
    """Another process has this journal open."""

    def __init__(self, directory: str, holder: str) -> None:
        self.directory, self.holder = directory, holder
        super().__init__(
            f"journal {directory} is open in process {holder}: stop that process, or give this one its own directory"
        )


class NotInJournal(TopsError):
    """A reader requests a record that was truncated, replaced by a rewrite, or not appended yet."""

    def __init__(self, directory: str, sequence: int, first: int, following: int) -> None:
        self.directory, self.sequence, self.first, self.following = directory, sequence, first, following
        super().__init__(
            f"journal {directory} has records {first} up to, not including, {following}: record {sequence} is not "
            "among them"
        )


class RecordTooLarge(TopsError):
    """A record is larger than the journal's limit; it was not appended."""

    def __init__(self, size: int, size_max: int) -> None:
        self.size, self.size_max = size, size_max
        super().__init__(f"a record of {size} bytes is over the journal's limit of {size_max}: split it")


class ResourceError(TopsError):
    """A database did not carry out an operation; `where` names it."""

    def __init__(self, where: str, problem: str) -> None:
        self.where = where
        super().__init__(f"{where}: {problem}")


class ResourceRejected(ResourceError):
    """The resource votes NO to the whole of an epoch or batch: locks, time, space; it has undone everything."""

    retry = Retry.SAFE


class MemberRejected(ResourceError):
    """One transaction can't be carried out here; it left nothing behind."""

    def __init__(self, where: str, tx: str, reason: str, sqlstate: str = "") -> None:
        self.tx, self.reason, self.sqlstate = tx, reason, sqlstate
        super().__init__(where, f"transaction {tx}: {reason}")


class StaleAttempt(ResourceError):
    """The request concerns an attempt that has ended or was replaced by a later one; nothing was done."""


class PreparedWorkLost(ResourceError):
    """A commit was requested of work that is neither prepared nor applied here: the data may diverge; an alarm."""


class CompensationRejected(ResourceError):
    """Something later is committed, so that the earlier part can't be undone any more; an alarm."""


class AgentReplaced(ResourceError):
    """Another agent has taken over this database; this one must not access it again."""
