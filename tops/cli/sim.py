"""`tops sim`: whole clusters of the real machines, simulated, with faults; reproducible from a seed."""

import json
import multiprocessing
import os
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from tops.errors import ConfigError
from tops.sim.faults import Faults
from tops.sim.runner import Result, run_seed, shortest_failing_prefix

app = typer.Typer(no_args_is_help=True, help=__doc__)
TRACE_LINES = 60


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
) -> None:
    """Run simulated clusters and check every promise; exit 1 if one is broken."""
    chosen = parse_faults(faults or [])
    if seeds is None:
        _one(seed if seed is not None else start, chosen, trace, output)
    else:
        _many(range(start, start + seeds), chosen, processes, output)


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


def _one(seed: int, faults: Faults, whole: bool, output: str) -> None:
    result, world = run_seed(seed, faults, keep_trace=whole)
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
            _print_failure(seed, faults)
        summary = f"seed {seed}: {result.transactions} transactions in {result.simulated_s:.0f} simulated seconds"
        print(f"{summary}, {len(result.violations)} violations, trace {result.digest[:16]}")
    if result.violations:
        sys.exit(1)


def _print_failure(seed: int, faults: Faults) -> None:
    world, found = shortest_failing_prefix(seed, faults)
    print(f"-- the last {TRACE_LINES} lines before it is seen, of {len(world.trace.lines)}:")
    print("\n".join(world.trace.lines[-TRACE_LINES:]))
    print("-- violations:")
    print("\n".join(found))


def _many(seeds: range, faults: Faults, processes: int, output: str) -> None:
    bad: list[Result] = []
    transactions, simulated_s = 0, 0.0
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with (
        Progress(*columns, console=Console(stderr=True)) as progress,
        multiprocessing.Pool(processes or os.cpu_count() or 1) as pool,
    ):
        task = progress.add_task("seeds", total=len(seeds))
        for result in pool.imap_unordered(_run, [(seed, faults) for seed in seeds], chunksize=4):
            transactions += result.transactions
            simulated_s += result.simulated_s
            if result.violations:
                bad.append(result)
            progress.advance(task)
    bad.sort(key=lambda r: r.seed)
    totals = {"runs": len(seeds), "transactions": transactions, "simulated_hours": round(simulated_s / 3600, 1)}
    if output == "json":
        print(json.dumps({**totals, "violations": _as_json(bad)}))
    else:
        table = Table("runs", "transactions", "simulated hours", "runs with violations")
        table.add_row(str(totals["runs"]), str(transactions), str(totals["simulated_hours"]), str(len(bad)))
        Console().print(table)
        for result in bad[:20]:
            print(f"seed {result.seed}: {result.violations[0]}")
    if bad:
        sys.exit(1)


def _run(job: tuple[int, Faults]) -> Result:
    return run_seed(*job)[0]


def _as_json(results: list[Result]) -> list[dict[str, object]]:
    return [{"seed": r.seed, "found": r.violations} for r in results]
