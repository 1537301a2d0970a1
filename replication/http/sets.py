"""Replica sets at a broker's HTTP side: a view of each, and writes.

`POST /v1/replica-sets/{name}/write` takes `{"sql": …, "args": […]}` or `{"changes": [{"insert": …}, …]}`; an
`Idempotency-Key` header makes it safe to send again. It is done on behalf of the caller: the identity of the client
certificate, or the service `SET-http` for a caller that shows the set's `write_token` as a bearer token. Each caller
has a session of its own, which the link's broker stamps with the caller: brokers and replicas check and audit by it.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from aiohttp import web
from pydantic import BaseModel, ConfigDict, ValidationError

from adapters.changes import Change, Delete, Insert, Statement, Update, Upsert
from replication.client.replica_set import ReplicaSet, connect
from replication.client.writes import WriteResult
from replication.model.config import Cluster, ReplicaSetConfig
from replication.rpc.rejections import ChangeNotProved, NotStarted, TooFewReplicas, WriteRejected, WriteTooLarge
from tops.http.gate import PRINCIPAL, Gate, json_response, shows
from tops.http.rights import Access, Needs, Right, Routes
from tops.model.errors import ConfigError, NotReachable, OutcomeUnknown, PermissionDenied, Retry, TopsError
from tops.model.event_types import INT_MAX, INT_MIN
from tops.protocol.messages import Principal
from tops.security import Identity, Kind, Verb

log = logging.getLogger("tops.replication")

WRITE_PATH = "/v1/replica-sets/{name}/write"
SESSIONS_MAX = 64  # of callers, besides those that are in use
WRITER_ROLE = "writer"  # of the service that a write_token stands for
RIGHTS: dict[tuple[str, str], Right] = {
    ("GET", "/v1/replica-sets"): Access.IDENTIFIED,
    ("GET", "/v1/replica-sets/{name}"): Needs(Verb.READ, "rs.{name}"),
    ("POST", WRITE_PATH): Needs(Verb.WRITE, "rs.{name}"),
}
STATUS_OF: tuple[tuple[type[TopsError], int], ...] = (
    (NotStarted, 503),
    (TooFewReplicas, 503),
    (ChangeNotProved, 400),
    (WriteTooLarge, 413),
    (WriteRejected, 409),
    (OutcomeUnknown, 504),
    (NotReachable, 503),
    (PermissionDenied, 403),
)


class RowChange(BaseModel):
    """One change of a row, as JSON."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["insert", "update", "upsert", "delete"]
    table: str
    key: dict[str, Any] = {}
    values: dict[str, Any] = {}
    add: dict[str, Any] = {}
    expect_version: int | None = None

    def change(self) -> Change:
        match self.kind:
            case "insert":
                return Insert(self.table, {**self.key, **self.values})
            case "update":
                return Update(self.table, self.key, self.values, self.add, self.expect_version)
            case "upsert":
                return Upsert(self.table, self.key, self.values, self.expect_version)
            case "delete":
                return Delete(self.table, self.key, self.expect_version)


class WriteBody(BaseModel):
    model_config = ConfigDict(extra="forbid")
    sql: str | None = None
    args: list[Any] = []
    changes: list[RowChange] = []

    def all_changes(self) -> list[Change]:
        if (self.sql is None) == (not self.changes):
            raise ConfigError("give either sql with args, or changes")
        _check_integers([self.args, *([c.key, c.values, c.add, c.expect_version] for c in self.changes)])
        if self.sql is not None:
            return [Statement(self.sql, tuple(self.args))]
        return [change.change() for change in self.changes]


def _check_integers(given: list[Any]) -> None:
    """JSON has integers of any size; no message and no column has."""
    waiting = list(given)
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
        elif isinstance(value, int) and not INT_MIN <= value <= INT_MAX:
            raise ConfigError("the body holds an integer that does not fit into 64 bits")


Opening = Callable[[], AbstractAsyncContextManager[ReplicaSet]]


class Session:
    """A connection to one set, on behalf of one caller or of the broker's HTTP side itself."""

    def __init__(self, opening: Opening) -> None:
        self._opening, self._stack = opening, AsyncExitStack()
        self._turn = asyncio.Lock()
        self._connected: ReplicaSet | None = None
        self.users = 0

    async def connected(self) -> ReplicaSet:
        async with self._turn:
            if self._connected is None:
                self._connected = await self._stack.enter_async_context(self._opening())
            return self._connected

    @property
    def is_open(self) -> bool:
        return self._connected is not None

    async def close(self) -> None:
        await self._stack.aclose()


class Sessions:
    """The sessions of one broker's HTTP side; the least recently used one without a user makes room for another."""

    def __init__(self, sessions_max: int = SESSIONS_MAX) -> None:
        self._max = sessions_max
        self._sessions: OrderedDict[tuple[str, Principal | None], Session] = OrderedDict()

    @asynccontextmanager
    async def using(self, key: tuple[str, Principal | None], opening: Opening) -> AsyncIterator[ReplicaSet]:
        """The session of this key; opened if there is none. A set that is unreachable holds up no other."""
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = Session(opening)
        self._sessions.move_to_end(key)
        session.users += 1
        try:
            yield await session.connected()
        finally:
            session.users -= 1
            if not session.is_open and not session.users and self._sessions.get(key) is session:
                del self._sessions[key]  # it could not connect: the next caller tries anew
            await self._make_room()

    async def _make_room(self) -> None:
        idle = [key for key, session in self._sessions.items() if not session.users]
        for session in [self._sessions.pop(key) for key in idle[: max(0, len(self._sessions) - self._max)]]:
            await session.close()

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()
        self._sessions.clear()


class SetRoutes:
    """The routes of all sets of a file, at one broker; connects to a set when it is first asked for."""

    def __init__(self, path: Path, broker: str, sessions_max: int = SESSIONS_MAX) -> None:
        self._path, self._broker = path, broker
        self._sessions = Sessions(sessions_max)

    def add_to(self, routes: Routes, gate: Gate) -> None:
        gate.authenticate_by_shown_secret(self._by_write_token)
        handlers = (self._list, self._show, self._write)
        for (route, right), handler in zip(RIGHTS.items(), handlers, strict=True):
            routes.add(*route, handler, right)
        routes.app.cleanup_ctx.append(self._life)

    def policy_of(self, name: str) -> str:
        """The policy that the file gives a set now; empty if it names no such set, or can't be used."""
        try:
            return Cluster.load(self._path).replica_set(name).policy
        except ConfigError:
            return ""

    def _by_write_token(self, request: web.Request) -> Identity | None:
        """Who shows a set's write token acts as that set's HTTP service, and only where the set is written to."""
        resource = request.match_info.route.resource
        if resource is None or resource.canonical != WRITE_PATH:
            return None
        cluster = self._cluster()
        found = next((s for s in cluster.replica_sets if s.name == request.match_info["name"]), None)
        if found is None or not found.write_token or not shows(request, found.write_token):
            return None
        return Identity(cluster.config.cluster.name, Kind.SITE, f"{found.name}-http", WRITER_ROLE)

    def _cluster(self) -> Cluster:
        """What the file says now; 503 while it can't be used."""
        try:
            return Cluster.load(self._path)
        except ConfigError as error:
            log.error("the configuration can't be used", extra={"reason": str(error)})
        text = "the configuration file of this broker can't be used at the moment: its log says why"
        response = json_response({"error": text, "code": "bad-config", "retry": Retry.SAFE.value})
        raise web.HTTPServiceUnavailable(text=response.text, content_type="application/json")

    async def _life(self, _: web.Application) -> AsyncIterator[None]:
        yield
        await self._sessions.close()

    async def _list(self, _: web.Request) -> web.Response:
        sets = self._cluster().replica_sets
        return json_response([{"name": s.name, "policy": s.policy, "replicas": s.names} for s in sets])

    async def _show(self, request: web.Request) -> web.Response:
        try:
            async with self._set(self._config(request)) as found:
                return json_response(await found.status())
        except TopsError as error:
            return self._rejection(error)

    async def _write(self, request: web.Request) -> web.Response:
        try:
            changes = WriteBody.model_validate_json(await request.read()).all_changes()
            key = request.headers.get("Idempotency-Key", "")
            if not key.isprintable():  # bytes that are no UTF-8 are not, either
                raise ConfigError("the Idempotency-Key holds characters that can't be printed")
            done = await self._written(self._config(request), changes, key, request[PRINCIPAL])
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the body"
            return json_response({"error": f"{where}: {first['msg']}"}, 400)
        except TopsError as error:
            return self._rejection(error)
        return json_response(
            {
                "tx": done.tx,
                "token": done.token,
                "rows": done.rows,
                "returned": done.returned,
                "pending": done.pending,
                "duplicate": done.duplicate,
            }
        )

    async def _written(
        self, config: ReplicaSetConfig, changes: list[Change], key: str, caller: Identity
    ) -> WriteResult:
        """Write on behalf of an identity that the gate has authenticated."""
        fields = {"set": config.name, "on_behalf_of": caller.name, "role": caller.role}
        log.info("write over HTTP", extra=fields)
        async with self._set(config, Principal(caller.name, caller.role)) as found:
            return await found.write(changes, idempotency_key=key)

    def _config(self, request: web.Request) -> ReplicaSetConfig:
        return self._cluster().replica_set(request.match_info["name"])

    def _set(
        self, config: ReplicaSetConfig, caller: Principal | None = None
    ) -> AbstractAsyncContextManager[ReplicaSet]:
        return self._sessions.using((config.name, caller), lambda: self._connect(config, caller))

    def _connect(self, config: ReplicaSetConfig, caller: Principal | None) -> AbstractAsyncContextManager[ReplicaSet]:
        cluster = self._cluster()
        url, insecure = cluster.config.broker_named(self._broker).url, cluster.config.cluster.insecure
        keys = cluster.http_keys_of(config, self._broker)
        return connect(url, config.name, keys=keys, on_behalf_of=caller, insecure=insecure)

    def _rejection(self, error: TopsError) -> web.Response:
        status = next((code for kind, code in STATUS_OF if isinstance(error, kind)), 400)
        text, resolved = str(error), self._path.resolve()
        if isinstance(error, ConfigError) and any(p in text for p in (str(self._path), f"{resolved.parent}/")):
            log.warning("rejected over HTTP", extra={"reason": text})  # where the files are is not for clients
            text = "the configuration of this broker has no such set, or does not allow it: its log says more"
        body: dict[str, Any] = {"error": text, "retry": error.retry.value}
        if isinstance(error, OutcomeUnknown):
            body["tx"] = error.tx
        if isinstance(error, WriteRejected):
            body["code"] = error.why
        return json_response(body, status)
