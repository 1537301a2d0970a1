"""One client of the gateway, from its start-up to its end.

    AUTHENTICATING  start-up, TLS, password; ends with the proof, or with the connection
    IDLE            between two messages
    WORKING         a message needs something that is not there at once (a session, a position, the set); messages that
                    come meanwhile wait in their order
    CLOSED          final

A query passes to a session of the replica's database, and its response comes back as it is. A write outside of a
transaction goes to the set when everything before it is answered. A client that does not read is not read from, nor is
its session of the database.
"""

import asyncio
import logging
import secrets
import ssl
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from replication.gateway import messages
from replication.gateway.backend import Backend
from replication.gateway.messages import Bind, Cancel, Decoder, Message, Reader, StartUp, Violation, WantsEncryption
from replication.gateway.scram import Failed, ScramServer
from replication.gateway.statements import Statement, What, classify
from replication.gateway.writing import Rejected, Writing
from tops.model.errors import TopsError

AUTHENTICATE_S = 30.0
QUEUED_BYTES_MAX = 4 * 2**20  # of messages that wait; beyond it the client is not read from
CONSISTENCIES = ("any", "current", "quorum", "primary")
_UNSET = {"tops.consistency": "", "tops.max_lag": ""}
_APPLIED = ("timezone", "datestyle", "extra_float_digits", "intervalstyle", "search_path")

log = logging.getLogger("tops.gateway")


class Host(Protocol):
    """The gateway, as a client sees it."""

    tls: ssl.SSLContext | None

    def scram(self, user: str) -> ScramServer: ...

    def admit(self, session: "ClientSession") -> None:
        """The user has proved itself. Raises PermissionDenied."""

    def left(self, session: "ClientSession") -> None: ...

    @property
    def default_consistency(self) -> str: ...

    def check_consistency(self, consistency: str) -> None: ...

    def cancel(self, pid: int, secret: int) -> None: ...

    def needs_wait(self, user: str, consistency: str, max_lag_s: float | None) -> bool: ...

    async def wait(self, user: str, consistency: str, max_lag_s: float | None) -> None: ...

    def idle_backend(self, session: "ClientSession") -> Backend | None: ...

    async def backend(self, session: "ClientSession") -> Backend: ...

    async def parameters(self) -> dict[str, str]: ...

    def writing(self, user: str) -> Writing: ...


class State(Enum):
    AUTHENTICATING = "authenticating"  # ends with the proof of the password
    IDLE = "idle"
    WORKING = "working"  # ends when what is awaited is there
    CLOSED = "closed"  # final


@dataclass(frozen=True, slots=True)
class Prepared:
    sql: str
    statement: Statement


class ClientSession(asyncio.Protocol):
    """`pid` and `secret` are what a cancellation names."""

    def __init__(self, host: Host, pid: int) -> None:
        self.host, self.pid, self.secret = host, pid, secrets.randbits(31)
        self.user, self.state = "", State.AUTHENTICATING
        self._decoder = Decoder()
        self._transport: Any = None
        self._scram: ScramServer | None = None
        self._start: dict[str, str] = {}
        self._queue: deque[Message] = deque()
        self._queued_bytes = 0
        self._backend: Backend | None = None
        self._is_pinned = False
        self._own = dict(_UNSET)
        self._prepared: dict[str, Prepared] = {}
        self._portals: dict[str, tuple[Prepared, Bind]] = {}
        self._expected = 0  # responses of the backend to messages of the extended protocol
        self._is_gated = self._skips = self._is_simple = False
        self._write: tuple[Prepared, Bind] | None = None  # executed once it is known to be the only one up to its Sync
        self._in_block = False
        self._moved: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._is_paused = False

    # ---------------------------------------------------------------------------------------------- asyncio.Protocol

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().call_later(AUTHENTICATE_S, self._too_late)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.state is State.CLOSED:
            return
        self.state = State.CLOSED
        if self._deadline is not None:
            self._deadline.cancel()
        if self._task is not None:
            self._task.cancel()
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.give_back()
        self.host.left(self)

    def pause_writing(self) -> None:
        self._is_paused = True
        if self._backend is not None:
            self._backend.pause(paused=True)

    def resume_writing(self) -> None:
        self._is_paused = False
        if self._backend is not None:
            self._backend.pause(paused=False)
        self._pump()

    def data_received(self, data: bytes) -> None:
        self._decoder.feed(data)
        if self._transport is None:
            return  # TLS begins: what it has decrypted waits until there is a way to respond
        try:
            while self.state is not State.CLOSED and (found := self._decoder.next()) is not None:
                if isinstance(found, Message):
                    self._queue.append(found)
                    self._queued_bytes += len(found.raw)
                    if found.kind == ord("p"):
                        break  # what follows may be long only once the password is proved
                else:
                    self._first(found)
            self._pump()
        except Violation as violation:
            self._die(violation.sqlstate, str(violation))
            return
        if self._queued_bytes > QUEUED_BYTES_MAX and self.state is not State.CLOSED:
            self._transport.pause_reading()

    # ------------------------------------------------------------------------------------------------------ start-up

    def _first(self, found: StartUp | WantsEncryption | Cancel) -> None:
        match found:
            case Cancel(pid=pid, secret=secret):
                self.host.cancel(pid, secret)
                self._close()
            case WantsEncryption(is_tls=is_tls):
                self._answer_encryption(is_tls=is_tls)
            case StartUp(parameters=parameters):
                self._start_up(parameters)

    def _answer_encryption(self, *, is_tls: bool) -> None:
        if self._decoder.has_more:
            # Plain bytes behind the request would be taken for encrypted ones.
            raise Violation("received unencrypted data after SSL request")
        if not is_tls or self.host.tls is None:
            self._transport.write(b"N")
            return
        self._transport.write(b"S")
        self._task = asyncio.ensure_future(self._encrypt(self.host.tls))

    async def _encrypt(self, tls: ssl.SSLContext) -> None:
        plain, self._transport = self._transport, None
        try:
            self._transport = await asyncio.get_running_loop().start_tls(plain, self, tls, server_side=True)
        except (OSError, ssl.SSLError):
            plain.abort()
            self.connection_lost(None)
        else:
            self.data_received(b"")

    def _start_up(self, parameters: dict[str, str]) -> None:
        encoding = parameters.get("client_encoding", "UTF8").replace("-", "").replace("'", "").upper()
        if encoding not in ("UTF8", "UNICODE"):
            raise Violation(f"client_encoding {encoding}: the gateway supports UTF8", "0A000")
        if not parameters.get("user"):
            raise Violation("no PostgreSQL user name specified in startup packet", "28000")
        self.user, self._start = parameters["user"], {k.lower(): v for k, v in parameters.items()}
        for option in self._start.get("options", "").replace("-c ", "-c").split():
            name, is_set, value = option.removeprefix("-c").removeprefix("--").partition("=")
            if is_set:
                self._start[name.lower()] = value
        self._scram = self.host.scram(self.user)
        self._transport.write(messages.message(b"R", (10).to_bytes(4) + b"SCRAM-SHA-256\0\0"))

    def _password(self, body: bytes) -> None:
        scram = self._scram
        if scram is None:
            raise Violation("a password message out of turn")
        try:
            if scram.state.value == "first":
                reader = Reader(body)
                if reader.text() != "SCRAM-SHA-256":
                    raise Violation("the client selected an unknown authentication mechanism")
                response = scram.on_first(reader.take(reader.int32()))
                self._transport.write(messages.message(b"R", (11).to_bytes(4) + response))
                return
            response = scram.on_final(body)
        except Failed:
            raise Violation(f'password authentication failed for user "{self.user}"', "28P01") from None
        self._scram = None
        self._transport.write(messages.message(b"R", (12).to_bytes(4) + response))
        self._work(self._admitted())

    async def _admitted(self) -> None:
        self.host.admit(self)
        for name in self._own:
            if name in self._start:
                self._set_own(name, self._start[name])
        parameters = await self.host.parameters()
        self._decoder.is_authenticated = True
        if self._deadline is not None:
            self._deadline.cancel()
        parts = [messages.message(b"R", (0).to_bytes(4))]
        parts += [messages.parameter_status(name, value) for name, value in parameters.items()]
        key = self.pid.to_bytes(4) + self.secret.to_bytes(4)
        parts += [messages.message(b"K", key), messages.ready()]
        self._transport.write(b"".join(parts))

    def _too_late(self) -> None:
        self._die("57014", f"authentication took longer than {AUTHENTICATE_S:g} s")

    # ------------------------------------------------------------------------------------------------------ messages

    def _pump(self) -> None:
        """Handle what has arrived, in order, until something has to be waited for."""
        while self._queue and self.state in (State.AUTHENTICATING, State.IDLE) and not self._is_paused:
            found = self._queue.popleft()
            self._queued_bytes -= len(found.raw)
            if self.state is State.AUTHENTICATING:
                if found.kind != ord("p"):
                    raise Violation("a message before authentication")
                self._password(found.body)
            else:
                self._handle(found)
        if self._queued_bytes <= QUEUED_BYTES_MAX and self._transport is not None and self.state is not State.CLOSED:
            self._transport.resume_reading()

    def _work(self, work: Coroutine[Any, Any, None]) -> None:
        self.state = State.WORKING
        self._task = asyncio.ensure_future(self._worked(work))

    async def _worked(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Violation as violation:
            self._die(violation.sqlstate, str(violation))
        except Rejected as rejected:
            if rejected.is_fatal:
                self._die(rejected.sqlstate, rejected.text, rejected.detail, rejected.hint)
            else:
                self._reject(rejected)
        except TopsError as error:
            self._reject(Rejected.of(error))
        except Exception as error:
            log.exception("a message of a client could not be handled")
            self._die("XX000", f"{type(error).__name__}: {error}")
        if self.state is not State.WORKING:
            return
        self.state = State.IDLE
        self._task = None
        try:
            self._pump()
            if not self._queue and self._decoder.has_more:
                self.data_received(b"")  # what stood behind the password
        except Violation as violation:
            self._die(violation.sqlstate, str(violation))

    def _handle(self, found: Message) -> None:
        kind = chr(found.kind)
        if self._write is not None and kind != "X":
            self._work(self._write_before(found, *self._write))
            return
        self._is_simple = kind == "Q"
        if kind == "X":
            self._close()
        elif kind == "Q":
            self._query(found)
        elif kind == "S":
            self._sync(found)
        elif kind in "dcf":
            return  # after an error of COPY the rest is ignored
        elif kind in "pF":
            raise Violation("function calls are not supported", "0A000") if kind == "F" else Violation("out of turn")
        elif self._skips:
            return
        else:
            self._extended(kind, found)

    def _query(self, found: Message) -> None:
        self._skips = False
        sql = Reader(found.body).text()
        statements = classify(sql)
        statement = statements[0]
        if statement.what is What.EMPTY:
            self._send(messages.message(b"I") + messages.ready(self._status))
        elif statement.what in (What.OWN_SET, What.OWN_SHOW):
            self._work(self._own_statement(statement))
        elif statement.what is What.REJECTED:
            self._work(self._rejected(statement))
        elif statement.what is What.WRITE and self._status == b"I":
            self._work(self._write_simple(sql, statement))
        else:
            self._pin(statement)
            if (backend := self._free_backend()) is not None and not self._must_wait(statement):
                backend.send(found.raw, expects_ready=True)
            else:
                self._work(self._forward(found.raw, statement, expects_ready=True))

    @property
    def _status(self) -> bytes:
        return self._backend.status if self._backend is not None else b"I"

    def _pin(self, statement: Statement) -> None:
        if statement.what is What.SESSION:
            self._is_pinned = statement.tag != "DISCARD"

    def _must_wait(self, statement: Statement) -> bool:
        """Whether the database may be behind what the client may see."""
        if self._is_gated or statement.what not in (What.READ, What.BEGIN) or self._status != b"I":
            return False
        return self.host.needs_wait(self.user, self._own["tops.consistency"], self._max_lag_s)

    @property
    def _max_lag_s(self) -> float | None:
        return float(self._own["tops.max_lag"]) if self._own["tops.max_lag"] else None

    def _free_backend(self) -> Backend | None:
        """The session that this client has, or one that is free at once."""
        if self._backend is None and (backend := self.host.idle_backend(self)) is not None:
            self._take(backend)
        return self._backend

    def _take(self, backend: Backend) -> None:
        self._backend = backend
        backend.lend(self)
        for name in _APPLIED:
            if name in self._start:
                value = self._start[name].replace("'", "''")
                backend.query(f"set {name} to '{value}'", swallow=True)
                self._is_pinned = True

    async def _forward(self, raw: bytes, statement: Statement, *, expects_ready: bool) -> None:
        if self._backend is None:
            self._take(await self.host.backend(self))
        if self._must_wait(statement):
            await self.host.wait(self.user, self._own["tops.consistency"], self._max_lag_s)
        assert self._backend is not None
        self._backend.send(raw, expects_ready=expects_ready)

    async def _rejected(self, statement: Statement) -> None:
        await self._settled()
        raise Rejected(statement.sqlstate, statement.text, hint=statement.hint)

    async def _write_simple(self, sql: str, statement: Statement) -> None:
        await self._settled()
        done = await self.host.writing(self.user).write(sql, statement.tag, None)
        self._send(done.description + done.response + messages.ready())

    async def _own_statement(self, statement: Statement) -> None:
        await self._settled()
        if statement.what is What.OWN_SET:
            try:
                self._set_own(statement.tag, statement.value or "")
            except Violation as violation:
                raise Rejected(violation.sqlstate, str(violation)) from None
            self._send(messages.complete("SET") + messages.ready(self._status))
            return
        shown = messages.row_description([(statement.tag, 25)])
        shown += messages.data_row([self._own[statement.tag].encode()]) + messages.complete("SHOW")
        self._send(shown + messages.ready(self._status))

    def _set_own(self, name: str, value: str) -> None:
        if name == "tops.consistency":
            if value and value not in CONSISTENCIES:
                raise Violation(f"invalid value for parameter {name}: {value!r}: {', '.join(CONSISTENCIES)}", "22023")
            value = value or self.host.default_consistency
            self.host.check_consistency(value)
        if name == "tops.max_lag" and value:
            try:
                is_valid = float(value) >= 0
            except ValueError:
                is_valid = False
            if not is_valid:
                raise Violation(f"invalid value for parameter {name}: {value!r}: a number of seconds", "22023")
        self._own[name] = value

    # ---------------------------------------------------------------------------------------------- extended protocol

    def _extended(self, kind: str, found: Message) -> None:
        statement = Statement(What.READ)
        if kind == "P":
            reader = Reader(found.body)
            name, sql = reader.text(), reader.text()
            several = classify(sql)
            statement = several[0]
            if len(several) > 1:
                statement = Statement(What.REJECTED, sqlstate="42601", text="one statement in a prepared statement")
            if statement.what is What.OWN_SET:
                hint = "send it as a simple query, or give it as an option at start-up"
                statement = Statement(What.REJECTED, sqlstate="0A000", text="a setting of the gateway", hint=hint)
            if statement.what is What.REJECTED:
                self._work(self._rejected_extended(statement))
                return
            self._prepared[name] = Prepared(sql, statement)
            self._is_pinned = True  # the database has the statement
        elif kind == "B":
            bind = messages.decode_bind(found.body)
            prepared = self._prepared.get(bind.statement)
            if prepared is not None:
                self._portals[bind.portal] = prepared, bind
                statement = prepared.statement
        elif kind == "E":
            portal = self._portals.get(Reader(found.body).text())
            if portal is not None:
                statement = portal[0].statement
                if statement.what is What.WRITE and self._status == b"I" and not self._in_block:
                    self._write = portal
                    return
                self._in_block = self._in_block or statement.what is What.BEGIN
                self._pin(statement)
        elif kind == "C":
            reader = Reader(found.body)
            of_statement, name = reader.byte() == ord("S"), reader.text()
            (self._prepared if of_statement else self._portals).pop(name, None)
        if kind != "H":
            self._expected += 1
        if (backend := self._free_backend()) is not None and not self._must_wait(statement):
            self._is_gated = True
            backend.send(found.raw)
        else:
            self._work(self._gated(found.raw, statement))

    async def _gated(self, raw: bytes, statement: Statement) -> None:
        await self._forward(raw, statement, expects_ready=False)
        self._is_gated = True

    def _sync(self, found: Message) -> None:
        self._skips = self._is_gated = self._in_block = False
        self._expected = 0
        if (backend := self._backend) is None:
            self._send(messages.ready())
        else:
            backend.send(found.raw, expects_ready=True)

    async def _rejected_extended(self, statement: Statement) -> None:
        await self._answered()
        raise Rejected(statement.sqlstate, statement.text, hint=statement.hint)

    async def _write_before(self, found: Message, prepared: Prepared, bind: Bind) -> None:
        """Carry out the write; then what came behind it has its turn."""
        self._write, self._is_simple = None, False
        try:
            await self._answered()
            if not self._skips:
                if self._begins_write(found):
                    text = "several writes before one Sync are one transaction, which the gateway does not execute"
                    raise Rejected("0A000", text, hint="send a Sync after each of them")
                done = await self.host.writing(self.user).write(prepared.sql, prepared.statement.tag, bind)
                self._send(done.response)
        finally:
            self._queue.appendleft(found)
            self._queued_bytes += len(found.raw)

    def _begins_write(self, found: Message) -> bool:
        reader = Reader(found.body)
        if found.kind == ord("P"):
            reader.text()
            return classify(reader.text())[0].what is What.WRITE
        if found.kind == ord("B"):
            prepared = self._prepared.get(messages.decode_bind(found.body).statement)
            return prepared is not None and prepared.statement.what is What.WRITE
        return False

    async def _answered(self) -> None:
        """The database has answered everything before; where it failed, what follows up to the Sync is skipped."""
        backend = self._backend
        if backend is None:
            return
        backend.send(messages.message(b"H"))
        while self._backend is backend and not (
            backend.is_ready and (backend.failed or backend.answered >= self._expected)
        ):
            await self._move()
        self._skips = self._skips or backend.failed

    async def _settled(self) -> None:
        """The database is ready again."""
        while self._backend is not None and not self._backend.is_ready:
            await self._move()

    async def _move(self) -> None:
        self._moved = asyncio.get_running_loop().create_future()
        await self._moved

    # --------------------------------------------------------------------------------------------------- the database

    def relay(self, data: bytes) -> None:
        if self.state is not State.CLOSED:
            self._transport.write(data)

    def backend_moved(self) -> None:
        backend = self._backend
        if backend is None:
            return
        is_unused = backend.is_ready and backend.status == b"I" and not self._is_pinned and not self._expected
        if is_unused and self.state is State.IDLE and not self._queue:
            self._backend = None
            backend.give_back()
        if self._moved is not None and not self._moved.done():
            self._moved.set_result(None)

    def backend_lost(self) -> None:
        self._backend = None
        self._die("57P01", "the session of the replica's database ended", hint="connect again")

    def choose(self, consistency: str) -> None:
        """What holds unless the client says otherwise."""
        self._own["tops.consistency"] = consistency

    def end(self, sqlstate: str, text: str) -> None:
        """The gateway stops."""
        self._die(sqlstate, text)

    def cancel(self) -> None:
        """A write that was sent to the set goes on: nobody could say what became of it."""
        if self._backend is not None and not self._backend.is_ready:
            self._cancelling = asyncio.ensure_future(self._backend.cancel())

    # ------------------------------------------------------------------------------------------------------ responses

    def _send(self, data: bytes) -> None:
        if self.state is not State.CLOSED and data:
            self._transport.write(data)

    def _reject(self, rejected: Rejected) -> None:
        self._send(messages.error(rejected.sqlstate, rejected.text, detail=rejected.detail, hint=rejected.hint,
                                  fields=rejected.fields))  # fmt: skip
        if self._backend is not None and self._backend.is_ready and self._backend.status == b"T":
            self._backend.fail()
        if self._is_simple:
            self._send(messages.ready(self._status))
        else:
            self._skips = True

    def _die(self, sqlstate: str, text: str, detail: str = "", hint: str = "") -> None:
        if self._transport is not None:
            self._send(messages.error(sqlstate, text, severity="FATAL", detail=detail, hint=hint))
        self._close()

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        self.connection_lost(None)
