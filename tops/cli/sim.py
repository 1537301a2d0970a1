"""`tops sim`: whole clusters of the real machines, simulated, with faults; reproducible from a seed."""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from enum import StrEnum
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from tops.model.errors import ConfigError
from tops.sim.faults import Faults
from tops.sim.ordering.runner import OrderingResult
from tops.sim.ordering.runner import run_seed as run_ordering_seed
from tops.sim.ordering.runner import run_seeds as run_ordering_seeds
from tops.sim.ordering.shape import OrderingFaults
from tops.sim.routing import runner as routing
from tops.sim.runner import Result, RunSeed, Totals, begin_work, run_seed, run_seeds, shortest_failing_prefix
from tops.sim.workers import WorkerDied
from tops.sim.world import World


class Layer(StrEnum):
    """What is simulated."""

    CORE = "core"  # transactions and logs
    ORDERING = "ordering"  # ordering domains
    ROUTING = "routing"  # routing transactions


app = typer.Typer(no_args_is_help=True, help=__doc__)
TRACE_LINES = 60
RUNS_PER_LINE = 1000
STOPPED = 130  # exit code after an interruption, as in shells


class Simulated(NamedTuple):
    """How a layer is run whose worlds have a trace."""

    run: RunSeed
    failing: Callable[[int, Faults | None], tuple[World, list[str]]]  # the run of a bad seed, as short as it gets


SIMULATED = {
    Layer.CORE: Simulated(run_seed, shortest_failing_prefix),
    Layer.ROUTING: Simulated(routing.run_seed, routing.failing_run),
}


@app.callback()
def sim() -> None:
    """Simulated clusters: the machines of a real one, on a virtual clock, network and disks."""


@app.command()
def run(
    seed: Annotated[int | None, typer.Option(help="One run, with its trace if it fails.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Number of runs.")] = None,
    start: Annotated[int, typer.Option(help="The first seed of many runs.")] = 0,
    faults: Annotated[
        list[str] | None, typer.Option(help="name=rate, e.g. crash=1.0; 'none' for a healthy cluster.")
    ] = None,
    processes: Annotated[int, typer.Option(help="Number of processes; 0: one per core.")] = 0,
    trace: Annotated[bool, typer.Option(help="Print the whole trace of a single run.")] = False,
    output: Annotated[str, typer.Option("--format", help="table or json")] = "table",
    layer: Annotated[
        Layer,
        typer.Option(help="core: transactions and logs; ordering: ordering domains; routing: routing transactions."),
    ] = Layer.CORE,
) -> None:
    """Run simulated clusters and check every guarantee; exit 1 on a violation.

    Ctrl-C or SIGTERM ends many runs at once, with the totals so far and the command that continues them.
    """
    if layer is Layer.ORDERING:
        if trace:
            raise ConfigError("--trace: runs of the ordering layer have no trace")
        first = range(start, start + seeds) if seeds is not None else range(seed or start, (seed or start) + 1)
        _ordering(first, parse_ordering_faults(faults or []), processes, output)
        return
    chosen, simulated = parse_faults(faults or []), SIMULATED[layer]
    if seeds is None:
        _one(simulated, seed if seed is not None else start, chosen, trace, output)
    else:
        _many(layer, range(start, start + seeds), chosen, processes, output)


def parse_faults(words: list[str]) -> Faults:
    """`crash=1.0 cut=0` and the like, on top of the default rates."""
    return Faults.none() if words == ["none"] else Faults(**_rates(words, Faults.__struct_fields__))


def parse_ordering_faults(words: list[str]) -> OrderingFaults:
    """The same for the ordering layer, whose rates are relative to the usual ones."""
    if words == ["none"]:
        return OrderingFaults.none()
    return OrderingFaults(**_rates(words, OrderingFaults.__struct_fields__))


def _rates(words: list[str], names: tuple[str, ...]) -> dict[str, float]:
    values: dict[str, float] = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            values[name] = float(value)
        except ValueError:
            raise ConfigError(f"--faults {word!r}: expected name=number or 'none'") from None
        if name not in names:
            known = ", ".join(names)
            raise ConfigError(f"--faults {word!r}: there is no fault {name!r}; there are {known}")
    return values


def _ordering(seeds: range, faults: OrderingFaults, processes: int, output: str) -> None:
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    results: list[OrderingResult] = []
    if len(seeds) == 1:
        results.append(run_ordering_seed(seeds[0], faults))
    else:
        workers = processes or os.cpu_count() or 1
        with closing(run_ordering_seeds(seeds, faults, workers, begin_work, stopped.is_set)) as running:
            for result in running:
                results.append(result)
                for found in result.violations[:1]:
                    Console(stderr=True).print(f"seed {result.seed}: {found}", markup=False, highlight=False)
    bad = [result for result in results if result.violations]
    if output == "json":
        figures = {"runs": len(results), "next_start": seeds.start + len(results)}
        print(json.dumps({**figures, "violations": [{"seed": r.seed, "found": r.violations} for r in bad]}))
    else:
        table = Table("runs", "events", "deliveries", "crashes", "runs with violations")
        sums = (sum(r.events for r in results), sum(r.delivered for r in results), sum(r.crashes for r in results))
        table.add_row(str(len(results)), *map(str, sums), str(len(bad)))
        Console().print(table)
        print("\n".join(f"seed {r.seed}: {v}" for r in bad[:20] for v in r.violations[: 1 if len(seeds) > 1 else None]))
    if len(results) < len(seeds):
        sys.exit(STOPPED)
    if bad:
        sys.exit(1)


def _one(layer: Simulated, seed: int, faults: Faults, whole: bool, output: str) -> None:
    result, world = layer.run(seed, faults, keep_trace=whole)
    if output == "json":
        print(
            json.dumps(
                {"runs": 1, "violations": _as_json([result] if result.violations else []), "trace": result.digest}
            )
        )
    else:
        if whole:
            print("\n".join(world.trace.lines))
        if result.violations:
            _print_failure(layer, seed, faults)
        summary = f"seed {seed}: {result.transactions} transactions in {result.simulated_s:.0f} simulated seconds"
        print(f"{summary}, {len(result.violations)} violations, trace {result.digest[:16]}")
    if result.violations:
        sys.exit(1)


def _print_failure(layer: Simulated, seed: int, faults: Faults) -> None:
    world, found = layer.failing(seed, faults)
    print(f"-- the last {TRACE_LINES} lines before it is seen, of {len(world.trace.lines)}:")
    print("\n".join(world.trace.lines[-TRACE_LINES:]))
    print("-- violations:")
    print("\n".join(found))


def _many(layer: Layer, seeds: range, faults: Faults, processes: int, output: str) -> None:
    totals = Totals()
    console = Console(stderr=True)
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    with (
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
        closing(run_seeds(seeds, faults, processes or None, stopped.is_set, SIMULATED[layer].run)) as results,
    ):
        task = progress.add_task("seeds", total=len(seeds))
        died: WorkerDied | None = None
        try:
            for result in results:
                totals.add(result)
                progress.advance(task)
                _report(console, totals, result, len(seeds))
        except WorkerDied as error:
            died = error
    _print_totals(totals, seeds, output)
    left = len(seeds) - totals.runs
    if left:
        rest = f"--layer {layer} --seeds {left} --start {seeds.start + totals.runs}"
        console.print(f"stopped; continue with: tops sim run {rest}", soft_wrap=True)
    if died is not None:
        raise died
    if left:
        sys.exit(STOPPED)
    if totals.bad:
        sys.exit(1)


def _report(console: Console, totals: Totals, result: Result, asked_for: int) -> None:
    """Print a violation at once; without a progress bar, also print the progress from time to time."""
    if result.violations:
        console.print(f"seed {result.seed}: {result.violations[0]}", markup=False, highlight=False)
    if not console.is_terminal and totals.runs % RUNS_PER_LINE == 0:
        reported = f"{totals.runs} of {asked_for} runs, up to seed {result.seed}: {totals.transactions} transactions, "
        console.print(f"{reported}{totals.crashes} crashes, {len(totals.bad)} runs with violations", soft_wrap=True)


def _print_totals(totals: Totals, seeds: range, output: str) -> None:
    figures = {
        "runs": totals.runs,
        "next_start": seeds.start + totals.runs,
        "transactions": totals.transactions,
        "crashes": totals.crashes,
        "simulated_hours": round(totals.simulated_s / 3600, 1),
    }
    if output == "json":
        print(json.dumps({**figures, "violations": _as_json(totals.bad)}))
        return
    table = Table("runs", "seeds", "transactions", "crashes", "simulated hours", "runs with violations")
    covered = f"{seeds.start} to {seeds.start + totals.runs - 1}"
    table.add_row(str(totals.runs), covered, *(str(v) for v in list(figures.values())[2:]), str(len(totals.bad)))
    Console().print(table)
    for result in totals.bad[:20]:
        print(f"seed {result.seed}: {result.violations[0]}")


def _as_json(results: list[Result]) -> list[dict[str, object]]:
    return [{"seed": r.seed, "found": r.violations} for r in results]
