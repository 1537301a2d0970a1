"""`tops bench`: measure TOPS and its peers; both sides alternate in one run."""

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from tops.model.errors import ConfigError, NotReachable, TopsError

app = typer.Typer(no_args_is_help=True, help="Measure TOPS and its peers; both sides alternate in one run.")

BENCHMARKS = {
    "core": "The protocol machines and the journal by themselves.",
    "overlay": "Publish and deliver through brokers, beside NATS.",
    "adapters": "Databases as resources: prepare, commit, batches.",
    "policies": "Replication policies, each beside the peer that promises the same.",
    "peers": "PostgreSQL, its replication, two-phase commit by hand, Galera, pgpool-II.",
    "gateway": "Reads through the API and the gateway, beside PostgreSQL asked directly.",
    "dispatch": "Routing transactions, beside regular operations with a wait.",
    "ordering": "Total and causal order across event types.",
    "seeding": "A replica's first copy, beside pg_dump | psql.",
    "divergence": "Finding the rows in which replicas differ.",
}


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"


Quick = Annotated[bool, typer.Option("--quick", help="Fewer and shorter runs: at most 3 minutes in all.")]
Profile = Annotated[bool, typer.Option("--profile", help="Also measure where the time of a transaction goes.")]
Figures = Annotated[
    list[str] | None, typer.Option("--figures", help="Only these, separated by commas or given again and again.")
]
OutputFormat = Annotated[Format, typer.Option("--format", help="What goes to standard output.")]
Results = Annotated[Path, typer.Option("--results", help="Where the JSON, the pictures and the page are written.")]


def _command(name: str) -> Callable[..., None]:
    def measure(
        quick: Quick = False,
        profile: Profile = False,
        figures: Figures = None,
        output: OutputFormat = Format.TABLE,
        results: Results = Path("bench/results"),
    ) -> None:
        from bench.command import run  # `--help` needs neither the harness nor its plots

        try:
            run(
                name,
                quick=quick,
                profile=profile,
                as_json=output is Format.JSON,
                directory=results,
                figures=[figure for given in figures or () for figure in given.split(",")],
            )
        except TopsError as error:
            # Refused, or not reachable; anything else is a benchmark that failed.
            _end(2 if isinstance(error, ConfigError) else 3 if isinstance(error, NotReachable) else 1, str(error))

    return measure


@app.command("revisions", help="This checkout beside an older revision of it, in pairs of runs.")
def revisions(
    against: Annotated[str, typer.Option("--against", help="The older revision: a commit, a branch or a tag.")],
    pairs: Annotated[int, typer.Option("--pairs", min=1, help="How many pairs of runs.")] = 7,
    workloads: Annotated[
        list[str] | None, typer.Option("--workload", help="policies, core or publish; all without it.")
    ] = None,
    output: OutputFormat = Format.TABLE,
    results: Results = Path("bench/results"),
) -> None:
    from bench.command import show
    from bench.revisions import run

    try:
        show(run(against, pairs, workloads or ()), as_json=output is Format.JSON, directory=results)
    except TopsError as error:
        _end(2 if isinstance(error, ConfigError) else 1, str(error))


def _end(code: int, reason: str) -> NoReturn:
    typer.echo(f"tops bench: {reason}", err=True)
    raise typer.Exit(code)


for _name, _summary in BENCHMARKS.items():
    app.command(_name, help=_summary)(_command(_name))
