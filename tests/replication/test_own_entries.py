"""A replica that commits first gets its transactions back from the log: it does them once, and misses no other."""

import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from adapters import SqliteAdapter
from adapters.changes import Member, Update, encode_member
from replication.model.events import batch_body
from replication.replica.apply.participant import ReplicaParticipant
from tops.model.ids import TxId
from tops.model.log_points import Digests, LogPoint
from tops.model.transactions import Scope, ScopeLimit, TxType
from tops.protocol.messages import Event, LogEntry, LoggedTx


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[SqliteAdapter]:
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        connection.execute("create table accounts (id integer primary key, bal integer not null)")
        connection.execute("insert into accounts values (1, 0)")
    async with SqliteAdapter(tmp_path / "shop.db", cluster="test", replica_set="shop") as adapter:
        yield adapter


def adding(amount: int, tx: str) -> Member:
    return Member(TxId(tx), (Update("accounts", {"id": 1}, add={"bal": amount}),), f"tx:{tx}", 3600)


def logged(number: int, *members: Member) -> LogEntry:
    event = Event("rs.shop", batch_body([encode_member(member) for member in members]))
    tx = LoggedTx(TxId(f"batch-{number}"), "rs.shop", (event,), {}, ScopeLimit.LOCAL, TxType.LOCAL)
    return LogEntry(number, (tx,))


def digests(upto: int) -> Digests:
    return Digests(0, b"".join(bytes([n]) * 16 for n in range(upto + 1)))


async def balance(database: SqliteAdapter) -> int:
    return int((await database.read("select bal from accounts")).rows[0]["bal"])


async def test_own_transactions_are_passed_over_and_those_of_others_are_applied(database: SqliteAdapter) -> None:
    participant = ReplicaParticipant(database, "rs.shop", "shop-r1", Scope.LOCAL)
    mine, theirs = adding(1, "r1.a"), adding(10, "r2.a")
    await database.write_local(mine)
    participant.own.add(batch_body([encode_member(mine)])["batch"])

    reached = await participant.apply_entries((logged(1, mine), logged(2, theirs)), 2, "h", digests(2))

    assert reached == LogPoint("h", 2, "02" * 16)
    assert await database.point() == reached
    assert await balance(database) == 11
    assert participant.own == set()


async def test_a_batch_that_was_logged_twice_is_known_by_its_keys_the_second_time(database: SqliteAdapter) -> None:
    participant = ReplicaParticipant(database, "rs.shop", "shop-r1", Scope.LOCAL)
    mine = adding(1, "r1.a")
    await database.write_local(mine)
    participant.own.add(batch_body([encode_member(mine)])["batch"])

    reached = await participant.apply_entries((logged(1, mine), logged(2, mine)), 2, "h", digests(2))

    assert reached == LogPoint("h", 2, "02" * 16)
    assert await database.point() == reached
    assert await balance(database) == 1
