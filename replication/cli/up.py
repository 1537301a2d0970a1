"""`tops up`: everything that a file names, in the foreground."""

import asyncio
import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop
from rich.console import Console

from adapters.embedded.programs import check_installed
from replication.cli.data import ConfigOption, KeysOption
from replication.cli.replica import TrustEqualOption
from replication.client.replica_set import connect_by_file
from replication.model.config import Cluster
from replication.operations.processes import GATEWAY, Processes
from tops.http.client import console_address
from tops.model.errors import ConfigError, TopsError

TIMEOUT_S = 20.0  # until replicas that are not in sync are named
AGAIN_S = 2.0
NOT_REACHABLE = 3  # the exit code of a command that lacks somebody else


def up(
    config: ConfigOption = Path("tops.toml"),
    logs: Annotated[Path | None, typer.Option("--logs", help="A folder for the processes' logs.")] = None,
    log_level: Annotated[str, typer.Option("--log-level")] = "warning",
    keys: KeysOption = None,
    trust_equal: TrustEqualOption = False,
) -> None:
    """Run all brokers, replicas and gateways of the file, each in its own process; Ctrl-C stops them in order.

    A part that is killed, or can't reach its database, is started again; if one gives up for another reason, such as
    another agent that took its place, the rest goes on until no replica is left, and the exit code is 1 in the end."""
    cluster = Cluster.load(config)
    # What is not there is told once, before anything runs.
    for replica_set in cluster.replica_sets:
        cluster.schema_of(replica_set)
    if any(replica.dsn is None for replica_set in cluster.replica_sets for replica in replica_set.replica):
        check_installed()
    processes = Processes(cluster, logs, log_level, replica_options=["--trust-equal"] if trust_equal else [])
    raise typer.Exit(uvloop.run(_up(cluster, processes, keys)))


async def _up(cluster: Cluster, processes: Processes, keys: Path | None) -> int:
    console = Console(stderr=True, soft_wrap=True)
    await _nobody_listens(cluster)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
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
    """Say when everything is in sync; meanwhile why a set has not started, and after a while what else is missing."""
    for replica_set in cluster.replica_sets:
        told, began = "", asyncio.get_running_loop().time()
        while True:
            try:
                async with connect_by_file(cluster, replica_set.name, keys=keys, timeout_s=2.0) as connected:
                    problem = _not_started(await connected.status())
                    if not problem:
                        await connected.wait_in_sync(AGAIN_S)
                        break
            except TopsError as error:
                late = asyncio.get_running_loop().time() - began > TIMEOUT_S
                problem = f"running, but {error}; `tops rs status` tells more" if late else ""
            if problem and _essence(problem) != _essence(told):
                console.print(problem)
                told = problem
            await asyncio.sleep(AGAIN_S / 2)
    url = cluster.urls()[0]
    for gateway in cluster.gateways:
        address = f"postgresql://{gateway.user[0].name}@{gateway.listen}/{gateway.replica_set}"
        console.print(f"PostgreSQL drivers connect to {address}")
    console.print(f"ready: {', '.join(processes.running)}; write to {url}; Ctrl-C stops")
    if url.startswith("ws:"):
        console.print(f"in a browser, once: {console_address(url)}; `tops console-url --url {url}` makes another")


def _not_started(status: dict[str, Any]) -> str:
    reasons = sorted({r["not_started"] for r in status["replicas"] if r.get("not_started")})
    return f"{status['name']} has not started: {'; '.join(reasons)}" if reasons else ""


def _essence(problem: str) -> str:
    """Without figures that change all the time, but for every tenth of a progress."""
    progress = re.search(r"([\d,]+) of about ([\d,]+) rows", problem)
    if progress is None:
        return problem
    done, total = (int(figure.replace(",", "")) for figure in progress.groups())
    return f"{problem[: progress.start()]} {10 * done // max(total, 1)}"


async def _serve(processes: Processes, stop: asyncio.Event, console: Console) -> int:
    """Until it is told to stop, or no part is left; one that was killed, or lacks something, is started again."""
    stopped = asyncio.ensure_future(stop.wait())
    failed: list[str] = []
    while True:
        ended = asyncio.ensure_future(processes.first_end())
        await asyncio.wait({stopped, ended}, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            ended.cancel()
            return 1 if failed else 0
        part, code = ended.result()
        if code < 0 or code == NOT_REACHABLE:
            why = "could not reach what it needs" if code == NOT_REACHABLE else f"was ended by signal {-code}"
            console.print(f"{part} {why}; it is started again")
            await processes.start(part)
            continue
        failed.append(part)
        processes.drop(part)
        if not any(_is_replica(left) for left in processes.running) and any(map(_is_replica, processes.parts)):
            ended_parts = ", ".join(filter(_is_replica, failed))
            console.print(
                f"no replica is left running ({ended_parts} gave up, {part} with code {code}): the brokers are ended, "
                "too; the reasons are in the replicas' logs"
            )
            return 1
        if not processes.running:
            console.print(f"{part} ended with code {code}; nothing is left running")
            return 1
        console.print(f"{part} ended with code {code}; the rest goes on without it{_restart(part)}")


def _is_replica(part: str) -> bool:
    return not part.startswith(("broker/", GATEWAY))


def _restart(part: str) -> str:
    if part.startswith(GATEWAY):
        return f" (`tops gateway run --name {part.removeprefix(GATEWAY)}` starts it again)"
    return "" if not _is_replica(part) else f" (`tops replica run --name {part}` starts it again)"
