"""Reading a durable type's log in passing: what is there is told, and nothing is kept for the reader's sake."""

import msgspec

from tests.core.test_log_requests import B1, SENDER, SITE, STOCK, letters, rendezvous_with_stock, site
from tops.core.coordinator.rendezvous import Rendezvous
from tops.model.errors import NotReachable
from tops.model.filters import Filter
from tops.protocol.effects import CompleteRequest, Effect, Note, SendTo
from tops.protocol.messages import (
    Address,
    Envelope,
    Event,
    FollowLog,
    FollowRejected,
    GetLogState,
    LogDelivered,
    LogStateReported,
    Origin,
)
from tops.protocol.messages import Published as EventPublished


def wanted(position: int, credit: int = 2) -> FollowLog:
    return FollowLog(
        name="look", definitions=(STOCK,), filter=Filter(), position=position, start="", credit=credit, voter=None,
        ephemeral=True,
    )  # fmt: skip


def with_events(count: int) -> Rendezvous:
    rendezvous = rendezvous_with_stock()
    for number in range(1, count + 1):
        published = EventPublished(event=Event("stock", {"item": "a"}), origin=Origin("stock", number))
        rendezvous.on_publication(published, SENDER, SITE, 0.0)
    return rendezvous


def numbers(effects: list[Effect]) -> list[int]:
    return [
        e.number
        for p in effects
        if isinstance(p, SendTo) and isinstance(p.message, LogDelivered)
        for e in p.message.entries
    ]


def test_every_question_gets_one_delivery_also_when_it_is_repeated() -> None:
    rendezvous = with_events(5)

    answers = [numbers(rendezvous.on_message(wanted(position), SENDER, SITE, 0.0)) for position in (0, 0, 2, 4)]

    assert answers == [[1, 2], [1, 2], [3, 4], [5]]


def test_a_reader_is_not_recorded_and_holds_nothing_back() -> None:
    rendezvous = with_events(3)

    effects = rendezvous.on_message(wanted(0), SENDER, SITE, 0.0)
    told = rendezvous.on_message(GetLogState(request=1, event_type="stock"), SENDER, SITE, 0.0)
    rendezvous.on_message(wanted(-1), SENDER, SITE, 0.0)

    assert not [e for e in effects if isinstance(e, Note)]
    assert [p.message.followers for p in told if isinstance(p, SendTo) and isinstance(p.message, LogStateReported)] == [
        ()
    ]
    assert rendezvous.logs["stock"].retain_from() == 4
    assert rendezvous.logs["stock"].feeds == {}


def test_a_site_asks_again_until_the_answer_to_this_very_question_is_there() -> None:
    core = site()
    core.types.define_all((STOCK,))
    core.read_log(3, "look", "stock", 4, 256)
    late = LogDelivered(name="look", event_type="stock", acknowledged=0, after=0, upto=4, entries=(), incarnation=1)
    right = msgspec.structs.replace(late, after=4, upto=6)

    again = core.timer(("retry",), 1.0)
    answers = [core.receive(Envelope(to=Address(B1), body=d), 1.0) for d in (late, right)]

    assert [w.position for w in letters(again, FollowLog)] == [4]  # type: ignore[attr-defined]
    assert answers == [[], [CompleteRequest(3, right)]]
    assert not letters(core.timer(("retry",), 2.0), FollowLog)


def test_what_is_no_longer_kept_is_said() -> None:
    core = site()
    core.types.define_all((STOCK,))
    core.read_log(3, "look", "stock", 0, 256)
    rejected = FollowRejected(name="look", event_type="stock", oldest=7)

    (answer,) = core.receive(Envelope(to=Address(B1), body=rejected), 1.0)

    assert isinstance(answer, CompleteRequest) and isinstance(answer.error, NotReachable)
    assert "begins at 7" in str(answer.error)
