"""Dispatching of work among agents: every update of an instance reaches the one agent that has it, and nobody else.

A dispatcher receives the updates of all instances that nobody has. When an instance is invoked it gives it to an agent:
the agent subscribes to the instance's updates, the dispatcher unsubscribes, and the first update is published, as one
routing transaction of three clients. Taking an instance back is the same the other way round. An agent that has no room
aborts all of it.

    python -m examples.dispatch
"""

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any

from adapters.embedded.free_ports import free_port
from tops import EventType, Filter, Participant, Received, Site
from tops.model.errors import TransactionAborted
from tops.runtime.config import parse_config
from tops.server.broker import Broker

INVOKE = EventType("invoke", {"instance": str, "agent": str}, routing="tree")
ASSIGN = EventType("assign", {"instance": str, "agent": str, "take": bool}, routing="tree")
UPDATE = EventType("update", {"instance": str, "value": int}, routing="tree")
ROOM = 2


def of(instance: str) -> Filter:
    """The updates of one instance."""
    return Filter.where("instance", "=", instance)


class Worker(Participant):
    """Has instances, by their subscriptions, and the updates that it got."""

    def __init__(self) -> None:
        super().__init__()
        self.instances: dict[str, Any] = {}
        self.updates: list[tuple[str, int]] = []

    def on_notify(self, event: Received) -> None:
        if event.type == UPDATE.name:
            self.updates.append((event.body["instance"], event.body["value"]))

    async def take(self, tx: Any, instance: str) -> None:
        self.instances[instance] = await tx.subscribe(UPDATE, of(instance), participant=self)

    async def give(self, tx: Any, instance: str) -> None:
        await tx.unsubscribe(self.instances[instance])


class Agent(Worker):
    """Takes what it is assigned, if it has room."""

    async def on_tcm(self, tx: Any, event: Received) -> None:
        instance = event.body["instance"]
        if not event.body["take"]:
            await self.give(tx, instance)
        elif len(self.instances) >= ROOM:
            raise ValueError(f"no room for {instance}")
        else:
            await self.take(tx, instance)


class Dispatcher(Worker):
    """Gives instances to agents, or takes them back if no agent is named."""

    def __init__(self) -> None:
        super().__init__()
        self.agent_of: dict[str, str] = {}

    async def on_tcm(self, tx: Any, event: Received) -> None:
        instance, agent = event.body["instance"], event.body["agent"]
        if agent:
            await tx.send_tcm(ASSIGN, {"instance": instance, "agent": agent, "take": True})
            await self.give(tx, instance)
            self.agent_of[instance] = agent
        else:
            await self.take(tx, instance)
            await tx.send_tcm(ASSIGN, {"instance": instance, "agent": self.agent_of[instance], "take": False})


async def move(environment: Site, instance: str, agent: str, value: int) -> bool:
    """Move an instance to an agent, or back to the dispatcher, and publish an update that its new owner gets."""
    try:
        async with environment.routing_transaction(isolated=True) as tx:
            await tx.send_tcm(INVOKE, {"instance": instance, "agent": agent})
            await tx.publish(UPDATE, {"instance": instance, "value": value})
    except TransactionAborted as aborted:
        print(f"{instance} stays where it is: {aborted.reason}")
        return False
    print(f"{instance} is at {agent or 'the dispatcher'}")
    return True


async def run(urls: dict[str, str]) -> dict[str, Worker]:
    """The scenario, with a client at each of three brokers; returns who got what."""
    workers: dict[str, Worker] = {"d": Dispatcher(), "a1": Agent(), "a2": Agent()}
    async with (
        Site.connect(urls["b1"], name="environment") as environment,
        Site.connect(urls["b2"], name="d") as dispatcher,
        Site.connect(urls["b3"], name="a1") as first,
        Site.connect(urls["b3"], name="a2") as second,
    ):
        await environment.advertise(INVOKE)
        await environment.advertise(UPDATE)
        await dispatcher.advertise(ASSIGN)
        await dispatcher.subscribe_tree(INVOKE, participant=workers["d"])
        for name, site in (("a1", first), ("a2", second)):
            await site.subscribe_tree(ASSIGN, Filter.where("agent", "=", name), participant=workers[name])
        for instance in ("x1", "x2", "x3"):
            subscription = await dispatcher.subscribe_tree(UPDATE, of(instance), participant=workers["d"])
            workers["d"].instances[instance] = subscription
        await settled(environment)
        await move(environment, "x1", "a1", 1)
        await move(environment, "x2", "a1", 1)
        await move(environment, "x3", "a1", 1)  # a1 has no room: the dispatcher keeps it
        await move(environment, "x3", "a2", 2)
        await move(environment, "x1", "", 2)  # consolidation
        for instance in ("x1", "x2", "x3"):
            await environment.publish(UPDATE, {"instance": instance, "value": 3})
        expected = {"d": [("x1", 2), ("x1", 3)], "a1": [("x1", 1), ("x2", 1), ("x2", 3)], "a2": [("x3", 2), ("x3", 3)]}
        async with asyncio.timeout(10):
            while {name: worker.updates for name, worker in workers.items()} != expected:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    return workers


async def settled(environment: Site) -> None:
    """Brokers need a moment to learn of regular subscriptions; an empty transaction passes all of them."""
    for _ in range(3):
        try:
            async with environment.routing_transaction(isolated=True, timeout_s=2.0):
                pass
        except TransactionAborted:
            await asyncio.sleep(0.2)


async def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="tops-dispatch-"))
    ports = {name: free_port() for name in ("b1", "b2", "b3")}
    links = {"b1": ["b2"], "b2": ["b3"], "b3": []}
    tables = [
        f'[[broker]]\nname = "{name}"\nlisten = "127.0.0.1:{port}"\ndata = "{name}"\nlinks = {links[name]}'
        for name, port in ports.items()
    ]
    config = parse_config("\n".join(['[cluster]\nname = "dispatch"', *tables]), folder / "tops.toml")
    try:
        async with Broker.run(config, "b1"), Broker.run(config, "b2"), Broker.run(config, "b3"):
            workers = await run({name: f"ws://127.0.0.1:{port}" for name, port in ports.items()})
        for name, worker in workers.items():
            print(name, worker.updates)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    asyncio.run(main())
