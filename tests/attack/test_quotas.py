"""What one identity may have at a rendezvous, all its sessions together: one more is rejected, others go on."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from tests.integration.overlay.secured import Secured, secured_broker
from tests.support.brokers import denied
from tests.support.hostile import Hostile
from tests.support.polling import eventually
from tops import EventType, Scope, TxType
from tops.model.filters import Filter
from tops.model.ids import TxId
from tops.protocol.messages import (
    AbortTx,
    AddressedMessage,
    BeginTx,
    EndLog,
    FollowLog,
    StandingRegistered,
    StandingWithdrawn,
    TxSpec,
    TypeAdvertised,
)

QUOTA = 4
LIMITS = "\n".join(f"{what}_max = {QUOTA}" for what in ("types", "followers", "transactions", "participants"))
ORDERS, LOG = EventType("orders", {"n": int}), EventType("ledger", {"n": int}, durable=True)
Made = Callable[[Hostile, int], AddressedMessage]


@pytest_asyncio.fixture
async def limited(tmp_path: Path) -> AsyncIterator[Secured]:
    async with secured_broker(tmp_path, limits=LIMITS) as running:
        async with running.site("owner", "admin") as owner:
            await owner.advertise(ORDERS)
            await owner.advertise(LOG)
        yield running


def tx_of(site: Hostile, number: int) -> TxId:
    return TxId(f"{site.node}.{site.incarnation}.{number}")


def a_type(_: Hostile, number: int) -> AddressedMessage:
    return TypeAdvertised(definitions=(EventType(f"made{number}", {}),))


def a_follower(_: Hostile, number: int) -> AddressedMessage:
    name = f"f{number}"
    return FollowLog(name=name, definitions=(LOG,), filter=Filter(), position=None, start="now", credit=1, voter=None)


def a_transaction(site: Hostile, number: int) -> AddressedMessage:
    return BeginTx(tx=tx_of(site, number), spec=TxSpec(ORDERS.name, TxType.DISTRIBUTED))


def a_participant(_: Hostile, number: int) -> AddressedMessage:
    return StandingRegistered(
        voter=f"v{number}",
        event_type=ORDERS.name,
        filter=Filter(),
        scope=Scope.DISTRIBUTED,
        secret=b"s" * 32,
        position=None,
        subscription=number,
    )


def the_end_of(make: Made, site: Hostile, number: int) -> AddressedMessage:
    if make is a_follower:
        return EndLog(request=1, event_type=LOG.name, name=f"f{number}")
    if make is a_transaction:
        tx = tx_of(site, number)
        return AbortTx(tx=tx, tx_type=TxType.DISTRIBUTED, event_type=ORDERS.name, reason="")
    return StandingWithdrawn(voter=f"v{number}", event_type=ORDERS.name)


@pytest.mark.parametrize("make", [a_type, a_follower, a_transaction, a_participant])
async def test_an_identity_has_no_more_than_its_quota_in_all_its_sessions(limited: Secured, make: Made) -> None:
    url, keys = limited.broker.url, limited.keys("greedy", "admin")
    async with (
        Hostile.connect(url, keys, instance="one") as one,
        Hostile.connect(url, keys, instance="two") as two,
        Hostile.connect(url, limited.keys("modest", "admin")) as modest,
    ):
        await one.send_messages(*(make(one, number) for number in range(QUOTA - 1)))
        await one.send_messages(make(one, 0))  # again: it is the same one
        await two.send_messages(*(make(two, number) for number in range(QUOTA, QUOTA + 3)))
        await eventually(lambda: len(two.rejected) == 2)
        await modest.send_messages(*(make(modest, number) for number in range(20, 20 + QUOTA)))
        if make is not a_type:  # what ends makes room; a type is for good
            await one.send_messages(the_end_of(make, one, 0))
            await one.send_messages(make(one, 9), make(one, 10))
            await eventually(lambda: len(one.rejected) == 1)

        assert {rejected.code for rejected in (*one.rejected, *two.rejected)} == {"quota"}
        assert all(f"{QUOTA} " in rejected.text for rejected in two.rejected)
        assert modest.rejected == []
        assert limited.broker.node.counters["over_quota"] == 2 + len(one.rejected)
    assert {record["who"].partition(":")[0] for record in denied(limited.broker)} == {"greedy"}
