"""`tops gateway`: PostgreSQL's protocol in front of a set, in the foreground."""

import asyncio
import logging
import signal
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from replication.gateway.server import Gateway
from replication.model.config import Cluster
from tops.model.errors import NotReachable
from tops.runtime.garbage import collect_rarely
from tops.runtime.logs import configure_logging

TIMEOUT_S = 60.0
AGAIN_S = 1.0

log = logging.getLogger("tops.gateway")

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)


@app.callback()
def gateway() -> None:
    """PostgreSQL's wire protocol in front of a replica set."""


@app.command()
def run(
    name: Annotated[str, typer.Option("--name", help="Which gateway of the file.")],
    config: Annotated[Path, typer.Option("-c", "--config", help="The cluster's file.")] = Path("tops.toml"),
    log_level: Annotated[str, typer.Option("--log-level")] = "info",
) -> None:
    """Run one gateway until SIGINT or SIGTERM."""
    configure_logging(log_level)
    collect_rarely()
    uvloop.run(serve(Cluster.load(config), name))


async def serve(cluster: Cluster, name: str) -> None:
    """Run a gateway until a signal ends it."""
    serving = asyncio.ensure_future(_serve(cluster, name))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    with suppress(asyncio.CancelledError):
        await serving


async def _serve(cluster: Cluster, name: str) -> None:
    """The set may still be starting: it is waited for, within a bound."""
    deadline = asyncio.get_running_loop().time() + TIMEOUT_S
    while True:
        try:
            async with Gateway.run(cluster, name):
                await asyncio.Event().wait()
        except NotReachable as error:
            if asyncio.get_running_loop().time() > deadline:
                raise
            log.info("waiting for the set", extra={"gateway": name, "reason": str(error)})
            await asyncio.sleep(AGAIN_S)
