"""`tops bench policies`: every policy under every workload, and the figures beside what people use instead.

A client is a coroutine of this process for either side; see `bench.policies.system` for what it holds.
"""

from collections.abc import Sequence
from contextlib import AsyncExitStack

import uvloop

from bench.harness import QUICK_BUDGET_S, Budget, Load, Run, say, start_all
from bench.machine import describe_machine, package_versions
from bench.policies.catalog import CASES
from bench.policies.figures import NOT_IN_QUICK, Compared, chosen, compare
from bench.policies.system import ProcessCluster
from bench.results import Result, rows
from bench.systems import System
from bench.workloads import AppendOnly, BankTransfer, Dataset, SingleRowUpdate, Workload, Ycsb

CLIENTS = (1, 16, 64)
REPLICAS = {3: "", 5: "_5"}  # and what is added to a system's name
PAIRS, QUICK_PAIRS = 5, 1
MATRIX_RUN_S = 0.5, 2.0  # warm-up and window


def run(quick: bool, profile: bool = False, figures: Sequence[str] = ()) -> Result:
    """The figures, then the matrix; with `figures` only those. Quick: the figures alone, in one short pair each."""
    return uvloop.run(_run(quick, profile, figures))


async def _run(quick: bool, profile: bool, names: Sequence[str]) -> Result:
    budget = Budget(QUICK_BUDGET_S if quick else None)
    dataset = Dataset()
    comparisons = chosen(names or ["all"])
    left_out = []
    if quick:
        comparisons = [c for c in comparisons if names or c.name not in NOT_IN_QUICK]
        left_out += [f"{PAIRS - QUICK_PAIRS} of {PAIRS} pairs", "two thirds of every run's duration"]
        left_out += [name for name in sorted(NOT_IN_QUICK) if not names]
    pairs, warmup_s, duration_s = (QUICK_PAIRS, 0.5, 1.5) if quick else (PAIRS, 2.0, 5.0)
    compared = await compare(comparisons, dataset, pairs, warmup_s, duration_s, budget, profile=profile)
    if quick or names:
        left_out.append("the matrix of all policies, workloads, numbers of clients and of replicas")
    else:
        compared.runs += await _matrix(dataset, compared)
    return {
        "name": "policies",
        "machine": describe_machine(),
        "versions": {**package_versions(), **compared.versions},
        "systems": compared.systems,
        "ours": [name for name, about in compared.systems.items() if about["description"].startswith("TOPS")],
        "rows": rows(compared.runs),
        "figures": compared.figures,
        "measures": {},
        "missing": compared.missing,
        "left_out": [*left_out, *budget.left_out],
    }


async def _matrix(dataset: Dataset, compared: Compared) -> list[Run]:
    """Every policy × workload × clients × replicas, one system at a time, with the clocks of a profile: nothing here is
    compared with a peer."""
    runs: list[Run] = []
    # Shared by all systems: an id that a workload gives occurs once.
    workloads: list[Workload] = [
        SingleRowUpdate(dataset),
        BankTransfer(dataset),
        *(Ycsb(mix, dataset) for mix in "ABC"),
        AppendOnly(),
    ]
    systems = [
        *(
            ProcessCluster(case, replicas, name=f"{case.name}{suffix}", profile=True)
            for replicas, suffix in REPLICAS.items()
            for case in CASES
        ),
        ProcessCluster(CASES[0], name=f"{CASES[0].name}_own_links", own_links=True, profile=True),
    ]
    for place, system in enumerate(systems, start=1):
        say(f"{place} of {len(systems)}")
        runs += await _row_of_matrix(system, dataset, workloads, compared)
    return runs


async def _row_of_matrix(
    system: System, dataset: Dataset, workloads: Sequence[Workload], compared: Compared
) -> list[Run]:
    runs: list[Run] = []
    async with AsyncExitStack() as stack:
        contenders, missing = await start_all(stack, [system], dataset)
        compared.missing.update(missing)
        for contender in contenders:
            compared.systems[system.name] = {"description": system.description, "promise": system.promise}
            for workload in workloads:
                for clients in CLIENTS:
                    measured = await contender.measure(workload, Load(clients, *MATRIX_RUN_S), seed=clients)
                    say(f"  {workload.name}, c={clients}: {measured.tps:,.0f} tps, p95 {measured.p95_ms:.2f} ms")
                    runs.append(measured)
    return runs
