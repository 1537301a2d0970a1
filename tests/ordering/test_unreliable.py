"""Domains whose events may be lost: the three ways in which an event leaves the buffer, and what comes late."""

from tests.ordering.driven import Driven, spread
from tops.model.ordering import OrderingDomain, Unreliable

BOTH = {"j": ("T1", "T2"), "k": ("T1", "T2")}


def domain(buffer: int = 100) -> OrderingDomain:
    return spread("T1", "T2", unreliable=Unreliable(buffer, 1.0))


def published(cluster: Driven, *events: tuple[str, str]) -> None:
    for event_type, name in events:
        cluster.publish(event_type, name)
        cluster.run()


def test_an_event_leaves_the_buffer_when_all_before_it_are_delivered() -> None:
    cluster = Driven(domain(), subscribers=BOTH)
    published(cluster, ("T1", "a"), ("T2", "b"))
    k = cluster["k"]

    k.take("b")
    assert k.module.buffered == 1
    k.take("a")

    assert (k.received, k.module.buffered) == (["a", "b"], 0)


def test_an_event_leaves_the_buffer_when_the_time_of_what_it_waits_for_expires() -> None:
    cluster = Driven(domain(), subscribers=BOTH)
    published(cluster, ("T1", "a"), ("T2", "b"), ("T2", "c"))
    k = cluster["k"]

    k.take("b", "c")
    k.expire()
    assert k.received == ["b", "c"]
    k.take("a")

    assert (k.received, k.out_of_order) == (["b", "c"], ["a"])


def test_the_oldest_event_leaves_the_buffer_when_it_is_full() -> None:
    cluster = Driven(domain(buffer=2), subscribers=BOTH)
    published(cluster, ("T1", "a"), ("T2", "b"), ("T1", "lost"), ("T2", "c"), ("T1", "d"), ("T2", "e"))
    k = cluster["k"]

    k.take("b", "c")
    assert k.received == []
    k.take("d")

    assert k.received == ["b"], "it waited for a alone"
    assert k.module.buffered == 2
    k.take("a")
    assert k.out_of_order == ["a"]


def test_what_arrives_again_is_delivered_neither_in_order_nor_out_of_it() -> None:
    cluster = Driven(domain(), subscribers=BOTH)
    published(cluster, ("T1", "a"), ("T2", "b"))
    k = cluster["k"]
    late = next(m for m in k.arriving if getattr(m, "event", None) and m.event.body["name"] == "a")  # type: ignore[union-attr]

    k.take("b")
    k.expire()
    k.take("a")
    k.arriving.append(late)
    k.take("a")

    assert (k.received, k.out_of_order) == (["b"], ["a"])


def test_a_gap_in_one_type_holds_up_what_waits_for_it_and_nothing_else() -> None:
    cluster = Driven(domain(), subscribers={**BOTH, "only": ("T2",)})
    published(cluster, ("T1", "a"), ("T2", "b"))

    cluster["k"].take("b")
    cluster["only"].take("b")

    assert cluster["k"].received == []
    assert cluster["only"].received == ["b"]
