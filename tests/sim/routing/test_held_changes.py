"""A transaction that failed too often keeps regular changes away; one that is not ended is aborted at its time-out."""

from tests.sim.routing.test_paper_cases import ADVERTISEMENT, ANY, SUBSCRIPTION, Client, Stage, at
from tops.core.routing_tx.site_transactions import HOLD_AFTER, OWN_TURN
from tops.model.ids import NodeId, TxId
from tops.model.routing import TxKind
from tops.sim.routing.apps import TIMEOUT_S
from tops.sim.routing.checkers import tables_agree
from tops.sim.site_app import Script, Sleep

B3 = NodeId("b3")


def publishing(stage: Stage, attempt: int) -> tuple[Client, Client]:
    """A client that publishes in an open transaction, and another one at the same broker that may subscribe."""
    publisher = Client(stage, (ADVERTISEMENT, "ev", ANY))
    subscriber = Client(stage)
    stage.place("c1", publisher, "b3")
    stage.place("c2", subscriber, "b3")
    stage.set_up()

    def script() -> Script:
        tx = yield from publisher.tx_begin(TxKind.ISOLATED, attempt)
        yield from publisher.tx_publish(tx, OWN_TURN, "ev", {"k": 1, "mark": "p1"})
        yield Sleep(1.0)
        yield from publisher.tx_end(tx)

    stage.play(publisher, script(), 0.5)
    return publisher, subscriber


def committed(stage: Stage) -> list[TxId]:
    return [record.tx for record in stage.commits()]


def test_a_regular_subscription_in_between_is_a_conflict() -> None:
    stage = Stage()
    _, subscriber = publishing(stage, attempt=0)

    subscriber.add(SUBSCRIPTION, "ev", at(1))
    stage.advance(stage.clock.now + 2.0)

    assert committed(stage) == []
    assert tables_agree(stage) == []


def test_after_conflicts_in_a_row_a_matching_subscription_is_held_until_the_end() -> None:
    stage = Stage()
    _, subscriber = publishing(stage, attempt=HOLD_AFTER)

    subscriber.add(SUBSCRIPTION, "ev", at(1))
    subscriber.add(SUBSCRIPTION, "ev", at(2))  # is in nobody's way
    stage.advance(stage.clock.now + 0.1)
    held = len(stage.tree(B3).routes.tables.entries)
    stage.advance(stage.clock.now + 2.0)

    assert held == 2
    assert len(committed(stage)) == 1
    assert tables_agree(stage) == []


def test_a_transaction_that_is_not_ended_is_aborted_at_its_timeout() -> None:
    stage = Stage()
    forgetful = Client(stage, (ADVERTISEMENT, "ev", ANY))
    stage.place("c1", forgetful, "b1")
    stage.set_up()

    def script() -> Script:
        tx = yield from forgetful.tx_begin(TxKind.ISOLATED, 0)
        yield from forgetful.tx_add(tx, OWN_TURN, SUBSCRIPTION, "ev", at(1))

    stage.play(forgetful, script(), TIMEOUT_S / 2)
    before = stage.open_work()
    stage.advance(stage.clock.now + TIMEOUT_S)

    assert before
    assert stage.open_work() == []
    assert committed(stage) == []
    assert tables_agree(stage) == []
