"""A session of the replica's database, lent to one client at a time: its bytes pass through, only their frames are
looked at, to know when the database is ready again.

The driver opens the connection and this protocol takes its transport. The session is logged in as *read*, its
transactions are read-only, and it is made clean before another client gets it.
"""

import asyncio
import struct
from contextlib import suppress
from typing import Any, Protocol

from asyncpg import connect_utils

from adapters.postgres.apply.session import Connection, Options, connect
from replication.gateway.messages import message
from tops.model.errors import TopsError

CLEAN = "DISCARD ALL"
FAIL = "select 1/0"  # what ends an explicit transaction, so that the database knows of it, too
CLEAN_AFTER_S = 1.0  # until a session that nobody uses is made clean
# A transaction that its client leaves open holds a session of the pool, and keeps old rows from being vacuumed.
SETTINGS = {"default_transaction_read_only": "on", "idle_in_transaction_session_timeout": "10s"}
_HEAD = struct.Struct(">BI")
_READY, _ERROR = ord("Z"), ord("E")
_ANSWERS = frozenset(b"123CIsTn")  # each ends what one message of the extended protocol asked for


class Taker(Protocol):
    """The client that has the session."""

    def relay(self, data: bytes) -> None:
        """What the database says to the client."""

    def backend_moved(self) -> None:
        """It has answered something; `is_ready`, `answered` and `failed` tell what."""

    def backend_lost(self) -> None: ...


class Backend(asyncio.Protocol):
    """One session. `status` is the last one that it told: I, T or E. `answered` counts what it has answered."""

    def __init__(self, connection: Connection, pool: "Pool") -> None:
        self.status = b"I"
        self.answered, self.failed = 0, False
        self.is_dirty = self.is_lost = False
        self._connection, self._pool = connection, pool
        self._transport: Any = connection._transport  # type: ignore[attr-defined]
        self._taker: Taker | None = None
        self._last: Taker | None = None  # whose state it has
        self._awaited = 0  # readies that are to come
        self._swallowed = 0  # of these, the first ones, which are not the client's
        self._buffer = b""
        self._transport.set_protocol(self)

    @property
    def is_ready(self) -> bool:
        return not self._awaited

    def lend(self, taker: Taker) -> None:
        self._taker = taker
        if self._last is not taker and self.is_dirty:
            self.query(CLEAN, swallow=True)
        self._last = taker

    def was_of(self, taker: Taker) -> bool:
        return self._last is taker

    def give_back(self) -> None:
        """To the pool, where it is made clean before another client gets it; one that is not ready is closed."""
        self._taker = None
        if self.is_lost:
            return
        if not self.is_ready or self.status != b"I":
            self.close()
        else:
            self._pool.returned(self)

    def clean(self) -> None:
        """It belongs to nobody; it is in the pool again when it is clean."""
        self.query(CLEAN, swallow=True)
        self.is_dirty, self._last = False, None

    def fail(self) -> None:
        """End the explicit transaction as an error does."""
        self.query(FAIL, swallow=True)
        self.status = b"E"

    def send(self, raw: bytes, *, expects_ready: bool = False) -> None:
        self._awaited += expects_ready
        self.is_dirty = True
        self._transport.write(raw)

    def query(self, sql: str, *, swallow: bool) -> None:
        """A command of the gateway's own."""
        assert not swallow or self._awaited == self._swallowed, "what is not for the client comes first"
        self._swallowed += swallow
        self.send(message(b"Q", sql.encode() + b"\0"), expects_ready=True)

    def pause(self, *, paused: bool) -> None:
        """While the client does not read, the database does not send."""
        with suppress(RuntimeError):
            if paused:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    async def cancel(self) -> None:
        """Ask the server to end what runs; it may have ended already."""
        protocol: Any = self._connection._protocol  # type: ignore[attr-defined]
        with suppress(OSError, TimeoutError):
            await connect_utils._cancel(  # type: ignore[attr-defined]
                loop=asyncio.get_running_loop(),
                addr=self._connection._addr,  # type: ignore[attr-defined]
                params=self._connection._params,  # type: ignore[attr-defined]
                backend_pid=protocol.backend_pid,
                backend_secret=protocol.backend_secret,
            )

    def close(self) -> None:
        self._connection.terminate()
        self.connection_lost(None)

    # ---------------------------------------------------------------------------------------------- asyncio.Protocol

    def connection_lost(self, exc: Exception | None) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        self._pool.lost(self)
        if self._taker is not None:
            self._taker.backend_lost()

    def eof_received(self) -> bool | None:
        return None

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer + data if self._buffer else data
        position, begin, end, head_at = 0, 0, len(buffer), _HEAD.unpack_from
        while end - position >= 5:
            kind, length = head_at(buffer, position)
            following = position + length + 1
            if following > end:
                break
            if kind in _ANSWERS:
                self.answered += 1
            elif kind == _ERROR:
                self.failed = True
                if self._taker is None:
                    self.close()  # it could not be made clean
                    return
            elif kind == _READY:
                self.status = buffer[position + 5 : position + 6]
                self.failed, self.answered = False, 0
                self._awaited -= 1
                if self._swallowed:
                    self._swallowed -= 1
                    begin = following
            position = following
        if self._swallowed:
            begin = position
        self._buffer = buffer[position:]
        if self._taker is None:
            if self.is_ready:
                self._pool.returned(self)
            return
        if begin < position:
            self._taker.relay(buffer[begin:position])
        self._taker.backend_moved()


class PoolFull(TopsError):
    """All sessions are lent."""

    code = "pool-full"


class Pool:
    """The sessions of one gateway, at most `size`."""

    def __init__(self, dsn: str, where: str, size: int, options: Options) -> None:
        self._dsn, self._where, self._size, self._options = dsn, where, size, options
        self._idle: list[Backend] = []
        self._all: set[Backend] = set()
        self._opening = 0
        self._waiting: list[asyncio.Future[None]] = []

    def idle(self, taker: Taker) -> Backend | None:
        """One that this client had before, if there is one."""
        for index, backend in enumerate(self._idle):
            if backend.was_of(taker):
                return self._idle.pop(index)
        return self._idle.pop(0) if self._idle else None

    async def run(self) -> None:
        """Make clean what nobody uses, until cancelled."""
        while True:
            await asyncio.sleep(CLEAN_AFTER_S)
            for backend in [backend for backend in self._idle if backend.is_dirty]:
                self._idle.remove(backend)
                backend.clean()

    async def take(self, taker: Taker, timeout_s: float) -> Backend:
        """Raises PoolFull after the bound, and NotReachable when the database is."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    if (backend := self.idle(taker)) is not None:
                        return backend
                    if len(self._all) + self._opening < self._size:
                        return await self._opened()
                    waiting = asyncio.get_running_loop().create_future()
                    self._waiting.append(waiting)
                    await waiting
        except TimeoutError:
            raise PoolFull(
                f"{self._where}: all {self._size} sessions of the gateway's pool are in use, some by clients that "
                "keep prepared statements or settings: raise `pool`, or let clients close connections"
            ) from None

    async def _opened(self) -> Backend:
        self._opening += 1
        try:
            backend = Backend(await self.connect(), self)
        finally:
            self._opening -= 1
        self._all.add(backend)
        return backend

    async def connect(self) -> Connection:
        """A connection of the same login that is none of the pool."""
        return await connect(self._dsn, self._where, "tops-gateway", self._options, SETTINGS)

    def returned(self, backend: Backend) -> None:
        if backend.is_lost or backend in self._idle:
            return
        self._idle.append(backend)
        self._wake()

    def lost(self, backend: Backend) -> None:
        self._all.discard(backend)
        if backend in self._idle:
            self._idle.remove(backend)
        self._wake()

    def _wake(self) -> None:
        while self._waiting:
            waiting = self._waiting.pop(0)
            if not waiting.done():
                waiting.set_result(None)
                return

    def close(self) -> None:
        for backend in list(self._all):
            backend.close()
