"""A publisher's own resources, and durable subscriptions that end for good, over a real broker."""

import pytest

from tests.integration.overlay.cluster import Cluster, Recorder, event_type
from tests.support.polling import eventually
from tops import Outcome, TxType
from tops.model.errors import TransactionAborted
from tops.protocol.messages import CensusPolicy

pytestmark = pytest.mark.asyncio

ONE_ANSWER = CensusPolicy(timeout_s=20.0, replies=1)


async def test_enlisted_resources_commit_with_the_publisher_s_transaction(broker: Cluster) -> None:
    orders, own, other = event_type(), Recorder(), Recorder()
    async with broker.site("publisher") as publisher, broker.site("subscriber") as subscriber:
        await publisher.advertise(orders)
        await subscriber.subscribe(orders, participant=other)
        ledger = await publisher.enlist(own, name="ledger")

        async with publisher.transaction(orders, TxType.DISTRIBUTED, census=ONE_ANSWER, own=ledger) as tx:
            await tx.publish(orders, {"id": 1})

        assert tx.outcome is not None
        assert tx.outcome.outcome is Outcome.COMMITTED
        await eventually(lambda: own.committed == other.committed == [tx.id])


async def test_enlisted_resources_that_refuse_abort_the_transaction(broker: Cluster) -> None:
    orders, own, other = event_type(), Recorder(reject="prepare"), Recorder()
    async with broker.site("publisher") as publisher, broker.site("subscriber") as subscriber:
        await publisher.advertise(orders)
        await subscriber.subscribe(orders, participant=other)
        ledger = await publisher.enlist(own, name="ledger")

        with pytest.raises(TransactionAborted):
            async with publisher.transaction(orders, TxType.DISTRIBUTED, census=ONE_ANSWER, own=ledger) as tx:
                await tx.publish(orders, {"id": 1})

        await eventually(lambda: bool(other.aborted))
        assert own.committed == other.committed == []


async def test_a_durable_subscription_that_is_forgotten_starts_anew(broker: Cluster) -> None:
    orders, before, after = event_type(durable=True), Recorder(), Recorder()
    async with broker.site("publisher") as publisher, broker.site("reader") as reader:
        await publisher.advertise(orders)
        subscription = await reader.subscribe(orders, participant=before, durable="reader")
        await publisher.publish(orders, {"id": 1})
        await eventually(lambda: before.ids() == [1])

        await subscription.unsubscribe(forget=True)
        await publisher.publish(orders, {"id": 2})
        await reader.subscribe(orders, participant=after, durable="reader")
        await publisher.publish(orders, {"id": 3})

        await eventually(lambda: after.ids() == [3])
