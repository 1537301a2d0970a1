"""A replica's database: the server if it is ours to run, and the resource in front of it."""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_delay, wait_fixed

from adapters import EmbeddedPostgres, Logins, PostgresAdapter, SqliteAdapter
from adapters.embedded.servers import DirectoryInUse, kept_logins
from adapters.postgres.access.grants import table_grants
from adapters.postgres.access.privileges import check_write_role, powers
from adapters.postgres.copy.scripts import missing_tables, run_script
from adapters.resource import Resource
from replication.conflicts.own_statements import OWN_STATEMENTS
from replication.model.config import SUPERUSER_ACCEPTED, ReplicaConfig, ReplicaSetConfig
from replication.replica.start import holder
from tops.model.errors import ConfigError, InvariantBroken, NotReachable, TopsError

START_TIMEOUT_S = 60.0
# After a crash a server syncs its data before it serves: one call for the whole file system, where that exists.
QUICK_RECOVERY = {"recovery_init_sync_method": "syncfs"} if sys.platform == "linux" else {}
WATCH_S = 0.5
TELL_AFTER_S = 5.0  # until a database that is waited for is told

log = logging.getLogger("tops.replication")


class ReplicaDatabase:
    """Brings a replica's database up and keeps it up for as long as the agent lives."""

    def __init__(self, cluster: str, config: ReplicaSetConfig, replica: ReplicaConfig, data: Path) -> None:
        self._cluster, self._config, self._replica = cluster, config, replica
        self._server = EmbeddedPostgres(data / "postgres", settings=QUICK_RECOVERY) if replica.dsn is None else None
        self._logins: Logins | None = None
        self.restarts = 0

    @property
    def dsn(self) -> str:
        """The agent's login, once the database is set up; of SQLite, the file."""
        return self.logins.agent if not self.is_sqlite else self._replica.dsn or ""

    @property
    def logins(self) -> Logins:
        if self._logins is None:
            raise InvariantBroken("set_up() makes the logins")
        return self._logins

    @property
    def is_sqlite(self) -> bool:
        return (self._replica.dsn or "").startswith("sqlite:")

    async def start(self) -> None:
        """Returns when the server takes connections; an earlier incarnation's server is given time to end."""
        if self._server is None:
            return

        async def check_unserved(state: RetryCallState) -> None:
            if state.attempt_number == 1 and state.outcome is not None:
                reason = str(state.outcome.exception())
                extra = {"replica": self._replica.name, "reason": reason}
                log.info("waiting for the embedded server's folder", extra=extra)
            await self._check_unserved()

        retrying = AsyncRetrying(
            stop=stop_after_delay(START_TIMEOUT_S),
            wait=wait_fixed(WATCH_S / 2),
            retry=retry_if_exception_type(DirectoryInUse),
            before_sleep=check_unserved,
            reraise=True,
        )
        await retrying(self._server.start)

    async def _check_unserved(self) -> None:
        """Raises ReplicaHeld if an agent that lives serves the replica with the server that runs on our data."""
        assert self._server is not None
        logins = kept_logins(self._server.data_dir, self._config.name)
        if logins is None:
            return
        with suppress(NotReachable):  # a server that is on its way out
            await holder.check_free(logins.agent, self._config.name, self._replica.name, replaceable=False)

    async def watch(self) -> None:
        """A server of ours that died is started again, until it is there."""
        while self._server is not None:
            await asyncio.sleep(WATCH_S)
            if not self._server.running:
                self.restarts += 1
                log.warning("the embedded server died and is started again", extra={"replica": self._replica.name})
                try:
                    await self.start()
                    log.info("the embedded server runs again", extra={"replica": self._replica.name})
                except TopsError as error:  # what is left of the old one may still hold its memory, or the disk is full
                    log.error("it does not start", extra={"replica": self._replica.name, "reason": str(error)})

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()

    @property
    def admin_dsn(self) -> str:
        """Who may change schemas: of a server of ours its superuser, of another one the agent, as far as it may."""
        return self._server.dsn if self._server is not None else self.logins.agent

    async def set_up(self) -> None:
        """The set's logins, or what is missing of them as a ConfigError."""
        if self.is_sqlite:
            return
        if self._server is not None:
            config = self._config
            self._logins = await self._server.provision(config.name, config.tables, config.temp_file_limit)
        else:
            self._logins = await given_logins(self._config, self._replica)

    async def ensure_schema(self, script: str | None) -> None:
        """Run the set's schema file on a database that lacks its tables; what is still missing then is a difference."""
        wanted = [] if self._config.tables == "*" else self._config.tables
        if script is None or (wanted and not await missing_tables(self.admin_dsn, wanted)):
            return
        script = f"{script}\n;{self.grants_on_new_tables()}"
        await run_script(self.admin_dsn, script, only_if_empty=not wanted)
        if self._server is not None:
            await self.set_up()  # with the rights to what is new

    def grants_on_new_tables(self) -> str:
        """SQL by which an agent that makes tables shares them with the set's logins; `set_up` does it elsewhere."""
        if self._server is None and self._logins is not None and self._logins.write_role is not None:
            return table_grants(self._logins, self._config.tables)
        return ""

    def resource(self) -> Resource:
        name = f"replica {self._config.name}/{self._replica.name}"
        if self.is_sqlite:
            path = self.dsn.removeprefix("sqlite://")
            return SqliteAdapter(path, cluster=self._cluster, replica_set=self._config.name, name=name)
        return PostgresAdapter(
            self.logins,
            cluster=self._cluster,
            replica_set=self._config.name,
            name=name,
            versioned=self._config.versioned,
            own_statements=OWN_STATEMENTS,
            read_timeout_s=self._config.read_timeout_s,
        )


async def given_logins(config: ReplicaSetConfig, replica: ReplicaConfig) -> Logins:
    """The logins that the file gives for an existing server, if client SQL is safe with them.

    A login that reaches the server's files gives them to every client: the file must say that this is wanted."""
    where, dsn = f"replica {config.name}/{replica.name}", replica.dsn or ""
    logins = Logins(dsn, replica.read_dsn or dsn, replica.write_dsn or dsn, replica.check_dsn or dsn)
    if config.allow_superuser is not None:
        return logins
    found = await powers(dsn, where) + (await powers(logins.read, where) if logins.read != dsn else [])
    if logins.write_role is not None:
        found += await powers(dsn, where, logins.write_role)
    if found:
        raise ConfigError(
            f"{where}: the login {found[0].role!r} {found[0].reason}, so clients could read and write the server's "
            f"files: give logins that may do less (`tops doctor {config.name} --print-grants` prints what to run), "
            f'or write allow_superuser = "{SUPERUSER_ACCEPTED}"'
        )
    missing = [key for key in ("read_dsn", "write_dsn") if getattr(replica, key) is None]
    if missing:
        raise ConfigError(
            f"{where}: {' and '.join(missing)} must be given beside dsn: client SQL runs with logins of its own; "
            f"run what `tops doctor {config.name} --print-grants` prints, then name the logins in the file"
        )
    await check_write_role(logins, where)
    return logins


async def with_retries(work: Callable[[], Awaitable[None]], replica: str, timeout_s: float = START_TIMEOUT_S) -> None:
    """Do what needs a server that may still be coming up, again until it is there; NotReachable after the bound."""
    began = asyncio.get_running_loop().time()
    deadline, told = began + timeout_s, False
    while True:
        try:
            await work()
        except NotReachable as error:
            now = asyncio.get_running_loop().time()
            if now > deadline:
                raise
            if now > began + TELL_AFTER_S and not told:
                told = True
                log.warning("waiting for the database", extra={"replica": replica, "reason": str(error)})
            await asyncio.sleep(WATCH_S)
        else:
            if told:
                log.info("the database responds", extra={"replica": replica})
            return
