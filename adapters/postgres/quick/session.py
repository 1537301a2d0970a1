"""One database session on which quick reads follow each other without waiting for responses.

    idle      nothing is on the way; ends when a group is sent
    busy      groups of reads are on the way, answered in their order
    closed    final: the connection is lost or was given up

A group is what ends with one Sync: its reads share a transaction, and so a snapshot that is taken after all of them
have been asked for. An error ends the group; what stands behind it was not carried out and is handed back.
The driver opens the connection (address, TLS, login, settings) and this protocol then takes its transport.
"""

import asyncio
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import asyncpg

from adapters.postgres.apply.session import Connection
from adapters.postgres.quick.statements import QuickStatement

RESULT_BYTES_MAX = 64 * 1024  # of one read; longer ones are not quick
RECEIVED_BYTES_MAX = 1024 * 1024  # of one read, before the session is given up rather than read to the end
PREPARED_MAX = 500  # statements that a session keeps

_EXECUTE = b"E\0\0\0\x09\0\0\0\0\0"
_SYNC = b"S\0\0\0\x04"
_TEXT_RESULTS = b"\0\0"
_HEAD = struct.Struct(">BI")
_PARSE_COMPLETE, _DATA_ROW, _COMMAND_COMPLETE, _ERROR, _READY = map(ord, "1DCEZ")
_HEAD_BYTES = 5


def _query(sql: str) -> bytes:
    return b"Q" + (len(sql) + 5).to_bytes(4) + sql.encode() + b"\0"


# What of DISCARD ALL a query could need; prepared statements stay, since they are ours and hold nothing of a client's.
_CLEAN = _query("RESET ALL;SELECT pg_advisory_unlock_all()")
_FORGET_STATEMENTS = _query("DEALLOCATE ALL")


class QuickRead:
    """One read; its owner says in `done` what becomes of the result.

    `done` is called once: with the rows as PostgreSQL's messages, or with why there are none; None means that the read
    was not carried out here and has to take the other road."""

    __slots__ = ("is_done", "parameters", "statement")

    def __init__(self, statement: QuickStatement, parameters: bytes) -> None:
        self.statement, self.parameters = statement, parameters
        self.is_done = False

    def done(self, result: bytes | asyncpg.PostgresError | None) -> None:
        raise NotImplementedError

    def end(self, result: bytes | asyncpg.PostgresError | None) -> None:
        """The first result counts: a read that was moved to another session may get two."""
        if not self.is_done:
            self.is_done = True
            self.done(result)


class _Group:
    """Reads on the way up to one Sync. `position` is the read whose response comes next."""

    __slots__ = ("parsing", "position", "reads", "sent_at")

    def __init__(self, reads: list[QuickRead], parsing: deque[int]) -> None:
        self.reads, self.parsing = reads, parsing
        self.position = 0
        self.sent_at = 0.0  # or, once it is the first, since when its next read runs


class QuickSession(asyncio.Protocol):
    """`on_answered` hears that reads have ended, with those that were not carried out; `on_closed` the end of all."""

    def __init__(
        self,
        connection: Connection,
        on_answered: "Callable[[QuickSession, Sequence[QuickRead]], None]",
        on_closed: "Callable[[QuickSession], None]",
    ) -> None:
        self.pid = connection.get_server_pid()
        self.owner = ""  # the identity whose reads it has run since it was clean
        self.is_dirty = False
        self.idle_since = 0.0
        self.is_alone = False  # a slow read runs: nothing is sent behind it
        self.is_closed = False
        self._connection = connection
        self._on_answered, self._on_closed = on_answered, on_closed
        self._transport: Any = connection._transport  # type: ignore[attr-defined]
        self._groups: deque[_Group] = deque()
        self._prepared: set[int] = set()
        self._buffer = b""
        self._rows: list[bytes] = []  # of the read whose response comes
        self._size = 0
        self._transport.set_protocol(self)

    @property
    def groups(self) -> int:
        return len(self._groups)

    def send(self, reads: list[QuickRead], owner: str) -> None:
        """Send these as one group; the session is made clean first if it was another identity's."""
        parts: list[bytes] = []
        if self.owner != owner and self.is_dirty:
            self._add(parts, _CLEAN)
        if len(self._prepared) > PREPARED_MAX:
            self._add(parts, _FORGET_STATEMENTS)
            self._prepared.clear()
        self.owner, self.is_dirty = owner, True
        parsing: deque[int] = deque()
        prepared = self._prepared
        for read in reads:
            statement, parameters = read.statement, read.parameters
            if statement.number not in prepared:
                prepared.add(statement.number)
                parsing.append(statement.number)
                parts.append(statement.parse)
            bind = statement.bind
            parts.append(b"B" + (len(bind) + len(parameters) + 6).to_bytes(4))
            parts += (bind, parameters, _TEXT_RESULTS, _EXECUTE)
        parts.append(_SYNC)
        group = _Group(reads, parsing)
        group.sent_at = time.monotonic()
        self._groups.append(group)
        self._transport.write(b"".join(parts))

    def clean(self) -> None:
        """Leave nothing of the last owner's."""
        if self.is_dirty:
            parts: list[bytes] = []
            self._add(parts, _CLEAN)
            self._transport.write(b"".join(parts))
            self.is_dirty, self.owner = False, ""

    def _add(self, parts: list[bytes], query: bytes) -> None:
        """A command of our own, which is a group without reads."""
        parts.append(query)
        group = _Group([], deque())
        group.sent_at = time.monotonic()
        self._groups.append(group)

    def running_s(self, now: float) -> float:
        """For how long the read runs whose response comes next."""
        return now - self._groups[0].sent_at if self._groups else 0.0

    def running(self) -> QuickRead | None:
        group = self._groups[0] if self._groups else None
        return group.reads[group.position] if group is not None and group.position < len(group.reads) else None

    def take_back(self) -> list[QuickRead]:
        """The reads behind the one that runs; what is answered to them here counts for nothing any more unless it
        comes first."""
        taken: list[QuickRead] = []
        for index, group in enumerate(self._groups):
            taken += [read for read in group.reads[group.position + (index == 0) :] if not read.is_done]
        return taken

    def close(self) -> None:
        """Give up the connection; what was on the way takes the other road."""
        self._connection.terminate()
        self.connection_lost(None)

    # ---------------------------------------------------------------------------------------------- asyncio.Protocol

    def connection_lost(self, exc: Exception | None) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        left = [read for group in self._groups for read in group.reads[group.position :]]
        self._groups.clear()
        for read in left:
            read.end(None)
        self._on_closed(self)

    def eof_received(self) -> bool | None:
        return None

    def data_received(self, data: bytes) -> None:
        if self.is_closed:
            return
        buffer = self._buffer + data if self._buffer else data
        position, end, head_at = 0, len(buffer), _HEAD.unpack_from
        unanswered: list[QuickRead] = []
        ended = False
        while end - position >= _HEAD_BYTES:
            kind, length = head_at(buffer, position)
            following = position + length + 1
            if following > end:
                break
            if kind == _DATA_ROW:
                self._size += following - position
                if self._size <= RESULT_BYTES_MAX:
                    self._rows.append(buffer[position:following])
                elif self._size > RECEIVED_BYTES_MAX:
                    if (read := self.running()) is not None:
                        read.statement.is_large = True
                    self.close()
                    return
            elif kind == _COMMAND_COMPLETE:
                self._answered()
                ended = True
            elif kind == _PARSE_COMPLETE:
                self._groups[0].parsing.popleft()
            elif kind == _ERROR:
                self._failed(buffer[position + _HEAD_BYTES : following])
                if self.is_closed:
                    return
            elif kind == _READY:
                unanswered += self._group_ended()
                ended = True
            position = following
        self._buffer = buffer[position:] if position < end else b""
        if len(self._buffer) > RECEIVED_BYTES_MAX:
            self.close()
        elif ended:
            self._on_answered(self, unanswered)

    def _answered(self) -> None:
        group, rows, size = self._groups[0], self._rows, self._size
        self._rows, self._size = [], 0
        if group.position >= len(group.reads):
            return  # a command of our own
        read = group.reads[group.position]
        group.position += 1
        group.sent_at = time.monotonic()
        if size > RESULT_BYTES_MAX:
            read.statement.is_large = True
            read.end(None)
        else:
            read.end(b"".join(rows))

    def _failed(self, fields: bytes) -> None:
        if not self._groups:
            return  # what the server says before it ends the connection
        error = _error(fields)
        group = self._groups[0]
        self._rows, self._size = [], 0
        if group.position < len(group.reads):
            read = group.reads[group.position]
            group.position += 1
            read.end(error)
        elif not group.reads:
            self.close()  # it could not be made clean

    def _group_ended(self) -> list[QuickRead]:
        """The reads of the group that were not carried out."""
        group = self._groups.popleft()
        self._prepared.difference_update(group.parsing)
        if self._groups:
            self._groups[0].sent_at = time.monotonic()
        else:
            self.is_alone = False
        return [read for read in group.reads[group.position :] if not read.is_done]


def _error(body: bytes) -> asyncpg.PostgresError:
    """The server's complaint, as the driver would raise it."""
    fields = {part[:1].decode(): part[1:].decode(errors="replace") for part in body.split(b"\0") if part}
    error: asyncpg.PostgresError = asyncpg.PostgresError.new(fields)
    return error
