"""One direct connection of a client: what arrives goes on at once, and responses of one event-loop iteration share a
message. A client that does not read its responses is not read from either."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

import msgspec

from adapters.postgres.quick import QuickStatement
from replication.replica.direct.quick_desk import QuickDesk
from replication.rpc import calls
from replication.rpc.calls import Denied, Failed
from replication.rpc.conversation import Respond
from replication.rpc.direct import (
    BUNDLE,
    QUICK,
    STATEMENTS_MAX,
    QuickRequests,
    QuickResponses,
    decode_quick_requests,
    encode_direct_bundle,
    encode_quick,
)
from tops.model.errors import ProtocolError
from tops.protocol.messages import Sender
from tops.runtime.links.sockets import Socket, abort, drained, take_messages, write

MESSAGE_BYTES = 2**20  # a message of responses takes no more once it has reached this
UNSENT_BYTES_MAX = 16 * 2**20  # of responses to a client that does not read them; then the connection ends

Receive = Callable[[Sender, bytes, Respond], None]


class DirectConnection:
    """The agent's end of one connection."""

    def __init__(self, sender: Sender, socket: Socket, receive: Receive, desk: QuickDesk | None) -> None:
        self.sender = sender
        self._socket, self._receive, self._desk = socket, receive, desk
        self._loop = asyncio.get_running_loop()
        self._statements: dict[int, QuickStatement] = {}
        self._bundle: list[Any] = []
        self._begin_message()
        self._unsent_bytes = 0
        self._awaited = 0  # quick reads without a response
        self._is_woken = self._is_closed = False
        self._draining: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Until the connection ends; raises ProtocolError for what is not ours."""
        try:
            await take_messages(self._socket, self._take, self._busy)
        finally:
            self._is_closed = True
            for task in [*self._tasks, *([self._draining] if self._draining is not None else [])]:
                task.cancel()

    def _busy(self) -> Awaitable[object] | None:
        """What is to be waited for before more is taken from the client."""
        return asyncio.wait([self._draining]) if self._draining is not None else None

    def _take(self, data: bytes) -> None:
        kind = data[0] if data else None
        if kind == QUICK:
            self._take_quick(decode_quick_requests(memoryview(data)[1:]))
        elif kind == BUNDLE:
            self._receive(self.sender, data[1:], self.respond)
        else:
            raise ProtocolError("a message of an unknown kind on a direct connection")

    def _take_quick(self, requests: QuickRequests) -> None:
        desk = self._desk
        if desk is None:
            raise ProtocolError("quick reads where none are served")
        if requests.is_anew:
            self._statements.clear()
        if requests.reads:
            self._awaited += len(requests.reads)
            desk.take(self, requests.reads, self._statements)
        if len(self._tasks) + len(requests.statements) > STATEMENTS_MAX:
            raise ProtocolError(f"more than {STATEMENTS_MAX} statements at once")
        for number, sql in requests.statements:
            self._spawn(self._describe(desk, number, sql))

    async def _describe(self, desk: QuickDesk, number: int, sql: str) -> None:
        statement = await desk.describe(self.sender, sql)
        if statement is None or len(self._statements) >= STATEMENTS_MAX:
            self.not_quick(number)
            return
        self._statements[number] = statement
        self._out.described.append((number, list(statement.parameters), list(statement.columns)))
        self._wake()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------------------------------------------------- responses

    def rows(self, read: int, rows: bytes) -> None:
        self._out.rows.append((read, rows))
        self._unsent_bytes += len(rows)
        self._awaited -= 1
        if not self._awaited and not self._is_woken:
            self._send()  # nothing else comes soon
        elif not self._is_woken:
            self._wake()

    def failed(self, read: int, error: Failed | Denied) -> None:
        self._out.failed.append((read, error))
        self._awaited -= 1
        self._wake()

    def again(self, read: int) -> None:
        self._out.again.append(read)
        self._awaited -= 1
        self._wake()

    def not_quick(self, statement: int) -> None:
        self._out.not_quick.append(statement)
        self._wake()

    def dropped(self, statement: int) -> None:
        self._statements.pop(statement, None)
        self._out.dropped.append(statement)
        self._wake()

    def respond(self, *said: tuple[bytes, calls.AnyResponse]) -> None:
        """Responses to requests that are no quick reads."""
        self._bundle.extend(said)
        self._unsent_bytes += sum(len(getattr(response, "rows", b"")) for _, response in said)
        self._wake()

    def _wake(self) -> None:
        if not self._is_woken and not self._is_closed:
            self._is_woken = True
            self._loop.call_soon(self._send)

    def _begin_message(self) -> None:
        self._out = QuickResponses([], [], [], [], [], [])

    def _send(self) -> None:
        self._is_woken = False
        if self._is_closed:
            return
        if self._draining is not None:
            if self._unsent_bytes > UNSENT_BYTES_MAX:
                self._is_closed = True
                abort(self._socket)
            return
        with suppress(ConnectionError):  # the reader hears of it as well
            room = True
            if self._bundle:
                room = self._send_bundle()
            out = self._out
            if out.rows or out.failed or out.again or out.described or out.not_quick or out.dropped:
                self._begin_message()
                room = self._send_quick(out) and room
            self._unsent_bytes = 0
            if not room:
                self._draining = asyncio.ensure_future(self._drain())

    def _send_bundle(self) -> bool:
        bundle, self._bundle, room = self._bundle, [], True
        for said in bundle:  # each may be as long as a message
            room = write(self._socket, encode_direct_bundle(calls.encode_bundle([said])))
        return room

    def _send_quick(self, out: QuickResponses) -> bool:
        if self._unsent_bytes <= MESSAGE_BYTES:
            return write(self._socket, encode_quick(out))
        rows, size = list[tuple[int, bytes]](), 0
        for read in out.rows:
            rows.append(read)
            size += len(read[1])
            if size > MESSAGE_BYTES:
                write(self._socket, encode_quick(QuickResponses(rows, [], [], [], [], [])))
                rows, size = [], 0
        return write(self._socket, encode_quick(msgspec.structs.replace(out, rows=rows)))

    async def _drain(self) -> None:
        with suppress(ConnectionError):
            await drained(self._socket)
        self._draining = None
        self._wake()
