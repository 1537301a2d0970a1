"""`tops up`: everything that a file names, in the foreground."""

import asyncio
import signal
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console

from replication.cli.data import ConfigOption, KeysOption
from replication.config import Cluster
from replication.processes import Processes, wait_ready
from tops.errors import ConfigError, TopsError
from tops.http.client import console_address

PATIENCE_S = 20.0  # until replicas that are not in sync are named
AGAIN_S = 2.0
NOT_REACHABLE = 3  # the exit code of a command that lacks somebody else


def up(
    config: ConfigOption = Path("tops.toml"),
    logs: Annotated[Path | None, typer.Option("--logs", help="A folder for the processes' logs.")] = None,
    log_level: Annotated[str, typer.Option("--log-level")] = "warning",
    keys: KeysOption = None,
) -> None:
    """Run all brokers and replicas of the file, each in its own process; Ctrl-C stops them in order.

    A part that is killed, or can't reach its database, is started again; if one gives up for another reason, the rest
    is stopped and the exit code is 1."""
    cluster = Cluster.load(config)
    for replica_set in cluster.replica_sets:
        cluster.schema_of(replica_set)  # a file that is not there is told once, before anything runs
    raise typer.Exit(uvloop.run(_up(cluster, logs, log_level, keys)))


async def _up(cluster: Cluster, logs: Path | None, log_level: str, keys: Path | None) -> int:
    console = Console(stderr=True, soft_wrap=True)
    await _nobody_listens(cluster)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    processes = Processes(cluster, logs, log_level)
    announcing: asyncio.Task[None] | None = None
    try:
        await processes.start_all()
        announcing = asyncio.ensure_future(_announce(cluster, processes, keys, console))
        return await _serve(processes, stop, console)
    finally:
        if announcing is not None:
            announcing.cancel()
        await processes.stop_all()


async def _nobody_listens(cluster: Cluster) -> None:
    """Whoever answers at a broker's address must be the broker that is about to start."""
    for broker in cluster.config.broker:
        with suppress(OSError):
            _, writer = await asyncio.open_connection(broker.host, broker.port)
            writer.close()
            raise ConfigError(f"{broker.listen}: somebody listens there already; does this cluster run already?")


async def _announce(cluster: Cluster, processes: Processes, keys: Path | None, console: Console) -> None:
    """Say when everything is in sync; if it takes long, what is missing."""
    names, told = [s.name for s in cluster.replica_sets], False
    while True:
        try:
            await wait_ready(cluster, names, processes, PATIENCE_S, keys)
            break
        except TopsError as error:
            if not told:
                console.print(f"running, but {error}; `tops rs status` tells more")
            told = True
            await asyncio.sleep(AGAIN_S)
    url = cluster.urls()[0]
    console.print(f"ready: {', '.join(processes.parts)}; write to {url}; Ctrl-C stops")
    if url.startswith("ws:"):
        console.print(f"in a browser, once: {console_address(url)}; `tops console-url --url {url}` makes another")


async def _serve(processes: Processes, stop: asyncio.Event, console: Console) -> int:
    """Until it is told to stop, or a part gives up; one that was killed, or lacks its database, is started again."""
    stopped = asyncio.ensure_future(stop.wait())
    while True:
        ended = asyncio.ensure_future(processes.first_end())
        await asyncio.wait({stopped, ended}, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            ended.cancel()
            return 0
        part, code = ended.result()
        if code >= 0 and code != NOT_REACHABLE:
            console.print(f"{part} ended with code {code}; stopping the rest")
            return 1
        why = "could not reach what it needs" if code == NOT_REACHABLE else f"was ended by signal {-code}"
        console.print(f"{part} {why}; it is started again")
        await processes.start(part)
