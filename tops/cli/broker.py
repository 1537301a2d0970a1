"""`tops broker`: one broker of a cluster, in the foreground."""

import asyncio
import signal
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from tops.cli.plugins import broker_routes
from tops.http.gate import Gate
from tops.http.rights import Routes
from tops.model.errors import JournalFailed
from tops.runtime.config import load_config
from tops.runtime.garbage import collect_rarely
from tops.runtime.logs import configure_logging
from tops.server.broker import Broker

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)


@app.callback()
def broker() -> None:
    """One broker of a cluster."""


@app.command()
def run(
    name: Annotated[str, typer.Option("--name", help="Name of the broker in the file.")],
    config: Annotated[Path, typer.Option("-c", "--config", help="The cluster's file.")] = Path("tops.toml"),
    log_level: Annotated[str, typer.Option("--log-level")] = "info",
) -> None:
    """Run until SIGINT or SIGTERM; SIGHUP reads the keys again; exit 2 on rejection, 1 when the journal failed."""
    configure_logging(log_level)
    collect_rarely()
    try:
        uvloop.run(_serve(config, name))
    except JournalFailed as error:
        typer.echo(f"tops: {error}", err=True)
        raise typer.Exit(1) from None


async def _serve(path: Path, name: str) -> None:
    config = load_config(path)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    extensions = [routes(path, name) for routes in broker_routes()]

    def extend(routes: Routes, gate: Gate) -> None:
        for extension in extensions:
            extension.add_to(routes, gate)

    def policy_of(replica_set: str) -> str:
        return next(filter(None, (extension.policy_of(replica_set) for extension in extensions)), "")

    async with Broker.run(config, name, extend=extend, policy_of=policy_of) as serving:
        loop.add_signal_handler(signal.SIGHUP, serving.reload_keys)
        failed = asyncio.ensure_future(serving.wait())
        stopped = asyncio.ensure_future(stop.wait())
        await asyncio.wait({failed, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if failed.done():
            failed.result()
        failed.cancel()
