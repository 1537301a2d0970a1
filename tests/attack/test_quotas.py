"""What one identity may have at a rendezvous, all its sessions together: one more is rejected, others go on."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from tests.attack.raw_link import RawLink, Verdict, raw_link
from tests.integration.overlay.secured import Secured, secured_broker
from tests.support.brokers import denied
from tops import EventType, Scope, TxType
from tops.model.filters import Filter
from tops.model.ids import NodeId, TxId
from tops.protocol.messages import (
    AbortTx,
    Address,
    AddressedMessage,
    BeginTx,
    EndLog,
    Envelope,
    FollowLog,
    StandingRegistered,
    StandingWithdrawn,
    TxSpec,
    TypeAdvertised,
)

QUOTA = 4
LIMITS = "\n".join(f"{what}_max = {QUOTA}" for what in ("types", "followers", "transactions", "participants"))
ORDERS, LOG = EventType("orders", {"n": int}), EventType("ledger", {"n": int}, durable=True)
Made = Callable[["Session", int], AddressedMessage]


@pytest_asyncio.fixture
async def limited(tmp_path: Path) -> AsyncIterator[Secured]:
    async with secured_broker(tmp_path, limits=LIMITS) as running:
        async with running.site("owner", "admin") as owner:
            await owner.advertise(ORDERS)
            await owner.advertise(LOG)
        yield running


@dataclass
class Session:
    """One of an identity's."""

    name: str
    link: RawLink

    def tx(self, number: int) -> TxId:
        return TxId(f"{self.name}:{self.link.instance}.{self.link.incarnation}.{number}")

    async def send(self, message: AddressedMessage) -> Verdict:
        return await self.link.send(Envelope(to=Address(NodeId("b1")), body=message))


@asynccontextmanager
async def session(limited: Secured, keys: Path, instance: str) -> AsyncIterator[Session]:
    async with raw_link(limited.broker.url, "b1", keys, instance) as link:
        yield Session(keys.name, link)


def a_type(_: Session, number: int) -> AddressedMessage:
    return TypeAdvertised(definitions=(EventType(f"made{number}", {}),))


def a_follower(_: Session, number: int) -> AddressedMessage:
    name = f"f{number}"
    return FollowLog(name=name, definitions=(LOG,), filter=Filter(), position=None, start="now", credit=1, voter=None)


def a_transaction(site: Session, number: int) -> AddressedMessage:
    return BeginTx(tx=site.tx(number), spec=TxSpec(ORDERS.name, TxType.DISTRIBUTED))


def a_participant(_: Session, number: int) -> AddressedMessage:
    return StandingRegistered(
        voter=f"v{number}",
        event_type=ORDERS.name,
        filter=Filter(),
        scope=Scope.DISTRIBUTED,
        secret=b"s" * 32,
        position=None,
        subscription=number,
    )


def the_end_of(make: Made, site: Session, number: int) -> AddressedMessage:
    if make is a_follower:
        return EndLog(request=1, event_type=LOG.name, name=f"f{number}")
    if make is a_transaction:
        tx = site.tx(number)
        return AbortTx(tx=tx, tx_type=TxType.DISTRIBUTED, event_type=ORDERS.name, reason="")
    return StandingWithdrawn(voter=f"v{number}", event_type=ORDERS.name)


@pytest.mark.parametrize("make", [a_type, a_follower, a_transaction, a_participant])
async def test_an_identity_has_no_more_than_its_quota_in_all_its_sessions(limited: Secured, make: Made) -> None:
    greedy = limited.keys("greedy", "admin")
    async with (
        session(limited, greedy, "one") as one,
        session(limited, greedy, "two") as two,
        session(limited, limited.keys("modest", "admin"), "one") as modest,
    ):
        assert [await one.send(make(one, number)) for number in range(QUOTA - 1)] == [Verdict.TAKEN] * (QUOTA - 1)
        assert [await two.send(make(two, number)) for number in (10, 11)] == [Verdict.TAKEN, Verdict.REJECTED]
        assert await one.send(make(one, 0)) is Verdict.TAKEN, "it has this one already"
        assert [await modest.send(make(modest, 20 + number)) for number in range(QUOTA)] == [Verdict.TAKEN] * QUOTA
        rejected = 1
        if make is not a_type:  # a type is for good; what ends makes room
            assert await one.send(the_end_of(make, one, 0)) is Verdict.TAKEN
            assert [await one.send(make(one, number)) for number in (4, 5)] == [Verdict.TAKEN, Verdict.REJECTED]
            rejected = 2

    assert limited.broker.node.counters["over_quota"] == rejected
    records = denied(limited.broker)
    assert {record["who"].partition(":")[0] for record in records} == {"greedy"}
    assert len(records) == rejected, records
