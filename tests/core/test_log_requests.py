"""Asking a durable type's coordinator how far its log is decided, and following a log without a vote."""

from collections.abc import Callable

import pytest

from tops.core.client.site import SiteCore
from tops.core.coordinator.rendezvous import Rendezvous, RendezvousOptions
from tops.core.participant.participation import SiteOptions, Wish
from tops.model.errors import InvalidEventType
from tops.model.event_types import EventType
from tops.model.filters import Filter
from tops.model.ids import NodeId
from tops.model.log_points import LogPoint
from tops.model.transactions import Scope
from tops.protocol.effects import CompleteRequest, Effect, SendOnLink, SendTo, SetTimer
from tops.protocol.messages import (
    Address,
    Envelope,
    Event,
    FollowLog,
    GetLogState,
    LogStateReported,
    Origin,
    Published,
    Sender,
    StandingRegistered,
    TypeAdvertised,
)

STOCK = EventType("stock", {"item": str}, durable=True)
B1 = NodeId("b1")
SITE, SENDER = Address(B1, "site", 1), Sender("site", "writer", incarnation=1)


def rendezvous_with_stock() -> Rendezvous:
    rendezvous = Rendezvous(B1, 1, {}, RendezvousOptions(), bytes)
    rendezvous.on_message(TypeAdvertised(definitions=(STOCK,)), SENDER, SITE, 0.0)
    return rendezvous


def site() -> SiteCore:
    core = SiteCore(NodeId("site"), 1, [B1], lambda size: bytes(size), SiteOptions())
    core.link_up(B1, 0.0)
    return core


def letters(effects: list[Effect], kind: Callable[..., object]) -> list[object]:
    sent = [e.message.body for e in effects if isinstance(e, SendOnLink) and isinstance(e.message, Envelope)]
    return [body for body in sent if isinstance(body, kind)]  # type: ignore[arg-type]


def test_the_coordinator_tells_how_far_the_log_is_decided() -> None:
    rendezvous = rendezvous_with_stock()
    published = Published(event=Event("stock", {"item": "a"}), origin=Origin("stock", 1))
    rendezvous.on_publication(published, SENDER, SITE, 0.0)
    rendezvous.logs["stock"].reserve()

    effects = rendezvous.on_message(GetLogState(request=7, event_type="stock"), SENDER, SITE, 0.0)

    assert [
        e.message.decided for e in effects if isinstance(e, SendTo) and isinstance(e.message, LogStateReported)
    ] == [1]


def test_a_question_about_a_log_is_repeated_until_it_is_answered() -> None:
    core = site()
    core.types.define_all((STOCK,))
    core.get_log_state(3, "stock")

    again = core.timer(("retry",), 1.0)
    told = LogStateReported(request=3, event_type="stock", decided=9, oldest=1, in_sync=(), followers=())
    answered = core.receive(Envelope(to=Address(B1), body=told), 1.0)
    silent = core.timer(("retry",), 2.0)

    assert letters(again, GetLogState)
    assert CompleteRequest(3, told) in answered
    assert not letters(silent, GetLogState)


def test_a_replica_with_local_scope_asks_for_the_log_and_leaves_no_standing_answer() -> None:
    core = site()
    wish = Wish((STOCK,), Filter.everything(), scope=Scope.LOCAL, durable="r1", replica=LogPoint("h", 4, "d"))

    effects = core.subscribe(1, 1, wish)

    assert CompleteRequest(1, 1) in effects
    assert [w.position for w in letters(effects, FollowLog)] == [4]  # type: ignore[attr-defined]
    assert letters(effects, StandingRegistered) == []
    assert any(isinstance(e, SetTimer) for e in effects)


def test_a_replica_can_not_be_without_any_scope() -> None:
    core = site()
    wish = Wish((STOCK,), Filter.everything(), scope=Scope.NONE, durable="r1", replica=LogPoint("h", 4, "d"))

    effects = core.subscribe(1, 1, wish)

    with pytest.raises(InvalidEventType, match="standing registration"):
        raise next(e.error for e in effects if isinstance(e, CompleteRequest) and e.error is not None)
