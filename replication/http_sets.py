"""Replica sets at a broker's HTTP side: a view of each, and writes.

`POST /v1/replica-sets/{name}/write` takes `{"sql": …, "args": […]}` or `{"changes": [{"insert": …}, …]}` and needs the
set's `write_token` as a bearer token; an `Idempotency-Key` header makes it safe to send again.
"""

import asyncio
import hmac
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal

import msgspec
from aiohttp import web
from pydantic import BaseModel, ConfigDict, ValidationError

from replication.config import Cluster, ReplicaSetConfig
from replication.refusals import ChangeNotProved, TooFewReplicas, WriteRefused
from replication.replica_set import ReplicaSet, connect
from tops.changes import Change, Delete, Insert, Statement, Update, Upsert
from tops.errors import ConfigError, NotReachable, OutcomeUnknown, PermissionDenied, TopsError

_encoder = msgspec.json.Encoder(enc_hook=str)
STATUS_OF: tuple[tuple[type[TopsError], int], ...] = (
    (TooFewReplicas, 503),
    (ChangeNotProved, 400),
    (WriteRefused, 409),
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
        if self.sql is not None:
            return [Statement(self.sql, tuple(self.args))]
        return [change.change() for change in self.changes]


class SetRoutes:
    """The routes of all sets of a file, at one broker; connects to a set when it is first asked for."""

    def __init__(self, path: Path, broker: str) -> None:
        self._path, self._broker = path, broker
        self._connected: dict[str, ReplicaSet] = {}
        self._stack = AsyncExitStack()
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # a set that is away holds up no other

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/v1/replica-sets", self._list)
        app.router.add_get("/v1/replica-sets/{name}", self._show)
        app.router.add_post("/v1/replica-sets/{name}/write", self._write)
        app.cleanup_ctx.append(self._life)

    async def _life(self, _: web.Application) -> AsyncIterator[None]:
        yield
        await self._stack.aclose()

    async def _list(self, _: web.Request) -> web.Response:
        sets = Cluster.load(self._path).replica_sets
        return _json([{"name": s.name, "policy": s.policy, "replicas": s.names} for s in sets])

    async def _show(self, request: web.Request) -> web.Response:
        try:
            found = await self._set(self._config(request))
            return _json(await found.status())
        except TopsError as error:
            return _refusal(error)

    async def _write(self, request: web.Request) -> web.Response:
        try:
            config = self._config(request)
            _check_token(config, request)
            body = WriteBody.model_validate_json(await request.read())
            found = await self._set(config)
            key = request.headers.get("Idempotency-Key", "")
            done = await found.write(body.all_changes(), idempotency_key=key)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the body"
            return _json({"error": f"{where}: {first['msg']}"}, 400)
        except TopsError as error:
            return _refusal(error)
        return _json(
            {
                "tx": done.tx,
                "token": done.token,
                "rows": done.rows,
                "returned": done.returned,
                "pending": done.pending,
                "duplicate": done.duplicate,
            }
        )

    def _config(self, request: web.Request) -> ReplicaSetConfig:
        return Cluster.load(self._path).replica_set(request.match_info["name"])

    async def _set(self, config: ReplicaSetConfig) -> ReplicaSet:
        async with self._turns[config.name]:
            if config.name not in self._connected:
                cluster = Cluster.load(self._path)
                table, insecure = cluster.config.broker_named(self._broker), cluster.config.cluster.insecure
                keys = cluster.http_keys_of(config, self._broker)
                link = connect(table.url, config.name, keys=keys, insecure=insecure)
                self._connected[config.name] = await self._stack.enter_async_context(link)
            return self._connected[config.name]


def _check_token(config: ReplicaSetConfig, request: web.Request) -> None:
    """Writes over HTTP are off unless the set has a token, and need it."""
    if config.write_token is None:
        raise PermissionDenied(f"replica set {config.name!r} takes no writes over HTTP: give it a write_token")
    given = request.headers.get("Authorization", "").removeprefix("Bearer ")
    if not hmac.compare_digest(given.encode(), config.write_token.encode()):
        raise PermissionDenied("the bearer token is not this replica set's write_token")


def _refusal(error: TopsError) -> web.Response:
    status = next((code for kind, code in STATUS_OF if isinstance(error, kind)), 400)
    body: dict[str, Any] = {"error": str(error), "retry": error.retry.value}
    if isinstance(error, OutcomeUnknown):
        body["tx"] = error.tx
    return _json(body, status)


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=_encoder.encode(value), status=status, content_type="application/json")
