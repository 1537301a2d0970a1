"""Texts and lists that a site makes as long as it likes: none of them is kept by a broker."""

import math
import typing
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from tests.attack.raw_link import RawLink, Verdict, raw_link
from tests.attack.samples import Named, sample
from tests.integration.overlay.secured import Secured
from tops import EventType, TxType
from tops.model.constraints import Required
from tops.model.errors import InvalidEvent, InvalidTransaction
from tops.model.event_types import NAME_LENGTH_MAX
from tops.model.filters import Filter
from tops.model.ids import NodeId, TxId
from tops.model.rejections import Rejection, RejectionCode
from tops.model.sizes import TEXT_MAX
from tops.model.transactions import ScopeLimit
from tops.protocol.messages import (
    AbortTx,
    Address,
    AddressedMessage,
    BeginPublic,
    BeginTx,
    CensusOpened,
    CensusPolicy,
    Dissemination,
    Envelope,
    EpochId,
    EpochVoted,
    FollowLog,
    LinkMessage,
    Publication,
    RunOneShot,
    SubscriptionChanged,
    TxSpec,
    TypeAdvertised,
)
from tops.runtime.edge.bounds import MEMBERS_MAX, PARTS, UNCOUNTED, VALUES, check_bounds
from tops.runtime.edge.rights import LINK_RIGHTS

B1 = NodeId("b1")
LONG = "x" * 4_000_000
PLAIN = EventType("plain", {"x": bytes})
OF_SITES = [kind for kind, need in LINK_RIGHTS.items() if need is not None]
EXEMPT = VALUES | UNCOUNTED | PARTS
SPEC = TxSpec("plain", TxType.LOCAL, limit=ScopeLimit.LOCAL, census=None)


def content(body: AddressedMessage) -> Envelope:
    return Envelope(to=Address(B1), body=body)


def texts_of(kind: type[msgspec.Struct]) -> Iterator[str]:
    """The fields of a kind of message that hold one text."""
    for name, hint in typing.get_type_hints(kind).items():
        inner = [h for h in typing.get_args(hint) or (hint,) if h is not type(None)]
        plain = [h.__supertype__ if isinstance(h, typing.NewType) else h for h in inner]
        if plain and plain[0] in (str, bytes) and typing.get_origin(hint) not in (tuple, frozenset, dict):
            yield name


@pytest.mark.parametrize("kind", OF_SITES, ids=lambda kind: kind.__name__)
def test_every_text_in_every_message_of_a_site_has_a_bound(kind: type[msgspec.Struct]) -> None:
    message = sample(kind, Named("rs.shop", "writer", 1, "b1"))
    check_bounds(message)
    hints = typing.get_type_hints(kind)
    for name in texts_of(kind):
        long: Any = b"x" * (TEXT_MAX + 1) if hints[name] is bytes else "x" * (TEXT_MAX + 1)
        with pytest.raises(InvalidEvent, match=name):
            check_bounds(msgspec.structs.replace(message, **{name: long}))


def collections_in(kind: type[msgspec.Struct]) -> list[tuple[str, Any]]:
    found = typing.get_type_hints(kind).items()
    return [
        (name, typing.get_origin(hint)) for name, hint in found if typing.get_origin(hint) in (tuple, frozenset, dict)
    ]


@pytest.mark.parametrize("kind", OF_SITES, ids=lambda kind: kind.__name__)
def test_every_list_in_every_message_of_a_site_has_a_bound(kind: type[msgspec.Struct]) -> None:
    message = sample(kind, Named("rs.shop", "writer", 1, "b1"))
    for name, origin in collections_in(kind):
        if (kind, name) in EXEMPT:
            continue
        many = [str(n) for n in range(MEMBERS_MAX + 1)]
        made = dict.fromkeys(many, "") if origin is dict else origin(many)
        with pytest.raises(InvalidEvent, match=name):
            check_bounds(msgspec.structs.replace(message, **{name: made}))


def test_what_is_exempt_still_exists() -> None:
    for kind, name in EXEMPT:
        assert name in kind.__struct_fields__


def wide(count: int) -> EventType:
    return EventType("wide", {f"{n}".rjust(NAME_LENGTH_MAX, "a"): int for n in range(count)})


def lineage(count: int) -> tuple[EventType, ...]:
    names = [f"{n}".rjust(NAME_LENGTH_MAX, "t") for n in range(count)]
    return tuple(EventType(name, {}, parent=before) for name, before in zip(names, [None, *names[:-1]], strict=True))


def vote(rejection: Rejection) -> EpochVoted:
    epoch = EpochId("plain", 1, 1, B1, 1)
    return EpochVoted(epoch=epoch, digest="d", voter="v", excluded={TxId("t.1.1"): rejection})


def overlong(tx: TxId) -> dict[str, LinkMessage]:
    """One message for each kind of thing that has no natural length."""
    strange = TxId(f"{tx.rsplit('.', 2)[0]}{LONG}.1.1")
    required = msgspec.structs.replace(SPEC, tx_type=TxType.DISTRIBUTED, constraints=(Required(frozenset([LONG])),))
    wanted = FollowLog(
        name=LONG, definitions=(PLAIN,), filter=Filter(), position=None, start="now", credit=1, voter=None
    )
    subscribed = SubscriptionChanged(subscription=1, definitions=(PLAIN,), filter=Filter(), scope=None, durable=False)
    return {
        "id": content(AbortTx(tx=strange, tx_type=TxType.LOCAL, event_type="plain", reason="")),
        "id of a one-shot": content(RunOneShot(tx=strange, spec=SPEC, events=())),
        "reason": content(AbortTx(tx=tx, tx_type=TxType.LOCAL, event_type="plain", reason=LONG)),
        "follower": content(wanted),
        "attributes of a type": content(TypeAdvertised(definitions=(wide(1000),))),
        "lineage": content(TypeAdvertised(definitions=lineage(1000))),
        "subscription": msgspec.structs.replace(subscribed, definitions=(wide(1000),)),
        "constraints": content(BeginTx(tx=tx, spec=required)),
        "plans": content(TypeAdvertised(definitions=(PLAIN,), plans=(required,))),
        "type of an event": content(RunOneShot(tx=tx, spec=msgspec.structs.replace(SPEC, event_type=LONG), events=())),
        "text of a rejection": content(vote(Rejection(RejectionCode.ERROR, LONG))),
        "sqlstate of a rejection": content(vote(Rejection(RejectionCode.ERROR, "x", sqlstate=LONG))),
        "texts of a rejection together": content(vote(Rejection(RejectionCode.ERROR, "x" * TEXT_MAX, "", "x"))),
        "pseudonym": content(BeginTx(tx=tx, spec=SPEC, own=typing.cast(Any, LONG))),
    }


@pytest_asyncio.fixture
async def writer(secured: Secured) -> AsyncIterator[RawLink]:
    async with raw_link(secured.broker.url, "b1", secured.keys("writer", "admin"), "x") as link:
        assert await link.send(content(TypeAdvertised(definitions=(PLAIN,)))) is Verdict.TAKEN
        yield link


async def test_what_is_too_long_is_rejected_and_not_repeated_in_the_audit_log(
    writer: RawLink, secured: Secured
) -> None:
    for what, message in overlong(TxId(f"writer:x.{writer.incarnation}.1")).items():
        assert await writer.send(message) is Verdict.REJECTED, what

    assert secured.broker.node.counters["alarms"] == 0
    assert (secured.broker.table.data / "audit.log").stat().st_size < 100_000
    assert "wide" not in secured.broker.node.core.rendezvous.types


def strange_times() -> Iterator[TxSpec]:
    for value in (math.nan, math.inf, -1.0, 1e300):
        yield msgspec.structs.replace(SPEC, vote_timeout_s=value)
        yield msgspec.structs.replace(SPEC, decide_within_s=value)
        yield msgspec.structs.replace(SPEC, tx_type=TxType.DISTRIBUTED, census=CensusPolicy(value))


@pytest.mark.parametrize("spec", list(strange_times()), ids=str)
def test_times_that_no_timer_can_be_set_to_are_refused(spec: TxSpec) -> None:
    with pytest.raises(InvalidTransaction, match="seconds from 0"):
        spec.check()


async def test_a_site_begins_no_transaction_with_such_times(writer: RawLink, secured: Secured) -> None:
    tx = TxId(f"writer:x.{writer.incarnation}.1")
    for spec in strange_times():
        opened = CensusOpened(tx=tx, spec=spec, coordinator=B1, incarnation=1, initiator=Address(B1))
        published: Publication = opened
        spread = Dissemination(rendezvous=B1, upward=True, early=False, publication=published)
        begun = content(BeginTx(tx=tx, spec=spec))
        for message in (spread, begun, content(BeginPublic(request=1, spec=spec))):
            assert await writer.send(message) is Verdict.REJECTED, spec

    assert not secured.broker.node.core.rendezvous.relays


def test_a_vote_on_very_many_changes_is_within_the_bounds() -> None:
    vote = sample(EpochVoted, Named("rs.shop", "writer", 1, "b1"))

    check_bounds(msgspec.structs.replace(vote, rows=(tuple(range(100_000)),)))
