"""A disk that is full, and processes that are there and do not answer: nothing is lost, and the status tells of it."""

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from replication import ReplicaSet
from tests.integration.replication.clusters import RunningCluster, running
from tests.integration.replication.observations import violations
from tests.integration.replication.test_kills import (
    IN_SYNC_S,
    POLICIES,
    PROMISED,
    acknowledged,
    check_nothing_prepared,
    check_replicas,
)
from tests.integration.replication.workloads import Record, fill, read_until, write_until
from tests.support.polling import eventually

SICK_S = 8.0
LAGGING_S = 3.0
Sickness = Callable[[RunningCluster, str], AbstractAsyncContextManager[None]]


@asynccontextmanager
async def stopped_server(cluster: RunningCluster, victim: str) -> AsyncIterator[None]:
    server = psutil.Process(int((postgres_of(cluster, victim) / "postmaster.pid").read_text().split()[0]))
    with suspended([server, *server.children()]):
        yield


@asynccontextmanager
async def stopped_agent(cluster: RunningCluster, victim: str) -> AsyncIterator[None]:
    with suspended([psutil.Process(cluster.processes.pid(f"shop/{victim}"))]):
        yield


@asynccontextmanager
async def stopped_coordinator(cluster: RunningCluster, _: str) -> AsyncIterator[None]:
    with suspended([psutil.Process(cluster.processes.pid("broker/b2"))]):
        yield


@asynccontextmanager
async def full_disk(cluster: RunningCluster, victim: str) -> AsyncIterator[None]:
    disk = postgres_of(cluster, victim).parent
    ballast = disk / "ballast"
    with ballast.open("wb") as file:
        for piece in (2**20, 2**12):  # the server takes and gives back room meanwhile
            while room(disk) >= piece:
                try:
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), piece)
                except OSError:
                    break
    try:
        yield
    finally:
        ballast.unlink()


def room(disk: Path) -> int:
    space = os.statvfs(disk)
    return space.f_bavail * space.f_frsize


def postgres_of(cluster: RunningCluster, replica: str) -> Path:
    shop = cluster.cluster.replica_set("shop")
    return cluster.cluster.data_of(shop, shop.replica_named(replica)) / "postgres"


@contextmanager
def suspended(processes: list[psutil.Process]) -> Iterator[None]:
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            if process.is_running():
                process.resume()


@pytest.fixture
def small_disks() -> Iterator[Callable[[Path], None]]:
    """Mounts a small file system on a folder."""
    with ExitStack() as mounted:

        def mount(path: Path) -> None:
            path.mkdir(parents=True)
            command = ["mount", "-t", "tmpfs", "-o", "size=200m,mode=755", "tmpfs", str(path)]
            if os.geteuid() != 0 or subprocess.run(command).returncode:
                pytest.skip("mounting a small file system needs root")
            mounted.callback(subprocess.run, ["umount", "-l", str(path)], check=True)

        yield mount


@pytest.mark.long
@pytest.mark.parametrize("sickness", [full_disk, stopped_server, stopped_agent, stopped_coordinator])
@pytest.mark.parametrize(
    ("policy", "victim"), [("write-all", "r2"), ("quorum", "r2"), ("primary-site", "r1"), ("peer-to-peer", "r2")]
)
async def test_acknowledged_writes_survive_a_sick_machine_and_the_status_tells_of_it(
    policy: str, victim: str, sickness: Sickness, folder: Path, small_disks: Callable[[Path], None]
) -> None:
    before = (lambda cluster: small_disks(postgres_of(cluster, victim).parent)) if sickness is full_disk else None
    async with running(folder, {"shop": POLICIES[policy]}, before=before) as cluster, cluster.connect() as shop:
        await fill(shop)
        record, stop = Record(), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for number, site in enumerate(("r1", "r2", "r3") * 2):
                group.create_task(write_until(cluster, site, number, stop, record))
            for consistency in PROMISED.get(policy, ()):
                group.create_task(read_until(cluster, consistency, stop, record))
            await record.grows(acknowledged, 50, "writes before the sickness")
            async with sickness(cluster, victim):
                await eventually(lambda: sick(shop, victim, sickness), what=f"{victim} told as sick")
                await asyncio.sleep(SICK_S)
                assert await sick(shop, victim, sickness), "it got well by itself"
            healed = time.monotonic()
            await record.grows(acknowledged, 50, "writes after the sickness")
            stop.set()
        await shop.wait_in_sync(healed + IN_SYNC_S - time.monotonic())

        assert record.other == []
        assert violations(record.seen) == []
        await check_replicas(shop, record)
        await check_nothing_prepared(cluster)


async def sick(shop: ReplicaSet, victim: str, sickness: Sickness) -> bool:
    """What an operator is shown: not in sync, and why, or a lag that has risen where nobody can be asked."""
    told: dict[str, Any] = next(r for r in (await shop.status())["replicas"] if r["replica"] == victim)
    match sickness.__name__:
        case "full_disk":
            return "No space left" in told["last_error"] and not told["in_sync"]
        case "stopped_server":
            return "has not answered" in told["last_error"] and not told["in_sync"]
        case "stopped_agent":
            return bool(told.get("unreachable")) and told["lag_s"] > LAGGING_S
    return not told["in_sync"] and bool(told["lag_s"] > LAGGING_S)
