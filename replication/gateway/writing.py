"""Writes of one user: from PostgreSQL's messages to the set, and from its outcome to PostgreSQL's messages."""

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import asyncpg

from replication.client.replica_set import ReplicaSet
from replication.client.writes import WriteResult
from replication.gateway import messages, values
from replication.gateway.backend import PoolFull
from replication.gateway.messages import Bind
from replication.gateway.values import NotBinary
from replication.rpc.rejections import NotStarted, SerializationFailure, TooFewReplicas, VersionConflict, WriteRejected
from tops.model.errors import LimitExceeded, NotReachable, OutcomeUnknown, PermissionDenied, Retry, TopsError

DESCRIBED_MAX = 2_000


@dataclass
class Rejected(Exception):
    """An error for the client. After a fatal one its connection ends."""

    sqlstate: str
    text: str
    detail: str = ""
    hint: str = ""
    fields: tuple[str, ...] = ()
    is_fatal: bool = False

    @classmethod
    def of(cls, error: TopsError) -> "Rejected":
        """Codes that drivers understand: 40001 may be tried again, 08007 has an unknown outcome."""
        fields: tuple[str, ...] = ()
        detail = hint = ""
        text = str(error)
        match error:
            case OutcomeUnknown():
                detail = f"transaction {getattr(error, 'tx', '')}: `tops rs outcome` tells what became of it"
                return cls("08007", text, detail, is_fatal=True)
            case PermissionDenied():
                code = "42501"
            case SerializationFailure() | VersionConflict():
                code = "40001"
            case TooFewReplicas() | NotStarted() | NotReachable():
                code = "57P03" if isinstance(error, NotStarted) else "08006"
                hint = "nothing happened: try again"
            case PoolFull() | LimitExceeded():
                code = "53300"
            case WriteRejected(sqlstate=code) if code:
                text, detail = error.text, f"transaction {error.tx} was rejected ({error.why})"
                if (told := error.database) is not None:
                    text, detail, hint = told.message, told.detail, told.hint
                    found = {"t": told.table, "n": told.constraint}
                    fields = tuple(f"{message}{value}" for message, value in found.items() if value)
            case WriteRejected():
                code = "40001" if error.retry is Retry.SAFE else "0A000"
            case _:
                code = "40001" if error.retry is Retry.SAFE else "XX000"
        return cls(code, text, detail, hint, fields)


@dataclass(frozen=True, slots=True)
class Described:
    """What the database says of a statement's parameters and columns."""

    parameters: tuple[int, ...]
    columns: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Done:
    """`description` is told in the simple protocol only."""

    response: bytes
    description: bytes = b""


@dataclass(slots=True)
class Descriptions:
    """Of statements that write, by their text; shared by all users of a gateway."""

    connect: Callable[[], Awaitable[asyncpg.Connection]]
    _known: OrderedDict[str, Described] = field(default_factory=OrderedDict)

    async def of(self, sql: str) -> Described:
        """Raises Rejected with the database's complaint."""
        if (known := self._known.get(sql)) is not None:
            return known
        connection = await self.connect()
        try:
            prepared = await connection.prepare(sql)
            described = Described(
                tuple(parameter.oid for parameter in prepared.get_parameters()),
                tuple((column.name, column.type.oid) for column in prepared.get_attributes()),
            )
        except asyncpg.PostgresError as error:
            raise Rejected(error.sqlstate or "XX000", error.message or str(error)) from None
        finally:
            connection.terminate()
        self._known[sql] = described
        if len(self._known) > DESCRIBED_MAX:
            self._known.popitem(last=False)
        return described

    def forget(self, sql: str) -> None:
        self._known.pop(sql, None)


class Writing:
    """The writes of one user."""

    def __init__(
        self,
        connected: Callable[[], Awaitable[ReplicaSet]],
        descriptions: Descriptions,
        written: Callable[[str], None],
    ) -> None:
        """`written` gets the token of what was written, which the user's later reads must see."""
        self._connected, self._descriptions, self._written = connected, descriptions, written

    async def write(self, sql: str, tag: str, bind: Bind | None) -> Done:
        """One statement as one transaction. Raises Rejected and TopsError."""
        described = Described((), ())
        if bind is not None or "returning" in sql.lower():
            described = await self._descriptions.of(sql)
        args = self._arguments(described, bind) if bind is not None else []
        columns = described.columns
        binary = [bind is not None and bind.result_format_of(index) == 1 for index in range(len(columns))]
        for (name, oid), is_binary in zip(columns, binary, strict=True):
            if is_binary and not values.knows_binary(oid):
                text = f"the column {name!r} in binary form is not available in RETURNING"
                raise Rejected("0A000", text, hint="cast it to text")
        shop = await self._connected()
        try:
            done = await shop.execute(sql, *args)
        except TopsError:
            self._descriptions.forget(sql)
            raise
        self._written(done.token)
        return _done(done, tag, columns, binary)

    @staticmethod
    def _arguments(described: Described, bind: Bind) -> list[object]:
        if len(bind.values) != len(described.parameters):
            count = len(described.parameters)
            text = f"bind message supplies {len(bind.values)} parameters, but the statement requires {count}"
            raise Rejected("08P01", text)
        try:
            return [
                values.parameter(value, oid, is_binary=bind.format_of(index) == 1)
                for index, (value, oid) in enumerate(zip(bind.values, described.parameters, strict=True))
            ]
        except NotBinary as error:
            raise Rejected("0A000", f"{error} is not available in writes", hint="send it as text") from None
        except ValueError as error:
            raise Rejected("22P02", str(error)) from None


def _done(result: WriteResult, tag: str, columns: tuple[tuple[str, int], ...], binary: list[bool]) -> Done:
    parts: list[bytes] = [messages.notice(text) for text in result.notices]
    rows = result.returned[0] if result.returned else ()
    for row in rows:
        found = [
            values.returned(row.get(name), oid, is_binary=is_binary)
            for (name, oid), is_binary in zip(columns, binary, strict=True)
        ]
        parts.append(messages.data_row(found))
    count = result.rows[0] if result.rows else len(rows)
    parts.append(messages.complete(tag if tag == "TRUNCATE TABLE" else f"{tag} {count}"))
    return Done(b"".join(parts), messages.row_description(columns) if columns else b"")
