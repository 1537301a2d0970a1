"""Bad input: refused with one family of errors that say what was wrong, and nothing half-done stays behind."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.scenarios.cluster import Cluster, Participant
from tops.model.constraints import MinParticipants
from tops.model.errors import (
    InvalidEvent,
    InvalidEventType,
    InvalidFilter,
    InvalidTransaction,
    NotAdvertised,
    Retry,
    TopsError,
    TransactionClosed,
    UnknownTransaction,
)
from tops.model.event_types import EventType
from tops.model.filters import Filter
from tops.model.ids import TxId
from tops.model.transactions import Access, LocalOutcome, Outcome, Scope, ScopeLimit, TxType
from tops.protocol.messages import Event
from tops.sim.databases import CallbackDatabase


def cluster_of() -> tuple[Cluster, Participant]:
    cluster = Cluster("P", "S")
    cluster["P"].advertise("plain", "set")
    return cluster, cluster["S"].subscribe("plain")


def untouched(cluster: Cluster, participant: Participant) -> None:
    """Nobody has heard of anything, and nothing is open."""
    cluster.run(1.0)
    assert participant.calls == []
    assert participant.seen() == []
    assert cluster["P"].node.core.transactions == {}
    assert cluster.world.open_work() == []


def test_publishing_a_type_that_was_not_advertised_names_it_and_the_remedy() -> None:
    cluster, participant = cluster_of()

    with pytest.raises(NotAdvertised, match=r"'other'.*advertise"):
        cluster["P"].publish("other", "one")
    untouched(cluster, participant)


@pytest.mark.parametrize("verb", ["begin", "execute"])
def test_a_transaction_on_a_type_that_was_not_advertised_is_refused(verb: str) -> None:
    cluster, participant = cluster_of()

    with pytest.raises(NotAdvertised):
        _ = cluster["P"].begin("other") if verb == "begin" else cluster["P"].execute("other", ["one"])
    untouched(cluster, participant)


@pytest.mark.parametrize(
    ("body", "attribute"),
    [
        ({"key": 7}, "key"),
        ({"bad": "yes"}, "bad"),
        ({"unheard": "of"}, "unheard"),
        ({"key": None}, "key"),
        ({"key": "\ud800"}, "key"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("where", ["outside", "inside", "one-shot"])
def test_an_event_that_does_not_fit_its_type_is_refused_at_the_publisher(
    body: dict[str, Any], attribute: str, where: str
) -> None:
    cluster, participant = cluster_of()
    p = cluster["P"]
    tx = p.begin("plain") if where == "inside" else None
    asked = len(participant.calls)

    if where == "one-shot":
        rejected = p.execute_soon("plain", ["one"], with_body=body).failure()
    else:
        rejected = p.publish_soon("plain", "one", tx=tx, **body).failure()

    assert isinstance(rejected, InvalidEvent)
    assert rejected.attribute == attribute
    assert f"'{attribute}'" in str(rejected)
    assert rejected.retry is Retry.NEVER
    if tx is not None:  # the transaction goes on without it
        p.publish("plain", "two", tx=tx)
        assert cluster.world.history.transactions[tx].marks.pop(0) == "one"
        p.commit(tx)
        assert participant.committed(tx) == ("two",)
    else:
        cluster.run(1.0)
        assert len(participant.calls) == asked
    cluster.check()


def test_a_missing_attribute_is_named() -> None:
    cluster, _ = cluster_of()
    core = cluster["P"].node.core

    rejected = cluster["P"].request(lambda request: core.publish(request, Event("plain", {"key": "a"})))

    assert isinstance(rejected.failure(), InvalidEvent)
    assert "'mark'" in str(rejected.failure())


@pytest.mark.parametrize("verb", ["publish", "commit", "abort"])
def test_an_unknown_transaction_id_is_refused_by_every_verb(verb: str) -> None:
    cluster, participant = cluster_of()
    p, nobody = cluster["P"], TxId("nobody.1.1")
    verbs: dict[str, Callable[[], object]] = {
        "publish": lambda: p.publish("plain", "one", tx=nobody),
        "commit": lambda: p.commit(nobody),
        "abort": lambda: p.abort(nobody),
    }

    with pytest.raises(UnknownTransaction, match=r"nobody\.1\.1"):
        verbs[verb]()
    untouched(cluster, participant)


def test_the_outcome_of_an_id_that_was_never_begun_is_aborted() -> None:
    cluster, _ = cluster_of()

    assert cluster["P"].outcome(TxId("nobody.1.1"), "plain").outcome is Outcome.ABORTED
    cluster.check()


STRANGE_IDS = ["no dots at all", "", "P.1.x", "P.1.-1", "P.1.\N{SUPERSCRIPT TWO}", f"P.1.{'9' * 5000}"]


@pytest.mark.parametrize("tx", STRANGE_IDS, ids=lambda tx: repr(tx[:20]))
def test_an_id_that_nobody_can_have_made_is_never_committed_and_stops_nobody(tx: str) -> None:
    cluster, participant = cluster_of()

    assert cluster["P"].outcome(TxId(tx), "plain").outcome is not Outcome.COMMITTED
    kept = cluster["P"].begin("plain")
    cluster["P"].commit(kept)
    assert participant.committed(kept) == ()
    cluster.check()


def test_a_question_about_a_type_that_nobody_knows_is_refused() -> None:
    cluster, _ = cluster_of()

    with pytest.raises(InvalidEventType, match="'unheard of' is not known here"):
        cluster["P"].outcome(TxId("P.1.1"), "unheard of")
    cluster.run(3.0)
    assert cluster["P"].node.core.outcome_queries == {}  # asked again for ever, it would raise for ever


@pytest.mark.parametrize(
    "properties",
    [
        {"tx_type": TxType.LOCAL, "limit": ScopeLimit.DISTRIBUTED},
        {"tx_type": TxType.LOCAL, "local_outcome": LocalOutcome.FOLLOWS},
        {"tx_type": TxType.LOCAL, "constraints": (MinParticipants(1),)},
    ],
    ids=["limit", "follows", "constraints"],
)
@pytest.mark.parametrize("access", Access)
def test_properties_that_contradict_each_other_are_refused_at_begin(properties: dict[str, Any], access: Access) -> None:
    cluster, participant = cluster_of()

    with pytest.raises(InvalidTransaction):
        cluster["P"].begin("plain", access=access, **properties)
    untouched(cluster, participant)


def test_using_a_transaction_after_its_end_says_how_it_ended() -> None:
    cluster, participant = cluster_of()
    p = cluster["P"]
    kept, given_up = p.begin("plain"), p.begin("plain")
    p.commit(kept)
    p.abort(given_up, "changed its mind")

    with pytest.raises(TransactionClosed, match="committed"):
        p.publish("plain", "late", tx=kept)
    with pytest.raises(TopsError, match="changed its mind"):
        p.publish("plain", "late", tx=given_up)
    with pytest.raises(TopsError, match="changed its mind"):
        p.commit(given_up)
    assert p.abort(kept).outcome is Outcome.COMMITTED
    assert participant.committed(kept) == ()


def test_a_filter_that_cannot_be_evaluated_on_the_type_is_refused() -> None:
    cluster, _ = cluster_of()

    with pytest.raises(InvalidFilter):
        cluster["S"].subscribe("plain", where=Filter.where("unheard", "=", 1))
    with pytest.raises(InvalidFilter):
        cluster["S"].subscribe("plain", where=Filter.where("key", "=", 1))
    assert len(cluster["S"].node.core.participation.subscriptions) == 1


@pytest.mark.parametrize(
    "start", ["yesterday", "", "-3", "1.5", "\N{SUPERSCRIPT TWO}", "9" * 5000], ids=lambda s: repr(s[:9])
)
def test_a_durable_subscription_that_starts_nowhere_is_refused(start: str) -> None:
    cluster, _ = cluster_of()

    with pytest.raises(TopsError, match="can't start at"):
        cluster["S"].subscribe("set", durable="reader", start=start)
    cluster.check()


@pytest.mark.parametrize(("start", "expected"), [("0", [1, 2, 3]), ("9", [3])])
def test_a_start_outside_of_the_log_means_its_nearer_end(start: str, expected: list[int]) -> None:
    cluster = Cluster("P", "S")
    cluster["P"].advertise("log")
    cluster["P"].publish("log", "one")
    cluster["P"].publish("log", "two")
    reader = cluster["S"].subscribe("log", durable="reader", start=start)
    cluster.run(1.0)

    cluster["P"].publish("log", "three")
    cluster.run(1.0)

    assert isinstance(reader.database, CallbackDatabase)
    assert reader.database.taken == expected


def test_another_definition_under_a_known_name_is_refused_where_the_type_lives() -> None:
    cluster, _ = cluster_of()
    cluster.types["plain"] = (EventType("plain", {"something": int}),)

    with pytest.raises(InvalidEventType, match="plain"):
        cluster["S"].advertise("plain")
    other = cluster.join("Q", "b2")
    with pytest.raises(InvalidEventType, match="plain"):
        other.advertise("plain")
    assert cluster["P"].publish("plain", "one") is None


def test_ending_a_subscription_that_does_not_exist_changes_nothing() -> None:
    cluster, _ = cluster_of()
    site = cluster["S"].node

    assert site.core.unsubscribe(99) == []
    assert site.core.participant_abort(99, TxId("P.1.1"), "because") == []
    assert site.core.call_done(12345, None) == []


def test_a_standing_answer_of_a_type_the_coordinator_does_not_know_counts_for_nothing() -> None:
    cluster = Cluster("P", "S")
    cluster["P"].advertise("plain")

    rejected = cluster["P"].execute_soon("plain", ["one"], census=None, constraints=(MinParticipants(1),))

    assert "0 of at least 1" in str(rejected.failure())
    cluster["S"].subscribe("plain", Scope.DISTRIBUTED, standing=True)
    assert cluster["P"].execute("plain", ["two"], census=None).outcome is Outcome.COMMITTED
    cluster.check()


def test_every_error_tells_what_is_safe_to_do_next() -> None:
    family = [TopsError]
    for kind in family:
        family += [k for k in kind.__subclasses__() if k not in family]

    assert len(family) > 15
    assert all(isinstance(kind.retry, Retry) for kind in family)
    assert all(kind.__doc__ for kind in family)
