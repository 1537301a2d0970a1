"""Writes as events: what a replica's participant finds in them is what a writer or a publisher put in."""

from adapters.changes import Insert, Member, Update, encode_member
from replication.model.events import at_ms, batch_body, batch_in, log_type, member_of, write_body
from tops.model.ids import TxId
from tops.protocol.messages import Event

FIRST = Member(TxId("r1.a"), (Update("accounts", {"id": 1}, add={"bal": -3}),), "tx:r1.a", 60)
SECOND = Member(TxId("r1.b"), (Insert("transfers", {"id": 7, "amount": 3}),), "tx:r1.b", 60)


def event(body: dict[str, object]) -> Event:
    log_type("shop").check(body)
    return Event("rs.shop", body)


def test_a_published_batch_holds_its_transactions_in_commit_order_under_their_own_ids() -> None:
    batch = event(batch_body([encode_member(FIRST), encode_member(SECOND)]))

    assert batch_in([batch]) == [FIRST, SECOND]
    assert at_ms([batch]) > 0


def test_a_write_that_is_logged_first_is_no_batch() -> None:
    assert batch_in([event(write_body(FIRST))]) == []


def test_a_write_of_an_epoch_runs_under_the_id_that_its_coordinator_knows() -> None:
    found = member_of(TxId("client.1"), [event(write_body(FIRST))])

    assert found.tx == "client.1"
    assert found.changes == FIRST.changes
