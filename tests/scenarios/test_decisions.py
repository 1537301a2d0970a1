"""Who may decide and say what, who aborts whom, and what a death means."""

from typing import Any

import pytest

from tests.scenarios.cluster import Cluster, Participant, content_of
from tops.core.commit.epochs import EpochCoordinator
from tops.core.commit.outcomes import Outcomes
from tops.model.constraints import MinParticipants
from tops.model.errors import CensusUnfulfilled, TransactionAborted, TransactionClosed
from tops.model.filters import Filter
from tops.model.ids import NodeId, TxId, hashed, standing_pseudonym
from tops.model.transactions import Access, LocalOutcome, Outcome, Scope, ScopeLimit, TxType
from tops.protocol.messages import (
    GetEpochOutcome,
    LinkMessage,
    RunOneShot,
    StandingAccepted,
    StandingRegistered,
    TxBegan,
    TxPublished,
)
from tops.protocol.records import TxRejected
from tops.sim.checkers import violations
from tops.sim.databases import CallbackDatabase

TX = TxId("P.1.1")  # the first transaction of the publisher's first life


def cluster_of(*names: str, scope: Scope = Scope.DISTRIBUTED) -> tuple[Cluster, dict[str, Participant]]:
    cluster = Cluster("P", *names)
    cluster["P"].advertise("plain")
    return cluster, {name: cluster[name].subscribe("plain", scope) for name in names}


def from_site(cluster: Cluster, site: str, kind: type) -> list[Any]:
    """Letters of this kind that the site sends or gets from here on."""
    found: list[Any] = []

    def look(owner: NodeId, peer: NodeId, message: LinkMessage) -> bool:
        if site in (owner, peer) and isinstance(content_of(message), kind):
            found.append(content_of(message))
        return False

    cluster.lose(look)
    return found


# ----------------------------------------------------------------------------------------------------- presumed abort


def doubt_while_another_votes() -> tuple[Cluster, dict[str, Participant]]:
    """S has promised and asks; the coordinator is still waiting for T, and has no record yet."""
    cluster, at = cluster_of("S", "T")
    tx = cluster["P"].begin("plain")
    cluster["P"].publish("plain", "one", tx=tx)
    at["T"].holds = {"PrepareTx"}
    requests = from_site(cluster, "S", GetEpochOutcome)
    ending = cluster["P"].commit_soon(tx)
    cluster.run(2.0)
    assert requests
    at["T"].release()
    cluster.until(lambda: ending.done, "the commit was not answered")
    cluster.settle()
    return cluster, at


def test_no_record_means_abort_only_when_the_coordinator_is_not_still_deciding() -> None:
    cluster, at = doubt_while_another_votes()

    assert at["S"].committed(TX) == at["T"].committed(TX) == ("one",)
    cluster.check()


def test_presuming_abort_while_votes_are_out_would_break_atomicity(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = EpochCoordinator.on_outcome_requested

    def hasty(self: EpochCoordinator, epoch: Any, *arguments: Any) -> Any:
        kept = self.in_flight.pop(epoch.number)
        answer = honest(self, epoch, *arguments)
        self.in_flight[epoch.number] = kept
        return answer

    monkeypatch.setattr(EpochCoordinator, "on_outcome_requested", hasty)
    cluster, _ = doubt_while_another_votes()

    assert violations(cluster.world, live=True)


def late_one_shot() -> tuple[Cluster, Participant, list[str]]:
    """A one-shot is lost on its way, its publisher asks and hears; then the one-shot arrives after all."""
    cluster = Cluster("P", "S")
    cluster["P"].advertise("other")
    participant = cluster["S"].subscribe("other", standing=True)
    kept: list[LinkMessage] = []

    def delay(owner: NodeId, peer: NodeId, message: LinkMessage) -> bool:
        if owner == "P" and isinstance(content_of(message), RunOneShot):
            kept.append(message)
            return True
        return False

    cluster.lose(delay)
    pending = cluster["P"].execute_soon("other", ["one"], census=None)
    told = str(pending.failure())
    cluster.lose_nothing()
    cluster.world.network.send(NodeId("P"), cluster.world.network.homes[NodeId("P")], kept[0])
    cluster.run(1.0)
    return cluster, participant, [told]


def test_a_question_about_an_unknown_transaction_refuses_it_for_good_before_it_is_answered() -> None:
    cluster, participant, told = late_one_shot()

    assert "no record" in told[0]
    assert participant.committed(cluster["P"].last_tx()) is None
    records = cluster.broker(cluster.rendezvous("other")).disk.records
    assert TxRejected(tx=cluster["P"].last_tx()) in records
    cluster.check()


def test_without_the_refusal_a_late_arrival_would_apply_after_aborted_was_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Outcomes, "reject", lambda self, tx: None)

    cluster, participant, _ = late_one_shot()

    assert participant.committed(cluster["P"].last_tx()) == ("one",)


def test_the_refusal_survives_the_coordinator() -> None:
    cluster, _, _ = late_one_shot()
    coordinator = cluster.rendezvous("other")

    cluster.kill(coordinator)
    cluster.restart(coordinator)

    assert cluster.broker(coordinator).core.rendezvous.outcomes.is_rejected(cluster["P"].last_tx())
    assert cluster["P"].outcome(cluster["P"].last_tx(), "other").outcome is Outcome.ABORTED


# ------------------------------------------------------------------------------------------------------------- deaths


def test_a_participant_that_dies_after_its_vote_is_bound_and_binds_nobody() -> None:
    """Counted as a NO it would abort what it has promised, and what the others may be told to commit."""
    cluster, at = cluster_of("S", "T")
    tx = cluster["P"].begin("plain")
    at["T"].holds = {"PrepareTx"}
    ending = cluster["P"].commit_soon(tx)
    cluster.until(lambda: at["S"].prepared(), "nothing was promised")
    cluster.run(0.2)

    cluster.kill("S")
    cluster.run(1.0)
    at["T"].release()
    outcome = ending.result()
    assert outcome.outcome is Outcome.COMMITTED
    assert len(outcome.pending) == 1
    cluster.restart("S")
    cluster.settle()

    assert at["S"].committed(tx) == at["T"].committed(tx) == ()
    cluster.check()


def test_a_participant_that_dies_before_its_vote_is_a_no() -> None:
    cluster, at = cluster_of("S", "T")
    tx = cluster["P"].begin("plain")
    at["S"].holds = {"PrepareTx"}
    ending = cluster["P"].commit_soon(tx)
    cluster.run(0.2)

    cluster.kill("S")

    assert "unreachable" in str(ending.failure())
    cluster.settle()
    assert at["T"].committed(tx) is None
    cluster.restart("S")
    cluster.check()


@pytest.mark.parametrize("access", Access)
@pytest.mark.parametrize("tx_type", TxType)
def test_the_death_of_an_initiator_aborts_its_undecided_transaction(tx_type: TxType, access: Access) -> None:
    cluster, at = cluster_of("S", "T", scope=Scope.LOCAL if tx_type is TxType.LOCAL else Scope.DISTRIBUTED)
    tx = cluster["P"].begin("plain", tx_type, access=access)
    cluster["P"].publish("plain", "one", tx=tx)
    cluster.run(0.3)

    cluster.kill("P")
    cluster.run(1.5)

    for participant in at.values():
        assert participant.seen(tx) == ["one"]
        assert participant.asked("AbortTxCall", tx) == 1
        assert participant.committed(tx) is None
    cluster.restart("P")
    assert cluster["P"].outcome(tx).outcome is Outcome.ABORTED
    cluster.check()


@pytest.mark.parametrize("said_done", [True, False])
@pytest.mark.parametrize("tx_type", TxType)
def test_the_death_of_a_contributor_matters_until_it_has_said_that_it_is_done(tx_type: TxType, said_done: bool) -> None:
    cluster, at = cluster_of("S", scope=Scope.LOCAL if tx_type is TxType.LOCAL else Scope.DISTRIBUTED)
    other = cluster.join("Q", "b2")
    other.advertise("plain")
    tx = cluster["P"].begin("plain", tx_type, access=Access.PUBLIC)
    other.contribute(tx)
    other.publish("plain", "one", tx=tx)
    if said_done:
        other.done(tx)

    cluster.kill("Q")
    cluster.run(1.5)
    ending = cluster["P"].commit_soon(tx)
    cluster.until(lambda: ending.done, "the commit was not answered")
    cluster.settle()

    assert at["S"].committed(tx) == (("one",) if said_done else None)
    assert (ending.error is None) is said_done
    cluster.restart("Q")
    cluster.check()


# ---------------------------------------------------------------------------------------------------- who aborts whom


def mixed(local_outcome: LocalOutcome = LocalOutcome.INDEPENDENT) -> tuple[Cluster, dict[str, Participant], Any]:
    """A distributed transaction with two distributed participants, two local subscribers and one non-transactional."""
    cluster = Cluster("P", "D", "E", "L", "M", "N")
    cluster["P"].advertise("plain")
    scopes = {"D": Scope.DISTRIBUTED, "E": Scope.DISTRIBUTED, "L": Scope.LOCAL, "M": Scope.LOCAL}
    at = {name: cluster[name].subscribe("plain", scope) for name, scope in scopes.items()}
    at["N"] = cluster["N"].subscribe("plain", Scope.NON_TRANSACTIONAL)
    tx = cluster["P"].begin("plain", local_outcome=local_outcome)
    return cluster, at, tx


def committed_by(at: dict[str, Participant], tx: Any) -> set[str]:
    return {name for name, p in at.items() if p.committed(tx) is not None}


def test_a_publisher_that_aborts_aborts_distributed_and_local_subscribers() -> None:
    cluster, at, tx = mixed()
    cluster["P"].publish("plain", "one", tx=tx)
    cluster.run(0.2)

    cluster["P"].abort(tx)
    cluster.settle()

    assert committed_by(at, tx) == set()
    assert all(at[name].asked("AbortTxCall", tx) == 1 for name in "DELM")
    assert at["N"].seen(tx) == ["one"]  # it keeps what it received
    cluster.check()


def test_a_distributed_participant_that_aborts_leaves_local_subscribers_unaffected() -> None:
    cluster, at, tx = mixed()
    at["D"].rejects = {"one"}
    cluster["P"].publish("plain", "one", tx=tx)
    cluster.run(0.3)
    cluster["P"].publish("plain", "two", tx=tx)

    with pytest.raises(TransactionAborted):
        cluster["P"].commit(tx)
    cluster.settle()

    assert committed_by(at, tx) == {"L", "M"}
    assert at["L"].committed(tx) == ("one", "two")
    assert at["E"].asked("AbortTxCall", tx) == 1


def test_a_local_subscriber_that_aborts_affects_only_itself() -> None:
    cluster, at, tx = mixed()
    at["L"].rejects = {"one"}
    cluster["P"].publish("plain", "one", tx=tx)

    outcome = cluster["P"].commit(tx)
    cluster.settle()

    assert outcome.outcome is Outcome.COMMITTED
    assert committed_by(at, tx) == {"D", "E", "M"}
    cluster.check()


@pytest.mark.parametrize("local_outcome", LocalOutcome)
def test_4_6_3_local_subscribers_commit_on_the_request_or_follow_the_decision(local_outcome: LocalOutcome) -> None:
    cluster, at, tx = mixed(local_outcome)
    at["D"].rejects_prepare = True
    cluster["P"].publish("plain", "one", tx=tx)

    with pytest.raises(TransactionAborted):
        cluster["P"].commit(tx)
    cluster.settle()

    assert committed_by(at, tx) == ({"L", "M"} if local_outcome is LocalOutcome.INDEPENDENT else set())


def test_locals_that_follow_commit_after_the_decision_and_not_before() -> None:
    cluster, at, tx = mixed(LocalOutcome.FOLLOWS)
    at["D"].holds = {"PrepareTx"}
    cluster["P"].publish("plain", "one", tx=tx)
    ending = cluster["P"].commit_soon(tx)
    cluster.run(0.5)
    assert committed_by(at, tx) == set()

    at["D"].release()
    ending.result()
    cluster.settle()

    assert committed_by(at, tx) == {"D", "E", "L", "M"}
    cluster.check()


def test_unsubscribing_while_a_member_counts_as_giving_up() -> None:
    cluster, at = cluster_of("S", "T")
    tx = cluster["P"].begin("plain", limit=ScopeLimit.DISTRIBUTED)

    cluster["S"].unsubscribe(at["S"])
    cluster.run(0.3)

    assert cluster["P"].told(tx) == [False]
    with pytest.raises(TransactionAborted, match="subscription ended"):
        cluster["P"].commit(tx)
    assert at["T"].committed(tx) is None


@pytest.mark.parametrize("tx_type", TxType)
def test_the_coordinator_checks_the_sequence_as_well_as_the_participants(tx_type: TxType) -> None:
    cluster, at = cluster_of("S", scope=Scope.LOCAL if tx_type is TxType.LOCAL else Scope.DISTRIBUTED)
    tx = cluster["P"].begin("plain", tx_type)
    coordinator = cluster.rendezvous("plain")

    def lost(owner: NodeId, peer: NodeId, message: LinkMessage) -> bool:
        content = content_of(message)
        return peer == coordinator and isinstance(content, TxPublished) and content.sequence == 1

    cluster.lose(lost)
    cluster["P"].publish("plain", "one", tx=tx)
    cluster["P"].publish("plain", "two", tx=tx)

    with pytest.raises(TransactionAborted, match="event 2 arrived after event 0"):
        cluster["P"].commit(tx)
    cluster.settle()
    assert at["S"].committed(tx) is None
    cluster.check()


# --------------------------------------------------------------------------------------------- after a commit request


def test_after_a_commit_request_events_are_refused_and_abort_tells_the_outcome() -> None:
    cluster, at = cluster_of("S")
    tx = cluster["P"].begin("plain")
    at["S"].holds = {"PrepareTx"}
    ending = cluster["P"].commit_soon(tx)

    with pytest.raises(TransactionClosed):
        cluster["P"].publish("plain", "too late", tx=tx)
    at["S"].release()
    assert ending.result().outcome is Outcome.COMMITTED

    assert cluster["P"].abort(tx).outcome is Outcome.COMMITTED
    with pytest.raises(TransactionClosed):
        cluster["P"].publish("plain", "far too late", tx=tx)
    assert at["S"].committed(tx) == ()


@pytest.mark.parametrize("tx_type", TxType)
def test_an_event_of_another_publisher_that_comes_after_the_commit_request_is_refused(tx_type: TxType) -> None:
    cluster, at = cluster_of("S", scope=Scope.LOCAL if tx_type is TxType.LOCAL else Scope.DISTRIBUTED)
    other = cluster.join("Q", "b3")
    other.advertise("plain")
    tx = cluster["P"].begin("plain", tx_type, access=Access.PUBLIC)
    other.contribute(tx)

    cluster["P"].commit(tx)

    with pytest.raises(TransactionClosed):
        other.publish("plain", "too late", tx=tx)
    cluster.settle()
    assert at["S"].committed(tx) == ()


def test_an_abort_that_comes_after_the_commit_request_changes_nothing_for_independent_locals() -> None:
    cluster, at, tx = mixed()
    at["D"].holds = {"PrepareTx"}
    cluster["P"].publish("plain", "one", tx=tx)
    cluster["P"].commit_soon(tx)
    cluster.run(0.3)

    outcome = cluster["P"].abort(tx)
    at["D"].release()
    cluster.settle()

    assert outcome.outcome is Outcome.ABORTED
    assert committed_by(at, tx) == {"L", "M"}


def test_a_transaction_that_nobody_joined_is_unfulfilled_for_good() -> None:
    cluster, at = cluster_of("S")
    at["S"].scope = Scope.NONE
    begun = cluster["P"].begin_soon("plain")
    assert isinstance(begun.failure(), CensusUnfulfilled)
    tx = cluster["P"].last_tx()

    at["S"].scope = Scope.DISTRIBUTED
    cluster.run(1.0)

    assert "no participant joined" in str(begun.failure())
    assert cluster["P"].outcome(tx, "plain").outcome is Outcome.ABORTED
    assert at["S"].asked("JoinTx") == 1
    cluster.check()


def test_asking_for_the_distributed_scope_of_a_local_transaction_is_an_error_of_the_participant() -> None:
    cluster, at = cluster_of("S", "L")
    at["L"].scope = Scope.LOCAL
    tx = cluster["P"].begin("plain", TxType.LOCAL)
    cluster["P"].publish("plain", "one", tx=tx)

    cluster["P"].commit(tx)
    cluster.settle()

    assert [kind for _, kind, _ in cluster.world.alarms] == ["wrong-scope"]
    assert committed_by(at, tx) == {"L"}


# ------------------------------------------------------------------------------------ attributes and standing answers


def test_subscriptions_are_matched_with_the_transactions_attributes_and_its_events_are_not_filtered() -> None:
    cluster = Cluster("P", "A", "B")
    cluster["P"].advertise("plain")
    matching = cluster["A"].subscribe("plain", where=Filter.where("key", "=", "a"))
    other = cluster["B"].subscribe("plain", where=Filter.where("key", "=", "b"))

    tx = cluster["P"].begin("plain", attributes={"mark": "", "key": "a"})
    cluster["P"].publish("plain", "one", tx=tx, key="b")
    cluster["P"].publish("plain", "two", tx=tx, key="c")
    cluster["P"].commit(tx)
    cluster.settle()

    assert matching.committed(tx) == ("one", "two")
    assert other.calls == []
    assert other.seen(tx) == []
    cluster.check()


def test_a_standing_answers_pseudonym_is_derived_from_its_secret_and_differs_in_every_transaction() -> None:
    cluster = Cluster("P", "S")
    cluster["P"].advertise("plain")
    lists = from_site(cluster, "S", TxBegan)
    participant = cluster["S"].subscribe("plain", standing=True)
    secret = cluster["S"].node.core.participation.subscriptions[1].secret

    transactions = [cluster["P"].begin("plain") for _ in range(2)]
    for tx in transactions:
        cluster["P"].commit(tx)

    assert [began.members for began in lists] == [{hashed(standing_pseudonym(secret, tx))} for tx in transactions]
    assert lists[0].members != lists[1].members
    assert participant.asked("JoinTx") == 0
    cluster.check()


def test_a_standing_answer_counts_from_the_coordinators_acknowledgement_on() -> None:
    cluster = Cluster("P", "S")
    cluster["P"].advertise("other")
    cluster.lose(lambda owner, peer, message: peer == "S" and isinstance(content_of(message), StandingAccepted))
    client = cluster["S"]
    with pytest.raises(AssertionError, match="not answered"):
        client.subscribe("other", standing=True)

    cluster.lose_nothing()
    cluster.run(2.0)

    assert client.node.core.participation.subscriptions[1].request is None


def test_a_standing_answer_that_is_not_renewed_is_withdrawn() -> None:
    """Otherwise every transaction would wait for a participant that nobody has heard of for long."""
    cluster = Cluster("P", "S", "T")
    cluster["P"].advertise("other")
    for name in ("S", "T"):
        cluster[name].subscribe("other", standing=True)
    assert cluster["P"].execute("other", ["one"], census=None, constraints=(MinParticipants(2),))

    cluster.lose(lambda owner, peer, message: owner == "S" and isinstance(content_of(message), StandingRegistered))
    cluster.run(8.0)

    rejected = cluster["P"].execute_soon("other", ["two"], census=None, constraints=(MinParticipants(2),))
    assert "1 of at least 2" in str(rejected.failure())
    cluster.check()


def test_a_standing_answer_is_good_for_one_life_of_the_link() -> None:
    cluster = Cluster("P", "S")
    cluster["P"].advertise("other")
    cluster["S"].subscribe("other", standing=True)
    before = cluster["S"].node.core.participation.subscriptions[1]
    key, secret = before.voter, before.secret

    cluster.kill("S")
    cluster.run(1.0)
    cluster.restart("S")
    cluster.run(1.0)

    standing = cluster.broker(cluster.rendezvous("other")).core.rendezvous.epochs["other"].standing
    assert key not in standing.registrations
    assert [s.secret for s in standing.registrations.values()] != [secret]
    assert cluster["P"].execute("other", ["one"], census=None).outcome is Outcome.COMMITTED
    cluster.check()


# ------------------------------------------------------------------------------------------- participants' own memory


def test_a_promise_is_kept_by_the_participants_database_and_found_again() -> None:
    """Kept only in the site's memory, a crash after a YES would leave work prepared that nobody asks about."""
    cluster, at = cluster_of("S", "T")
    tx = cluster["P"].begin("plain")
    cluster["P"].publish("plain", "one", tx=tx)
    at["T"].holds = {"PrepareTx"}
    ending = cluster["P"].commit_soon(tx)
    cluster.until(lambda: at["S"].prepared(), "nothing was promised")
    cluster.run(0.2)
    cluster.kill("S")

    assert at["S"].prepared()
    cluster.restart("S")
    at["T"].release()
    ending.result()
    cluster.settle()

    assert at["S"].committed(tx) == ("one",)
    assert isinstance(at["S"].database, CallbackDatabase)
    assert at["S"].database.finished == {}  # forgotten once the coordinator had noted it
    cluster.check()


def test_a_coordinator_that_dies_before_a_decision_is_on_disk_has_aborted() -> None:
    cluster, at = cluster_of("S", "T")
    tx = cluster["P"].begin("plain")
    at["T"].holds = {"PrepareTx"}
    ending = cluster["P"].commit_soon(tx)
    cluster.until(lambda: at["S"].prepared(), "nothing was promised")
    coordinator = cluster.rendezvous("plain")

    cluster.kill(coordinator)
    at["T"].release()
    cluster.run(0.3)
    cluster.restart(coordinator)

    assert isinstance(ending.failure(), TransactionAborted)
    cluster.settle()
    assert at["S"].committed(tx) is at["T"].committed(tx) is None
    cluster.check()


def test_a_publishers_own_resources_are_a_member_that_no_constraint_counts() -> None:
    cluster, at = cluster_of("S")
    own = cluster["P"].enlist()
    tx = cluster["P"].begin("plain", own=own, constraints=(MinParticipants(1),))
    members = cluster.broker(cluster.rendezvous("plain")).core.rendezvous.coordinators[tx].members
    rejected = cluster["P"].begin_soon("plain", own=own, constraints=(MinParticipants(2),))

    assert [m.counts for m in members.values()] == [False, True]
    assert "1 of at least 2" in str(rejected.failure())
    cluster["P"].abort(tx)
    cluster.settle()
    assert at["S"].committed(tx) is None
    cluster.check()
