"""A private transaction is its initiator's alone, and its events are for its members alone."""

import msgspec

from tests.scenarios.cluster import Cluster, content_of
from tops.model.constraints import MaxParticipants, MinParticipants, OnlyFrom
from tops.model.errors import UncheckedTransaction
from tops.model.ids import NodeId, TxId
from tops.model.transactions import Access, Outcome, Scope, ScopeLimit, TxType
from tops.protocol.effects import Reject
from tops.protocol.messages import (
    AbortTx,
    Address,
    AddressedMessage,
    CommitTx,
    Dissemination,
    Envelope,
    Event,
    LinkMessage,
    LocalCommitOrdered,
    Publication,
    PublishInTx,
    TxPublished,
)


def cluster_of(*sites: str) -> Cluster:
    cluster = Cluster(*sites)
    cluster["P"].advertise("plain", "other")
    return cluster


def say(cluster: Cluster, site: str, message: AddressedMessage) -> None:
    """A letter to the coordinator of `plain` that the site's library would never write."""
    to = Address(NodeId(cluster.rendezvous("plain")))
    _send(cluster, site, Envelope(to=to, body=message))


def spread(cluster: Cluster, site: str, publication: Publication) -> None:
    dissemination = Dissemination(
        rendezvous=NodeId(cluster.rendezvous("plain")),
        upward=True,
        early=True,
        publication=publication,
        lineage=("plain",),
    )
    _send(cluster, site, dissemination)


def _send(cluster: Cluster, site: str, message: LinkMessage) -> None:
    network = cluster.world.network
    network.send(NodeId(site), network.homes[NodeId(site)], message)
    cluster.run(0.3)


def commit(tx: TxId) -> CommitTx:
    return CommitTx(tx=tx, tx_type=TxType.DISTRIBUTED, event_type="plain", last_sequence=0)


def abort(tx: TxId, *, operator: bool = False) -> AbortTx:
    return AbortTx(tx=tx, tx_type=TxType.DISTRIBUTED, event_type="plain", reason="no", operator=operator)


def event(tx: TxId, sequence: int) -> TxPublished:
    return TxPublished(tx=tx, event_type="plain", sequence=sequence, event=Event("plain", {"mark": "x", "key": "a"}))


def test_nobody_but_its_initiator_commits_aborts_or_fills_a_private_transaction() -> None:
    cluster = cluster_of("P", "S", "X")
    s = cluster["S"].subscribe("plain")
    tx = cluster["P"].begin("plain")

    for message in (commit(tx), abort(tx)):
        say(cluster, "X", message)
    spread(cluster, "X", event(tx, 1))
    spread(cluster, "X", LocalCommitOrdered(tx=tx, event_type="plain", last_sequence=0))
    cluster["P"].publish("plain", "one", tx=tx)
    outcome = cluster["P"].commit(tx)

    assert outcome.outcome is Outcome.COMMITTED
    assert s.committed(tx) == ("one",)
    cluster.check()


def test_a_later_life_of_the_initiator_is_not_the_initiator() -> None:
    cluster = cluster_of("P", "S")
    cluster["S"].subscribe("plain")
    tx = cluster["P"].begin("plain")
    coordinators = cluster.broker(cluster.rendezvous("plain")).core.rendezvous
    coordinator = coordinators.coordinators[tx]
    later = msgspec.structs.replace(coordinator.begun_by, incarnation=coordinator.begun_by.incarnation + 1)

    rejected = coordinators.on_message(commit(tx), later, coordinator.initiator, 0.0)

    assert [type(effect) for effect in rejected] == [Reject]
    assert tx in coordinators.coordinators
    cluster["P"].abort(tx)
    cluster.check()


def test_nobody_but_its_initiator_ends_a_private_local_transaction() -> None:
    cluster = cluster_of("P", "S", "X")
    s = cluster["S"].subscribe("plain", Scope.LOCAL)
    tx = cluster["P"].begin("plain", TxType.LOCAL, limit=ScopeLimit.LOCAL)
    cluster["P"].publish("plain", "one", tx=tx)
    cluster.run(0.3)

    say(cluster, "X", commit(tx))
    spread(cluster, "X", event(tx, 2))
    before = s.committed(tx)
    cluster["P"].commit(tx)
    cluster.settle()

    assert before is None
    assert s.committed(tx) == ("one",)
    cluster.check()


def test_an_operator_ends_a_private_transaction_of_somebody_else() -> None:
    cluster = cluster_of("P", "S", "X")
    s = cluster["S"].subscribe("plain")
    tx = cluster["P"].begin("plain")

    say(cluster, "X", abort(tx, operator=True))
    cluster.settle()

    assert cluster["P"].told(tx) == [False]
    assert s.committed(tx) is None
    cluster.check()


def test_a_public_transaction_is_ended_by_whoever_published_in_it_and_by_nobody_else() -> None:
    for contributes in (False, True):
        cluster = cluster_of("P", "S", "X")
        cluster["S"].subscribe("plain")
        tx = cluster["P"].begin("plain", access=Access.PUBLIC)
        if contributes:
            say(cluster, "X", PublishInTx(tx=tx, request=1, event=Event("plain", {"mark": "x", "key": "a"})))

        say(cluster, "X", abort(tx))
        cluster.run(1.0)

        assert cluster["P"].told(tx) == ([False] if contributes else [])
        if not contributes:
            cluster["P"].abort(tx)


def test_ids_of_public_transactions_grow_and_can_not_be_guessed() -> None:
    cluster = cluster_of("P", "S")
    cluster["S"].subscribe("plain")

    numbers = [int(cluster["P"].begin("plain", access=Access.PUBLIC).rpartition(".")[2]) for _ in range(3)]

    assert numbers == sorted(numbers)
    assert numbers[1] - numbers[0] not in (1, numbers[2] - numbers[1])


def _events_to(cluster: Cluster, site: str, tx: TxId) -> list[TxPublished]:
    """Events of a transaction that cross the site's link, from now on."""
    crossed: list[TxPublished] = []

    def look(owner: NodeId, peer: NodeId, message: LinkMessage) -> bool:
        what = content_of(message)
        if peer == site and isinstance(what, TxPublished) and what.tx == tx:
            crossed.append(what)
        return False

    cluster.lose(look)
    return crossed


def test_a_standing_subscriber_that_is_turned_away_gets_no_event() -> None:
    for constraints in ((OnlyFrom(frozenset({"S"})), MinParticipants(1)), (MinParticipants(1), MaxParticipants(1))):
        cluster = cluster_of("P", "S", "T")
        at = {name: cluster[name].subscribe("plain", standing=True) for name in ("S", "T")}
        tx = cluster["P"].begin("plain", constraints=constraints)
        members = cluster.broker(cluster.rendezvous("plain")).core.rendezvous.coordinators[tx].members
        (welcome,) = [m.identity for m in members.values()]
        turned_away = "T" if welcome == "S" else "S"
        crossed, welcomed = _events_to(cluster, turned_away, tx), _events_to(cluster, str(welcome), tx)

        cluster["P"].publish("plain", "one", tx=tx)
        cluster["P"].commit(tx)
        cluster.settle()

        assert (crossed, len(welcomed)) == ([], 1)
        assert at[turned_away].seen(tx) == []
        assert at[str(welcome)].committed(tx) == ("one",)
        cluster.check()


def test_a_site_with_a_standing_answer_gets_its_events_whatever_its_other_subscriptions_choose() -> None:
    cluster = cluster_of("P", "S")
    standing = cluster["S"].subscribe("plain", standing=True)
    cluster["S"].subscribe("plain", Scope.NONE)

    tx = cluster["P"].begin("plain")
    cluster["P"].publish("plain", "one", tx=tx)
    cluster["P"].commit(tx)
    cluster.settle()

    assert standing.committed(tx) == ("one",)


def test_one_shots_do_not_wait_for_a_transaction_whose_publisher_must_say_whether_to_wait() -> None:
    cluster = cluster_of("P", "Q", "S", "T")
    cluster["Q"].advertise("other")
    slow = cluster["S"].subscribe("other")
    quick = cluster["T"].subscribe("other", standing=True)
    slow.holds.add("PrepareTx")
    tx = cluster["P"].begin("other", vote_timeout_s=0.5)
    assert isinstance(cluster["P"].commit_soon(tx).failure(), UncheckedTransaction)

    done = cluster["Q"].execute("other", ["one"], census=None)

    assert done.outcome is Outcome.COMMITTED
    assert quick.committed(done.tx) == ("one",)
    slow.release()
    assert cluster["P"].commit(tx).outcome is Outcome.COMMITTED
    cluster.check()


def test_a_site_forgets_the_names_it_voted_under_on_links_that_are_gone() -> None:
    cluster = cluster_of("P", "S")
    cluster["S"].subscribe("other", standing=True)
    home = cluster.world.network.homes[NodeId("S")]
    for _ in range(5):
        cluster.kill(home)
        cluster.restart(home)

    names = cluster["S"].node.core.participation.voters.names

    assert len(names) == 1
    assert cluster["P"].execute("other", ["one"], census=None).outcome is Outcome.COMMITTED
