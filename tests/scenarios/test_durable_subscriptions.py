"""A durable subscription is kept for its name until somebody ends it for good."""

from tests.scenarios.cluster import Client, Cluster
from tops.model.transactions import Scope
from tops.protocol.records import SubscriptionAdvanced


def reader() -> tuple[Cluster, Client]:
    cluster = Cluster("P", "S")
    cluster["P"].advertise("log")
    participant = cluster["S"].subscribe("log", Scope.LOCAL, durable="reader", start="oldest")
    cluster["P"].publish("log", "one")
    cluster.run(1.0)
    cluster["S"].unsubscribe(participant)
    return cluster, cluster["S"]


def end(client: Client) -> None:
    client.request(lambda request: client.node.core.end_log(request, "log", "reader")).result()


def test_an_ended_subscription_holds_nothing_of_the_log_back() -> None:
    cluster, s = reader()
    log = cluster.broker(cluster.rendezvous("log")).core.rendezvous.logs["log"]
    cluster["P"].publish("log", "two")
    before = log.retain_from()

    end(s)

    assert before == 2
    assert log.retain_from() == log.last_number + 1


def test_the_end_of_a_durable_subscription_survives_a_crash_of_its_broker() -> None:
    cluster, s = reader()
    home = cluster.rendezvous("log")
    end(s)
    written = [r for r in cluster.broker(home).disk.records if isinstance(r, SubscriptionAdvanced)]

    cluster.kill(home)
    cluster.restart(home)

    assert written[-1].position == -1
    assert cluster.broker(home).core.rendezvous.logs["log"].feeds == {}


def test_an_end_is_said_again_until_the_rendezvous_answers_and_ending_twice_is_no_error() -> None:
    cluster, s = reader()
    home = cluster.rendezvous("log")
    cluster.kill(home)
    pending = s.request(lambda request: s.node.core.end_log(request, "log", "reader"))
    cluster.run(2.0)
    assert not pending.done

    cluster.restart(home)
    pending.result()
    end(s)

    assert cluster.broker(home).core.rendezvous.logs["log"].feeds == {}


def test_a_name_that_was_ended_starts_anew() -> None:
    cluster, s = reader()
    cluster["P"].publish("log", "two")
    end(s)

    again = s.subscribe("log", Scope.LOCAL, durable="reader")
    cluster["P"].publish("log", "three")
    cluster.run(1.0)

    assert again.seen()[-1] == "three"
    assert "two" not in again.seen()
