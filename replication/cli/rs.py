"""`tops rs`: replica sets: check the file, compare it with what runs, see how they are, pause and resume."""

from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop

from replication.cli.data import ConfigOption, FormatOption, KeysOption, UrlOption, opened, show
from replication.config import Cluster
from replication.plan import plan_for
from tops.errors import NotReachable

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)

NameArgument = Annotated[str, typer.Argument(help="The replica set.")]
ReplicaOption = Annotated[str | None, typer.Option("--replica", help="One replica; without it, all.")]
STATUS_COLUMNS = (
    "replica", "in_sync", "position", "lag_s", "lag_transactions", "lag_network", "lag_apply", "conflicts",
    "set_aside", "stopped",
)  # fmt: skip


@app.callback()
def rs() -> None:
    """Replica sets."""


@app.command()
def validate(config: ConfigOption = Path("tops.toml")) -> None:
    """Check the file without starting or asking anything; exit 2 with file, line and key if it is wrong."""
    cluster = Cluster.load(config)
    for replica_set in cluster.replica_sets:
        typer.echo(f"{replica_set.name}: {replica_set.policy}, replicas {', '.join(replica_set.names)}")
    typer.echo(f"{config} is fine")


@app.command()
def apply(
    name: NameArgument,
    config: ConfigOption = Path("tops.toml"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the plan.")] = False,
    keys: KeysOption = None,
    format: FormatOption = "table",
) -> None:
    """Bring what runs to what the file says; shows the plan first."""
    cluster = Cluster.load(config)
    wanted = cluster.replica_set(name)
    steps = uvloop.run(plan_for(cluster, wanted, keys))
    show([{"step": s.text, "how": s.how} for s in steps] or [{"step": "nothing to do", "how": ""}], format)
    if dry_run or not steps:
        return
    manual = [s for s in steps if not s.automatic]
    for step in steps:
        if step.automatic:
            typer.echo(uvloop.run(_order(config, name, step.replica, step.order, keys)), err=True)
    if manual:
        typer.echo("some steps need a hand: see above", err=True)
        raise typer.Exit(1)


@app.command()
def status(
    name: NameArgument,
    config: ConfigOption = Path("tops.toml"),
    url: UrlOption = None,
    keys: KeysOption = None,
    format: FormatOption = "table",
) -> None:
    """Every replica: position, lag in seconds and transactions (network and apply), why it stopped; exit 1 if one is
    not in sync."""

    async def run() -> dict[str, Any]:
        async with opened(name, config, url, keys) as replica_set:
            return await replica_set.status()

    found = uvloop.run(run())
    if format == "json":
        show([found], "json")
    else:
        coordinator = found["coordinator"]
        head = f"log at {coordinator['head']}" if coordinator["reachable"] else f"coordinator: {coordinator['problem']}"
        typer.echo(f"{name}: {found['policy']}, {head}")
        show(
            [
                {c: r.get(c, "unreachable" if c == "stopped" else None) for c in STATUS_COLUMNS}
                for r in found["replicas"]
            ],
            "table",
        )
    if not all(r["in_sync"] for r in found["replicas"]):
        raise typer.Exit(1)


@app.command()
def pause(
    name: NameArgument,
    replica: ReplicaOption = None,
    config: ConfigOption = Path("tops.toml"),
    keys: KeysOption = None,
) -> None:
    """Stop applying; what was acknowledged stays, and the log waits."""
    _tell_all(config, name, replica, "pause", keys)


@app.command()
def resume(
    name: NameArgument,
    replica: ReplicaOption = None,
    config: ConfigOption = Path("tops.toml"),
    keys: KeysOption = None,
) -> None:
    """Go on after a pause, or after an error was mended."""
    _tell_all(config, name, replica, "resume", keys)


@app.command()
def retry(
    name: NameArgument,
    replica: ReplicaOption = None,
    config: ConfigOption = Path("tops.toml"),
    keys: KeysOption = None,
) -> None:
    """Try transactions that were set aside once more."""
    _tell_all(config, name, replica, "retry", keys)


@app.command()
def conflicts(
    name: NameArgument,
    limit: Annotated[int, typer.Option("--limit")] = 50,
    config: ConfigOption = Path("tops.toml"),
    url: UrlOption = None,
    keys: KeysOption = None,
    format: FormatOption = "table",
) -> None:
    """The conflict log: kind, both versions, the winner."""

    async def run() -> list[dict[str, Any]]:
        async with opened(name, config, url, keys) as replica_set:
            found = await replica_set.conflicts(limit)
            return [{"replica": replica, **row} for replica, rows in found.items() for row in rows]

    show(uvloop.run(run()), format)


def _tell_all(config: Path, name: str, replica: str | None, what: str, keys: Path | None) -> None:
    wanted = Cluster.load(config).replica_set(name)
    failed = False
    for each in [wanted.replica_named(replica).name] if replica is not None else wanted.names:
        try:
            typer.echo(uvloop.run(_order(config, name, each, what, keys)))
        except NotReachable as error:
            typer.echo(f"{each}: {error}", err=True)
            failed = True
    if failed:
        raise typer.Exit(3)


async def _order(config: Path, name: str, replica: str, what: str, keys: Path | None) -> str:
    async with opened(name, config, None, keys) as replica_set:
        return await replica_set.order(replica, what)
