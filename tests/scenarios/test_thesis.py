"""The thesis' own scenarios, by the number of their section."""

import pytest

from tests.scenarios.cluster import Cluster
from tops.model.constraints import MinParticipants
from tops.model.errors import CensusUnfulfilled, TransactionAborted
from tops.model.ids import TxId
from tops.model.transactions import Access, Outcome, Scope, ScopeLimit, TxState, TxType
from tops.protocol.messages import CensusPolicy

# ------------------------------------------------------------------------------------ chapter 3: use cases of the HTS


def test_3_1_2_a_successful_transaction_commits_at_all_subscribers() -> None:
    cluster = Cluster("Pub01", "Sub01", "Sub02", brokers=5)
    for name in ("ETCensus01", "ET01", "ET02"):
        cluster.define(name)
    cluster["Pub01"].advertise("ETCensus01", "ET01", "ET02")
    first, second = (cluster[s].subscribe("ETCensus01") for s in ("Sub01", "Sub02"))

    tx = cluster["Pub01"].begin("ETCensus01")
    cluster["Pub01"].publish("ET01", "one", tx=tx)
    cluster["Pub01"].publish("ET02", "two", tx=tx)
    outcome = cluster["Pub01"].commit(tx)

    assert outcome.outcome is Outcome.COMMITTED
    assert outcome.pending == ()
    assert first.committed(tx) == second.committed(tx) == ("one", "two")
    cluster.check()


def test_3_1_3_too_few_enlisted_leaves_the_census_unfulfilled_and_no_transaction() -> None:
    cluster = Cluster("Pub01", "Sub01", "Sub02", brokers=5)
    cluster.define("ETCensus01")
    cluster["Pub01"].advertise("ETCensus01")
    enlists = cluster["Sub01"].subscribe("ETCensus01")
    stays_out = cluster["Sub02"].subscribe("ETCensus01", Scope.NONE)

    begun = cluster["Pub01"].begin_soon("ETCensus01", constraints=(MinParticipants(2),))

    assert isinstance(begun.failure(), CensusUnfulfilled)
    assert "1 of at least 2" in str(begun.failure())
    assert enlists.asked("JoinTx") == stays_out.asked("JoinTx") == 1
    assert enlists.asked("PrepareTx") == 0
    cluster.check()


def test_3_1_4_one_failed_preparation_aborts_the_transaction_everywhere() -> None:
    cluster = Cluster("Pub01", "Sub01", "Sub02", brokers=5)
    cluster.define("ETCensus01")
    cluster.define("ET01")
    cluster["Pub01"].advertise("ETCensus01", "ET01")
    accepts, fails = (cluster[s].subscribe("ETCensus01") for s in ("Sub01", "Sub02"))
    fails.rejects_prepare = True

    tx = cluster["Pub01"].begin("ETCensus01")
    cluster["Pub01"].publish("ET01", "one", tx=tx)
    with pytest.raises(TransactionAborted, match="can't prepare"):
        cluster["Pub01"].commit(tx)
    cluster.settle()

    assert accepts.committed(tx) is fails.committed(tx) is None
    assert accepts.asked("AbortTxCall", tx) == 1
    assert not accepts.prepared()
    cluster.check()


def test_3_1_5_two_clients_run_transactions_against_each_other_and_both_commit() -> None:
    cluster = Cluster("Client01", "Client02", brokers=5)
    one, two = cluster["Client01"], cluster["Client02"]
    for name in ("ETCensus01", "ET01", "ETCensus02", "ET02"):
        cluster.define(name)
    one.advertise("ETCensus01", "ET01")
    two.advertise("ETCensus02", "ET02")
    at_two, at_one = two.subscribe("ETCensus01"), one.subscribe("ETCensus02")

    begun = one.begin_soon("ETCensus01"), two.begin_soon("ETCensus02")
    first, second = (b.result() for b in begun)
    for client, tx, name in ((one, first, "ET01"), (two, second, "ET02")):
        client.publish(name, f"of {client.name}", tx=tx)
    ends = one.commit_soon(first), two.commit_soon(second)

    assert [e.result().outcome for e in ends] == [Outcome.COMMITTED] * 2
    assert at_two.committed(first) == ("of Client01",)
    assert at_one.committed(second) == ("of Client02",)
    assert at_two.committed(second) is at_one.committed(first) is None
    cluster.check()


# ------------------------------------------------------------------------------------------ 4.1: what TOPS is there for


def meeting(*names: str) -> Cluster:
    cluster = Cluster(*names)
    cluster.define("meeting schedule")
    cluster.define("meeting location")
    return cluster


def test_4_1_1_two_publishers_contribute_to_one_transaction() -> None:
    cluster = meeting("A", "B", "attendee")
    for publisher in ("A", "B"):
        cluster[publisher].advertise("meeting schedule", "meeting location")
    attendee = cluster["attendee"].subscribe("meeting schedule")

    tx = cluster["A"].begin("meeting schedule", access=Access.PUBLIC)
    cluster["A"].publish("meeting schedule", "on Monday", tx=tx)
    cluster["B"].contribute(tx)
    cluster["B"].publish("meeting location", "in room 7", tx=tx)
    cluster["B"].done(tx)
    outcome = cluster["A"].commit(tx)

    assert outcome.outcome is Outcome.COMMITTED
    assert attendee.committed(tx) == ("on Monday", "in room 7")
    cluster.check()


def test_4_1_2_the_initiator_takes_no_part_unless_it_subscribes_and_joins() -> None:
    cluster = meeting("A", "B", "guest")
    cluster["A"].advertise("meeting schedule")
    host, guest = cluster["B"].subscribe("meeting schedule"), cluster["guest"].subscribe("meeting schedule")

    tx = cluster["A"].begin("meeting schedule", constraints=(MinParticipants(2),))
    cluster["A"].publish("meeting schedule", "on Monday", tx=tx)
    cluster["A"].commit(tx)

    assert host.committed(tx) == guest.committed(tx) == ("on Monday",)
    joins = cluster["A"].subscribe("meeting schedule")
    second = cluster["A"].begin("meeting schedule", constraints=(MinParticipants(3),))
    cluster["A"].publish("meeting schedule", "on Tuesday", tx=second)
    cluster["A"].commit(second)
    assert joins.committed(tx) is None
    assert joins.committed(second) == ("on Tuesday",)
    cluster.check()


def test_4_1_3_one_subscription_gets_ordinary_and_transactional_events_of_a_type() -> None:
    cluster = meeting("A", "B", "staff")
    for publisher in ("A", "B"):
        cluster[publisher].advertise("meeting schedule")
    staff = cluster["staff"].subscribe("meeting schedule")

    cluster["A"].publish("meeting schedule", "ordinary")
    tx = cluster["B"].begin("meeting schedule")
    cluster["B"].publish("meeting schedule", "in a transaction", tx=tx)
    cluster["B"].commit(tx)
    cluster.settle()

    assert staff.seen() == ["ordinary"]
    assert staff.seen(tx) == ["in a transaction"]
    assert staff.committed(tx) == ("in a transaction",)
    cluster.check()


def test_4_1_4_participants_get_events_of_types_they_never_subscribed_to() -> None:
    cluster = meeting("A", "one", "two")
    cluster["A"].advertise("meeting schedule", "meeting location")
    participants = [cluster[s].subscribe("meeting schedule") for s in ("one", "two")]

    tx = cluster["A"].begin("meeting schedule")
    cluster["A"].publish("meeting location", "in room 7", tx=tx)
    cluster["A"].commit(tx)
    cluster["A"].publish("meeting location", "outside of the transaction")
    cluster.settle()

    assert [p.committed(tx) for p in participants] == [("in room 7",)] * 2
    assert [p.seen() for p in participants] == [[], []]
    cluster.check()


@pytest.mark.parametrize("fails_at", ["event", "prepare"])
def test_4_1_5_constraints_that_still_hold_let_the_others_commit(fails_at: str) -> None:
    cluster = meeting("A", "top", "middle", "bottom")
    cluster["A"].advertise("meeting schedule")
    top, middle, bottom = (cluster[s].subscribe("meeting schedule") for s in ("top", "middle", "bottom"))
    top.rejects_prepare = fails_at == "prepare"
    top.rejects = {"on Monday"} if fails_at == "event" else set()

    tx = cluster["A"].begin("meeting schedule", constraints=(MinParticipants(2),))
    cluster["A"].publish("meeting schedule", "on Monday", tx=tx)
    outcome = cluster["A"].commit(tx)

    assert outcome.outcome is Outcome.COMMITTED
    assert middle.committed(tx) == bottom.committed(tx) == ("on Monday",)
    assert top.committed(tx) is None
    cluster.check()


def test_4_1_6_in_a_local_transaction_only_the_subscriber_that_fails_aborts() -> None:
    cluster = meeting("A", "top", "middle", "bottom")
    cluster["A"].advertise("meeting schedule", "meeting location")
    top, middle, bottom = (cluster[s].subscribe("meeting schedule", Scope.LOCAL) for s in ("top", "middle", "bottom"))
    top.rejects = {"in room 7"}

    tx = cluster["A"].begin("meeting schedule", TxType.LOCAL)
    cluster["A"].publish("meeting schedule", "on Monday", tx=tx)
    cluster["A"].publish("meeting location", "in room 7", tx=tx)
    outcome = cluster["A"].commit(tx)
    cluster.settle()

    assert outcome.outcome is Outcome.COMMITTED
    assert middle.committed(tx) == bottom.committed(tx) == ("on Monday", "in room 7")
    assert top.committed(tx) is None
    assert top.asked("AbortTxCall", tx) == 1
    cluster.check()


# ----------------------------------------------------------------------------- 4.5.2: where the components are active


class Active:
    """Which nodes run which component of a transaction, by looking inside."""

    def __init__(self, cluster: Cluster, tx: TxId) -> None:
        self.event_coordinators = {
            name
            for name, site in cluster.world.sites.items()
            if (own := site.core.transactions.get(tx)) is not None and own.numbering is not None
        }
        self.tx_coordinators: set[str] = set()
        self.sub_tx_executors: set[str] = set()
        for name, broker in cluster.world.brokers.items():
            rendezvous = broker.core.rendezvous
            owner = rendezvous.coordinators.get(tx) or rendezvous.relays.get(tx)
            if owner is not None and owner.numbering is not None:
                self.event_coordinators.add(name)
            if tx in rendezvous.coordinators:
                self.tx_coordinators.add(name)
        for name, site in cluster.world.sites.items():
            for executor in site.core.participation.executors.get(tx, {}).values():
                self.sub_tx_executors.add(name)
                if executor.scope is Scope.LOCAL:  # it coordinates itself
                    self.tx_coordinators.add(name)


@pytest.mark.parametrize("access", Access)
@pytest.mark.parametrize("tx_type", TxType)
def test_4_5_2_figure_4_L_components_are_active_where_the_kind_of_transaction_puts_them(
    tx_type: TxType, access: Access
) -> None:
    cluster = Cluster("P", "S", "T")
    cluster["P"].advertise("plain")
    scope = Scope.LOCAL if tx_type is TxType.LOCAL else Scope.DISTRIBUTED
    for subscriber in ("S", "T"):
        cluster[subscriber].subscribe("plain", scope)
    rendezvous = cluster.rendezvous("plain")

    tx = cluster["P"].begin("plain", tx_type, access=access)
    cluster["P"].publish("plain", "one", tx=tx)
    cluster.run(0.3)
    active = Active(cluster, tx)

    assert active.event_coordinators == ({"P"} if access is Access.PRIVATE else {rendezvous})
    assert active.tx_coordinators == ({"S", "T"} if tx_type is TxType.LOCAL else {rendezvous})
    assert active.sub_tx_executors == {"S", "T"}
    cluster["P"].commit(tx)
    cluster.settle()
    assert Active(cluster, tx).sub_tx_executors == set()
    cluster.check()


def test_4_5_2_figure_4_M_one_component_serves_transactions_of_different_kinds_at_once() -> None:
    cluster = Cluster("A", "B", "C", "D", "E")
    for publisher in ("A", "B"):
        cluster[publisher].advertise("plain")
    at = {name: cluster[name].subscribe("plain", Scope.NONE) for name in "ABCDE"}
    rendezvous = cluster.rendezvous("plain")

    def choose(choices: dict[str, Scope]) -> None:
        for name, participant in at.items():
            participant.scope = choices.get(name, Scope.NONE)

    choose(dict.fromkeys("ACD", Scope.LOCAL))
    first = cluster["A"].begin("plain", TxType.LOCAL)
    cluster.run(0.3)
    choose({"B": Scope.DISTRIBUTED, "D": Scope.DISTRIBUTED, "C": Scope.LOCAL, "E": Scope.LOCAL})
    second = cluster["B"].begin("plain", access=Access.PUBLIC)
    cluster["A"].publish("plain", "of T1", tx=first)
    cluster["B"].publish("plain", "of T2", tx=second)
    cluster.run(0.3)
    local, mixed = Active(cluster, first), Active(cluster, second)

    assert (local.event_coordinators, mixed.event_coordinators) == ({"A"}, {rendezvous})
    assert (local.tx_coordinators, mixed.tx_coordinators) == (set("ACD"), {rendezvous, "C", "E"})
    assert (local.sub_tx_executors, mixed.sub_tx_executors) == (set("ACD"), set("BCDE"))
    cluster["A"].commit(first)
    cluster["B"].commit(second)
    cluster.settle()
    assert {n for n, p in at.items() if p.committed(first) == ("of T1",)} == set("ACD")
    assert {n for n, p in at.items() if p.committed(second) == ("of T2",)} == set("BCDE")
    cluster.check()


# ------------------------------------------------------------------------------------------- 4.7: the API's use cases


def test_4_7_2_the_callbacks_of_a_single_publisher_transaction_come_in_order() -> None:
    cluster = Cluster("S1", "S2")
    cluster.define("ET1")
    cluster.define("ET2")
    cluster["S1"].advertise("ET1", "ET2")
    participant = cluster["S2"].subscribe("ET1")

    tx = cluster["S1"].begin("ET1", access=Access.PRIVATE, limit=ScopeLimit.NONE)
    cluster["S1"].publish("ET1", "EV1", tx=tx)
    cluster["S1"].publish("ET2", "EV2", tx=tx)
    cluster["S1"].commit(tx)

    called = [kind for kind, _ in participant.calls]
    assert called == ["JoinTx", "NotifyTx", "NotifyTx", "PrepareTx", "CommitTxCall"]
    assert participant.committed(tx) == ("EV1", "EV2")
    cluster.check()


def test_4_7_3_publishers_take_part_and_a_non_transactional_subscriber_sees_ordinary_events() -> None:
    cluster = Cluster("S1", "S2", "S3")
    cluster.define("ET1")
    cluster.define("ET2")
    cluster["S1"].advertise("ET1")
    cluster["S2"].advertise("ET1", "ET2")
    one, two = cluster["S1"].subscribe("ET1"), cluster["S2"].subscribe("ET1")
    three = cluster["S3"].subscribe("ET1", Scope.NON_TRANSACTIONAL)

    tx = cluster["S1"].begin("ET1", access=Access.PUBLIC, limit=ScopeLimit.NONE, constraints=(MinParticipants(2),))
    cluster["S1"].publish("ET1", "EV1", tx=tx)
    cluster["S2"].contribute(tx)
    cluster["S2"].publish("ET2", "EV2", tx=tx)
    cluster["S2"].done(tx)
    outcome = cluster["S1"].commit(tx)
    cluster.settle()

    assert outcome.outcome is Outcome.COMMITTED
    assert one.committed(tx) == two.committed(tx) == ("EV1", "EV2")
    assert three.seen(tx) == ["EV1", "EV2"]
    assert [kind for kind, _ in three.calls] == ["JoinTx"]
    cluster.check()


def test_table_4_B_publishers_hear_the_outcome_of_their_transactions_as_well() -> None:
    cluster = Cluster("P", "S")
    cluster["P"].advertise("plain")
    participant = cluster["S"].subscribe("plain")
    kept, given_up = cluster["P"].begin("plain"), cluster["P"].begin("plain")

    cluster["P"].commit(kept)
    cluster["P"].abort(given_up)
    participant.scope = Scope.NONE
    unfulfilled = cluster["P"].begin_soon("plain")

    assert isinstance(unfulfilled.failure(), CensusUnfulfilled)
    assert cluster["P"].told(kept) == [True]
    assert cluster["P"].told(given_up) == [False]
    assert cluster["P"].told(cluster["P"].last_tx()) == [False]
    cluster.check()


# ------------------------------------------------------------------------------------------------ 4.3: who takes what

T, L = TxType, ScopeLimit
NONE, NON_TX, LOCAL, DISTRIBUTED = Scope.NONE, Scope.NON_TRANSACTIONAL, Scope.LOCAL, Scope.DISTRIBUTED
TABLE_4_A: dict[tuple[TxType, Scope, ScopeLimit], Scope] = {
    (T.DISTRIBUTED, NONE, L.NONE): NONE,
    (T.DISTRIBUTED, NONE, L.LOCAL): NONE,
    (T.DISTRIBUTED, NONE, L.DISTRIBUTED): NONE,
    (T.DISTRIBUTED, NON_TX, L.NONE): NON_TX,
    (T.DISTRIBUTED, NON_TX, L.LOCAL): NONE,
    (T.DISTRIBUTED, NON_TX, L.DISTRIBUTED): NONE,
    (T.DISTRIBUTED, LOCAL, L.NONE): LOCAL,
    (T.DISTRIBUTED, LOCAL, L.LOCAL): LOCAL,
    (T.DISTRIBUTED, LOCAL, L.DISTRIBUTED): NONE,
    (T.DISTRIBUTED, DISTRIBUTED, L.NONE): DISTRIBUTED,
    (T.DISTRIBUTED, DISTRIBUTED, L.LOCAL): DISTRIBUTED,
    (T.DISTRIBUTED, DISTRIBUTED, L.DISTRIBUTED): DISTRIBUTED,
    (T.LOCAL, NONE, L.NONE): NONE,
    (T.LOCAL, NONE, L.LOCAL): NONE,
    (T.LOCAL, NON_TX, L.NONE): NON_TX,
    (T.LOCAL, NON_TX, L.LOCAL): NONE,
    (T.LOCAL, LOCAL, L.NONE): LOCAL,
    (T.LOCAL, LOCAL, L.LOCAL): LOCAL,
    (T.LOCAL, DISTRIBUTED, L.NONE): NONE,  # an error of on_join; only a standing answer is lowered to local
    (T.LOCAL, DISTRIBUTED, L.LOCAL): NONE,
}


@pytest.mark.parametrize("standing", [False, True], ids=["asked", "standing"])
@pytest.mark.parametrize("case", TABLE_4_A, ids=lambda c: "-".join(part.name for part in c))
def test_table_4_A_the_scope_taken_in_a_run_is_the_one_of_the_table(
    case: tuple[TxType, Scope, ScopeLimit], standing: bool
) -> None:
    tx_type, asked, limit = case
    expected = TABLE_4_A[case]
    if standing and tx_type is TxType.LOCAL and asked is DISTRIBUTED:
        expected = LOCAL
    cluster = Cluster("P", "S", "always", brokers=2)
    cluster["P"].advertise("plain")
    participant = cluster["S"].subscribe("plain", asked, standing=standing)
    cluster["always"].subscribe("plain", LOCAL if tx_type is TxType.LOCAL else DISTRIBUTED)

    tx = cluster["P"].begin("plain", tx_type, limit=limit)
    if not standing:
        cluster.within(0.2, lambda: participant.asked("JoinTx", tx) == 1, "the subscriber was not asked")
    cluster["P"].publish("plain", "one", tx=tx)
    cluster["P"].commit(tx)
    cluster.settle()

    assert participant.seen(tx) in ([], ["one"])
    assert participant.taken(tx) is expected
    cluster.check()


@pytest.mark.parametrize("access", Access)
def test_table_4_A_a_limit_above_the_transaction_type_is_refused_at_begin(access: Access) -> None:
    cluster = Cluster("P", "S")
    cluster["P"].advertise("plain")
    participant = cluster["S"].subscribe("plain")

    begun = cluster["P"].begin_soon("plain", TxType.LOCAL, limit=ScopeLimit.DISTRIBUTED, access=access)

    assert "higher than the transaction type" in str(begun.failure())
    cluster.run(1)
    assert participant.calls == []
    cluster.check()


def test_4_4_4_a_census_waits_for_its_time_when_nothing_else_closes_it() -> None:
    cluster = Cluster("P", "S")
    cluster["P"].advertise("plain")
    cluster["S"].subscribe("plain")

    begun = cluster["P"].begin_soon("plain", census=CensusPolicy(timeout_s=5.0))
    cluster.run(4.5)

    assert not begun.done
    coordinator = cluster.broker(cluster.rendezvous("plain")).core.rendezvous.coordinators
    assert [c.state for c in coordinator.values()] == [TxState.CENSUS]
    tx = begun.result()
    cluster["P"].abort(tx)
    cluster.check()
