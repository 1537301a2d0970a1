"""A child of an event type is declared by those who may publish the type: its events reach the type's subscribers."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.integration.overlay.secured import Secured, secured_broker
from tests.support.brokers import denied
from tests.support.polling import eventually
from tops import EventType
from tops.model.errors import PermissionDenied

NEWS = EventType("news", {"text": str})
LOG = EventType("ledger", {"text": str}, durable=True)
ROLE = '[[role]]\nname = "own"\nallow = ["advertise mine.**", "publish mine.**", "subscribe mine.**", "follow mine.**"]'


@pytest_asyncio.fixture
async def roles(tmp_path: Path) -> AsyncIterator[Secured]:
    async with secured_broker(tmp_path, roles=[ROLE]) as running:
        yield running


@pytest.mark.parametrize("parent", [NEWS, LOG], ids=["ordinary", "durable"])
async def test_nobody_declares_a_child_of_a_type_that_it_may_not_publish(roles: Secured, parent: EventType) -> None:
    child = EventType("mine.child", {}, parent=parent.name, durable=parent.durable)
    async with roles.site("owner") as owner, roles.site("mallory", "own") as mallory:
        await owner.advertise(parent)
        subscription = await owner.subscribe(parent, durable="audit" if parent.durable else None)
        mallory.define(parent)
        with pytest.raises(PermissionDenied, match=parent.name):
            await mallory.advertise(child)

        await owner.publish(parent, {"text": "honest"})

        received = await asyncio.wait_for(anext(aiter(subscription)), 10)
        assert received.type == parent.name
        assert {record["who"] for record in denied(roles.broker)} == {"mallory"}


async def test_a_reader_of_a_log_declares_no_child_of_it(roles: Secured) -> None:
    child = EventType("mine.child", {}, parent="ledger", durable=True)
    types = roles.broker.node.core.rendezvous.types
    async with roles.site("owner") as owner, roles.site("mallory", "own") as mallory:
        await owner.advertise(LOG)
        for site in (mallory, owner):
            site.define(LOG)
        await mallory.subscribe(child, durable="mine")
        await eventually(lambda: {record["who"] for record in denied(roles.broker)} == {"mallory"})
        assert child.name not in types

        await owner.subscribe(child, durable="mine")

        await eventually(lambda: child.name in types)


async def test_who_may_publish_the_parent_declares_children_of_it(roles: Secured) -> None:
    child = EventType("more.news", {}, parent="news")
    async with roles.site("owner") as owner, roles.site("another") as another:
        await owner.advertise(NEWS)
        subscription = await owner.subscribe(NEWS)
        another.define(NEWS)
        await another.advertise(child)

        await another.publish(child, {"text": "more"})

        received = await asyncio.wait_for(anext(aiter(subscription)), 10)
        assert received.type == "more.news"
