"""The behaviour of publish/subscribe and of transactions, over real processes and sockets, in every topology."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from tests.integration.overlay.cluster import Cluster, Recorder, event_type
from tests.support.polling import eventually
from tops import Access, EventType, Filter, Outcome, Scope, ScopeLimit, Site, TxType
from tops.model import constraints
from tops.model.errors import InvalidEvent, NotAdvertised, TransactionAborted, TransactionClosed
from tops.protocol.messages import CensusPolicy

pytestmark = pytest.mark.asyncio(loop_scope="module")

DISTRIBUTED_ONLY = ScopeLimit.DISTRIBUTED


def census(replies: int) -> CensusPolicy:
    """Closes with the last expected answer; the time is for a machine under load."""
    return CensusPolicy(timeout_s=20.0, replies=replies)


async def sites(stack: AsyncExitStack, cluster: Cluster, number: int) -> list[Site]:
    """A publisher and subscribers, spread over the brokers."""
    return [await stack.enter_async_context(cluster.site(f"s{i}", i)) for i in range(number)]


async def test_a_subscriber_gets_the_matching_events_of_a_publisher_in_order(cluster: Cluster) -> None:
    orders = event_type()
    async with AsyncExitStack() as stack:
        publisher, near, far = await sites(stack, cluster, 3)
        await publisher.advertise(orders)
        all_of_it, some_of_it = Recorder(), Recorder()
        await near.subscribe(orders, participant=all_of_it)
        await far.subscribe(orders, Filter.where("total", ">", 50), participant=some_of_it)

        for i in range(100):
            await publisher.publish(orders, {"id": i, "total": i})

        await eventually(lambda: len(all_of_it.ordinary) == 100 and len(some_of_it.ordinary) == 49)
        assert all_of_it.ids() == list(range(100))
        assert some_of_it.ids() == list(range(51, 100))


async def test_a_subscription_to_a_parent_receives_its_children(cluster: Cluster) -> None:
    parent = event_type("parent")
    child = EventType(parent.name + ".child", {"extra": int}, parent=parent.name)
    async with AsyncExitStack() as stack:
        publisher, subscriber, _ = await sites(stack, cluster, 3)
        publisher.define(parent)
        await publisher.advertise(child)
        taken = Recorder()
        await subscriber.subscribe(parent, participant=taken)

        await publisher.publish(child, {"id": 1, "extra": 2})

        await eventually(lambda: len(taken.ordinary) == 1)
        assert taken.ordinary[0].type == child.name


async def test_nothing_arrives_after_unsubscribe(cluster: Cluster) -> None:
    orders = event_type()
    async with AsyncExitStack() as stack:
        publisher, leaving, staying = await sites(stack, cluster, 3)
        await publisher.advertise(orders)
        gone, there = Recorder(), Recorder()
        subscription = await leaving.subscribe(orders, participant=gone)
        await staying.subscribe(orders, participant=there)

        await subscription.unsubscribe()
        await publisher.publish(orders, {"id": 1})

        await eventually(lambda: there.ids() == [1])
        assert gone.ordinary == []


async def test_publishing_what_does_not_fit_or_was_not_advertised_is_refused_here(cluster: Cluster) -> None:
    orders = event_type()
    async with AsyncExitStack() as stack:
        (publisher,) = await sites(stack, cluster, 1)

        with pytest.raises(NotAdvertised):
            await publisher.publish(orders, {"id": 1})
        await publisher.advertise(orders)
        with pytest.raises(InvalidEvent, match="total"):
            await publisher.publish(orders, {"id": 1, "total": "twelve"})


async def test_a_durable_subscriber_goes_on_where_it_stopped(cluster: Cluster) -> None:
    orders = event_type(durable=True)
    async with AsyncExitStack() as stack:
        publisher, _ = await sites(stack, cluster, 2)
        await publisher.advertise(orders)
        first = Recorder()
        async with cluster.site("reader", 3) as reader:
            await reader.subscribe(orders, participant=first, durable="reader")
            numbers = [await publisher.publish(orders, {"id": i}) for i in range(5)]
            await eventually(lambda: len(first.ordinary) == 5)
            await eventually(lambda: _position(cluster, orders, "reader", 5))
        for i in range(5, 10):
            await publisher.publish(orders, {"id": i})
        second = Recorder()
        async with cluster.site("reader", 4) as reader:
            await reader.subscribe(orders, participant=second, durable="reader")
            await eventually(lambda: len(second.ordinary) == 5)

    assert numbers == [1, 2, 3, 4, 5]
    assert first.ids() == [0, 1, 2, 3, 4]
    assert second.ids() == [5, 6, 7, 8, 9]
    assert [e.number for e in second.ordinary] == [6, 7, 8, 9, 10]


async def _position(cluster: Cluster, durable_type: EventType, name: str, position: int) -> bool:
    views = [await cluster.get(broker, "/v1/subscriptions") for broker in cluster.names]
    return any(
        d["event_type"] == durable_type.name and d["name"] == name and d["position"] == position
        for view in views
        if view is not None
        for d in view["durable"]
    )


async def test_all_participants_of_a_distributed_transaction_commit_every_event(cluster: Cluster) -> None:
    orders = event_type()
    async with AsyncExitStack() as stack:
        publisher, one, two = await sites(stack, cluster, 3)
        await publisher.advertise(orders)
        participants = [Recorder(), Recorder()]
        for site, participant in zip((one, two), participants, strict=True):
            await site.subscribe(orders, participant=participant)

        async with publisher.transaction(
            orders, TxType.DISTRIBUTED, constraints=[constraints.MinParticipants(2)], census=census(2)
        ) as tx:
            for i in range(5):
                await tx.publish(orders, {"id": i})

        assert tx.committed
        for participant in participants:
            assert participant.events == {tx.id: [0, 1, 2, 3, 4]}
            await eventually(lambda p=participant: (p.prepared, p.committed) == ([tx.id], [tx.id]))
        known = await publisher.get_outcome(tx.id, orders)
        assert known.outcome is Outcome.COMMITTED


@pytest.mark.parametrize("reject", ["notify", "prepare"])
async def test_a_participant_that_fails_aborts_everybody(cluster: Cluster, reject: str) -> None:
    orders = event_type()
    async with AsyncExitStack() as stack:
        publisher, one, two = await sites(stack, cluster, 3)
        await publisher.advertise(orders)
        good, bad = Recorder(), Recorder(reject=reject)
        await one.subscribe(orders, participant=good)
        await two.subscribe(orders, participant=bad)

        with pytest.raises(TransactionAborted, match="ValueError"):
            async with publisher.transaction(orders, TxType.DISTRIBUTED, census=census(2)) as tx:
                await tx.publish(orders, {"id": 1})

        await eventually(lambda: tx.id in good.aborted and tx.id in bad.aborted)
        assert good.committed == bad.committed == []


async def test_an_exception_in_the_block_aborts_the_transaction_everywhere(cluster: Cluster) -> None:
    orders = event_type()
    async with AsyncExitStack() as stack:
        publisher, one, two = await sites(stack, cluster, 3)
        await publisher.advertise(orders)
        distributed, local = Recorder(), Recorder(Scope.LOCAL)
        await one.subscribe(orders, participant=distributed)
        await two.subscribe(orders, participant=local)

        with pytest.raises(RuntimeError, match="changed my mind"):
            async with publisher.transaction(orders, TxType.DISTRIBUTED, census=census(1)) as tx:
                await tx.publish(orders, {"id": 1})
                raise RuntimeError("changed my mind")

        await eventually(lambda: tx.id in distributed.aborted and tx.id in local.aborted)
        assert distributed.committed == local.committed == []
        with pytest.raises((TransactionClosed, TransactionAborted)):
            await tx.publish(orders, {"id": 2})


async def test_whoever_stays_out_sees_no_event_of_the_transaction(cluster: Cluster) -> None:
    orders = event_type()
    async with AsyncExitStack() as stack:
        publisher, one, two = await sites(stack, cluster, 3)
        await publisher.advertise(orders)
        inside, outside = Recorder(), Recorder(Scope.NONE)
        await one.subscribe(orders, participant=inside)
        await two.subscribe(orders, participant=outside)

        async with publisher.transaction(orders, TxType.DISTRIBUTED, census=census(1)) as tx:
            await tx.publish(orders, {"id": 1})
        await publisher.publish(orders, {"id": 2})

        await eventually(lambda: outside.ids() == [2] and inside.ids() == [2] and inside.committed == [tx.id])
        assert outside.events == {}


async def test_a_public_transaction_takes_events_of_several_publishers_in_one_order(cluster: Cluster) -> None:
    orders = event_type()
    async with AsyncExitStack() as stack:
        initiator, contributor, subscriber = await sites(stack, cluster, 3)
        for site in (initiator, contributor):
            await site.advertise(orders)
        participants = [Recorder(), Recorder()]
        await subscriber.subscribe(orders, participant=participants[0])
        await contributor.subscribe(orders, participant=participants[1])

        async with initiator.transaction(
            orders, TxType.DISTRIBUTED, access=Access.PUBLIC, census=census(2), limit=DISTRIBUTED_ONLY
        ) as tx:
            other = contributor.contribute(tx.id, tx.spec)
            await asyncio.gather(
                *(tx.publish(orders, {"id": i}) for i in range(5)),
                *(other.publish(orders, {"id": 10 + i}) for i in range(5)),
            )
            other.done()

        assert tx.committed
        seen = [p.events[tx.id] for p in participants]
        assert seen[0] == seen[1]
        assert sorted(seen[0]) == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]


async def test_one_shots_with_standing_answers_commit_at_every_participant(cluster: Cluster) -> None:
    orders = event_type()
    async with AsyncExitStack() as stack:
        publisher, one, two = await sites(stack, cluster, 3)
        await publisher.advertise(orders)
        participants = [Recorder(), Recorder()]
        for site, participant in zip((one, two), participants, strict=True):
            await site.subscribe(orders, participant=participant, scope=Scope.DISTRIBUTED)

        outcomes = await asyncio.gather(
            *(
                publisher.execute(
                    orders,
                    events=[{"id": 10 * i}, {"id": 10 * i + 1}],
                    constraints=[constraints.MinParticipants(2)],
                    limit=DISTRIBUTED_ONLY,
                )
                for i in range(20)
            )
        )

        assert {o.outcome for o in outcomes} == {Outcome.COMMITTED}
        for participant in participants:
            await eventually(lambda p=participant: len(p.committed) == 20)
            assert sorted(map(tuple, participant.events.values())) == [(10 * i, 10 * i + 1) for i in range(20)]


async def test_a_compensatable_participant_undoes_in_reverse_what_was_aborted(cluster: Cluster) -> None:
    orders = event_type()
    async with AsyncExitStack() as stack:
        publisher, one, two = await sites(stack, cluster, 3)
        await publisher.advertise(orders)
        early, bad = Recorder(), Recorder(reject="prepare")
        early.compensatable = True
        await one.subscribe(orders, participant=early)
        await two.subscribe(orders, participant=bad)

        with pytest.raises(TransactionAborted):
            async with publisher.transaction(orders, TxType.DISTRIBUTED, census=census(2)) as tx:
                for i in range(3):
                    await tx.publish(orders, {"id": i})

        await eventually(lambda: tx.id in early.aborted)
        if early.committed:
            assert early.compensated == [2, 1, 0]


async def test_a_question_about_an_unknown_transaction_refuses_it_for_good(cluster: Cluster) -> None:
    orders = event_type()
    async with AsyncExitStack() as stack:
        publisher, _ = await sites(stack, cluster, 2)
        await publisher.advertise(orders)

        response = await publisher.get_outcome(f"{publisher.name}.1.1", orders)
        again = await publisher.get_outcome(f"{publisher.name}.1.1", orders)

        assert response.outcome is again.outcome is Outcome.ABORTED
