"""`tops replica`: one replica's agent, in the foreground."""

import asyncio
import signal
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from replication.http.agent import serve_agent
from replication.model.config import Cluster
from replication.replica.agent import Agent
from tops.model.errors import AgentReplaced, ConfigError
from tops.runtime.garbage import collect_rarely
from tops.runtime.logs import configure_logging

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)

ConfigOption = Annotated[Path, typer.Option("-c", "--config", help="The cluster's file.")]
FAILED_S = 60.0  # for how long an agent that failed tells why
TrustEqualOption = Annotated[
    bool, typer.Option("--trust-equal", help="The databases are clones: compare schemas and row counts alone.")
]


@app.callback()
def replica() -> None:
    """One replica of a replica set."""


@app.command()
def run(
    name: Annotated[str, typer.Option("--name", help="Which replica: NAME, or SET/NAME if several sets have one.")],
    config: ConfigOption = Path("tops.toml"),
    log_level: Annotated[str, typer.Option("--log-level")] = "info",
    take_over: Annotated[bool, typer.Option("--take-over", help="Replace an agent that serves this replica.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="A copy may replace rows that are here.")] = False,
    trust_equal: TrustEqualOption = False,
) -> None:
    """Run one replica's agent until SIGINT or SIGTERM; exit 2 if another one serves the replica.

    SIGHUP reads its keys again."""
    configure_logging(log_level)
    collect_rarely()
    cluster = Cluster.load(config)
    if trust_equal:
        cluster.trust_equal()
    set_name, replica_name = find_replica(cluster, name)
    uvloop.run(serve(cluster, set_name, replica_name, take_over=take_over, overwrite=overwrite))


def find_replica(cluster: Cluster, name: str) -> tuple[str, str]:
    """The set and the replica that a name on the command line means."""
    wanted_set, _, wanted = name.rpartition("/")
    found = [
        (s.name, r.name)
        for s in cluster.replica_sets
        for r in s.replica
        if r.name == wanted and wanted_set in ("", s.name)
    ]
    if len(found) != 1:
        known = ", ".join(f"{s.name}/{r.name}" for s in cluster.replica_sets for r in s.replica) or "none"
        problem = "names several replicas" if found else "names no replica"
        raise ConfigError(f"{cluster.path}: {name!r} {problem}; the file has {known}")
    return found[0]


async def serve(cluster: Cluster, set_name: str, replica_name: str, **options: bool) -> None:
    """Run an agent until a signal ends it, also while it waits for its database; raises what it can't go on with.

    An agent that failed has left its set. It answers for a while, so that the status tells why, and ends then: whoever
    supervises it can start it again."""
    serving = asyncio.ensure_future(_serve(cluster, set_name, replica_name, options))

    def end() -> None:
        if not serving.cancelling():  # once: what follows is the end in order
            serving.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, end)
    with suppress(asyncio.CancelledError):
        await serving


async def _serve(cluster: Cluster, set_name: str, replica_name: str, options: dict[str, bool]) -> None:
    async with Agent.open(cluster, set_name, replica_name, **options) as agent, serve_agent(agent):
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, agent.site.reload_keys)
        try:
            await agent.wait()
        except AgentReplaced:
            raise  # the other one answers
        except Exception:
            await asyncio.sleep(FAILED_S)
            raise
