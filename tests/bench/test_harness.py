"""The harness on real servers, with little data and short windows; no claim here is about speed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import asyncpg
import pytest

from bench.harness import Budget, Contender, Load, alternate, start_all
from bench.peers.postgres import until
from bench.peers.programs import program
from bench.peers.single import SinglePostgres
from bench.results import figures, rows
from bench.systems import BenchmarkFailed
from bench.workloads import AppendOnly, BankTransfer, Dataset, SingleRowUpdate, Totals, Workload, Ycsb

DATASET = Dataset(rows=200)
LOAD = Load(clients=4, warmup_s=0.05, duration_s=1.0)


class OtherPostgres(SinglePostgres):
    name = "other"


class NotInstalled(SinglePostgres):
    name = "not_installed"

    async def start(self) -> None:
        program("no-such-server", "no-such-package")


class Unloadable(SinglePostgres):
    async def load(self, dataset: Dataset) -> None:
        raise BenchmarkFailed("the disk is full")


@pytest.fixture
async def contender() -> AsyncIterator[Contender]:
    async with Contender.started(SinglePostgres(), DATASET) as started:
        yield started


async def behind_our_back(contender: Contender, sql: str) -> None:
    assert isinstance(contender.system, SinglePostgres)
    connection = await asyncpg.connect(contender.system.writer.dsn)
    try:
        await connection.execute(sql)
    finally:
        await connection.close()


@pytest.mark.parametrize(
    "workload",
    [SingleRowUpdate(DATASET), BankTransfer(DATASET), Ycsb("A", DATASET), AppendOnly()],
    ids=lambda workload: workload.name,
)
async def test_a_run_of_any_workload_is_measured_and_its_data_found_right(
    contender: Contender, workload: Workload
) -> None:
    run = await contender.measure(workload, LOAD, seed=1)

    assert run.workload == workload.name
    assert run.committed >= run.tps * LOAD.duration_s > 0
    assert 0 < run.p50_ms <= run.p95_ms <= run.p99_ms
    assert run.errors == 0
    assert set(run.cpu_cores) == {"client", "primary"}
    assert run.fsyncs_per_tx is not None


async def test_an_update_that_nobody_was_told_of_fails_the_benchmark(contender: Contender) -> None:
    await behind_our_back(contender, "update accounts set bal = bal + 1 where id = 7")

    with pytest.raises(BenchmarkFailed, match=r"primary has balance = .* its clients were told"):
        await contender.measure(SingleRowUpdate(DATASET), LOAD, seed=1)


async def test_a_lost_insert_fails_the_benchmark(contender: Contender) -> None:
    await contender.measure(BankTransfer(DATASET), LOAD, seed=1)
    await behind_our_back(contender, "delete from transfers where id = (select min(id) from transfers)")

    with pytest.raises(BenchmarkFailed, match="transfers"):
        await contender.verify()


async def test_work_outside_the_clients_is_right_once_it_is_accounted_for(contender: Contender) -> None:
    await behind_our_back(contender, "insert into entries values (1, 'x'), (2, 'x')")

    contender.credit(Totals(entries=2))

    await contender.verify()


async def test_a_system_that_dies_under_load_fails_the_benchmark_at_once(contender: Contender) -> None:
    assert isinstance(contender.system, SinglePostgres)
    server = contender.system.writer
    measuring = asyncio.create_task(contender.measure(SingleRowUpdate(DATASET), Load(4, 0.0, 3600.0), seed=1))
    await until(server.dsn, "select sum(bal) > 100 from accounts")

    await server.crash()

    with pytest.raises(BenchmarkFailed, match="broke down under load"):
        await measuring


async def test_a_system_that_refuses_everything_has_no_figures(contender: Contender) -> None:
    await behind_our_back(contender, "alter table accounts add constraint never check (bal = 0)")

    with pytest.raises(BenchmarkFailed, match="no operation was committed"):
        await contender.measure(SingleRowUpdate(DATASET), LOAD, seed=1)


async def test_what_cannot_run_here_is_named_with_its_reason_and_the_rest_goes_on() -> None:
    async with AsyncExitStack() as stack:
        contenders, missing = await start_all(stack, [NotInstalled(), SinglePostgres()], DATASET)

        assert [contender.system.name for contender in contenders] == ["postgres_single"]
        assert missing == {"not_installed": "no-such-server is not installed: apt-get install no-such-package"}


async def test_a_system_that_fails_to_load_is_stopped() -> None:
    system = Unloadable()

    with pytest.raises(BenchmarkFailed, match="disk is full"):
        async with Contender.started(system, DATASET):
            pytest.fail("it must not start")

    assert system.servers == {}


async def test_sides_alternate_and_every_other_round_goes_backwards() -> None:
    async with AsyncExitStack() as stack:
        contenders, _ = await start_all(stack, [SinglePostgres(), OtherPostgres()], DATASET)

        runs = await alternate(contenders, SingleRowUpdate(DATASET), [LOAD], 2, Budget(None))

    assert [run.system for run in runs] == ["postgres_single", "other", "other", "postgres_single"]
    assert [(row["system"], row["runs"]) for row in rows(runs)] == [("postgres_single", 2), ("other", 2)]
    found = figures(runs, "other", ["postgres_single"], workload="W")
    assert set(found) == {"other.c4.vs_postgres_single"}
    assert found["other.c4.vs_postgres_single"]["runs"] == 2


async def test_what_does_not_fit_the_budget_is_left_out_and_said_so(contender: Contender) -> None:
    budget = Budget(0.0)

    runs = await alternate([contender], SingleRowUpdate(DATASET), [LOAD], 1, budget)

    assert runs == []
    assert budget.left_out == ["round 1/1, W, c=4, postgres_single"]
