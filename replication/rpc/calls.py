"""Requests from clients to replicas, and their responses; `replication.rpc.conversation` carries them."""

from collections.abc import Sequence
from functools import cache
from typing import Any, Generic, TypeVar, cast, get_args

import msgspec

from tops.model.errors import NotListed, PermissionDenied, ProtocolError, Retry, TopsError, code_of
from tops.model.log_points import BEGINNING, LogPoint
from tops.model.rejections import Rejection

INTERNAL_ERROR, UNEXPECTED_RESPONSE = "internal-error", "unexpected-response"


class ReplicaResponse(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Something a replica answers."""


class Failed(ReplicaResponse, frozen=True):
    """An error, by its code; raised again at the client as `ReplicaFailed`."""

    code: str
    text: str
    retry: str

    @classmethod
    def because(cls, error: TopsError) -> "Failed":
        return cls(code=code_of(error), text=str(error), retry=error.retry.value)


class Denied(ReplicaResponse, frozen=True):
    """The sender of the request lacks the right that it needs; raised as PermissionDenied at the client."""

    code: str
    text: str
    identity: str
    verb: str
    event_type: str

    @classmethod
    def because(cls, error: PermissionDenied) -> "Denied":
        return cls(
            code=error.code,
            text=str(error),
            identity=error.who,
            verb=error.verb,
            event_type=error.event_type,
        )

    def error(self) -> PermissionDenied:
        kind = NotListed if self.code == NotListed.code else PermissionDenied
        return kind(self.text, who=self.identity, verb=self.verb, event_type=self.event_type)


class Described(ReplicaResponse, frozen=True):
    replica: str
    config: bytes  # the set's configuration as JSON, without addresses and secrets
    not_started: str = ""  # why the replica has not started


class Located(ReplicaResponse, frozen=True):
    replica: str
    position: int
    prepared: tuple[int, ...]


class DirectAddress(ReplicaResponse, frozen=True):
    """Where a replica serves direct connections; empty: nowhere. Without keys, both sides prove that they know the
    secret of the broker at `secret_of`."""

    replica: str
    url: str
    secret_of: str


class ReadDone(ReplicaResponse, frozen=True):
    replica: str
    rows: bytes
    position: int


class LockedReadDone(ReplicaResponse, frozen=True):
    """`locks`: table and key (empty: the whole table)."""

    replica: str
    rows: bytes
    position: int
    locks: tuple[tuple[str, str], ...]


class Judged(ReplicaResponse, frozen=True):
    """Why which of the transactions were rejected."""

    rejected: dict[str, Rejection]


class WriteDone(ReplicaResponse, frozen=True):
    replica: str
    tx: str
    rows: tuple[int, ...]
    returned: bytes = b""
    position: int | None = None
    duplicate: bool = False
    rejection: Rejection | None = None  # why it is nowhere


class DatabaseError(msgspec.Struct, frozen=True, array_like=True):
    """Why a transaction was rejected where it was executed, in the fields of PostgreSQL's error responses.

    `proof`: of a change that is not proved deterministic and that an origin can't execute, the code of the reason.
    """

    sqlstate: str
    message: str
    detail: str = ""
    hint: str = ""
    table: str = ""
    constraint: str = ""
    proof: str = ""


class ExecuteDone(ReplicaResponse, frozen=True):
    """Committed, unless `error` tells why the database has rejected it, or `rejection` why the set has."""

    replica: str
    tx: str
    rows: tuple[int, ...] = ()
    returned: bytes = b""
    notices: tuple[str, ...] = ()
    position: int | None = None
    pending: tuple[str, ...] = ()
    duplicate: bool = False
    error: DatabaseError | None = None
    rejection: Rejection | None = None


class HeldReported(ReplicaResponse, frozen=True):
    held: bool


class StatusReported(ReplicaResponse, frozen=True):
    replica: str
    fields: dict[str, Any]


class OperationDone(ReplicaResponse, frozen=True):
    text: str


class RowsReturned(ReplicaResponse, frozen=True):
    replica: str
    rows: bytes


class CopyOpened(ReplicaResponse, frozen=True):
    """What a copy consists of, all as of one snapshot; `pieces` are packed (`replication.replica.copies`).

    `data` names rows that do not change before the set starts: a later snapshot with the same name has the same rows.
    It is empty once they may change."""

    replica: str
    snapshot: str
    data: str
    pieces: bytes
    point: LogPoint = BEGINNING
    sequences: dict[str, int] = {}


class CopyChunk(ReplicaResponse, frozen=True):
    """Some of a piece's rows; `is_last`: the piece ends with them."""

    data: bytes
    is_last: bool


class SchemaDumped(ReplicaResponse, frozen=True):
    """SQL, compressed: what comes before the rows and what comes after them; and what it needs of the server."""

    replica: str
    pre_data: bytes
    post_data: bytes
    extensions: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()


class StartState(ReplicaResponse, frozen=True):
    """`fingerprint` is empty before there is one; `problem` says why the replica is not further."""

    replica: str
    state: str
    attempt: str = ""
    basis: str = ""
    fingerprint: bytes = b""
    problem: str = ""


class TableFingerprint(ReplicaResponse, frozen=True):
    """`detail` is empty if the replica has no such table."""

    replica: str
    detail: bytes = b""


class SchemaDigests(ReplicaResponse, frozen=True):
    """Digests of the definitions of all tables of the set that the replica has, by name."""

    replica: str
    tables: dict[str, str]


class SnapshotReported(ReplicaResponse, frozen=True):
    """A snapshot in which exactly the log up to `position` is applied: to be imported, or a file to be read."""

    replica: str
    snapshot: str
    path: str
    position: int
    at: str


R = TypeVar("R", bound=ReplicaResponse)


class ReplicaRequest(msgspec.Struct, Generic[R], frozen=True, kw_only=True, array_like=True, tag=True):
    """Something a client asks a replica; `R` is the kind of response to it."""


class Describe(ReplicaRequest[Described], frozen=True):
    """What is this set? Answer: `Described`."""


class Where(ReplicaRequest[Located], frozen=True):
    """How far are you? Answer: `Located`."""


class GetDirectAddress(ReplicaRequest[DirectAddress], frozen=True):
    """Where can I read from you without a broker in between? Response: `DirectAddress`."""


class Read(ReplicaRequest[ReadDone], frozen=True):
    """A query, once the replica's position has reached `at_least`. Answer: `ReadDone`.

    `settled`: not before the outcome of what this replica has promised is known here, too. `chosen`: the client has
    named this replica, and wants what it shows even if others show something else."""

    sql: str
    args: bytes
    at_least: int = 0
    wait_s: float = 5.0
    max_lag_s: float | None = None
    settled: bool = False
    chosen: bool = False


class LockedRead(ReplicaRequest[LockedReadDone], frozen=True):
    """A query inside a serializable transaction, once the replica's position has reached `at_least`. Answer:
    `LockedReadDone`, with what of the data it depends on."""

    sql: str
    args: bytes
    at_least: int = 0
    wait_s: float = 5.0


class Judgement(ReplicaRequest[Judged], frozen=True):
    """What became of logged transactions (number, id), once the last of them is applied. Answer: `Judged`."""

    asked: tuple[tuple[int, str], ...]
    wait_s: float = 5.0


class Write(ReplicaRequest[WriteDone], frozen=True):
    """Changes to commit at this replica first. Answer: `WriteDone`."""

    tx: str
    member: bytes


class Execute(ReplicaRequest[ExecuteDone], frozen=True):
    """Execute the member's changes once, here, and replicate the rows that they change. Response: `ExecuteDone`.

    Known by the member's idempotency key, or by `tx`; begins at a position of at least `at_least`. `reads`: what a
    serializable transaction depends on."""

    tx: str
    member: bytes
    at_least: int = 0
    reads: bytes = b""


class Held(ReplicaRequest[HeldReported], frozen=True):
    """Whether anything is committed under an idempotency key, once the replica's position has reached `at_least`.
    Answer: `HeldReported`."""

    key: str
    at_least: int = 0
    wait_s: float = 5.0


class Status(ReplicaRequest[StatusReported], frozen=True):
    """Answer: `StatusReported`."""


class Pause(ReplicaRequest[OperationDone], frozen=True):
    """Apply nothing more until `Resume`; the reason is shown with the status."""

    reason: str = ""


class Resume(ReplicaRequest[OperationDone], frozen=True):
    """Apply again."""


class RetryErrors(ReplicaRequest[OperationDone], frozen=True):
    """Apply again what could not be applied."""


class Reload(ReplicaRequest[OperationDone], frozen=True):
    """Read the configuration file again."""


class Quarantine(ReplicaRequest[OperationDone], frozen=True):
    """Take a transaction that can't be published out of the outbox, and publish what is behind it."""


class CheckDone(ReplicaRequest[OperationDone], frozen=True):
    """A check has compared these tables wholly; `found`: how this replica differs, by table."""

    tables: tuple[str, ...]
    found: dict[str, str]


class Conflicts(ReplicaRequest[RowsReturned], frozen=True):
    """The newest entries of the conflict log. Answer: `RowsReturned`."""

    limit: int = 100


class OpenCopy(ReplicaRequest[CopyOpened], frozen=True):
    """Hold a snapshot of the set's tables for a copy of this name; one that is held already is gone on with, and any
    other that the same target has asked for is let go. Response: `CopyOpened`."""

    copy: str
    target: str = ""


class GetCopyChunk(ReplicaRequest[CopyChunk], frozen=True):
    """Chunk `number`, counted from 0, of a copy's piece. Response: `CopyChunk`."""

    copy: str
    piece: int
    number: int


class CloseCopy(ReplicaRequest[OperationDone], frozen=True):
    """The copy is loaded, or given up."""

    copy: str


class GetSchema(ReplicaRequest[SchemaDumped], frozen=True):
    """The schema of a replica's database. Response: `SchemaDumped`."""


class GetStartState(ReplicaRequest[StartState], frozen=True):
    """How far the start of the set has come at a replica. Response: `StartState`."""


class GetTableFingerprint(ReplicaRequest[TableFingerprint], frozen=True):
    """What a replica's fingerprint of one table was made of. Response: `TableFingerprint`."""

    table: str


class GetSchemaDigests(ReplicaRequest[SchemaDigests], frozen=True):
    """How a replica's tables are defined at the moment. Response: `SchemaDigests`."""


class PrepareBarrier(ReplicaRequest[OperationDone], frozen=True):
    """Be ready to take a snapshot when this barrier is reached in the log."""

    barrier: str


class BarrierSnapshot(ReplicaRequest[SnapshotReported], frozen=True):
    """The snapshot that was taken at the barrier, once it is. Answer: `SnapshotReported`."""

    barrier: str
    wait_s: float


class BarrierDone(ReplicaRequest[OperationDone], frozen=True):
    """The snapshot need not be held any more."""

    barrier: str


class GuardRows(ReplicaRequest[OperationDone], frozen=True):
    """Remember from now on which of these rows (table, key) are written, until a repair asks."""

    repair: str
    row_keys: tuple[tuple[str, str], ...]


class GuardDone(ReplicaRequest[OperationDone], frozen=True):
    """Answer: `OperationDone`."""

    repair: str


AnyRequest = (
    Describe
    | Where
    | GetDirectAddress
    | Read
    | LockedRead
    | Judgement
    | Write
    | Execute
    | Held
    | Status
    | Pause
    | Resume
    | RetryErrors
    | Reload
    | Quarantine
    | CheckDone
    | Conflicts
    | OpenCopy
    | GetCopyChunk
    | CloseCopy
    | GetSchema
    | GetStartState
    | GetTableFingerprint
    | GetSchemaDigests
    | PrepareBarrier
    | BarrierSnapshot
    | BarrierDone
    | GuardRows
    | GuardDone
)
AnyResponse = (
    Failed
    | Denied
    | Described
    | Located
    | DirectAddress
    | ReadDone
    | LockedReadDone
    | Judged
    | WriteDone
    | ExecuteDone
    | HeldReported
    | StatusReported
    | OperationDone
    | RowsReturned
    | CopyOpened
    | CopyChunk
    | SchemaDumped
    | StartState
    | TableFingerprint
    | SchemaDigests
    | SnapshotReported
)
RequestId = bytes  # drawn at random by the client: only a replica that received the request can respond to it
_encoder = msgspec.msgpack.Encoder()
_request: msgspec.msgpack.Decoder[AnyRequest] = msgspec.msgpack.Decoder(AnyRequest)
_requests = msgspec.msgpack.Decoder(list[tuple[RequestId, AnyRequest]])
_answers = msgspec.msgpack.Decoder(list[tuple[RequestId, AnyResponse]])
_undecoded = msgspec.msgpack.Decoder(list[tuple[RequestId, msgspec.Raw]])


def response_to(request: ReplicaRequest[R]) -> type[R]:
    """The kind of response to a request."""
    return cast(type[R], _response_to(type(request)))


@cache
def _response_to(kind: type[ReplicaRequest[Any]]) -> type[ReplicaResponse]:
    """As the kind of request declares it: `class Where(ReplicaRequest[Located])`."""
    (base,) = kind.__orig_bases__  # type: ignore[attr-defined]
    (response,) = get_args(base)
    return cast(type[ReplicaResponse], response)


def encode_bundle(items: Sequence[tuple[RequestId, ReplicaRequest[Any] | ReplicaResponse]]) -> bytes:
    """Requests or responses with their ids, in one piece; ProtocolError if one of them can't be written down."""
    try:
        return _encoder.encode(items)
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"what is to be said can't be written down: {error}") from error


def decode_requests(bundle: bytes) -> list[tuple[RequestId, AnyRequest]]:
    return _requests.decode(bundle)


def decode_responses(bundle: bytes) -> list[tuple[RequestId, AnyResponse]]:
    return _answers.decode(bundle)


def undecoded(bundle: bytes) -> list[tuple[RequestId, msgspec.Raw]]:
    """For a bundle in which something can't be read: each by itself."""
    return _undecoded.decode(bundle)


def decode_request(encoded: msgspec.Raw) -> AnyRequest:
    return _request.decode(encoded)


class ReplicaFailed(TopsError):
    """A replica could not do what was asked; `code` is that of its error."""

    def __init__(self, replica: str, failed: Failed) -> None:
        self.replica, self.code = replica, failed.code
        self.retry = Retry(failed.retry)
        super().__init__(f"{replica}: {failed.text}")


def unexpected(request: ReplicaRequest[Any], response: ReplicaResponse) -> Failed:
    """In the place of a response that is none to that request: nobody knows what the replica has done."""
    text = f"it responded to a {type(request).__name__} with a {type(response).__name__}"
    return Failed(code=UNEXPECTED_RESPONSE, text=text, retry=Retry.ASK_FIRST.value)
