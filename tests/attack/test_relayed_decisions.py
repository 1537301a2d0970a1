"""A replica of the set lies to a peer in doubt: what it passes on counts only with the coordinator's signature."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.attack.test_forged_senders import Replica, Shop, Slow, shop_at
from tests.integration.overlay.secured import Secured
from tests.support.brokers import denied
from tests.support.hostile import Hostile
from tests.support.polling import eventually
from tops.model.ids import NodeId, hashed
from tops.model.log_points import LogPoint
from tops.protocol.effects import BatchPrepared, Memo
from tops.protocol.messages import Address, DecisionRelayed, Envelope, EpochMember
from tops.security import Credentials, Kind, decision_signer


class Watched(Replica):
    """Tells what it has promised, and how each promise ended."""

    def __init__(self) -> None:
        super().__init__()
        self.prepared: list[Memo] = []
        self.ended: list[bool] = []

    async def prepare_batch(self, memo: Memo, members: tuple[EpochMember, ...], before: LogPoint) -> BatchPrepared:
        prepared = await super().prepare_batch(memo, members, before)
        self.prepared.append(memo)
        return prepared

    async def finish_batch(self, memo: Memo, committed: bool) -> LogPoint | None:
        self.ended.append(committed)
        return await super().finish_batch(memo, committed)


class InDoubt:
    """`shop/r1` has promised a write, and the decision waits for the vote of `shop/r2`."""

    def __init__(self, secured: Secured, shop: Shop, victim: Watched) -> None:
        self.secured, self.shop, self.victim = secured, shop, victim

    @property
    def memo(self) -> Memo:
        return self.victim.prepared[-1]

    @property
    def address(self) -> Address:
        return self.secured.broker.node.core.edge.sites[NodeId("shop/r1")].address

    def relayed(self, commits: bool, proof: bytes = b"") -> DecisionRelayed:
        committing = frozenset([hashed(self.memo.voter)] if commits else [])
        return DecisionRelayed(epoch=self.memo.epoch, digest=self.memo.digest, committing=committing, proof=proof)


@asynccontextmanager
async def in_doubt(secured: Secured) -> AsyncIterator[InDoubt]:
    victim, slow = Watched(), Slow()
    async with shop_at(secured, slow, victim) as shop:
        await eventually(lambda: victim.ended == [True])
        slow.let_go.clear()
        writing = asyncio.ensure_future(shop.write())
        await eventually(lambda: len(victim.prepared) == 2)

        yield InDoubt(secured, shop, victim)

        slow.let_go.set()
        await writing
        await eventually(lambda: victim.ended == [True, True])
        await shop.is_whole()


def signed_by(keys: Path, known: DecisionRelayed) -> bytes:
    return decision_signer(lambda: Credentials.load(keys))(known.text)


@pytest.mark.parametrize("commits", [True, False], ids=["commit", "abort"])
async def test_a_member_that_passes_on_a_decision_without_a_signature_is_not_believed(
    secured: Secured, commits: bool
) -> None:
    async with in_doubt(secured) as doubt, Hostile.connect(secured.broker.url, secured.keys("shop/r3")) as liar:
        await liar.send(Envelope(to=doubt.address, body=doubt.relayed(commits)))

        await eventually(lambda: bool(liar.rejected))
        assert doubt.victim.ended == [True]
        assert "not signed by its coordinator" in liar.rejected[0].text
        assert [record["who"] for record in denied(secured.broker)] == ["shop/r3"]
        assert secured.broker.node.counters["sender_mismatches"] == 1


@pytest.mark.parametrize("kind", [Kind.REPLICA, Kind.BROKER, Kind.SITE], ids=lambda kind: kind.value)
async def test_only_the_signature_of_the_broker_that_coordinates_counts(secured: Secured, kind: Kind) -> None:
    signer = secured.keys("shop/r4" if kind is Kind.REPLICA else "another", kind=kind)
    async with in_doubt(secured) as doubt, Hostile.connect(secured.broker.url, secured.keys("shop/r3")) as liar:
        proof = signed_by(signer, doubt.relayed(commits=True))
        await liar.send(Envelope(to=doubt.address, body=doubt.relayed(commits=True, proof=proof)))

        await eventually(lambda: bool(liar.rejected))
        assert doubt.victim.ended == [True]
        assert "not of broker 'b1'" in liar.rejected[0].text


async def test_a_signature_on_another_decision_does_not_count(secured: Secured) -> None:
    coordinator = secured.broker.table.keys
    assert coordinator is not None
    async with in_doubt(secured) as doubt, Hostile.connect(secured.broker.url, secured.keys("shop/r3")) as liar:
        proof = signed_by(coordinator, doubt.relayed(commits=False))
        await liar.send(Envelope(to=doubt.address, body=doubt.relayed(commits=True, proof=proof)))

        await eventually(lambda: bool(liar.rejected))
        assert doubt.victim.ended == [True]


async def test_with_the_coordinators_signature_a_decision_that_a_peer_passes_on_ends_the_doubt(
    secured: Secured,
) -> None:
    coordinator = secured.broker.table.keys
    assert coordinator is not None
    async with in_doubt(secured) as doubt, Hostile.connect(secured.broker.url, secured.keys("shop/r3")) as peer:
        proof = signed_by(coordinator, doubt.relayed(commits=True))
        await peer.send(Envelope(to=doubt.address, body=doubt.relayed(commits=True, proof=proof)))

        await eventually(lambda: doubt.victim.ended == [True, True])
        assert not peer.rejected
