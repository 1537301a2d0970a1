"""Messages of sites that fit a frame, and would not fit one any more inside of what a broker makes of them."""

import struct
from collections.abc import AsyncIterator, Iterator
from typing import Any, TypeVar

import msgspec
import pytest
import pytest_asyncio

from tests.attack.raw_link import RawLink, Verdict, raw_link
from tests.integration.overlay.cluster import Recorder
from tests.integration.overlay.secured import Secured
from tests.support.polling import eventually
from tops import EventType, LocalOutcome, TxType
from tops.core.link.session import Frame
from tops.model.errors import TransactionTooLarge
from tops.model.filters import Filter
from tops.model.ids import NodeId, TxId
from tops.model.sizes import ENCODED_BYTES_MAX, MESSAGE_BYTES_MAX, SITE_MESSAGE_BYTES_MAX, encoded_bytes
from tops.model.transactions import Access, Outcome, Scope, ScopeLimit
from tops.protocol.messages import (
    Address,
    AddressedMessage,
    BeginPublic,
    BeginTx,
    CensusOpened,
    ConfirmRoute,
    Dissemination,
    Envelope,
    EpochFinished,
    EpochVoted,
    Event,
    EventsPublished,
    LinkMessage,
    Message,
    OneShot,
    Origin,
    PrepareEpoch,
    Publication,
    Published,
    PublishInTx,
    RunOneShot,
    RunOneShots,
    StandingRegistered,
    TxOutcome,
    TxPublished,
    TxSpec,
    TypeAdvertised,
)
from tops.runtime.links.wire import encode_frame

L = TypeVar("L", bound=Message)
B1, TYPE = NodeId("b1"), "sized"
DURABLE = EventType(TYPE, {"x": bytes, "xs": list}, durable=True, optional=("x", "xs"))
PLAIN = EventType("plain", {"x": bytes}, durable=True)


@pytest_asyncio.fixture
async def writer(secured: Secured) -> AsyncIterator[RawLink]:
    async with raw_link(secured.broker.url, "b1", secured.keys("writer", "admin"), "x") as link:
        assert await link.send(message(TypeAdvertised(definitions=(DURABLE,)))) is Verdict.TAKEN
        yield link


def message(body: AddressedMessage) -> Envelope:
    return Envelope(to=Address(B1), body=body)


def spread(publication: Publication) -> Dissemination:
    return Dissemination(rendezvous=B1, upward=True, early=False, publication=publication)


def letters(link: RawLink, kind: type[L]) -> list[L]:
    """What the link has received of one kind."""
    return [m.body for m in link.received if isinstance(m, Envelope) and isinstance(m.body, kind)]


def one_shots(tx: TxId, body: dict[str, Any], attributes: dict[str, Any]) -> Envelope:
    spec = TxSpec(TYPE, TxType.LOCAL, limit=ScopeLimit.LOCAL, census=None, attributes=attributes)
    return message(RunOneShots(spec=spec, transactions=(OneShot(tx, (Event(TYPE, body),)),)))


def padded(link: RawLink, padding: bytes) -> Iterator[LinkMessage]:
    """Every message of a site that carries events or attributes of any length."""
    body, tx = {"x": padding}, TxId(f"writer:x.{link.incarnation}.1")
    event, spec = Event(TYPE, body), TxSpec(TYPE, TxType.LOCAL, limit=ScopeLimit.LOCAL, census=None)
    long = TxSpec(TYPE, TxType.LOCAL, attributes=body)
    encoded = msgspec.Raw(msgspec.msgpack.encode(body))
    yield spread(Published(event=event, origin=Origin(TYPE, 1)))
    yield spread(EventsPublished(event_type=TYPE, bodies=(encoded,), origin=Origin(TYPE, 1)))
    yield spread(TxPublished(tx=tx, event_type=TYPE, sequence=1, event=event))
    yield message(RunOneShot(tx=tx, spec=spec, events=(event,)))
    yield one_shots(tx, body, {})
    yield one_shots(tx, {}, body)
    yield message(PublishInTx(tx=tx, request=1, event=event))
    yield message(BeginTx(tx=tx, spec=long))
    yield message(BeginPublic(request=1, spec=long))
    yield spread(CensusOpened(tx=tx, spec=long, coordinator=B1, incarnation=1, initiator=Address(B1)))


async def test_messages_that_fit_a_frame_alone_are_rejected(writer: RawLink, secured: Secured) -> None:
    kinds = len(list(padded(writer, b"")))
    for kind in range(kinds):
        around = encoded_bytes(list(padded(writer, bytes(2**20)))[kind]) - 2**20
        message = list(padded(writer, bytes(MESSAGE_BYTES_MAX - around)))[kind]
        assert encoded_bytes(message) == MESSAGE_BYTES_MAX
        assert await writer.send(message) is Verdict.REJECTED, kind

    assert secured.broker.node.core.rendezvous.logs[TYPE].last_number == 0
    audit = secured.broker.table.data / "audit.log"
    await eventually(lambda: f"invalid: tx writer:x.{writer.incarnation}.1" in audit.read_text())


@pytest.mark.parametrize("attributes", [False, True], ids=["events", "attributes"])
async def test_the_longest_transaction_reaches_a_durable_subscriber(
    writer: RawLink, secured: Secured, attributes: bool
) -> None:
    def message(padding: int) -> Envelope:
        tx, long = TxId(f"writer:x.{writer.incarnation}.1"), {"x": bytes(padding)}
        return one_shots(tx, {}, long) if attributes else one_shots(tx, long, {})

    longest = message(SITE_MESSAGE_BYTES_MAX - (encoded_bytes(message(2**20)) - 2**20))
    assert encoded_bytes(longest) == SITE_MESSAGE_BYTES_MAX
    assert await writer.send(longest) is Verdict.TAKEN

    async with secured.site("reader", "admin") as reader:
        recorder = Recorder(Scope.LOCAL)
        await reader.subscribe(DURABLE, participant=recorder, durable="reader", start="oldest")
        await eventually(lambda: bool(recorder.joined))
    assert secured.broker.node.counters["alarms"] == 0


@pytest.mark.parametrize("kind", ["published", "together", "one-shot"])
async def test_a_message_is_measured_as_it_is_encoded_again(writer: RawLink, secured: Secured, kind: str) -> None:
    """Floats of five bytes, which every encoder here writes with nine."""
    count = (SITE_MESSAGE_BYTES_MAX - 2048) // 5
    mark = b"@" * 300
    messages: dict[str, LinkMessage] = {
        "published": spread(Published(event=Event(TYPE, {"xs": mark}), origin=Origin(TYPE, 1))),
        "together": spread(
            EventsPublished(
                event_type=TYPE, bodies=(msgspec.Raw(msgspec.msgpack.encode({"xs": mark})),), origin=Origin(TYPE, 1)
            )
        ),
        "one-shot": one_shots(TxId(f"writer:x.{writer.incarnation}.1"), {"xs": mark}, {}),
    }
    encoded_mark = msgspec.msgpack.encode(mark)
    floats = b"\xdd" + struct.pack(">I", count) + struct.pack(">Bf", 0xCA, 1.5) * count
    data = encode_frame(Frame(*writer.next_position(), (messages[kind],))).replace(encoded_mark, floats)
    assert ENCODED_BYTES_MAX < len(data) < SITE_MESSAGE_BYTES_MAX, "as it arrives it is not too long"

    assert await writer.send_encoded(data) is Verdict.REJECTED
    assert secured.broker.node.core.rendezvous.logs[TYPE].last_number == 0


async def test_writes_in_parallel_that_no_message_holds_together_are_all_decided(
    writer: RawLink, secured: Secured
) -> None:
    chain, spec = secured.broker.node.core.rendezvous.logs[TYPE].chain, TxSpec(TYPE, TxType.DISTRIBUTED, census=None)
    spec = msgspec.structs.replace(spec, local_outcome=LocalOutcome.FOLLOWS)
    async with raw_link(secured.broker.url, "b1", secured.keys("voter", "admin"), "x") as voter:
        standing = StandingRegistered(
            voter="v",
            event_type=TYPE,
            filter=Filter(),
            scope=Scope.DISTRIBUTED,
            secret=b"s",
            position=0,
            history=chain.history,
            digest=chain.at(0) or "",
        )
        assert await voter.send(message(standing)) is Verdict.TAKEN
        for number in range(1, 7):
            tx = TxId(f"writer:x.{writer.incarnation}.{number}")
            run = RunOneShot(tx=tx, spec=spec, events=(Event(TYPE, {"x": bytes(5_000_000)}),))
            assert await writer.send(message(run)) is Verdict.TAKEN
        committed: list[TxId] = []
        for _ in range(6):
            await voter.send(message(ConfirmRoute(subscription=1)))
            prepare = next(m for m in letters(voter, PrepareEpoch) if m.epoch.number == len(committed) + 1)
            vote = EpochVoted(epoch=prepare.epoch, digest=prepare.digest, voter="v", excluded={})
            await voter.send(message(vote), message(EpochFinished(epoch=prepare.epoch, voter="v", note=False)))
            committed += [member.tx for member in prepare.members]
        await writer.send(message(ConfirmRoute(subscription=1)))

    assert [outcome.tx for outcome in letters(writer, TxOutcome) if outcome.outcome is Outcome.COMMITTED] == committed
    assert len(committed) == 6
    assert secured.broker.node.counters["alarms"] == 0


async def test_a_follower_far_behind_costs_the_broker_one_delivery_of_memory_at_a_time(secured: Secured) -> None:
    async with secured.site("writer", "admin") as writer:
        await writer.advertise(PLAIN)
        for _ in range(6):
            await writer.publish(PLAIN, {"x": bytes(2_000_000)})
    read = await secured.broker.node.store.entries(PLAIN.name, 1, 6)
    assert [entry.number for entry in read] == [1]
    assert [entry.number for entry in await secured.broker.node.store.entries(PLAIN.name, 2, 6)] == [2]


async def test_a_transaction_of_many_messages_is_aborted_when_it_is_too_long_for_its_log(
    writer: RawLink, secured: Secured
) -> None:
    tx = TxId(f"writer:x.{writer.incarnation}.1")
    spec = TxSpec(TYPE, TxType.LOCAL, limit=ScopeLimit.LOCAL, census=None)
    opened = CensusOpened(tx=tx, spec=spec, coordinator=B1, incarnation=1, initiator=Address(B1))
    await writer.send(spread(opened))
    for sequence in (1, 2):
        event = Event(TYPE, {"x": bytes(5_000_000)})
        await writer.send(spread(TxPublished(tx=tx, event_type=TYPE, sequence=sequence, event=event)))

    outcomes = letters(writer, TxOutcome)
    assert [(o.tx, o.outcome) for o in outcomes] == [(tx, Outcome.ABORTED)]
    assert outcomes[0].reason.startswith("too-large: ")
    assert not secured.broker.node.core.rendezvous.relays


@pytest.mark.parametrize("access", list(Access))
async def test_a_publisher_is_told_that_its_transaction_takes_no_more(secured: Secured, access: Access) -> None:
    async with secured.site("writer", "admin") as writer:
        await writer.advertise(PLAIN)
        tx = await writer.begin(TxSpec(PLAIN.name, TxType.LOCAL, access, ScopeLimit.LOCAL))
        assert await tx.publish(PLAIN, {"x": bytes(5_000_000)}) == 1
        with pytest.raises(TransactionTooLarge) as error:
            await tx.publish(PLAIN, {"x": bytes(5_000_000)})
        assert (error.value.code, error.value.tx) == ("too-large", tx.id)
        assert await tx.publish(PLAIN, {"x": b"x"}) == 2  # it is as it was
        assert (await tx.commit()).outcome is Outcome.COMMITTED
