"""What a coordinator remembers, and when it may say that something never happened."""

from tests.core.machines import PUBLISHER, address, persisted, sent_messages
from tops.core.commit.outcomes import Outcomes
from tops.model.ids import TxId
from tops.model.rejections import Rejection, RejectionCode
from tops.model.transactions import Outcome
from tops.protocol.effects import Persist, SendTo
from tops.protocol.messages import TxOutcome
from tops.protocol.records import TxRejected

TX = TxId("P.1.1")


def committed(tx: str = TX) -> TxOutcome:
    return TxOutcome(tx=TxId(tx), outcome=Outcome.COMMITTED)


def test_the_publisher_and_whoever_asked_are_told_once_each() -> None:
    outcomes = Outcomes()
    for requester in ("x", "x", "y"):
        assert outcomes.query(TX, address(requester), alive=True) == []

    told = outcomes.settle(committed(), PUBLISHER)

    assert [e.to for e in told if isinstance(e, SendTo)] == [PUBLISHER, address("x"), address("y")]
    assert outcomes.requesters == {}


def test_a_commit_is_told_to_whoever_asks_later_and_an_abort_with_its_reason() -> None:
    outcomes = Outcomes()
    outcomes.settle(committed("P.1.1"), PUBLISHER)
    outcomes.settle(
        TxOutcome(tx=TxId("P.1.2"), outcome=Outcome.ABORTED, rejection=Rejection(RejectionCode.NOT_TAKEN, "full")),
        PUBLISHER,
    )

    first = sent_messages(outcomes.query(TxId("P.1.1"), PUBLISHER, alive=False), TxOutcome)
    second = sent_messages(outcomes.query(TxId("P.1.2"), PUBLISHER, alive=False), TxOutcome)

    assert (first[0].outcome, second[0].outcome, second[0].reason) == (Outcome.COMMITTED, Outcome.ABORTED, "full")


def test_an_unknown_id_is_refused_on_disk_before_it_is_answered_and_once() -> None:
    outcomes = Outcomes()

    effects = outcomes.query(TX, PUBLISHER, alive=False)

    assert isinstance(effects[0], Persist)
    assert effects[0].record == TxRejected(tx=TX)
    assert sent_messages(effects, TxOutcome)[0].outcome is Outcome.ABORTED
    assert outcomes.is_rejected(TX)
    assert persisted(outcomes.query(TX, PUBLISHER, alive=False), TxRejected) == []


def test_one_that_is_alive_is_never_called_aborted() -> None:
    outcomes = Outcomes()

    assert outcomes.query(TX, PUBLISHER, alive=True) == []
    assert not outcomes.is_rejected(TX)


def test_between_the_decision_and_its_end_the_answer_waits_for_the_end() -> None:
    outcomes = Outcomes()
    outcomes.remember(committed())

    assert outcomes.query(TX, address("x"), alive=True) == []
    told = sent_messages(
        outcomes.settle(TxOutcome(tx=TX, outcome=Outcome.COMMITTED, pending=("C",)), PUBLISHER), TxOutcome
    )

    assert [o.pending for o in told] == [("C",), ("C",)]


def test_what_may_have_been_forgotten_is_unknown_and_never_aborted() -> None:
    """Presuming abort for an id that was committed long ago would be a lie."""
    outcomes = Outcomes(keep_max=2)
    for counter in range(1, 5):
        outcomes.settle(committed(f"P.1.{counter}"), None)

    old = sent_messages(outcomes.query(TxId("P.1.1"), PUBLISHER, alive=False), TxOutcome)[0]
    new = sent_messages(outcomes.query(TxId("P.1.9"), PUBLISHER, alive=False), TxOutcome)[0]
    other_incarnation = sent_messages(outcomes.query(TxId("P.2.1"), PUBLISHER, alive=False), TxOutcome)[0]

    assert (old.outcome, new.outcome, other_incarnation.outcome) == (Outcome.UNKNOWN, Outcome.ABORTED, Outcome.ABORTED)


def test_whatever_ended_or_was_refused_comes_too_late_to_begin() -> None:
    outcomes = Outcomes()
    outcomes.settle(committed("P.1.1"), None)
    outcomes.settle(TxOutcome(tx=TxId("P.1.2"), outcome=Outcome.ABORTED), None)
    outcomes.reject(TxId("P.1.3"))

    assert [outcomes.is_rejected(TxId(f"P.1.{n}")) for n in (1, 2, 3, 4)] == [True, True, True, False]


def test_an_abort_that_is_no_longer_remembered_comes_too_late_to_begin_and_is_still_an_abort() -> None:
    outcomes = Outcomes(keep_max=1)
    for counter in (1, 2):
        outcomes.settle(TxOutcome(tx=TxId(f"P.1.{counter}"), outcome=Outcome.ABORTED), None)

    assert [outcomes.is_rejected(TxId(f"P.1.{n}")) for n in (1, 2, 3)] == [True, True, False]
    (told,) = sent_messages(outcomes.query(TxId("P.1.1"), PUBLISHER, alive=False), TxOutcome)
    assert told.outcome is Outcome.ABORTED


def test_what_is_forgotten_is_remembered_once_per_origin_however_often_it_was_restarted() -> None:
    outcomes = Outcomes(keep_max=1)
    for incarnation in range(1, 200):
        outcomes.remember(committed(f"P.{incarnation}.1"))

    assert len(outcomes.truncated) == 1
    for early in ("P.1.1", "P.197.5", "P.198.1"):
        told = sent_messages(outcomes.query(TxId(early), PUBLISHER, alive=False), TxOutcome)
        assert told[0].outcome is Outcome.UNKNOWN
    fresh = sent_messages(outcomes.query(TxId("P.198.2"), PUBLISHER, alive=False), TxOutcome)
    assert fresh[0].outcome is Outcome.ABORTED


def test_what_may_be_forgotten_survives_in_the_journal_as_it_was() -> None:
    outcomes, later = Outcomes(keep_max=1), Outcomes()
    for tx in ("P.7.1", "P.7.2", "with.dots.3.9", "with.dots.3.10"):
        outcomes.remember(committed(tx))

    for incarnation, counter in outcomes.incarnations([TxId("Q.1.5"), TxId("P.7.1")]).items():
        later.forget(TxId(f"{incarnation}.{counter}"))

    assert outcomes.truncated == {"P": (7, 2), "with.dots": (3, 9)}
    assert later.truncated == {"P": (7, 2), "with.dots": (3, 10), "Q": (1, 5)}, "what is remembered is dropped, too"
