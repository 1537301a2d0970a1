"""`tops journal`: what to do when a coordinator's journal turns out to be older than its replicas."""

from pathlib import Path
from typing import Annotated

import typer
import uvloop

from replication.cli.data import ConfigOption, KeysOption, opened
from tops.protocol.messages import LogRecovered

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)


@app.callback()
def journal() -> None:
    """Journals."""


@app.command()
def recover(
    name: Annotated[str, typer.Argument(help="The replica set.")],
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Go on although replicas that may hold more do not respond.")
    ] = False,
    config: ConfigOption = Path("tops.toml"),
    keys: KeysOption = None,
) -> None:
    """Let the set's log go on in a new history, behind its most advanced replica; exit 1 if that is not safe.

    Only for a journal that is stale and whose newer copy is lost: if there is one, stop the broker, put it back and
    start the broker again instead.
    """

    async def run() -> tuple[LogRecovered, dict[str, str]]:
        async with opened(name, config, None, keys) as replica_set:
            replicas = {replica_set.config.site_of(replica): replica for replica in replica_set.config.names}
            return await replica_set.recover_log(accept_loss=accept_loss), replicas

    recovered, replicas = uvloop.run(run())

    def named(sites: tuple[str, ...]) -> str:
        return ", ".join(replicas[site] for site in sites)

    if recovered.problem:
        problem = recovered.problem
        for site, replica in replicas.items():
            problem = problem.replace(site, replica)
        typer.echo(f"{name}: {problem}", err=True)
        raise typer.Exit(1)
    typer.echo(f"{name}: goes on behind index {recovered.point.index} in history {recovered.point.history}")
    typer.echo(f"following: {named(recovered.following)}")
    for copied in (recovered.behind, recovered.silent):
        if copied:
            why = "at another point" if copied is recovered.behind else "silent"
            typer.echo(f"{why}: {named(copied)}: stop, empty the database and start again, to get a copy")
