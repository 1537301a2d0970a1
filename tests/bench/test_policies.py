"""The policies behind the port of the harness: real servers, real brokers, real agents, and little data."""

from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest
from typer.testing import CliRunner

from adapters.postgres.access.guard_triggers import TRIGGER
from bench.harness import Budget, Contender, Load, Run
from bench.policies.catalog import CASES, case_named
from bench.policies.figures import COMPARISONS, Comparison, FollowersLate, chosen, compare, figure_of
from bench.policies.observation import figures_in
from bench.policies.system import OneProcess, PolicySystem, ProcessCluster
from bench.policies.tracing import Clock, Trace, TraceReader
from bench.systems import PHASES, BenchmarkFailed
from bench.workloads import AppendOnly, BankTransfer, Dataset, SingleRowUpdate, Ycsb
from tests.bench.test_report import run
from tops.cli.main import app
from tops.model.errors import ConfigError

DATASET = Dataset(rows=200)
LOAD = Load(clients=4, warmup_s=0.05, duration_s=1.0)


@pytest.fixture(params=CASES, ids=lambda case: case.name)
async def policy(request: pytest.FixtureRequest) -> AsyncIterator[Contender]:
    async with Contender.started(OneProcess(request.param), DATASET) as started:
        yield started


async def test_every_policy_runs_every_workload_and_its_replicas_hold_what_clients_were_told(policy: Contender) -> None:
    for workload in (SingleRowUpdate(DATASET), BankTransfer(DATASET), Ycsb("A", DATASET), AppendOnly()):
        measured = await policy.measure(workload, LOAD, seed=1)

        assert measured.committed > 0
        assert measured.errors == 0
        assert measured.messages_per_tx is not None and measured.messages_per_tx > 0
        assert measured.bytes_per_tx is not None and measured.bytes_per_tx > 0


@pytest.fixture
async def profiled() -> AsyncIterator[Contender]:
    system = ProcessCluster(case_named("write_all"), profile=True, own_links=True)
    async with Contender.started(system, DATASET) as started:
        yield started


async def test_a_cluster_of_processes_tells_cpu_by_component_and_where_the_time_goes(profiled: Contender) -> None:
    measured = await profiled.measure(SingleRowUpdate(DATASET), LOAD, seed=1)

    replicas = ("r1", "r2", "r3")
    parts = {"client", "broker", *(f"agent {r}" for r in replicas), *(f"database {r}" for r in replicas)}
    assert set(measured.cpu_cores) == parts
    assert set(measured.phases) <= {*PHASES, "waiting"}
    assert measured.phases["database"] > 0
    assert measured.phases["disk"] > 0


async def test_a_replica_with_another_balance_fails_the_benchmark(profiled: Contender) -> None:
    assert isinstance(profiled.system, PolicySystem)
    connection = await asyncpg.connect(profiled.system.servers["r2"].dsn)
    await connection.execute(
        f"alter table accounts disable trigger {TRIGGER};"
        "update accounts set bal = bal + 1 where id = 7;"
        f"alter table accounts enable always trigger {TRIGGER}"
    )
    await connection.close()

    with pytest.raises(BenchmarkFailed, match="r2 has balance"):
        await profiled.measure(SingleRowUpdate(DATASET), LOAD, seed=1)


async def test_a_comparison_runs_both_sides_in_turn_and_gives_a_ratio() -> None:
    comparison = Comparison("overlay.c64.vs_in_process", "write_all", "write_all_in_process", 0.67, 0.85, clients=4)

    compared = await compare([comparison], DATASET, 2, 0.05, 0.4, Budget(None))

    assert [r.system for r in compared.runs] == ["write_all", *["write_all_in_process"] * 2, "write_all"]
    figure = compared.figures["overlay.c64.vs_in_process"]
    assert figure["runs"] == 2
    assert figure["low"] <= figure["ratio"] <= figure["high"]
    assert set(compared.systems) == {"write_all", "write_all_in_process"}


def test_the_figures_have_the_names_that_others_look_for() -> None:
    assert {comparison.name for comparison in COMPARISONS} == {
        "write_all.c64.vs_hand_2pc",
        "write_all.c64.vs_streaming",
        "write_all.c1.latency_vs_hand_2pc",
        "quorum2of3.c64.vs_streaming_any1",
        "serializable.c64.vs_write_all",
        "primary.c64.vs_single",
        "primary.apply.vs_logical",
        "p2p.converged.vs_primary",
        "overlay.c64.vs_in_process",
        "executed_once.c64.vs_shipped",
        "executed_once.c1.vs_shipped",
        "executed_once.hot_row",
        "write_all.c64.vs_galera",
    }


def sides(comparison: Comparison, **ours: float) -> list[Run]:
    runs = [run(comparison.ours, 100.0, clients=64), run(comparison.theirs, 200.0, clients=64)]
    return [Run(**{**{f: getattr(runs[0], f) for f in Run.__slots__}, **ours}), runs[1]]


def test_a_writer_whose_followers_are_late_has_no_figure() -> None:
    (comparison,) = chosen(["primary.c64.vs_single"])

    assert figure_of(comparison, sides(comparison, settle_s=0.9)) is not None
    with pytest.raises(FollowersLate, match=r"needed 1\.1 s"):
        figure_of(comparison, sides(comparison, settle_s=1.1))


def test_apply_rates_count_until_everything_is_applied() -> None:
    (comparison,) = chosen(["primary.apply.vs_logical"])

    figure = figure_of(comparison, sides(comparison, tps=999.0, applied_tps=90.0))

    assert figure is not None
    assert figure["ratio"] == 0.5


def test_a_lower_latency_than_theirs_is_a_ratio_above_1() -> None:
    (comparison,) = chosen(["write_all.c1.latency_vs_hand_2pc"])

    figure = figure_of(comparison, sides(comparison, p50_ms=1.0))

    assert figure is not None
    assert figure["ratio"] == 2.0


def test_an_unknown_figure_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no figure 'write_some'.*write_all\.c64\.vs_hand_2pc"):
        chosen(["write_some"])

    ended = CliRunner().invoke(app, ["bench", "policies", "--figures", "write_some", "--results", str(tmp_path)])

    assert ended.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_benchmark_without_figures_to_choose_from_refuses_them(tmp_path: Path) -> None:
    ended = CliRunner().invoke(app, ["bench", "core", "--figures", "x", "--results", str(tmp_path)])

    assert ended.exit_code == 2
    assert "without --figures" in ended.output


def test_the_brokers_own_figures_are_read_from_what_prometheus_would_get() -> None:
    text = """# TYPE tops_received_messages_total counter
tops_received_messages_total 5.0
# TYPE tops_sent_messages_total counter
tops_sent_messages_total 7.0
# TYPE tops_received_bytes_total counter
tops_received_bytes_total 100.0
# TYPE tops_sent_bytes_total counter
tops_sent_bytes_total 50.0
# TYPE tops_journal_fsyncs_total counter
tops_journal_fsyncs_total 3.0
"""

    found = figures_in(text)

    assert (found.messages, found.bytes, found.fsyncs) == (12, 150, 3)


def test_the_time_of_a_batch_counts_in_full_for_each_member_and_once_between_two_looks(tmp_path: Path) -> None:
    agents = [Trace(tmp_path / name) for name in ("1", "2")]
    reader = TraceReader(tmp_path, 2, case_named("write_all"))
    for agent in agents:
        agent.add(Clock.PREPARE, 0.010, weight=4)
        agent.add(Clock.COMMIT, 0.002)
    agents[0].add(Clock.DISK, 0.001)

    phases = reader.phases(4)

    assert phases["database"] == pytest.approx(0.012)
    assert phases["disk"] == pytest.approx(0.001)
    assert reader.phases(0) == {}


def test_among_reads_the_time_of_writes_counts_by_their_share(tmp_path: Path) -> None:
    agent, reader = Trace(tmp_path / "1"), TraceReader(tmp_path, 1, case_named("write_all"))
    agent.add(Clock.PREPARE, 0.010, weight=5)
    agent.add(Clock.BROKER, 0.200)

    phases = reader.phases(100)

    assert phases["database"] == pytest.approx(0.010 * 0.05)
    assert phases["broker"] == pytest.approx(0.002)


@pytest.mark.parametrize(("policy", "disk"), [("primary", 0.0), ("primary_logged", 0.001)])
def test_the_journal_counts_for_whoever_waits_for_the_log(tmp_path: Path, policy: str, disk: float) -> None:
    agent, reader = Trace(tmp_path / "1"), TraceReader(tmp_path, 1, case_named(policy))
    agent.add(Clock.WRITE, 0.010, weight=5)
    agent.add(Clock.DISK, 0.001)

    assert reader.phases(5)["disk"] == pytest.approx(disk)
