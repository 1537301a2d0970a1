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
    """Run all brokers and replicas of the file, each in its own process; Ctrl-C stops them in order."""
    cluster = Cluster.load(config)
    raise typer.Exit(uvloop.run(_up(cluster, logs, log_level, keys)))


async def _up(cluster: Cluster, logs: Path | None, log_level: str, keys: Path | None) -> int:
    console = Console(stderr=True)
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
            ended = asyncio.ensure_future(processes.first_end())
            await asyncio.wait({stopped, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not stop.is_set():
                part, code = ended.result()
                console.print(f"{part} ended with code {code}; stopping the rest")
                return 1
            ended.cancel()
        else:
            ready.cancel()
    finally:
        await processes.stop_all()
    return 0
