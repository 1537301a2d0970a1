"""The gateway's process: listens, knows the users, lends sessions, and keeps what a user has written visible to it."""

import asyncio
import hmac
import logging
import secrets
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from adapters.embedded.servers import kept_logins
from adapters.postgres.apply.session import Options
from replication.client.reads import Consistency, SharedAsk
from replication.client.replica_set import ReplicaSet, connect
from replication.gateway.backend import Backend, Pool
from replication.gateway.client_session import ClientSession
from replication.gateway.scram import SALT_BYTES, ScramServer, Verifier
from replication.gateway.writing import Descriptions, Rejected, Writing
from replication.model.config import Cluster, GatewayConfig
from replication.replica.databases import given_logins
from tops.model.errors import ConfigError, LimitExceeded, NotReachable
from tops.model.event_types import SETS_ROOT
from tops.protocol.messages import Principal
from tops.security import Permissions, Verb, check_listen, identity_of, split_address

CONNECT_S = 15.0
POOL_WAIT_S = 10.0
BARRIER = "select 1 as reached"
_PARAMETERS = (
    "server_version", "server_encoding", "client_encoding", "DateStyle", "TimeZone", "IntervalStyle",
    "integer_datetimes", "standard_conforming_strings", "is_superuser", "session_authorization",
)  # fmt: skip
_SHOW = "select name, setting from pg_settings where name = any($1)"

log = logging.getLogger("tops.gateway")


class Gateway:
    """One gateway at work; `Gateway.run` makes it."""

    def __init__(self, cluster: Cluster, config: GatewayConfig) -> None:
        self.cluster, self.config = cluster, config
        self.replica_set = cluster.replica_set(config.replica_set)
        self.replica = config.replica or self.replica_set.names[0]
        self.tls: ssl.SSLContext | None = None
        self.port = 0
        self._permissions: Permissions = cluster.config.permissions()
        self._users = {user.name: user for user in config.user}
        self._verifiers = {
            user.name: Verifier.of(user.password, secrets.token_bytes(SALT_BYTES)) for user in config.user
        }
        self._nobody = secrets.token_bytes(32)
        self._sessions: dict[int, ClientSession] = {}
        self._next_pid = 1
        self._stack = AsyncExitStack()
        self._sets: dict[str, asyncio.Task[ReplicaSet]] = {}
        self._floors: dict[str, str] = {}  # by user: the token of its last write
        self._reached: dict[str, str] = {}  # by user: the token that the replica is known to have reached
        self._parameters: dict[str, str] = {}
        self._barriers: dict[str, SharedAsk[None]] = {}
        self._shop: ReplicaSet
        self._pool: Pool
        self._descriptions: Descriptions

    @classmethod
    @asynccontextmanager
    async def run(cls, cluster: Cluster, name: str) -> AsyncIterator["Gateway"]:
        """A gateway that listens, stopped on leaving. Raises TopsError when it can't start."""
        gateway = cls(cluster, cluster.gateway_named(name))
        async with gateway._stack:
            await gateway._start()
            yield gateway

    async def _start(self) -> None:
        config = self.config
        host, port = split_address(config.listen)
        check_listen(host, config.tls_certificate is not None, self.cluster.config.cluster.insecure)
        self.tls = self._tls_context()
        self._shop = await self._connected(None)
        if config.consistency not in self._shop.policy.consistencies():
            raise ConfigError(
                f"gateway {config.name!r}: the policy {self.replica_set.policy} can't promise "
                f"{config.consistency!r} reads"
            )
        where = f"gateway {config.name}"
        timeout_s = self.replica_set.read_timeout_s
        options = Options(lock_timeout_s=timeout_s, statement_timeout_s=timeout_s, connect_timeout_s=CONNECT_S)
        self._pool = Pool(await self._read_dsn(), where, config.pool, options)
        self._stack.callback(self._pool.close)
        self._descriptions = Descriptions(self._pool.connect)
        await self.parameters()
        cleaning = asyncio.ensure_future(self._pool.run())
        self._stack.callback(cleaning.cancel)
        loop = asyncio.get_running_loop()
        try:
            server = await loop.create_server(self._session, host, port, backlog=1024)
        except OSError as error:
            raise ConfigError(f"gateway {config.name!r} can't listen on {config.listen}: {error}") from None
        self._stack.callback(self._close, server)
        self.port = server.sockets[0].getsockname()[1]
        log.info("serving", extra={"gateway": config.name, "listen": config.listen, "replica": self.replica})

    def _close(self, server: asyncio.Server) -> None:
        server.close()
        for session in list(self._sessions.values()):
            session.end("57P01", "terminating connection: the gateway stops")
        for task in self._sets.values():
            task.cancel()

    def _tls_context(self) -> ssl.SSLContext | None:
        config = self.config
        if config.tls_certificate is None or config.tls_key is None:
            return None
        folder = self.cluster.path.parent
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(folder / config.tls_certificate, folder / config.tls_key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"gateway {config.name!r}: tls_certificate and tls_key can't be used: {error}") from None
        return context

    def _keys(self) -> Path | None:
        return self.cluster.path.parent / self.config.keys if self.config.keys is not None else None

    async def _connected(self, principal: Principal | None) -> ReplicaSet:
        insecure = self.cluster.config.cluster.insecure
        replica = self.replica_set.replica_named(self.replica)
        linked = connect(
            self.cluster.urls(replica.broker),
            self.replica_set.name,
            keys=self._keys(),
            on_behalf_of=principal,
            insecure=insecure,
            prefer=self.replica,
            timeout_s=CONNECT_S,
        )
        return await self._stack.enter_async_context(linked)

    async def _read_dsn(self) -> str:
        """The login *read* of the replica's database; that of an embedded server lies beside its data."""
        replica = self.replica_set.replica_named(self.replica)
        if replica.dsn is not None:
            return (await given_logins(self.replica_set, replica)).read
        data = self.cluster.data_of(self.replica_set, replica) / "postgres"
        logins = kept_logins(data, self.replica_set.name)
        if logins is None:
            raise NotReachable(
                f"gateway {self.config.name!r}: the embedded server of replica {self.replica!r} does not run on this "
                f"machine ({data}): start the replica first, or run the gateway beside it"
            )
        return logins.read

    # -------------------------------------------------------------------------------------- what a client session asks

    def _session(self) -> ClientSession:
        pid = self._next_pid
        self._next_pid = pid % (2**31 - 1) + 1
        session = self._sessions[pid] = ClientSession(self, pid)
        return session

    def scram(self, user: str) -> ScramServer:
        nonce = secrets.token_urlsafe(18)
        verifier = self._verifiers.get(user)
        if verifier is not None:
            return ScramServer(verifier, nonce, is_known=True)
        # The same salt each time, as a user that exists has.
        salt = hmac.digest(self._nobody, user.encode(), "sha256")[:SALT_BYTES]
        return ScramServer(Verifier(salt, bytes(32), bytes(32)), nonce, is_known=False)

    def admit(self, session: ClientSession) -> None:
        if len(self._sessions) > self.config.clients_max:
            raise LimitExceeded(f"gateway {self.config.name}: sorry, too many clients already")
        identity = identity_of(self.cluster.config.cluster.name, self._principal(session.user))
        self._permissions.check(identity, Verb.READ, f"{SETS_ROOT}.{self.replica_set.name}")
        session.choose(self.config.consistency)

    def _principal(self, user: str) -> Principal:
        found = self._users[user]
        cluster = self.cluster.config.cluster
        return Principal(found.name, found.role if self.config.keys is not None else cluster.site_role)

    def left(self, session: ClientSession) -> None:
        self._sessions.pop(session.pid, None)

    def cancel(self, pid: int, secret: int) -> None:
        session = self._sessions.get(pid)
        if session is not None and session.secret == secret:
            session.cancel()

    @property
    def default_consistency(self) -> str:
        return self.config.consistency

    def check_consistency(self, consistency: str) -> None:
        """Raises Rejected for one that the set, or this replica, can't promise."""
        if consistency not in self._shop.policy.consistencies():
            can = ", ".join(sorted(self._shop.policy.consistencies()))
            raise Rejected("22023", f"the policy {self.replica_set.policy} can't promise {consistency!r} reads: {can}")
        if consistency == "primary" and self.replica != self.replica_set.primary:
            raise Rejected("22023", f"this gateway reads at {self.replica}, which is not the primary")

    def needs_wait(self, user: str, consistency: str, max_lag_s: float | None) -> bool:
        if max_lag_s is not None or consistency not in ("any", "primary"):
            return True
        return self._shop.policy.reads_await_prepared or self._floors.get(user, "") != self._reached.get(user, "")

    async def wait(self, user: str, consistency: str, max_lag_s: float | None) -> None:
        """Returns when the replica shows what the read must see. Raises TopsError."""
        floor = self._floors.get(user, "")
        if floor != self._reached.get(user, ""):
            await self._shop.fetch(BARRIER, after=floor, replica=self.replica)
            self._reached[user] = floor
        if max_lag_s is not None:
            await self._shop.fetch(BARRIER, max_lag=max_lag_s, replica=self.replica)
        if consistency not in ("any", "primary") or self._shop.policy.reads_await_prepared:
            barrier = self._barriers.get(consistency)
            if barrier is None:
                request = _Barrier(self._shop, self.replica, consistency)
                barrier = self._barriers[consistency] = SharedAsk(request, overlapping=True)
            await barrier.request()

    def idle_backend(self, session: ClientSession) -> Backend | None:
        return self._pool.idle(session)

    async def backend(self, session: ClientSession) -> Backend:
        return await self._pool.take(session, POOL_WAIT_S)

    async def parameters(self) -> dict[str, str]:
        if not self._parameters:
            connection = await self._pool.connect()
            try:
                found = {row["name"]: row["setting"] for row in await connection.fetch(_SHOW, list(_PARAMETERS))}
            finally:
                connection.terminate()
            self._parameters = {**found, "client_encoding": "UTF8", "is_superuser": "off"}
        return self._parameters

    def writing(self, user: str) -> Writing:
        async def connected() -> ReplicaSet:
            task = self._sets.get(user)
            if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
                task = self._sets[user] = asyncio.ensure_future(self._connected(self._principal(user)))
            return await asyncio.shield(task)

        def written(token: str) -> None:
            self._floors[user] = token

        return Writing(connected, self._descriptions, written)


class _Barrier:
    """Asks the replica to reach what a consistency demands."""

    def __init__(self, shop: ReplicaSet, replica: str, consistency: str) -> None:
        self._shop, self._replica, self._consistency = shop, replica, consistency

    async def __call__(self) -> None:
        consistency: Consistency = self._consistency  # type: ignore[assignment]
        await self._shop.fetch(BARRIER, consistency=consistency, replica=self._replica)
