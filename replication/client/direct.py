"""Direct connections from a client to the replicas of its set: reads that need no broker on their way.

A connection is opened in the background when the first read wants it; until it stands, and whenever there is none,
reads go through brokers. Reads of one event-loop iteration share a message. A statement that is read a second time is
described by the agent, and is quick from then on: its parameters and rows travel as PostgreSQL takes and gives them.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from adapters.changes import Row
from adapters.text_values import DECODERS, ENCODERS, Decode, Encode, decode_rows, encode_parameters
from replication.model.config import ReplicaSetConfig
from replication.rpc import calls
from replication.rpc.calls import Denied, Failed, ReplicaFailed, ReplicaRequest, RequestId
from replication.rpc.conversation import Caller
from replication.rpc.direct import (
    BUNDLE,
    PATH,
    QUICK,
    READY,
    STATEMENTS_MAX,
    QuickRequest,
    QuickRequests,
    QuickResponses,
    decode_quick_responses,
    encode_direct_bundle,
    encode_quick,
)
from tops.client.site import Site
from tops.model.errors import NotReachable, ProtocolError, TopsError
from tops.runtime.links.dialling import DIAL_ERRORS, Session, client_session, open_socket
from tops.runtime.links.identity import HANDSHAKE_TIMEOUT_S
from tops.runtime.links.link import receive_bytes
from tops.runtime.links.sockets import DialledSocket, drained, take_messages, write
from tops.security import Kind

AGAIN_FIRST_S, AGAIN_MAX_S = 0.5, 30.0  # between two tries to open a connection
ADDRESS_S = 2.0
LOOK_S = 0.25  # between two looks for reads whose time is over

log = logging.getLogger("tops.replication")


class ConnectionLost(NotReachable):
    """The direct connection broke before the response; another road may be open."""


class _Statement:
    """What a connection knows of a text."""

    __slots__ = ("decoders", "encoders", "is_asked", "is_quick", "names", "number")

    def __init__(self) -> None:
        self.number = 0
        self.is_asked = self.is_quick = False
        self.encoders: tuple[Encode, ...] = ()
        self.names: tuple[str, ...] = ()
        self.decoders: tuple[Decode, ...] = ()


class _Pending(NamedTuple):
    response: "asyncio.Future[bytes | Failed | Denied | None]"
    deadline: float


class DirectConnection:
    """One open connection to one replica."""

    def __init__(self, replica: str, site: str, socket: DialledSocket, caller: Caller) -> None:
        self.replica, self.is_open = replica, True
        self.quick_reads = 0  # that were sent
        self._site, self._socket, self._caller = site, socket, caller
        self._loop = asyncio.get_running_loop()
        self._texts: OrderedDict[str, _Statement] = OrderedDict()
        self._numbered: dict[int, _Statement] = {}
        self._is_anew = False
        self._reads: list[QuickRequest] = []
        self._wanted: list[tuple[int, str]] = []
        self._bundle: list[tuple[RequestId, ReplicaRequest[Any]]] = []
        self._pending: dict[int, _Pending] = {}
        self._asked: set[RequestId] = set()
        self._next = 0
        self._is_woken = False
        self._draining: asyncio.Task[None] | None = None
        self._looking: asyncio.TimerHandle | None = None

    # ---------------------------------------------------------------------------------------- requests of other kinds

    def put(self, request_id: RequestId, request: ReplicaRequest[Any]) -> None:
        """As `Connection` says, for `Caller.ask`."""
        self._asked.add(request_id)
        self._bundle.append((request_id, request))
        self._wake()

    def forget(self, request_id: RequestId) -> None:
        self._asked.discard(request_id)

    # -------------------------------------------------------------------------------------------------- quick reads

    async def read(
        self, sql: str, args: Sequence[Any], at_least: int, wait_s: float, timeout_s: float, flags: int
    ) -> list[Row] | None:
        """The rows; None if the read has to be asked for in another way, which nothing speaks against.

        Raises ReplicaFailed and PermissionDenied as `Caller.ask`, NotReachable after `timeout_s`."""
        statement = self._texts.get(sql)
        if statement is None or not statement.is_quick:
            self._learn(sql, statement)
            return None
        parameters = encode_parameters(statement.encoders, args)
        if parameters is None:
            return None
        number = self._next = self._next + 1
        response: asyncio.Future[bytes | Failed | Denied | None] = self._loop.create_future()
        self._pending[number] = _Pending(response, self._loop.time() + timeout_s)
        self.quick_reads += 1
        self._reads.append((number, statement.number, parameters, at_least, wait_s, flags))
        if len(self._pending) == 1 and not self._is_woken:
            self._flush()  # nothing else is on the way, so that this one would rarely get company
        elif not self._is_woken:
            self._wake()
        result = await response
        if type(result) is bytes:
            try:
                return decode_rows(result, statement.names, statement.decoders)
            except (ValueError, OverflowError):
                return None  # the agent's driver knows what it is
        if isinstance(result, Denied):
            raise result.error()
        if isinstance(result, Failed):
            raise ReplicaFailed(self._site, result)
        return None

    def _learn(self, sql: str, statement: _Statement | None) -> None:
        """A text that comes a second time is worth a description."""
        if statement is None:
            self._texts[sql] = _Statement()
            if len(self._texts) > STATEMENTS_MAX:
                self._texts.popitem(last=False)
        elif not statement.is_asked:
            if len(self._numbered) >= STATEMENTS_MAX:
                self._forget_all()
                self._texts[sql] = statement
            statement.is_asked = True
            statement.number = len(self._numbered) + 1
            self._numbered[statement.number] = statement
            self._wanted.append((statement.number, sql))
            self._wake()

    def _forget_all(self) -> None:
        """Begin to count anew; reads that are on the way keep what they need."""
        self._flush()
        self._texts.clear()
        self._numbered.clear()
        self._wanted.clear()
        self._is_anew = True

    # ---------------------------------------------------------------------------------------------------- the socket

    def _wake(self) -> None:
        if not self._is_woken and self.is_open:
            self._is_woken = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_woken = False
        if self._draining is not None or not self.is_open:
            return
        try:
            room = True
            if self._bundle:
                bundle, self._bundle = self._bundle, []
                for asked in bundle:
                    room = self._send_request(asked)
            if self._reads or self._wanted:
                reads, wanted, is_anew = self._reads, self._wanted, self._is_anew
                self._reads, self._wanted, self._is_anew = [], [], False
                room = write(self._socket, encode_quick(QuickRequests(reads, wanted, is_anew)))
        except ConnectionError:
            return  # the reader hears of it as well
        if not room:
            self._draining = asyncio.ensure_future(self._drain())
        if self._pending and self._looking is None:
            self._looking = self._loop.call_later(LOOK_S, self._look)

    def _send_request(self, asked: tuple[RequestId, ReplicaRequest[Any]]) -> bool:
        try:
            return write(self._socket, encode_direct_bundle(calls.encode_bundle([asked])))
        except ProtocolError as error:  # it can't be written down
            self._caller.fail([asked[0]], error)
            return True

    async def _drain(self) -> None:
        with suppress(ConnectionError):
            await drained(self._socket)
        self._draining = None
        self._wake()

    async def serve(self) -> None:
        """Until the connection ends; raises ProtocolError for what is not ours."""
        try:
            await take_messages(self._socket, self._take, lambda: None)
        finally:
            self._end()

    def _take(self, data: bytes) -> None:
        kind = data[0] if data else None
        if kind == QUICK:
            self._receive(decode_quick_responses(memoryview(data)[1:]))
        elif kind == BUNDLE:
            self._caller.on_response(self._site, data[1:])
        else:
            raise ProtocolError("a message of an unknown kind on a direct connection")

    def _receive(self, responses: QuickResponses) -> None:
        pending = self._pending
        for number, result in (*responses.rows, *responses.failed):
            if (read := pending.pop(number, None)) is not None and not read.response.done():
                read.response.set_result(result)
        for number in responses.again:
            if (read := pending.pop(number, None)) is not None and not read.response.done():
                read.response.set_result(None)
        for number, parameters, columns in responses.described:
            if (statement := self._numbered.get(number)) is not None:
                _describe(statement, parameters, columns)
        for number in responses.not_quick:
            if (statement := self._numbered.get(number)) is not None:
                statement.is_quick = False
        for number in responses.dropped:
            if (statement := self._numbered.get(number)) is not None:
                statement.is_quick = statement.is_asked = False

    def _look(self) -> None:
        """Reads whose time is over; one timer serves all."""
        self._looking = None
        now = self._loop.time()
        for number, read in list(self._pending.items()):
            if read.deadline <= now or read.response.done():
                del self._pending[number]
                if not read.response.done():
                    read.response.set_exception(NotReachable(f"replica agent {self._site} did not answer in time"))
        if self._pending:
            self._looking = self._loop.call_later(LOOK_S, self._look)

    def _end(self) -> None:
        self.is_open = False
        if self._looking is not None:
            self._looking.cancel()
        if self._draining is not None:
            self._draining.cancel()
        error = ConnectionLost(f"the direct connection to replica agent {self._site} is lost")
        for read in self._pending.values():
            if not read.response.done():
                read.response.set_exception(error)
        self._pending.clear()
        self._caller.fail(list(self._asked), error)
        self._asked.clear()


def _describe(statement: _Statement, parameters: Sequence[int], columns: Sequence[tuple[str, int]]) -> None:
    try:
        statement.encoders = tuple(ENCODERS[oid] for oid in parameters)
        statement.decoders = tuple(DECODERS[oid] for _, oid in columns)
    except KeyError:
        return  # the agent knows types that this client does not
    statement.names = tuple(name for name, _ in columns)
    statement.is_quick = True


class DirectConnections:
    """Those of one connected replica set, opened where they are wanted and opened again when they break."""

    def __init__(self, site: Site, config: ReplicaSetConfig, caller: Caller) -> None:
        self._site, self._config, self._caller = site, config, caller
        self._open: dict[str, DirectConnection] = {}
        self._opening: dict[str, asyncio.Task[None]] = {}
        self._session: Session | None = None
        self._told: set[str] = set()

    def to(self, replica: str) -> DirectConnection | None:
        """The connection to a replica, if it stands; if not, one is being opened."""
        connection = self._open.get(replica)
        if connection is None and replica not in self._opening:
            self._opening[replica] = asyncio.ensure_future(self._keep(replica))
        return connection

    async def _keep(self, replica: str) -> None:
        """Open it, again and again, until it is closed for good."""
        pause_s = AGAIN_FIRST_S
        while True:
            problem = ""
            try:
                await self._serve(replica)
                pause_s = AGAIN_FIRST_S  # it stood for a while
            except (TopsError, *DIAL_ERRORS) as error:
                problem = str(error) or type(error).__name__
            finally:
                self._open.pop(replica, None)
            if problem and replica not in self._told:
                self._told.add(replica)
                log.warning("reads go through brokers", extra={"replica": replica, "reason": problem})
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, AGAIN_MAX_S)

    async def _serve(self, replica: str) -> None:
        site = self._config.site_of(replica)
        found = await self._caller.request(site, calls.GetDirectAddress(), ADDRESS_S)
        if not found.url:
            raise NotReachable("the replica serves no direct connections")
        if self._session is None:
            self._session = client_session()
        own = self._site.own
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            opened = await open_socket(self._session, found.url, own, self._site.heartbeat_s, PATH)
        async with opened as socket:
            host = urlsplit(found.url).hostname or ""
            await own.introduce(socket, host, site, kind=Kind.REPLICA, secret_of=found.secret_of)
            if await receive_bytes(socket, HANDSHAKE_TIMEOUT_S) != READY:
                raise ProtocolError("the other end did not say that it is ready")
            connection = self._open[replica] = DirectConnection(replica, site, socket, self._caller)
            self._told.discard(replica)
            async with own.watching(socket):
                await connection.serve()

    async def close(self) -> None:
        tasks: list[asyncio.Task[None]] = list(self._opening.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
