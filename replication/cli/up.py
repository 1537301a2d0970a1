"""`tops up`: everything that a file names, in the foreground."""

import asyncio
import signal
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console

from replication.cli.data import ConfigOption, KeysOption
from replication.config import Cluster
from replication.processes import Processes, wait_ready


def up(
    config: ConfigOption = Path("tops.toml"),
    logs: Annotated[Path | None, typer.Option("--logs", help="A folder for the processes' logs.")] = None,
    log_level: Annotated[str, typer.Option("--log-level")] = "warning",
    keys: KeysOption = None,
) -> None:
    """Run all brokers and replicas of the file, each in its own process; Ctrl-C stops them in order.

    A part that is killed is started again; if one gives up by itself, the rest is stopped and the exit code is 1."""
    cluster = Cluster.load(config)
    for replica_set in cluster.replica_sets:
        cluster.schema_of(replica_set)  # a file that is not there is told once, before anything runs
    raise typer.Exit(uvloop.run(_up(cluster, logs, log_level, keys)))


async def _up(cluster: Cluster, logs: Path | None, log_level: str, keys: Path | None) -> int:
    console = Console(stderr=True, soft_wrap=True)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    processes = Processes(cluster, logs, log_level)
    try:
        await processes.start_all()
        stopped = asyncio.ensure_future(stop.wait())
        names = [s.name for s in cluster.replica_sets]
        ready = asyncio.ensure_future(wait_ready(cluster, names, processes, keys=keys))
        await asyncio.wait({stopped, ready}, return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            ready.result()
            console.print(f"ready: {', '.join(processes.parts)}; write to {cluster.urls()[0]}; Ctrl-C stops")
            return await _serve(processes, stop, console)
        ready.cancel()
    finally:
        await processes.stop_all()
    return 0


async def _serve(processes: Processes, stop: asyncio.Event, console: Console) -> int:
    """Until it is told to stop, or a part gives up; one that was killed is started again."""
    stopped = asyncio.ensure_future(stop.wait())
    while True:
        ended = asyncio.ensure_future(processes.first_end())
        await asyncio.wait({stopped, ended}, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            ended.cancel()
            return 0
        part, code = ended.result()
        if code >= 0:
            console.print(f"{part} ended with code {code}; stopping the rest")
            return 1
        console.print(f"{part} was ended by signal {-code}; it is started again")
        await processes.start(part)
