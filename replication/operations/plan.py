"""What has to be done so that what runs is what the file says."""

import secrets
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec

from replication.client.replica_set import connect_by_file
from replication.model.config import HIDDEN, Cluster, ReplicaSetConfig
from replication.model.events import log_type
from replication.replica.start.policy_change import DECIDING, behind
from replication.rpc.calls import Describe, Described
from replication.rpc.conversation import Caller
from tops.client.site import Site
from tops.model.errors import ConfigError

REQUEST_S = 3.0
LIVE = frozenset({"on_failure", "block_s", "wait_s"})  # what agents take from the file when they are told to


class Step(msgspec.Struct, frozen=True):
    """One step of a plan; `automatic` steps are orders to a replica's agent."""

    text: str
    how: str
    automatic: bool = False
    replica: str = ""
    order: str = ""


async def plan_for(cluster: Cluster, wanted: ReplicaSetConfig, keys: Path | None = None) -> list[Step]:
    """Compare the file with what the set's agents say they run. ConfigError for a change of policy while a replica is
    behind: it could not follow what was written before."""
    async with _connected(cluster, keys) as site:
        caller = Caller(site, wanted.name, site.brokers)
        await caller.start()
        responses = await caller.request_all(Describe(), REQUEST_S, len(wanted.replica))
    running = {a.replica: ReplicaSetConfig.model_validate_json(a.config) for a in responses if isinstance(a, Described)}
    if any(_differences(wanted, config) & DECIDING for config in running.values()):
        async with connect_by_file(cluster, wanted.name, keys=keys) as replica_set:
            late = behind(await replica_set.status())
        if late:
            raise ConfigError(f"the policy can't be changed now: {'; '.join(late)}: wait until all are in sync")
    return steps_between(wanted, running)


async def declare_members(cluster: Cluster, wanted: ReplicaSetConfig, keys: Path | None = None) -> None:
    """The set has the replicas that the file names, and no others. Replicas declare the same when they start; those
    that take the place of all others can't, since they are not in the list. Needs the right to originate."""
    async with _connected(cluster, keys) as site:
        await site.advertise(log_type(wanted.name), members=wanted.sites())


def _connected(cluster: Cluster, keys: Path | None) -> AbstractAsyncContextManager[Site]:
    settings = cluster.config.cluster
    return Site.connect(
        cluster.urls(),
        instance=secrets.token_hex(4),
        keys=keys,
        cluster=settings.name,
        insecure=settings.insecure,
    )


def steps_between(wanted: ReplicaSetConfig, running: dict[str, ReplicaSetConfig]) -> list[Step]:
    """The steps from what runs to what is wanted, in order."""
    steps: list[Step] = []
    new: list[str] = []
    restart = False
    for name in wanted.names:
        if name not in running:
            new.append(name)
            continue
        changed = _differences(wanted, running[name])
        if changed and changed <= LIVE:
            steps.append(
                Step(f"{name}: take over {', '.join(sorted(changed))}", "told to the agent", True, name, "reload")
            )
        elif changed:
            restart = True
            text = f"{name}: {', '.join(sorted(changed))} changed"
            steps.append(Step(text, "stop all agents of the set, then start them with this file"))
    for name in sorted(set(running) - set(wanted.names)):
        steps.append(Step(f"stop replica {name}", "end its agent; the file no longer names it"))
    when = "with the others, once all are stopped: " if restart else ""
    steps += [
        Step(
            f"start replica {name}",
            f"{when}tops replica run --name {wanted.name}/{name} (it takes a copy if it is new)",
        )
        for name in new
    ]
    return steps


def _differences(wanted: ReplicaSetConfig, running: ReplicaSetConfig) -> set[str]:
    one, other = wanted.model_dump(exclude=HIDDEN), running.model_dump(exclude=HIDDEN)
    return {key for key in one if one[key] != other[key]}
