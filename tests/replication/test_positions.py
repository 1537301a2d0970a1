"""Where a replica says it is: a number that it has promised is promised or reached at every moment in between."""

import asyncio
import sqlite3
from pathlib import Path

from adapters import SqliteAdapter
from adapters.changes import Barrier, Member, Repair
from replication.model.events import write_body
from replication.replica.apply.participant import ReplicaParticipant
from tops.model.ids import NodeId, TxId
from tops.model.log_points import BEGINNING, NO_DIGESTS
from tops.model.transactions import Scope
from tops.protocol.effects import Memo
from tops.protocol.messages import EpochId, EpochMember, Event


class SlowVisitor:
    """A check that holds the replica at a barrier until it may go on."""

    watches = False

    def __init__(self) -> None:
        self.arrived, self.may_go_on = asyncio.Event(), asyncio.Event()

    def expects(self, barrier: str) -> bool:
        return True

    async def reached(self, barrier: str) -> None:
        self.arrived.set()
        await self.may_go_on.wait()

    def permitted(self, member: Member, repair: Repair) -> Member:
        return member

    def saw(self, member: Member, number: int) -> None:
        pass


async def test_whoever_asks_during_a_commit_hears_of_the_number(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        connection.execute("create table accounts (id integer primary key)")
    async with SqliteAdapter(tmp_path / "shop.db", cluster="test", replica_set="shop") as database:
        replica = ReplicaParticipant(database, "rs.shop", "shop-r1", Scope.DISTRIBUTED)
        visitor = replica.visitor = SlowVisitor()
        barrier = Member(TxId("c.1.1"), (), control=Barrier("check"))
        memo = Memo(EpochId("rs.shop", 1, 1, NodeId("b1"), 1), "digest", "voter", (barrier.tx,))
        member = EpochMember(barrier.tx, 1, (Event("rs.shop", write_body(barrier)),))
        await replica.prepare_batch(memo, (member,), BEGINNING)

        finishing = asyncio.ensure_future(replica.finish_batch(memo, committed=True))
        while not visitor.arrived.is_set():
            assert (replica.reached, replica.prepared, replica.in_doubt()) == (0, {1}, 1)
            await asyncio.sleep(0)
        assert (await database.applied()).prefix == 1
        assert (replica.reached, replica.prepared, replica.in_doubt()) == (0, {1}, 1)
        visitor.may_go_on.set()
        await finishing

        assert (replica.reached, replica.prepared, replica.in_doubt()) == (1, set(), 0)


async def test_who_waits_for_a_position_goes_on_when_it_is_reached_and_not_before(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        connection.execute("create table accounts (id integer primary key)")
    async with SqliteAdapter(tmp_path / "shop.db", cluster="test", replica_set="shop") as database:
        replica = ReplicaParticipant(database, "rs.shop", "shop-r1", Scope.DISTRIBUTED)
        waiting = [asyncio.ensure_future(replica.wait_for(number, 30.0)) for number in (1, 2, 2)]

        await replica.apply_entries((), 1, "h", NO_DIGESTS)
        await waiting[0]
        assert not waiting[1].done()
        waiting[2].cancel()
        await replica.apply_entries((), 2, "h", NO_DIGESTS)
        await waiting[1]

        assert replica.reached == 2
        assert (await asyncio.gather(waiting[2], return_exceptions=True))[0].__class__ is asyncio.CancelledError
