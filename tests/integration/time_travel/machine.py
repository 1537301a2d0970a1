"""A small cluster whose journals and databases can be put back to an earlier time."""

import itertools
import shutil
from pathlib import Path
from typing import Any

import asyncpg

from adapters.changes import Insert
from replication.model.events import log_type
from replication.rpc.rejections import WriteRejected
from tests.integration.replication.inprocess import SmallCluster, _forget_promises
from tests.support.command_line import tops_of
from tests.support.polling import eventually
from tops.model.errors import NotReachable, OutcomeUnknown, TopsError
from tops.protocol.messages import LogRecovered

IDS = "select id from accounts order by id"
_copies = itertools.count(1)


class TimeMachine:
    """Writes numbered rows, remembers which of them were acknowledged, and restores parts of the cluster."""

    def __init__(self, small: SmallCluster) -> None:
        self.small = small
        self.acknowledged: list[int] = []
        self._next = itertools.count(1)
        self._copies: list[str] = []

    # ------------------------------------------------------------------------------------------------------ writing

    async def write(self, count: int = 5) -> None:
        async with self.small.connect() as shop:
            for _ in range(count):
                number = next(self._next)
                await shop.write([Insert("accounts", {"id": number, "balance": number})])
                self.acknowledged.append(number)

    @property
    def commits_locally(self) -> bool:
        """Whether a replica takes writes by itself; they wait for the log then."""
        config = self.small.cluster.replica_set("shop")
        return (config.policy == "peer-to-peer" and config.order != "ordered") or config.ack == "local"

    async def rejection(self) -> str:
        """The code with which a write is rejected."""
        async with self.small.connect(timeout_s=5.0) as shop:
            try:
                await shop.write([Insert("accounts", {"id": 1_000_000 + next(self._next), "balance": 1})])
            except WriteRejected as rejected:
                return rejected.why
            except (NotReachable, OutcomeUnknown) as error:
                return type(error).__name__
        return "written"

    async def caught_up(self) -> None:
        """Every replica has everything that was acknowledged."""

        async def has_all() -> bool:
            return all([set(self.acknowledged) <= await self.ids(name) for name in self.small.databases])

        await eventually(has_all, what="every acknowledged row at every replica")

    async def ids(self, replica: str) -> set[int]:
        return {row["id"] for row in await self.small.sql(replica, IDS)}

    # ------------------------------------------------------------------------------------------------------- copies

    @property
    def coordinator(self) -> str:
        return str(self.small.cluster.config.topology().rendezvous(log_type("shop").name))

    def journal_of(self, broker: str) -> Path:
        return self.small.cluster.config.broker_named(broker).data

    async def copy_journal(self, broker: str, *, running: bool = False) -> Path:
        """A backup of a broker's folder; one that is taken while it runs may end anywhere."""
        if not running:
            await self.small.stop_broker(broker)
        copy = self.journal_of(broker).with_name(f"copy{next(_copies)}")
        # What is known to be durable first: a copy that claims more than it has is rejected as damaged.
        shutil.copytree(self.journal_of(broker), copy, ignore=shutil.ignore_patterns("*.segment"))
        for segment in sorted(self.journal_of(broker).rglob("*.segment")):
            shutil.copy2(segment, copy / segment.relative_to(self.journal_of(broker)))
        if not running:
            await self.small.start_broker(broker)
        return copy

    async def restore_journal(self, broker: str, copy: Path | None) -> None:
        """Put a backup in place of a broker's folder; None: an empty one."""
        await self.small.stop_broker(broker)
        shutil.rmtree(self.journal_of(broker))
        if copy is not None:
            shutil.copytree(copy, self.journal_of(broker))
        await self.small.start_broker(broker)

    async def copy_database(self, replica: str) -> str:
        await self.small.stop(replica)
        name, copy = self.small.databases[replica], f"copy{next(_copies)}"
        await _forget_promises(self.small.server, name)
        await self._admin(f'create database "{copy}" template "{name}"')
        self._copies.append(copy)
        await self.small.start(replica)
        return copy

    async def restore_database(self, replica: str, copy: str) -> None:
        """Stops the replica's agent and leaves it stopped."""
        await self.small.stop(replica)
        name = self.small.databases[replica]
        await _forget_promises(self.small.server, name)
        await self._admin(f'drop database "{name}" with (force)')
        await self._admin(f'create database "{name}" template "{copy}"')

    async def _admin(self, sql: str) -> None:
        connection = await asyncpg.connect(self.small.server.dsn)
        try:
            await connection.execute(sql)
        finally:
            await connection.close()

    async def close(self) -> None:
        for copy in self._copies:
            await self._admin(f'drop database if exists "{copy}" with (force)')

    # -------------------------------------------------------------------------------------------- what is to be seen

    async def status(self) -> dict[str, Any]:
        async with self.small.connect() as shop:
            return await shop.status()

    async def is_noticed(self) -> None:
        """The journal is found to be stale, nobody is in sync, and no write is taken."""

        async def stale() -> bool:
            found = await self.status()
            return bool(found["coordinator"].get("stale"))

        async def says_why() -> bool:
            found = await self.status()
            assert [r["replica"] for r in found["replicas"] if r["in_sync"]] == []
            return all(r["stopped"] or r["last_error"] for r in found["replicas"] if not r.get("unreachable"))

        await eventually(stale, what="a stale journal is noticed")
        for _ in range(3):
            found = await self.status()
            assert not any(r["in_sync"] for r in found["replicas"])
        await eventually(says_why, what="every replica says why")
        assert await self.rejection() != "written" or self.commits_locally

    async def recover(self, *, accept_loss: bool = False) -> LogRecovered:
        """As `tops journal recover` does; once every running replica has told where it is."""
        recovered: list[LogRecovered] = []

        async def done() -> bool:
            async with self.small.connect() as shop:
                response = await shop.recover_log(accept_loss=accept_loss)
            recovered.append(response)
            silent = set(response.silent) & {
                self.small.cluster.replica_set("shop").site_of(n) for n in self.small.agents
            }
            return not silent

        await eventually(done, what="every running replica has told where it is")
        return recovered[-1]

    async def recover_by_command(self) -> str:
        """The command itself, until every replica has told where it is."""
        said: list[str] = []

        async def done() -> bool:
            code, out, errors = await tops_of(self.small.cluster, "journal", "recover", "shop")
            said.append(out + errors)
            return code == 0

        await eventually(done, 60.0, what="the recovery")
        return said[-1]

    async def copied_anew(self, *replicas: str) -> None:
        """What an operator does with a replica that can't follow."""
        for replica in replicas:
            await self.small.stop(replica)
            await self.small.lose_database(replica)
            await self.small.start(replica)

    async def goes_on(self) -> None:
        """Everybody is in sync, new writes are taken, nothing that was acknowledged is lost, and all are equal."""
        async with self.small.connect() as shop:
            await shop.wait_in_sync(60.0)
        await self.write(2)
        await self.caught_up()

        async def equal() -> bool:
            rows = [await self.ids(name) for name in self.small.databases]
            return all(found == rows[0] for found in rows)

        await eventually(equal, what="equal rows at all replicas")

    async def problem_of(self, replica: str) -> str:
        try:
            found = {r["replica"]: r for r in (await self.status())["replicas"]}[replica]
        except TopsError as error:
            return str(error)
        return str(found.get("stopped") or found.get("last_error") or "")
