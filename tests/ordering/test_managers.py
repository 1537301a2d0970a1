"""Topic managers, step by step: changes that are late, managers that have lost their memory, changes under way."""

from tests.ordering.driven import Driven, spread
from tops.model.ids import NodeId
from tops.protocol.messages import Address, KnownSubscription, StageStarted

BOTH = {"j": ("T1", "T2"), "k": ("T1", "T2")}


def test_an_older_version_of_a_subscription_is_ignored() -> None:
    cluster = Driven(spread("T1", "T2"), subscribers=BOTH)
    managers = cluster.brokers[NodeId("b1")].domains["d"].managers
    assert managers is not None
    subscriber = Address(NodeId("b1"), "j", 1)
    version = managers.groups.known[subscriber].version

    assert not managers.groups.store(KnownSubscription(subscriber, 1, version - 1, (0,)))
    assert managers.groups.store(KnownSubscription(subscriber, 1, version, (0, 1))), "a repetition passes"
    assert managers.groups.known[subscriber].topics == (0, 1)


def test_the_first_event_after_a_change_has_the_types_of_the_group_before_it() -> None:
    cluster = Driven(spread("T1", "T2"), subscribers=BOTH)

    cluster["k"].unsubscribe("T2")
    cluster.run()
    for name in ("first", "second"):
        cluster.publish("T1", name)
        cluster.run()

    assert set(cluster.timestamps["first"]) == {0, 1}
    assert set(cluster.timestamps["second"]) == {0}


def test_a_stage_that_lost_its_memory_numbers_nothing_before_the_stage_below_has_told() -> None:
    cluster = Driven(spread("T1", "T2"), subscribers=BOTH)
    cluster.restart("b1")
    chain = (("b2", "b1"),)

    cluster.publish("T1", "e")
    cluster.run(without=chain)
    assert "e" not in cluster.timestamps
    cluster.run()

    assert cluster.timestamps["e"][1] == (1 << 10) + 1, "what had passed before the restart is before it"


def test_an_event_whose_line_was_lost_gets_a_new_index_and_its_old_one_is_skipped() -> None:
    cluster = Driven(spread("T1", "T2"), subscribers=BOTH)
    cluster.publish("T2", "e")
    cluster.lines.clear()  # it is lost with the stage above
    cluster.restart("b1")
    cluster.run()
    cluster["j"].take_all()

    assert cluster["j"].received == ["e"]
    assert cluster["j"].module.held[1].clock == (1 << 10) + 3, "two indexes after the first event"


def test_a_start_that_is_known_is_answered_and_changes_nothing() -> None:
    cluster = Driven(spread("T1", "T2"), subscribers=BOTH)
    domain = cluster.brokers[NodeId("b2")].domains["d"]
    managers = domain.managers
    assert managers is not None
    before = dict(managers.groups.known)

    effects = domain.on_started(StageStarted(domain="d", incarnation=1), NodeId("b1"))

    assert len(effects) == 1
    assert managers.groups.known == before


def test_an_event_that_names_a_new_type_waits_for_the_cut_and_others_do_not() -> None:
    cluster = Driven(spread("T1", "T2", "T3"), subscribers={"j": ("T1", "T2"), "k": ("T1",), "m": ("T1", "T2")})
    cluster["k"].subscribe("T2")
    cluster.pass_on("k", "b1")
    cluster.run(without=(("b1", "k"),))  # the cut is made, and has not arrived
    cluster.publish("T1", "behind the cut")
    cluster.run(without=(("b1", "k"),))

    cluster["k"].take_all()
    assert cluster["k"].received == []
    cluster.run()

    assert cluster["k"].received == ["behind the cut"]
