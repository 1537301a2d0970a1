"""What a coordinator may say, to whom, and what must be on its disk before."""

import msgspec
import pytest

from tests.core.driven_rendezvous import ME, PUBLISHER, DrivenRendezvous, sent_effects, standing_only
from tests.core.machines import sender
from tops.core.coordinator.open_transactions import Quotas, RendezvousOptions
from tops.model.constraints import AnyConstraint, Deadline, MaxParticipants, MinParticipants, Required
from tops.model.event_types import EventType
from tops.model.filters import Filter
from tops.model.ids import TxId
from tops.model.transactions import Outcome, ScopeLimit, TxType
from tops.protocol.effects import Alarm, Persist, SendTo
from tops.protocol.messages import (
    Address,
    AdvertisementHandled,
    BeginTx,
    CensusPolicy,
    CommitTx,
    EpochFinished,
    GetMembership,
    GetOutcome,
    LogDelivered,
    PrepareEpoch,
    Sender,
    TxOpened,
    TxOutcome,
    TxOutcomes,
    TxSpec,
    TypeAdvertised,
)
from tops.protocol.records import LogAppended, TxRejected


def test_a_void_number_is_on_disk_before_anybody_hears_of_it() -> None:
    rendezvous = DrivenRendezvous()
    rendezvous.stand("v", "set", "replica", position=0)
    rendezvous.feed("v", "replica", 0)
    (prepare,) = sent_effects(rendezvous.one_shot("p.1.1", standing_only("set")), PrepareEpoch)

    effects = rendezvous.vote(prepare, TxId("p.1.1"))

    on_disk = {
        e.record.entry.number: i
        for i, e in enumerate(effects)
        if isinstance(e, Persist) and isinstance(e.record, LogAppended)
    }
    (told,) = [i for i, e in enumerate(effects) if isinstance(e, SendTo) and isinstance(e.message, LogDelivered)]
    assert on_disk[1] < told


@pytest.mark.parametrize("event_type", ["set", "other"])
@pytest.mark.parametrize("constraint", [Deadline(5.0), MaxParticipants(2)])
def test_a_one_shot_that_nobody_is_there_to_commit_aborts_at_once(event_type: str, constraint: AnyConstraint) -> None:
    rendezvous = DrivenRendezvous()

    effects = rendezvous.one_shot("p.1.1", standing_only(event_type, constraint))

    (outcome,) = sent_effects(effects, TxOutcome)
    assert outcome.outcome is Outcome.ABORTED


def test_an_epoch_whose_voters_are_all_gone_aborts_whatever_its_constraints_allow() -> None:
    rendezvous = DrivenRendezvous()
    rendezvous.stand("v", "set", "replica", position=0)
    spec = standing_only("set", MinParticipants(0))
    (prepare,) = sent_effects(rendezvous.one_shot("p.1.1", spec), PrepareEpoch)

    effects = rendezvous.core.on_timer(("epoch", "set", str(prepare.epoch.number)), 5.0)

    (outcome,) = sent_effects(effects, TxOutcome)
    assert outcome.outcome is Outcome.ABORTED


def test_a_standing_answer_for_a_child_type_is_not_asked_about_its_parent() -> None:
    rendezvous = DrivenRendezvous()
    rendezvous.stand("parent", "other", "s1")
    rendezvous.stand("child", "other.child", "s2")

    asked = sent_effects(rendezvous.one_shot("p.1.1", standing_only("other")), PrepareEpoch)

    assert [p.voter for p in asked] == ["parent"]


def test_a_standing_answer_for_a_parent_type_is_asked_about_its_children() -> None:
    rendezvous = DrivenRendezvous()
    rendezvous.stand("parent", "other", "s1")
    rendezvous.stand("child", "other.child", "s2")

    asked = sent_effects(rendezvous.one_shot("p.1.1", standing_only("other.child")), PrepareEpoch)

    assert {p.voter for p in asked} == {"parent", "child"}


def test_two_standing_subscriptions_of_one_site_are_two_participants() -> None:
    rendezvous = DrivenRendezvous()
    rendezvous.stand("one", "other", "s1", subscription=1)
    rendezvous.stand("two", "other", "s1", subscription=2)

    asked = sent_effects(rendezvous.one_shot("p.1.1", standing_only("other")), PrepareEpoch)

    assert {p.voter for p in asked} == {"one", "two"}


def test_a_subscription_that_comes_back_under_a_new_key_replaces_its_former_self() -> None:
    rendezvous = DrivenRendezvous()
    rendezvous.stand("old", "other", "s1")
    rendezvous.stand("new", "other", "s1")

    asked = sent_effects(rendezvous.one_shot("p.1.1", standing_only("other")), PrepareEpoch)

    assert [p.voter for p in asked] == ["new"]


def test_a_transaction_is_not_judged_by_the_voters_of_the_one_before_it() -> None:
    rendezvous = DrivenRendezvous()
    rendezvous.stand("first", "other", "s0")
    busy = sent_effects(rendezvous.one_shot("p.1.1", standing_only("other")), PrepareEpoch)
    rendezvous.stand("one", "other", "s1", wants=Filter.where("key", "in", ["a", "b"]))
    rendezvous.stand("two", "other", "s2", wants=Filter.where("key", "in", ["b"]))
    both = standing_only("other", Required(frozenset(["s1", "s2"])))
    rendezvous.one_shot("p.1.2", msgspec.structs.replace(both, attributes={"key": "a"}))
    rendezvous.one_shot("p.1.3", msgspec.structs.replace(both, attributes={"key": "b"}))

    effects = rendezvous.vote(busy[0], TxId("p.1.1"))

    assert [m.tx for m in sent_effects(effects, PrepareEpoch)[0].members] == [TxId("p.1.3")]
    assert TxId("p.1.2") in {o.tx for o in sent_effects(effects, TxOutcome)}


def test_nobody_is_told_that_a_one_shot_aborted_while_it_is_being_voted_on() -> None:
    rendezvous = DrivenRendezvous()
    rendezvous.stand("v", "other", "s1")
    rendezvous.one_shot("p.1.1", standing_only("other"))
    request = GetMembership(tx=TxId("p.1.1"), event_type="other", voter="local")

    assert not rendezvous.deliver(request, Address(ME, "local", 1))


def test_a_replica_that_is_ahead_of_the_log_never_votes_and_raises_an_alarm() -> None:
    rendezvous = DrivenRendezvous()

    effects = rendezvous.stand("v", "set", "replica", position=3)

    assert [e.kind for e in effects if isinstance(e, Alarm)] == ["journal-stale"]
    assert not sent_effects(rendezvous.one_shot("p.1.1", standing_only("set")), PrepareEpoch)


def local_one_shot() -> TxSpec:
    return TxSpec(event_type="set", tx_type=TxType.LOCAL, limit=ScopeLimit.LOCAL, census=None)


def test_a_local_one_shot_on_a_durable_type_is_logged_once_however_often_it_arrives() -> None:
    rendezvous = DrivenRendezvous()

    first = rendezvous.one_shot("p.1.1", local_one_shot())
    again = rendezvous.one_shot("p.1.1", local_one_shot())

    (entry,) = [e.record.entry for e in first if isinstance(e, Persist) and isinstance(e.record, LogAppended)]
    assert [logged.tx for logged in entry.transactions] == ["p.1.1"]
    assert not any(isinstance(e, Persist) for e in again)
    assert sent_effects(again, TxOutcome) == sent_effects(first, TxOutcome)
    assert sent_effects(first, TxOutcome)[0].log_number == entry.number


def test_a_local_one_shot_that_arrives_after_it_was_said_to_be_aborted_is_not_logged() -> None:
    rendezvous = DrivenRendezvous()
    asked = GetOutcome(tx=TxId("p.1.1"), tx_type=TxType.LOCAL, event_type="set")

    told = rendezvous.core.on_message(asked, sender("p"), Address(ME, "p", 1), 0.0)
    late = rendezvous.one_shot("p.1.1", local_one_shot())

    assert [e.record for e in told if isinstance(e, Persist)] == [TxRejected(tx=TxId("p.1.1"))]
    assert not any(isinstance(e, Persist) for e in late)
    assert [outcome.outcome for outcome in sent_effects(late, TxOutcome)] == [Outcome.ABORTED]


def test_one_shots_that_arrive_together_are_prepared_together_and_their_publisher_hears_of_all_at_once() -> None:
    rendezvous = DrivenRendezvous()
    rendezvous.stand("v", "set", "replica", position=0)
    (prepare,) = sent_effects(
        rendezvous.one_shots(standing_only("set"), "p.1.1", "p.1.2", "p.1.2", "p.1.3"), PrepareEpoch
    )
    rendezvous.vote(prepare, TxId("p.1.2"))

    finished = EpochFinished(epoch=prepare.epoch, voter="v", note=False)
    (told,) = sent_effects(rendezvous.deliver(finished, Address(ME, "v", 1)), TxOutcomes)
    again = rendezvous.one_shots(standing_only("set"), "p.1.1", "p.1.2", "p.1.4")

    assert [m.tx for m in prepare.members] == ["p.1.1", "p.1.2", "p.1.3"]
    assert [o.tx for o in told.outcomes] == ["p.1.1", "p.1.3"]
    assert [o.outcome for o in sent_effects(again, TxOutcome)] == [Outcome.COMMITTED, Outcome.ABORTED]
    assert [m.tx for m in sent_effects(again, PrepareEpoch)[0].members] == ["p.1.4"]


def test_local_one_shots_that_arrive_together_are_one_entry_of_the_log() -> None:
    rendezvous = DrivenRendezvous()
    rendezvous.one_shot("p.1.1", local_one_shot())

    effects = rendezvous.one_shots(local_one_shot(), "p.1.1", "p.1.2", "p.1.3", "p.1.3")

    (entry,) = [e.record.entry for e in effects if isinstance(e, Persist) and isinstance(e.record, LogAppended)]
    (told,) = sent_effects(effects, TxOutcomes)
    assert [logged.tx for logged in entry.transactions] == ["p.1.2", "p.1.3"]
    assert [(o.tx, o.log_number) for o in told.outcomes] == [("p.1.2", entry.number), ("p.1.3", entry.number)]
    assert [(o.tx, o.log_number) for o in sent_effects(effects, TxOutcome)] == [("p.1.1", entry.number - 1)]


@pytest.mark.parametrize(("incarnation", "outcomes"), [(1, []), (7, [Outcome.ABORTED])])
def test_what_a_former_life_opened_is_not_committed_because_its_begin_came_again(
    incarnation: int, outcomes: list[Outcome]
) -> None:
    rendezvous = DrivenRendezvous()
    rendezvous.stand("v", "other", "s1")
    tx = TxId("p.1.1")
    (opened,) = sent_effects(
        rendezvous.deliver(
            BeginTx(tx=tx, spec=TxSpec("other", TxType.DISTRIBUTED, census=CensusPolicy(replies=1))), PUBLISHER
        ),
        TxOpened,
    )
    assert opened.incarnation == 1

    order = CommitTx(tx=tx, tx_type=TxType.DISTRIBUTED, event_type="other", last_sequence=0, incarnation=incarnation)
    effects = rendezvous.deliver(order, PUBLISHER)

    assert [told.outcome for told in sent_effects(effects, TxOutcome)] == outcomes
    assert bool(sent_effects(effects, PrepareEpoch)) is not bool(outcomes)


def test_the_definitions_of_one_identity_have_a_quota_in_bytes() -> None:
    driven = DrivenRendezvous(RendezvousOptions(quotas=Quotas(type_bytes=10_000)))
    greedy, modest = Sender("greedy", "writer", incarnation=1), Sender("modest", "writer", incarnation=1)
    wide = [EventType(f"wide{n}", {f"attribute{n}-{k}": int for k in range(200)}) for n in range(4)]

    told = [
        sent_effects(driven.deliver(TypeAdvertised(definitions=(t,)), PUBLISHER, greedy), AdvertisementHandled)
        for t in wide
    ]
    again = sent_effects(
        driven.deliver(TypeAdvertised(definitions=(wide[0],)), PUBLISHER, greedy), AdvertisementHandled
    )
    other = sent_effects(
        driven.deliver(TypeAdvertised(definitions=(wide[-1],)), PUBLISHER, modest), AdvertisementHandled
    )

    assert not told[0][0].rejection and "10000 bytes" in (told[-1][0].rejection or "")
    assert not again[0].rejection and not other[0].rejection
