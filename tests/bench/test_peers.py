"""Every peer, for a moment: it starts, takes operations, its nodes agree, and nothing stays behind."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import asyncpg
import psutil
import pytest

from bench.harness import Contender, Load
from bench.peers import all_peers
from bench.peers.galera import Galera
from bench.peers.logical import LogicalReplication
from bench.peers.nats import NatsServer, core_delivery, jetstream_delivery
from bench.peers.pgpool import Pgpool
from bench.peers.programs import Program, accepts_connections
from bench.peers.streaming import Mode, StreamingReplication
from bench.peers.two_phase import HandWrittenTwoPhaseCommit
from bench.systems import BenchmarkFailed, System, SystemUnavailable
from bench.workloads import BankTransfer, Dataset, SingleRowUpdate, Totals

DATASET = Dataset(rows=200)
LOAD = Load(clients=4, warmup_s=0.05, duration_s=1.0)

PEERS = [
    pytest.param(lambda: StreamingReplication(Mode.REMOTE_APPLY_ALL), 3, id="streaming_remote_apply"),
    pytest.param(lambda: StreamingReplication(Mode.ASYNCHRONOUS), 3, id="streaming_async"),
    pytest.param(LogicalReplication, 3, id="logical"),
    pytest.param(HandWrittenTwoPhaseCommit, 3, id="hand_2pc"),
    pytest.param(Pgpool, 3, id="pgpool"),
    pytest.param(Galera, 3, id="galera", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("make", "nodes"), PEERS)
async def test_the_nodes_of_a_peer_agree_after_every_run(make: Callable[[], System], nodes: int) -> None:
    system = make()
    try:
        async with Contender.started(system, DATASET) as contender:
            processes = list(system.processes().values())
            for workload in (SingleRowUpdate(DATASET), BankTransfer(DATASET)):
                run = await contender.measure(workload, LOAD, seed=1)
                assert run.committed > 0
                assert run.errors == 0
            assert len(await system.totals()) == nodes
            assert await system.versions()
    except SystemUnavailable as reason:
        pytest.skip(str(reason))

    assert not any(psutil.pid_exists(pid) for pid in processes)


async def test_two_nodes_that_hold_different_rows_fail_the_benchmark() -> None:
    system = HandWrittenTwoPhaseCommit()
    async with Contender.started(system, DATASET) as contender:
        connection = await asyncpg.connect(system.servers["node2"].dsn)
        try:
            await connection.execute("update accounts set pad = 'other' where id = 1")
        finally:
            await connection.close()

        with pytest.raises(BenchmarkFailed, match="the nodes hold different rows"):
            await contender.verify()


async def test_a_transaction_that_one_server_refuses_leaves_nothing_prepared_at_the_others() -> None:
    system = HandWrittenTwoPhaseCommit()
    async with Contender.started(system, DATASET) as contender:
        connection = await asyncpg.connect(system.servers["node3"].dsn)
        try:
            await connection.execute("alter table accounts add constraint never check (bal = 0)")
        finally:
            await connection.close()

        with pytest.raises(BenchmarkFailed, match="no operation was committed"):
            await contender.measure(SingleRowUpdate(DATASET), LOAD, seed=1)

        assert {totals.balance for totals in (await system.totals()).values()} == {0}
        for server in system.servers.values():
            connection = await asyncpg.connect(server.dsn)
            try:
                assert await connection.fetchval("select count(*) from pg_prepared_xacts") == 0
            finally:
                await connection.close()


async def test_a_profiled_system_tells_the_time_of_each_statement_and_of_the_wait_for_the_slowest_node() -> None:
    system = HandWrittenTwoPhaseCommit(profile=True)
    async with Contender.started(system, DATASET) as contender:
        run = await contender.measure(SingleRowUpdate(DATASET), LOAD, seed=1)

    # On a busy machine a client also waits for its turn; what it waited in the warm-up is no part of the latency.
    assert set(run.phases) - {"waiting"} == {"begin", "statements", "prepare", "commit prepared", "slowest node"}
    assert all(seconds > 0 for seconds in run.phases.values())
    assert system.phases(0) == {}  # told once, for the transactions since the last time


async def test_a_logical_backlog_reaches_both_subscribers() -> None:
    system = LogicalReplication()
    async with Contender.started(system, DATASET) as contender:
        assert await system.drain_rate(500, first_id=1000) > 0

        contender.credit(Totals(entries=500))
        await contender.verify()


def test_every_peer_has_a_name_of_its_own_and_says_what_it_promises() -> None:
    peers = all_peers()

    assert len({peer.name for peer in peers}) == len(peers)
    assert all(peer.promise and peer.description for peer in peers)


async def test_three_nats_subscribers_receive_every_event() -> None:
    try:
        async with NatsServer() as server:
            core = await core_delivery(server, 1000)
            stored = await jetstream_delivery(server, 500, in_flight=64)
            pid = server.pid
    except SystemUnavailable as reason:
        pytest.skip(str(reason))

    assert core.received_per_s > 0
    assert stored.received_per_s > 0
    assert 0 < stored.p50_ms <= stored.p95_ms
    assert not psutil.pid_exists(pid)


async def test_a_missing_program_names_the_package_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.peers.programs.shutil.which", lambda *_, **__: None)

    with pytest.raises(SystemUnavailable, match="apt-get install nats-server"):
        await NatsServer().__aenter__()


async def test_a_server_that_does_not_come_up_is_unavailable_with_the_end_of_its_log(tmp_path: Path) -> None:
    failing = Program(["/bin/sh", "-c", "echo the port is taken; exit 3"], tmp_path)

    with pytest.raises(SystemUnavailable, match=r"(?s)ended with code 3.*the port is taken"):
        await failing.start(lambda: accepts_connections(1))


def test_a_server_does_not_outlive_a_benchmark_that_is_killed(tmp_path: Path) -> None:
    directory = tmp_path / "server"
    directory.mkdir()
    benchmark = f"""
import asyncio
from pathlib import Path
from bench.peers.programs import Program

async def main():
    server = Program(["/bin/sleep", "3600"], Path({str(directory)!r}))
    await server.start(lambda: asyncio.sleep(0))
    print(server.pid, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", benchmark], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        server = psutil.Process(int(process.stdout.readline()))
        process.kill()

    server.wait(timeout=60)
    deadline = time.monotonic() + 60
    while directory.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not directory.exists()
