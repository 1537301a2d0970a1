"""Events that no library sends: nested too deeply, unlike their type's definition, or with a wrong clock."""

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from adapters.changes import Member
from adapters.embedded.free_ports import free_port
from replication.model.events import write_body
from tests.attack.raw_link import RawLink, Verdict, raw_link
from tests.integration.overlay.secured import Secured
from tests.support.polling import eventually
from tops import Broker, EventType, TxType
from tops.core.link.session import Frame
from tops.model.errors import InvalidEvent, InvalidEventType, JournalFailed, ProtocolError
from tops.model.event_types import NESTING_MAX
from tops.model.ids import NodeId, TxId
from tops.model.transactions import ScopeLimit
from tops.protocol.effects import Persist, SendOnLink
from tops.protocol.messages import (
    Address,
    AddressedMessage,
    BeginPublic,
    BeginTx,
    CensusOpened,
    Dissemination,
    Envelope,
    Event,
    EventsPublished,
    LinkMessage,
    LogEntry,
    OneShot,
    Origin,
    Publication,
    Published,
    PublishInTx,
    RoutesReset,
    RunOneShot,
    RunOneShots,
    TxPublished,
    TxSpec,
    TypeAdvertised,
)
from tops.protocol.records import LogAppended
from tops.protocol.set_types import set_definition
from tops.runtime.config import parse_config
from tops.runtime.edge.event_checks import CLOCK_DIFFERENCE_MAX_MS, EventChecks, check_nesting
from tops.runtime.links.dialling import client_session, open_socket
from tops.runtime.links.identity import Self
from tops.runtime.links.link import exchange_link_hello, receive_bytes
from tops.runtime.links.wire import LinkHello, decode, encode_frame, make_link_hello
from tops.security import Kind

B1 = NodeId("b1")
LOG = "rs.alpha"


@pytest_asyncio.fixture
async def replica(secured: Secured) -> AsyncIterator[RawLink]:
    """A link with the key of a replica, which may do most with its set's log."""
    async with raw_link(secured.broker.url, "b1", secured.keys("alpha/r1"), "") as link:
        assert await link.send(content(TypeAdvertised(definitions=(set_definition(LOG),)))) is Verdict.TAKEN
        yield link


@pytest_asyncio.fixture
async def writer(secured: Secured) -> AsyncIterator[RawLink]:
    async with raw_link(secured.broker.url, "b1", secured.keys("writer", "admin"), "x") as link:
        yield link


def content(body: AddressedMessage) -> Envelope:
    return Envelope(to=Address(B1), body=body)


def spread(publication: Publication) -> Dissemination:
    return Dissemination(rendezvous=B1, upward=True, early=False, publication=publication)


def raw(body: dict[str, Any]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(body))


def nested(levels: int, kind: str = "list") -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"list": [value], "dict": {"k": value}, "key": (value,)}[kind]
    return {value: 1} if kind == "key" else value


def with_events(name: str, body: dict[str, Any], node: str, incarnation: int) -> Iterator[LinkMessage]:
    """Every message of a site that carries events, with this body."""
    event, spec = Event(name, body), TxSpec(name, TxType.LOCAL, limit=ScopeLimit.LOCAL, census=None)
    one, two = (TxId(f"{node}.{incarnation}.{number}") for number in (1, 2))
    yield spread(Published(event=event, origin=Origin(name, 1)))
    yield spread(EventsPublished(event_type=name, bodies=(raw(body),), origin=Origin(name, 2)))
    yield spread(TxPublished(tx=one, event_type=name, sequence=1, event=event))
    yield content(RunOneShot(tx=one, spec=spec, events=(event,)))
    yield content(RunOneShots(spec=spec, transactions=(OneShot(two, (event,)),)))
    yield content(PublishInTx(tx=one, request=1, event=event))


def with_attributes(name: str, attributes: dict[str, Any], node: str, incarnation: int) -> Iterator[LinkMessage]:
    spec = TxSpec(name, TxType.LOCAL, attributes=attributes)
    tx = TxId(f"{node}.{incarnation}.3")
    yield content(BeginTx(tx=tx, spec=spec))
    yield content(BeginPublic(request=1, spec=spec))
    yield content(RunOneShot(tx=tx, spec=spec, events=()))
    yield content(TypeAdvertised(definitions=(EventType(name, {}),), plans=(spec,)))
    yield spread(CensusOpened(tx=tx, spec=spec, coordinator=B1, incarnation=1, initiator=Address(B1)))


@pytest.mark.parametrize("kind", ["list", "dict", "key"])
async def test_values_over_the_bound_are_rejected_in_every_message(
    writer: RawLink, secured: Secured, kind: str
) -> None:
    me, incarnation = "writer:x", writer.incarnation
    deepest, deeper = nested(NESTING_MAX - (kind == "key"), kind), nested(NESTING_MAX + 1 - (kind == "key"), kind)

    for deep in [
        *with_events("t", {"x": deeper}, me, incarnation),
        *with_attributes("t", {"x": deeper}, me, incarnation),
    ]:
        assert await writer.send(deep) is Verdict.REJECTED, deep
    for allowed in with_events("t", {"x": deepest}, me, incarnation):
        if isinstance(allowed, Dissemination) and isinstance(allowed.publication, Published | EventsPublished):
            assert await writer.send(allowed) is Verdict.TAKEN

    await eventually(lambda: "invalid: events t" in (secured.broker.table.data / "audit.log").read_text())


def test_the_bound_is_checked_without_recursion() -> None:
    with pytest.raises(InvalidEvent, match="'x' is nested deeper"):
        check_nesting("t", {"flat": 1, "x": nested(100_000)})


@pytest.mark.parametrize(
    "beside", [raw({"x": 1}), msgspec.Raw(b"\xc0"), msgspec.Raw(b"\xa1x")], ids=["map", "nil", "text"]
)
def test_a_deep_body_is_found_among_others_of_one_message(beside: msgspec.Raw) -> None:
    checks = EventChecks()
    for levels, is_deep in ((NESTING_MAX, False), (NESTING_MAX + 1, True)):
        bodies = (*[beside] * 300, raw({"x": nested(levels)}), *[beside] * 300)
        message = EventsPublished(event_type="t", bodies=bodies, origin=Origin("t", len(bodies)))
        with pytest.raises(InvalidEvent, match="nested deeper") if is_deep else nullcontext():
            checks.check(message)


@pytest.mark.parametrize("levels", range(880, 1000, 10))
async def test_no_depth_that_some_decoder_takes_gets_past_the_edge(secured: Secured, levels: int) -> None:
    """As deep as the decoder of a link still takes, and the encoder of the journal does not."""
    durable = EventType("deep", {"x": list}, durable=True)
    async with raw_link(secured.broker.url, "b1", secured.keys("writer", "admin"), "x") as link:
        await link.send(content(TypeAdvertised(definitions=(durable,))))
        for message in (
            spread(Published(event=Event("deep", {"x": "@@@@"}), origin=Origin("deep", 1))),
            spread(EventsPublished(event_type="deep", bodies=(raw({"x": "@@@@"}),), origin=Origin("deep", 2))),
        ):
            await link.open()
            frame = encode_frame(Frame(*link.next_position(), (message,)))
            data = frame.replace(b"\xa4@@@@", b"\x91" * levels + b"\xc0")
            assert await link.send_encoded(data) in (Verdict.REJECTED, Verdict.CLOSED)

        assert secured.broker.node.core.rendezvous.logs["deep"].last_number == 0
    async with secured.site("honest", "admin") as honest:
        await honest.advertise(durable)
        assert await honest.publish(durable, {"x": [1]}) == 1


@pytest.mark.parametrize(
    "changed",
    [{"more": 1}, {"at": "now"}, {"write": [b""]}, {"reads": None}, {"write": "text"}],
    ids=["unknown", "kind", "list", "nothing", "text"],
)
async def test_events_of_a_set_that_do_not_fit_its_definition_are_rejected(
    replica: RawLink, secured: Secured, changed: dict[str, Any]
) -> None:
    fitting: dict[str, Any] = write_body(Member(TxId(""), ()))
    me, incarnation = "alpha/r1", replica.incarnation

    for message in with_events(LOG, {**fitting, **changed}, me, incarnation):
        assert await replica.send(message) is Verdict.REJECTED, message
    del fitting["write"]
    for message in with_events(LOG, fitting, me, incarnation):
        assert await replica.send(message) is Verdict.REJECTED, message

    assert secured.broker.node.core.rendezvous.logs[LOG].last_number == 0


def test_no_event_has_a_name_below_rs_that_is_none_of_a_set() -> None:
    for name in ("rs", "rs.alpha.other"):
        checks = EventChecks()
        with pytest.raises(InvalidEventType, match="no event type of a replica set"):
            checks.event(Event(name, {}))


async def test_attributes_that_a_known_type_does_not_have_are_rejected(writer: RawLink) -> None:
    orders = EventType("orders", {"n": int})
    await writer.send(content(TypeAdvertised(definitions=(orders,))))
    me, incarnation = "writer:x", writer.incarnation

    fitting, unknown = (list(with_events("orders", body, me, incarnation)) for body in ({"n": 1}, {"n": 1, "m": 2}))

    assert await writer.send(fitting[0]) is Verdict.TAKEN
    for message in unknown:
        if not (isinstance(message, Dissemination) and isinstance(message.publication, EventsPublished)):
            assert await writer.send(message) is Verdict.REJECTED


@pytest.mark.parametrize("wrong", [2**62, 0, -(2**63)])
async def test_a_writers_clock_that_is_far_from_the_brokers_is_replaced(
    replica: RawLink, secured: Secured, wrong: int
) -> None:
    fitting: dict[str, Any] = {**write_body(Member(TxId(""), ())), "at": wrong}
    log = secured.broker.node.core.rendezvous.logs[LOG]
    one, together, _, in_transaction, *_ = with_events(LOG, fitting, "alpha/r1", replica.incarnation)
    sent = (one, together, in_transaction)

    for message in sent:
        assert await replica.send(message) is Verdict.TAKEN
    await eventually(lambda: log.last_number == len(sent))

    entries = [log.tail[number] for number in range(1, len(sent) + 1)]
    events = [e.event for e in entries if e.event] + [
        event for e in entries for t in e.transactions for event in t.events
    ]
    assert len(events) == len(sent) == 3
    assert all(abs(event.body["at"] - time.time() * 1000) < 60_000 for event in events)


def test_a_writers_clock_that_is_near_the_brokers_stays() -> None:
    checks = EventChecks(clock=lambda: 1_000.0)

    for difference in (-CLOCK_DIFFERENCE_MAX_MS, 0, CLOCK_DIFFERENCE_MAX_MS):
        body: dict[str, Any] = {**write_body(Member(TxId(""), ())), "at": 1_000_000 + difference}
        assert not checks.event(Event(LOG, body))
        assert body["at"] == 1_000_000 + difference


async def test_a_record_that_can_not_be_encoded_stops_the_broker(secured: Secured) -> None:
    broker, sent = secured.broker, len(secured.broker.node.outbox)
    entry = LogEntry(1, event=Event("t", {"x": nested(100_000)}))

    with pytest.raises(JournalFailed, match="LogAppended can't be written: RecursionError"):
        broker.node.act([Persist(LogAppended(event_type="t", entry=entry)), SendOnLink(B1, RoutesReset(routes=()))])

    with pytest.raises(JournalFailed, match="RecursionError"):
        await broker.wait()
    assert len(broker.node.outbox) == sent, "what is behind the record does not happen"


async def test_an_undecodable_message_of_a_broker_is_not_sent_for_ever(tmp_path: Path) -> None:
    ports = [free_port(), free_port()]
    text = '[cluster]\nname = "test"\n' + "".join(
        f'[[broker]]\nname = "b{n}"\nlisten = "127.0.0.1:{port}"\ndata = "b{n}"\n' for n, port in enumerate(ports, 1)
    )
    async with Broker.run(parse_config(text, tmp_path / "tops.toml"), "b2") as broker, client_session() as session:

        async def meet(known: str) -> tuple[Any, LinkHello]:
            own = Self.without_keys("test", Kind.BROKER, "b1", 1, "writer")
            socket = await open_socket(session, broker.url, own, 30)
            await own.introduce(socket, "127.0.0.1")
            return socket, await exchange_link_hello(socket, make_link_hello(known, 0, "", (), ()), 10)

        socket, met = await meet("")
        event = Published(event=Event("t", {"x": "@@@@"}), origin=Origin("t", 1))
        frame = encode_frame(Frame(1, 0, (spread(event),))).replace(b"\xa4@@@@", b"\x91" * 5000 + b"\xc0")
        await socket.send_bytes(frame)
        with pytest.raises(ProtocolError):
            while True:
                await receive_bytes(socket, 10)
        again, met_again = await meet(met.proposal)

        assert met_again.session == "", "both ends begin anew, and what can't be decoded is dropped"
        assert decode(await receive_bytes(again, 10)) == Frame(1, 0, (RoutesReset(routes=()),))
        assert broker.node.counters["resets"] == 1
        assert [kind for _, kind, _ in broker.node.alarms] == ["undecodable"]
        await again.close()
