"""Routing transactions on three broker processes: the dispatching scenario, and a client and a broker killed in it."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from examples.dispatch import ASSIGN, INVOKE, UPDATE, Agent, Dispatcher, of, run
from tests.integration.overlay.cluster import ROOT, Cluster
from tests.support.polling import eventually
from tops import Filter, Received, Site, StaticPlan
from tops.model.errors import NoReceiver, TransactionAborted

pytestmark = pytest.mark.asyncio

CHAIN = {"b1": ["b2"], "b2": ["b3"], "b3": []}


@asynccontextmanager
async def chain(directory: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(directory, CHAIN)
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.stop()


class Scene:
    """Environment at b1, dispatcher at b2, agent a2 at b3."""

    def __init__(self, environment: Site, dispatcher: Site, agent: Site) -> None:
        self.environment, self.dispatcher, self.agent = environment, dispatcher, agent
        self.d, self.a2 = Dispatcher(), Agent()

    async def set(self) -> None:
        await self.environment.advertise(INVOKE)
        await self.environment.advertise(UPDATE)
        await self.dispatcher.advertise(ASSIGN)
        await self.dispatcher.subscribe_tree(INVOKE, participant=self.d)
        await self.agent.subscribe_tree(ASSIGN, Filter.where("agent", "=", "a2"), participant=self.a2)
        subscription = await self.dispatcher.subscribe_tree(UPDATE, of("x1"), participant=self.d)
        self.d.instances["x1"] = subscription

    async def move(self, agent: str, value: int, timeout_s: float = 20.0) -> None:
        """Again until it commits: regular routes and broken links take a moment."""

        async def moved() -> bool:
            try:
                async with self.environment.routing_transaction(timeout_s=timeout_s) as tx:
                    await tx.send_tcm(INVOKE, {"instance": "x1", "agent": agent})
                    await tx.publish(UPDATE, {"instance": "x1", "value": value})
            except TransactionAborted:
                return False
            return True

        await eventually(moved, 60.0)

    async def update_reaches(self, updates: list[tuple[str, int]], value: int) -> None:
        """A regular update: again while a broker recovers, which may lose it."""

        async def seen() -> bool:
            await self.environment.publish(UPDATE, {"instance": "x1", "value": value})
            await asyncio.sleep(0)
            return ("x1", value) in updates

        await eventually(seen, 30.0)


@asynccontextmanager
async def scene(cluster: Cluster) -> AsyncIterator[Scene]:
    async with (
        cluster.site("environment", "b1") as environment,
        cluster.site("d", "b2") as dispatcher,
        cluster.site("a2", "b3") as agent,
    ):
        made = Scene(environment, dispatcher, agent)
        await made.set()
        yield made


async def test_the_dispatching_scenario_on_real_brokers(tmp_path: Path) -> None:
    async with chain(tmp_path) as cluster:
        workers = await run({name: cluster.url(name) for name in cluster.names})

        assert sorted(workers) == ["a1", "a2", "d"]


async def test_a_static_plan_moves_an_instance(tmp_path: Path) -> None:
    async with chain(tmp_path) as cluster, scene(cluster) as here:
        here.dispatcher.accept_plans(here.d)
        here.agent.accept_plans(here.a2)
        await here.move("a2", 0)  # every route is in place then
        await here.move("", 1)
        plan = StaticPlan()
        invoke = plan.tcm("environment", "invoke", {"instance": "x1", "agent": "a2"})
        assign = plan.tcm("d", "assign", {"instance": "x1", "agent": "a2", "take": True}, after=invoke)
        taken = plan.subscribe("a2", "update", of("x1"), after=assign)
        plan.unsubscribe("d", "update", here.d.instances["x1"].key, after=taken)
        plan.publish("environment", "update", {"instance": "x1", "value": 7})

        await here.environment.execute_plan(plan)

        await eventually(lambda: ("x1", 7) in here.a2.updates)
        assert ("x1", 7) not in here.d.updates


async def test_a_tcm_without_a_receiver_aborts(tmp_path: Path) -> None:
    async with chain(tmp_path) as cluster, cluster.site("environment", "b1") as environment:
        await environment.advertise(INVOKE)

        with pytest.raises(NoReceiver):
            async with environment.routing_transaction() as tx:
                await tx.send_tcm(INVOKE, {"instance": "x1", "agent": "a2"})


async def test_an_agent_that_is_killed_in_the_middle_leaves_its_work_where_it_was(tmp_path: Path) -> None:
    async with chain(tmp_path) as cluster, scene(cluster) as here:
        agent = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.integration.overlay.dispatch_agent",
            cluster.url("b3"),
            "a1",
            "hang",
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
        )
        assert agent.stdout is not None
        assert await agent.stdout.readline() == b"ready\n"
        await here.move("a2", 0)
        await here.move("", 1)
        moving = asyncio.create_task(_move_once(here, "a1", 2))
        assert (await agent.stdout.readline()).startswith(b"assigned")

        agent.send_signal(signal.SIGKILL)
        await agent.wait()

        with pytest.raises(TransactionAborted):
            await moving
        await here.update_reaches(here.d.updates, 3)
        await here.move("a2", 4)
        await eventually(lambda: ("x1", 4) in here.a2.updates)


async def _move_once(here: Scene, agent: str, value: int) -> None:
    async with here.environment.routing_transaction(timeout_s=30.0) as tx:
        await tx.send_tcm(INVOKE, {"instance": "x1", "agent": agent})
        await tx.publish(UPDATE, {"instance": "x1", "value": value})


@pytest.mark.parametrize("victim", ["b1", "b2", "b3"])
async def test_a_broker_that_is_killed_in_the_middle_aborts_the_transaction(tmp_path: Path, victim: str) -> None:
    async with chain(tmp_path) as cluster, scene(cluster) as here:
        await here.move("a2", 0)
        await here.move("", 1)
        reached, go_on = asyncio.Event(), asyncio.Event()
        original = here.a2.on_tcm

        async def slow(tx: Any, event: Received) -> None:
            await original(tx, event)
            reached.set()
            await go_on.wait()

        here.a2.on_tcm = slow  # type: ignore[method-assign]
        moving = asyncio.create_task(_move_once(here, "a2", 2))
        await reached.wait()

        await cluster.kill(victim)
        await cluster.start(victim)
        go_on.set()

        with pytest.raises(TransactionAborted):
            await moving
        here.a2.on_tcm = original  # type: ignore[method-assign]
        await here.update_reaches(here.d.updates, 3)
        await here.move("a2", 4)
        await eventually(lambda: ("x1", 4) in here.a2.updates)
        assert ("x1", 4) not in here.d.updates
