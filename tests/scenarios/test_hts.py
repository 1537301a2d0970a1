"""What the Hermes Transaction Service promises, by the section of its paper."""

import msgspec
import pytest

from tests.scenarios.cluster import Cluster, Participant, content_of
from tops.model.constraints import MaxParticipants, MinParticipants
from tops.model.errors import TransactionAborted, UncheckedTransaction
from tops.model.ids import NodeId, TxId
from tops.model.rejections import Rejection, RejectionCode
from tops.model.transactions import Outcome, Scope, ScopeLimit
from tops.protocol.effects import AbortTxCall, CommitTxCall, Effect, PrepareTx
from tops.protocol.messages import (
    Address,
    CensusPolicy,
    CensusReplied,
    DecisionRelayed,
    EpochDecided,
    EpochVoted,
    GetEpochOutcome,
    GetMembership,
    LinkMessage,
    QueryPeers,
    Sender,
    StandingRegistered,
    TxAbandoned,
    TxBegan,
    TxPublished,
)
from tops.sim.databases import CallbackDatabase


def two_subscribers(*, compensatable: bool = False) -> tuple[Cluster, Participant, Participant]:
    cluster = Cluster("P", "S", "T")
    cluster["P"].advertise("plain")
    return cluster, cluster["S"].subscribe("plain", compensatable=compensatable), cluster["T"].subscribe("plain")


def lose_for(cluster: Cluster, site: str, kind: type) -> None:
    """Messages of this kind never reach that site."""

    def lost(owner: NodeId, peer: NodeId, message: LinkMessage) -> bool:
        return peer == site and isinstance(content_of(message), kind)

    cluster.lose(lost)


def sent(cluster: Cluster, kind: type) -> list[tuple[str, str]]:
    """From here on, who sends letters of this kind over which link."""
    found: list[tuple[str, str]] = []

    def look(owner: NodeId, peer: NodeId, message: LinkMessage) -> bool:
        if isinstance(content_of(message), kind):
            found.append((owner, peer))
        return False

    cluster.lose(look)
    return found


# ------------------------------------------------------------------------------------------------------ 4.1: the census


def test_4_1_a_census_closes_when_its_time_is_over() -> None:
    cluster, s, t = two_subscribers()
    t.holds = {"JoinTx"}

    tx = cluster["P"].begin("plain", census=CensusPolicy(timeout_s=0.4))
    t.release()
    cluster["P"].publish("plain", "one", tx=tx)
    cluster["P"].commit(tx)
    cluster.settle()

    assert s.committed(tx) == ("one",)
    assert t.committed(tx) is None
    assert t.seen(tx) == []
    cluster.check()


def test_4_1_a_census_closes_with_enough_replies() -> None:
    cluster, s, t = two_subscribers()

    begun = cluster["P"].begin_soon("plain", census=CensusPolicy(timeout_s=30.0, replies=2))

    cluster.within(1.0, lambda: begun.done, "the census goes on")
    cluster["P"].commit(begun.result())
    assert s.asked("CommitTxCall") == t.asked("CommitTxCall") == 1
    cluster.check()


@pytest.mark.parametrize("when_met", [True, False])
def test_4_1_a_census_closes_as_soon_as_the_constraints_are_met_if_asked_to(when_met: bool) -> None:
    cluster, _, _ = two_subscribers()
    policy = CensusPolicy(timeout_s=3.0, when_met=when_met)

    begun = cluster["P"].begin_soon("plain", census=policy, constraints=(MinParticipants(2),))

    if when_met:
        cluster.within(1.0, lambda: begun.done, "the census goes on")
    else:
        cluster.run(1.0)
        assert not begun.done
    cluster["P"].abort(begun.result())
    cluster.check()


def test_4_1_the_published_list_holds_hashes_and_no_pseudonym() -> None:
    cluster, _, _ = two_subscribers()
    replies: list[str] = []
    lists: list[frozenset[str]] = []

    def look(owner: NodeId, peer: NodeId, message: LinkMessage) -> bool:
        content = content_of(message)
        if isinstance(content, CensusReplied):
            replies.append(content.pseudonym)
        if isinstance(content, TxBegan):
            lists.append(content.members)
        return False

    cluster.lose(look)
    cluster["P"].abort(cluster["P"].begin("plain"))
    cluster["P"].abort(cluster["P"].begin("plain"))

    assert len(set(replies)) == 4  # two participants, two transactions, a fresh one each time
    assert all(len(members) == 2 and members.isdisjoint(replies) for members in lists)
    cluster.check()


def test_4_1_who_is_compensatable_is_told_to_nobody() -> None:
    for kind in (CensusReplied, StandingRegistered, EpochVoted):
        assert not [f for f in msgspec.structs.fields(kind) if "compens" in f.name]


def test_4_3_the_vote_of_one_who_is_no_member_is_ignored() -> None:
    """Without the check of membership the stranger's NO would end the transaction."""
    cluster, s, t = two_subscribers()
    tx = cluster["P"].begin("plain", constraints=(MaxParticipants(2), MinParticipants(2)))
    s.holds = {"PrepareTx"}
    ending = cluster["P"].commit_soon(tx)
    cluster.run(0.3)
    broker = cluster.broker(cluster.rendezvous("plain"))
    epoch = next(iter(broker.core.rendezvous.epochs["plain"].in_flight.values()))

    forged = EpochVoted(
        epoch=epoch.id,
        digest=epoch.digest,
        voter="stranger",
        excluded={tx: Rejection(RejectionCode.PARTICIPANT_FAILED, "because")},
    )
    stranger, at = Sender("stranger", "writer", incarnation=1), Address(NodeId("b1"), "stranger", 1)
    broker.act(lambda: broker.core.rendezvous.on_message(forged, stranger, at, cluster.world.clock.now))
    s.release()

    assert ending.result().outcome is Outcome.COMMITTED
    assert s.committed(tx) == t.committed(tx) == ()
    cluster.check()


# ----------------------------------------------------------------------------------------- 4.2: the transaction phase


def test_4_2_a_participant_that_fails_early_aborts_the_transaction_at_once() -> None:
    cluster, s, t = two_subscribers()
    s.rejects = {"one"}

    tx = cluster["P"].begin("plain", limit=ScopeLimit.DISTRIBUTED)
    cluster["P"].publish("plain", "one", tx=tx)

    cluster.within(0.3, lambda: cluster["P"].told(tx) == [False], "the publisher was not told")
    cluster.within(0.3, lambda: t.asked("AbortTxCall", tx) == 1, "the other was not told")
    assert s.asked("PrepareTx") == t.asked("PrepareTx") == 0
    with pytest.raises(TransactionAborted, match="one can't be processed"):
        cluster["P"].publish("plain", "two", tx=tx)
    cluster.check()


def test_4_2_events_of_a_private_transaction_reach_participants_only() -> None:
    cluster, s, t = two_subscribers()
    t.scope = Scope.NONE
    events = sent(cluster, TxPublished)

    tx = cluster["P"].begin("plain")
    cluster["P"].publish("plain", "one", tx=tx)
    cluster["P"].commit(tx)

    assert s.seen(tx) == ["one"]
    assert t.seen(tx) == []
    assert not [peer for _, peer in events if peer == "T"]  # held back by its broker, not by its own good will
    cluster.check()


def test_3_1_an_event_is_delivered_again_before_its_failure_counts() -> None:
    cluster = Cluster("P")
    cluster.world.site_options = msgspec.structs.replace(cluster.world.site_options, delivery_attempts=3)
    cluster["P"].advertise("plain")
    s = cluster.join("S", "b2").subscribe("plain")
    s.rejects = {"one"}
    tx = cluster["P"].begin("plain")

    s.holds = {"NotifyTx"}
    cluster["P"].publish("plain", "one", tx=tx)
    cluster.run(0.2)
    s.release()
    cluster.run(0.2)

    assert s.asked("NotifyTx", tx) == 3
    with pytest.raises(TransactionAborted):
        cluster["P"].commit(tx)
    cluster.check()


# -------------------------------------------------------------------------------------------------- 4.3: the commitment


@pytest.mark.parametrize("fails", [False, True], ids=["commit", "abort"])
def test_4_3_compensatable_and_other_participants_share_one_transaction_and_its_end(fails: bool) -> None:
    cluster = Cluster("P", "early", "late", "third")
    cluster["P"].advertise("plain")
    early = cluster["early"].subscribe("plain", compensatable=True)
    late, third = cluster["late"].subscribe("plain"), cluster["third"].subscribe("plain")
    third.holds = {"PrepareTx"}

    tx = cluster["P"].begin("plain")
    cluster["P"].publish("plain", "one", tx=tx)
    cluster["P"].publish("plain", "two", tx=tx)
    ending = cluster["P"].commit_soon(tx)
    # At prepare, before any decision:
    cluster.within(0.5, lambda: early.committed(tx) == ("one", "two"), "nothing is committed early")
    assert late.committed(tx) is None
    third.rejects_prepare = fails
    third.release()
    ending.wait()
    cluster.settle()

    if fails:
        assert isinstance(ending.failure(), TransactionAborted)
        assert early.committed(tx) is late.committed(tx) is None
        assert early.compensated(tx) == ("two", "one")
        assert late.compensated(tx) is None
    else:
        assert ending.result().outcome is Outcome.COMMITTED
        assert early.committed(tx) == late.committed(tx) == third.committed(tx) == ("one", "two")
        assert early.compensated(tx) is None
    cluster.check()


@pytest.mark.parametrize("moment", ["prepared", "before compensation", "after compensation"])
def test_5_5_compensation_runs_once_and_backwards_whatever_moment_the_site_crashes(moment: str) -> None:
    """The early commit and the events consumed are one durable record; without it nothing would be undone, and
    without forgetting it together with the compensation, it would be undone twice."""
    cluster = Cluster("P", "early", "late")
    cluster["P"].advertise("plain")
    early, late = cluster["early"].subscribe("plain", compensatable=True), cluster["late"].subscribe("plain")
    late.holds = {"PrepareTx"}
    late.rejects_prepare = True
    tx = cluster["P"].begin("plain")
    for mark in ("one", "two", "three"):
        cluster["P"].publish("plain", mark, tx=tx)
    ending = cluster["P"].commit_soon(tx)
    cluster.run(0.5)
    assert early.prepared()

    if moment == "before compensation":
        cluster.kill_when("early", lambda effect: isinstance(effect, AbortTxCall))
    if moment == "prepared":
        cluster.kill("early")
    late.release()
    if moment == "after compensation":
        cluster.until(lambda: early.compensated(tx) is not None, "nothing was compensated")
        cluster.kill("early")
    ending.failure()
    cluster.run(1.0)
    cluster.restart("early")
    cluster.settle()

    assert early.compensated(tx) == ("three", "two", "one")
    assert early.committed(tx) is None
    assert not early.prepared()
    cluster.check()


# ---------------------------------------------------------------------------------------- 5.6: late and lost messages


def test_5_6_a_late_vote_raises_unchecked_and_waiting_again_commits() -> None:
    cluster, s, t = two_subscribers()
    s.holds = {"PrepareTx"}
    tx = cluster["P"].begin("plain", vote_timeout_s=0.5)
    cluster["P"].publish("plain", "one", tx=tx)

    for _ in range(3):
        with pytest.raises(UncheckedTransaction) as unchecked:
            cluster["P"].wait(tx)
        assert unchecked.value.missing == 1
    waiting = cluster["P"].commit_soon(tx)
    s.release()

    assert waiting.result().outcome is Outcome.COMMITTED
    assert s.committed(tx) == t.committed(tx) == ("one",)
    cluster.check()


def test_5_6_a_publisher_that_will_not_wait_any_longer_aborts_an_unchecked_transaction() -> None:
    cluster, s, t = two_subscribers()
    s.holds = {"PrepareTx"}
    tx = cluster["P"].begin("plain", vote_timeout_s=0.5)

    with pytest.raises(UncheckedTransaction):
        cluster["P"].commit(tx)
    outcome = cluster["P"].abort(tx, "waited long enough")
    s.release()
    cluster.settle()

    assert (outcome.outcome, outcome.reason) == (Outcome.ABORTED, "waited long enough")
    assert s.committed(tx) is t.committed(tx) is None
    cluster.check()


def test_5_6_a_participant_that_misses_an_event_votes_no() -> None:
    """Prepare carries the last sequence number; without it the participant would commit less than the others."""
    cluster, _, t = two_subscribers()
    lose_for(cluster, "S", TxPublished)
    tx = cluster["P"].begin("plain")
    cluster["P"].publish("plain", "one", tx=tx)

    with pytest.raises(TransactionAborted, match="0 of 1 events arrived"):
        cluster["P"].commit(tx)
    cluster.settle()

    assert t.committed(tx) is None
    cluster.check()


def test_5_6_in_doubt_in_the_census_a_subscriber_asks_and_takes_part() -> None:
    cluster, s, t = two_subscribers()
    lose_for(cluster, "S", TxBegan)
    tx = cluster["P"].begin("plain")
    requests = sent(cluster, GetMembership)
    cluster.run(3.0)  # longer than a participant bears silence
    cluster.lose_nothing()

    cluster["P"].publish("plain", "one", tx=tx)
    outcome = cluster["P"].commit(tx)

    assert ("S", cluster.world.network.homes[NodeId("S")]) in requests
    assert outcome.outcome is Outcome.COMMITTED
    assert s.committed(tx) == t.committed(tx) == ("one",)
    cluster.check()


def test_5_6_in_doubt_in_the_transaction_a_participant_asks_and_rolls_back() -> None:
    cluster, s, t = two_subscribers()
    tx = cluster["P"].begin("plain")
    cluster["P"].publish("plain", "one", tx=tx)
    cluster.run(0.2)
    lose_for(cluster, "S", TxAbandoned)

    cluster["P"].abort(tx)
    cluster.run(0.2)
    assert isinstance(s.database, CallbackDatabase)
    assert tx in s.database.running
    cluster.run(4.0)

    assert tx not in s.database.running
    assert s.asked("AbortTxCall", tx) == t.asked("AbortTxCall", tx) == 1
    cluster.check()


def test_5_6_in_doubt_in_the_commitment_a_participant_asks_the_coordinator() -> None:
    cluster, s, t = two_subscribers()
    tx = cluster["P"].begin("plain")
    requests = sent(cluster, GetEpochOutcome)
    first = [True]

    def lost(owner: NodeId, peer: NodeId, message: LinkMessage) -> bool:
        if peer == "S" and isinstance(content_of(message), EpochDecided) and first:
            first.clear()
            return True
        return False

    cluster.lose(lost)
    outcome = cluster["P"].commit(tx)

    assert outcome.outcome is Outcome.COMMITTED
    assert [owner for owner, _ in requests if owner == "S"]
    assert s.committed(tx) == t.committed(tx) == ()
    cluster.check()


def in_doubt_without_coordinator(*, received_by_peer: bool) -> tuple[Cluster, TxId, Participant, Participant]:
    """S has promised, and the coordinator dies before S hears; T has heard the decision or not."""
    cluster, s, t = coordinator_elsewhere()
    tx = cluster["P"].begin("plain")
    lose_for(cluster, "S", EpochDecided)
    if not received_by_peer:
        lose_for(cluster, "T", EpochDecided)
    cluster["P"].commit_soon(tx)
    if received_by_peer:
        cluster.until(lambda: t.committed(tx) is not None, "the peer never heard")
    else:
        cluster.run(0.3)
    cluster.kill(cluster.rendezvous("plain"))
    return cluster, tx, s, t


def coordinator_elsewhere() -> tuple[Cluster, Participant, Participant]:
    """All sites at brokers that survive the coordinator, in a mesh, so that they can still talk."""
    cluster = Cluster(brokers=4, shape="mesh")
    others = [b for b in cluster.world.topology.brokers if b != cluster.rendezvous("plain")]
    for name, broker in zip(("P", "S", "T"), others, strict=True):
        cluster.join(name, broker)
    cluster["P"].advertise("plain")
    return cluster, cluster["S"].subscribe("plain"), cluster["T"].subscribe("plain")


def test_5_6_in_doubt_without_a_coordinator_a_peer_that_heard_the_decision_ends_it() -> None:
    cluster, tx, s, t = in_doubt_without_coordinator(received_by_peer=True)
    answers = sent(cluster, DecisionRelayed)

    cluster.run(3.0)

    assert t.committed(tx) == ()
    assert s.committed(tx) == ()
    assert answers
    cluster.restart(cluster.rendezvous("plain"))
    cluster.check()


def test_5_6_in_doubt_peers_that_have_only_promised_stay_silent_and_nobody_guesses() -> None:
    """A peer that inferred an abort from its own ignorance would contradict the commit on the coordinator's disk."""
    cluster, tx, s, t = in_doubt_without_coordinator(received_by_peer=False)
    requests, answers = sent(cluster, QueryPeers), sent(cluster, DecisionRelayed)

    cluster.run(5.0)

    assert requests
    assert not answers
    assert s.prepared()
    assert t.prepared()
    cluster.lose_nothing()
    cluster.restart(cluster.rendezvous("plain"))
    cluster.settle()
    assert s.committed(tx) == t.committed(tx) == ()
    cluster.check()


@pytest.mark.parametrize("call", [PrepareTx, CommitTxCall])
def test_a_participant_that_crashes_around_its_promise_ends_like_the_others(call: type[Effect]) -> None:
    """Before its promise a crash is a NO; after it, the promise is found again and the decision asked for."""
    cluster, s, t = two_subscribers()
    tx = cluster["P"].begin("plain")
    cluster["P"].publish("plain", "one", tx=tx)
    cluster.kill_when("S", lambda effect: isinstance(effect, call))

    ending = cluster["P"].commit_soon(tx)
    cluster.run(3.0)
    cluster.restart("S")
    cluster.settle()

    if call is PrepareTx:
        assert isinstance(ending.failure(), TransactionAborted)
        assert s.committed(tx) is t.committed(tx) is None
    else:
        assert ending.result().outcome is Outcome.COMMITTED
        assert s.committed(tx) == t.committed(tx) == ("one",)
    cluster.check()
