"""PostgreSQL's streaming replication: one primary, two standbys, in three strengths of promise."""

import asyncio
from enum import Enum

from adapters import EmbeddedPostgres
from bench.peers.postgres import PostgresSystem, execute, fetch_text, until
from bench.systems import BenchmarkFailed

STANDBYS = ("standby1", "standby2")


class Mode(Enum):
    """Whom a commit waits for: name, `synchronous_standby_names`, `synchronous_commit`, state of a standby, promise."""

    REMOTE_APPLY_ALL = (
        "streaming_remote_apply",
        "FIRST 2 (standby1, standby2)",
        "remote_apply",
        "sync",
        "on disk at all three and visible to reads at both standbys",
    )
    REMOTE_APPLY_ANY = (
        "streaming_remote_apply_any1",
        "ANY 1 (standby1, standby2)",
        "remote_apply",
        "quorum",
        "on disk and visible to reads at the primary and one standby",
    )
    ASYNCHRONOUS = (
        "streaming_async",
        "",
        "on",
        "async",
        "on disk at the primary; a standby may lack it, and loses it with the primary",
    )


class StreamingReplication(PostgresSystem):
    """A primary that takes all writes and two hot standbys that replay its log."""

    def __init__(self, mode: Mode) -> None:
        super().__init__()
        self.name, self._names, self._commit, self._state, self.promise = mode.value
        waits = self._names or "no standby"
        self.description = f"PostgreSQL streaming replication, 2 standbys, commit waits for {waits}"

    async def start(self) -> None:
        primary = await EmbeddedPostgres(settings=self.settings).start()
        self.servers["primary"] = primary
        for name in STANDBYS:
            standby = EmbeddedPostgres(settings=self.settings, standby_of=primary, standby_name=name)
            self.servers[name] = await standby.start()
        # Only now: with no standby connected, a commit that waits for one waits for ever.
        await execute(
            primary.dsn,
            f"alter system set synchronous_standby_names = '{self._names}'",
            f"alter system set synchronous_commit = '{self._commit}'",
            "select pg_reload_conf()",
        )
        await self._until_states_are_right()

    async def settle(self) -> None:
        """Asks the standbys themselves: what the primary knows of an asynchronous one can be seconds old."""
        target = await fetch_text(self.writer.dsn, "select pg_current_wal_lsn()::text")
        for name in STANDBYS:
            await until(self.servers[name].dsn, "select pg_last_wal_replay_lsn() >= $1::text::pg_lsn", target)

    async def fsyncs(self) -> int | None:
        """Not known: PostgreSQL 16 does not count what a standby's receiver syncs."""
        return None

    async def _until_states_are_right(self) -> None:
        states = "select coalesce(array_agg(state || ' ' || sync_state), '{}') from pg_stat_replication"
        wanted = [f"streaming {self._state}" for _ in STANDBYS]
        try:
            async with asyncio.timeout(30):
                await until(self.writer.dsn, f"select ({states}) = $1::text[]", wanted)
        except TimeoutError as error:
            found = await fetch_text(self.writer.dsn, states)
            raise BenchmarkFailed(f"{self.name}: the standbys are {found} instead of {wanted}") from error
