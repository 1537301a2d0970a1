"""`tops sim`: whole clusters of the real machines, simulated, with faults; reproducible from a seed."""

import json
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from tops.model.errors import ConfigError
from tops.sim.faults import Faults
from tops.sim.routing import runner as routing
from tops.sim.runner import Result, RunSeed, Totals, run_seed, run_seeds, shortest_failing_prefix
from tops.sim.workers import WorkerDied
from tops.sim.world import World

app = typer.Typer(no_args_is_help=True, help=__doc__)
TRACE_LINES = 60
RUNS_PER_LINE = 1000
STOPPED = 130  # by an interruption, as shells have it


class Layer(NamedTuple):
    """A part of the protocol that is simulated by itself."""

    run: RunSeed
    failing: Callable[[int, Faults | None], tuple[World, list[str]]]  # the run of a bad seed, as short as it gets


LAYERS = {
    "transactions": Layer(run_seed, shortest_failing_prefix),
    "routing": Layer(routing.run_seed, routing.failing_run),
}


@app.callback()
def sim() -> None:
    """Simulated clusters: the same machines as in a real one, on a virtual clock, network and disks."""


@app.command()
def run(
    seed: Annotated[int | None, typer.Option(help="One run, with its trace if it fails.")] = None,
    seeds: Annotated[int | None, typer.Option(help="So many runs.")] = None,
    start: Annotated[int, typer.Option(help="The first seed of many runs.")] = 0,
    faults: Annotated[
        list[str] | None, typer.Option(help="name=rate, e.g. crash=1.0; 'none' for a healthy cluster.")
    ] = None,
    processes: Annotated[int, typer.Option(help="How many at a time; 0: one per core.")] = 0,
    trace: Annotated[bool, typer.Option(help="Print the whole trace of a single run.")] = False,
    output: Annotated[str, typer.Option("--format", help="table or json")] = "table",
    layer: Annotated[str, typer.Option(help=f"Which part of the protocol: {', '.join(LAYERS)}.")] = "transactions",
) -> None:
    """Run simulated clusters and check every promise; exit 1 if one is broken.

    Ctrl-C, or SIGTERM, ends many runs at once with the totals so far and the command that goes on from there.
    """
    chosen, simulated = parse_faults(faults or []), parse_layer(layer)
    if seeds is None:
        _one(simulated, seed if seed is not None else start, chosen, trace, output)
    else:
        _many(layer, range(start, start + seeds), chosen, processes, output)


def parse_layer(name: str) -> Layer:
    """The layer of that name."""
    if name not in LAYERS:
        raise ConfigError(f"--layer {name!r}: there is no such layer; there are {', '.join(LAYERS)}")
    return LAYERS[name]


def parse_faults(words: list[str]) -> Faults:
    """`crash=1.0 cut=0` and the like, on top of the default rates."""
    if words == ["none"]:
        return Faults.none()
    values: dict[str, float] = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            values[name] = float(value)
        except ValueError:
            raise ConfigError(f"--faults {word!r}: expected name=number or 'none'") from None
        if name not in Faults.__struct_fields__:
            known = ", ".join(Faults.__struct_fields__)
            raise ConfigError(f"--faults {word!r}: there is no fault {name!r}; there are {known}")
    return Faults(**values)


def _one(layer: Layer, seed: int, faults: Faults, whole: bool, output: str) -> None:
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


def _print_failure(layer: Layer, seed: int, faults: Faults) -> None:
    world, found = layer.failing(seed, faults)
    print(f"-- the last {TRACE_LINES} lines before it is seen, of {len(world.trace.lines)}:")
    print("\n".join(world.trace.lines[-TRACE_LINES:]))
    print("-- violations:")
    print("\n".join(found))


def _many(layer: str, seeds: range, faults: Faults, processes: int, output: str) -> None:
    totals = Totals()
    console = Console(stderr=True)
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    with (
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
        closing(run_seeds(seeds, faults, processes or None, stopped.is_set, LAYERS[layer].run)) as results,
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
        console.print(f"stopped; go on with: tops sim run {rest}", soft_wrap=True)
    if died is not None:
        raise died
    if left:
        sys.exit(STOPPED)
    if totals.bad:
        sys.exit(1)


def _report(console: Console, totals: Totals, result: Result, asked_for: int) -> None:
    """What is found is told at once; where nobody watches a bar, so is how far it has come."""
    if result.violations:
        console.print(f"seed {result.seed}: {result.violations[0]}", markup=False, highlight=False)
    if not console.is_terminal and totals.runs % RUNS_PER_LINE == 0:
        told = f"{totals.runs} of {asked_for} runs, up to seed {result.seed}: {totals.transactions} transactions, "
        console.print(f"{told}{totals.crashes} crashes, {len(totals.bad)} runs with violations", soft_wrap=True)


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
