"""A version that a writer expects of a row is looked at, or the write is rejected: it is never passed over."""

from typing import Any, cast

import pytest

from adapters.changes import Change, Delete, InvalidChange, Member, Update, Upsert, encode_member
from replication.conflicts.peer_writes import PeerWrites
from replication.replica.origin.executor import OriginExecutor
from replication.rpc.calls import Execute
from tops.model.ids import TxId

EXPECTING: list[Change] = [
    Update("acc", {"id": 1}, {"bal": 2}, {}, 7),
    Upsert("acc", {"id": 1}, {"bal": 2}, 7),
    Delete("acc", {"id": 1}, 7),
]


@pytest.mark.parametrize("change", EXPECTING, ids=lambda change: type(change).__name__)
async def test_a_transaction_that_is_executed_once_expects_no_version(change: Change) -> None:
    nothing = cast(Any, None)
    participant = cast(Any, type("Participant", (), {"resource": None, "event_type": "rs.shop"}))
    executor = OriginExecutor("r1", nothing, participant, nothing, None)
    member = Member(TxId(""), (Update("acc", {"id": 2}, {"bal": 1}), change))

    with pytest.raises(InvalidChange, match="expect_version of table acc"):
        await executor.execute(Execute(tx="w.1.1@r1", member=encode_member(member)), "w")


@pytest.mark.parametrize("change", EXPECTING, ids=lambda change: type(change).__name__)
async def test_a_peer_to_peer_set_takes_no_write_that_expects_a_version(change: Change) -> None:
    nothing = cast(Any, None)
    writes = PeerWrites("r1", nothing, nothing, nothing, nothing)

    with pytest.raises(InvalidChange, match="expect_version of table acc"):
        await writes.named(Member(TxId("w.1.1"), (change,)))
