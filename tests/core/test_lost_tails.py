"""A rendezvous whose journal was cut off, letter by letter: who is waited for, and who ends the waiting."""

from tests.core.driven_rendezvous import ME, PUBLISHER, DrivenRendezvous, posts, standing_only
from tests.core.test_joining import commit
from tops.core.rendezvous import Rendezvous, RendezvousOptions
from tops.effects import Alarm, Effect, Note, Persist
from tops.messages import (
    Address,
    AskReached,
    EndLog,
    Event,
    LogDelivered,
    Origin,
    PrepareEpoch,
    Published,
    ReachedTold,
    Sender,
)
from tops.records import TailFound, TailLost


def cut_off(former: DrivenRendezvous) -> tuple[DrivenRendezvous, list[Effect]]:
    """The second life, with everything that is on disk, and word that there was more."""
    return restarted(former, 2, torn=True)


def restarted(former: DrivenRendezvous, incarnation: int, torn: bool) -> tuple[DrivenRendezvous, list[Effect]]:
    driven = DrivenRendezvous()
    driven.core = Rendezvous(ME, incarnation, {}, RendezvousOptions(), bytes)
    for effect in former.effects:
        if isinstance(effect, Persist | Note):
            driven.core.recover(effect.record)
    driven.effects = [e for e in former.effects if isinstance(e, Persist | Note)]
    effects = driven.core.recovered(torn)
    driven.effects += effects
    return driven, effects


def with_two_replicas() -> DrivenRendezvous:
    rendezvous = DrivenRendezvous()
    for name in "ab":
        rendezvous.stand(name, "set", name.upper(), position=0)
        rendezvous.feed(name, name.upper(), 0)
    commit(rendezvous, "p.1.1")
    return rendezvous


def tell(rendezvous: DrivenRendezvous, site: str, reached: int, incarnation: int = 2) -> list[Effect]:
    told = ReachedTold(event_type="set", incarnation=incarnation, reached=reached, transactions=())
    return rendezvous.hear(told, Address(ME, site, 1))


def test_every_replica_that_makes_itself_heard_is_asked_until_it_has_told() -> None:
    rendezvous, _ = cut_off(with_two_replicas())

    (asked,) = posts(rendezvous.feed("a", "A", 1), AskReached)
    tell(rendezvous, "A", 1)
    again = posts(rendezvous.feed("a", "A", 1), AskReached)

    assert (asked.end, asked.incarnation) == (1, 2)
    assert not again


def test_what_was_told_to_an_earlier_life_does_not_count() -> None:
    rendezvous, _ = cut_off(with_two_replicas())

    for site in "AB":
        tell(rendezvous, site, 1, incarnation=1)

    assert rendezvous.core.logs["set"].lost is not None


def test_a_replica_whose_subscription_an_operator_ends_is_not_waited_for() -> None:
    rendezvous, begun = cut_off(with_two_replicas())
    rendezvous.stand("a", "set", "A", position=1)
    waits = posts(rendezvous.one_shot("p.1.2", standing_only("set")), PrepareEpoch)
    tell(rendezvous, "A", 1)

    effects = rendezvous.hear(EndLog(request=1, event_type="set", name="B", operator=True), PUBLISHER)

    assert [e.record for e in begun if isinstance(e, Persist)] == [TailLost(event_type="set", end=1)]
    assert not waits
    assert TailFound(event_type="set", end=1, reached=1) in [e.record for e in effects if isinstance(e, Persist)]
    assert [p.epoch.number for p in posts(effects, PrepareEpoch)] == [2]


def test_who_was_not_heard_in_time_is_asked_for_what_was_decided_before_the_log_went_on_also_by_later_lives() -> None:
    rendezvous, _ = cut_off(with_two_replicas())
    (waiting,) = posts(rendezvous.feed("b", "B", 1), AskReached)
    rendezvous.stand("a", "set", "A", position=1)
    tell(rendezvous, "A", 1)
    rendezvous.effects += rendezvous.core.on_timer(("tail", "set"), 10.0)
    commit(rendezvous, "p.1.2")

    (late,) = posts(rendezvous.feed("b", "B", 1), AskReached)
    rendezvous, _ = restarted(rendezvous, 3, torn=False)
    (later,) = posts(rendezvous.feed("b", "B", 1), AskReached)
    tell(rendezvous, "B", 1, incarnation=3)

    assert [(m.incarnation, m.end, m.went_on_in) for m in (waiting, late, later)] == [
        (2, 1, None),
        (2, 1, 2),
        (3, 1, 2),
    ]
    assert [(d.after, d.upto) for d in posts(rendezvous.feed("b", "B", 1), LogDelivered)] == [(1, 2)]


def test_a_log_that_nobody_votes_in_waits_a_while_for_its_followers() -> None:
    former = DrivenRendezvous()
    former.feed("", "F", 0)
    published = Published(event=Event("set", {"mark": "m", "key": "a"}), origin=Origin("set", 1))
    former.effects += former.core.on_publication(published, Sender("P", "writer", incarnation=1), PUBLISHER, 0.0)
    rendezvous, _ = cut_off(former)

    tell(rendezvous, "F", 4)
    waits = rendezvous.core.logs["set"].lost is not None
    effects = rendezvous.core.on_timer(("tail", "set"), 10.0)

    assert waits
    assert rendezvous.core.logs["set"].last_number == 4
    assert [e.kind for e in effects if isinstance(e, Alarm)] == ["ahead-of-log"]
