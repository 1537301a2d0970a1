"""Questions and answers on their way: bundled, repeated where that is harmless, and never in each other's way."""

import asyncio
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast, get_args

import msgspec
import pytest

from adapters.postgres.apply.orphans import QueriesLeft
from replication.rpc import calls, conversation
from replication.rpc.calls import AnyRequest, AnyResponse, Read, ReadDone, ReplicaFailed, Write, WriteDone
from replication.rpc.conversation import BUNDLE_BYTES_MAX, Caller, Responder
from replication.rpc.rejections import NotStarted
from replication.rpc.rights import RequestGuard
from tests.support.polling import eventually
from tops.model.errors import (
    LimitExceeded,
    NotReachable,
    OutcomeUnknown,
    PermissionDenied,
    ProtocolError,
    ResourceRejected,
    Retry,
    TopsError,
)
from tops.model.event_types import EventType
from tops.model.filters import Filter
from tops.protocol.messages import Sender
from tops.runtime.participants import Participant, Received
from tops.security import Permissions

TIMEOUT_S = 30.0


class Line:
    """Two sites and what one publishes for the other; `lost` many events vanish."""

    def __init__(self) -> None:
        self.name, self.brokers = "shop/r1", ("b1",)
        self.sender = Sender("shop/r1", "replica")  # what the broker stamps on every event
        self.subscribers: dict[str, Participant] = {}
        self.events: list[tuple[str, bytes]] = []
        self.lost = 0

    async def advertise(self, _: EventType) -> None: ...

    async def flush(self) -> None: ...

    async def subscribe(self, event_type: EventType, _: Filter, participant: Participant) -> None:
        self.subscribers[event_type.name] = participant

    async def publish(self, event_type: EventType, body: dict[str, Any]) -> None:
        self.events.append((event_type.name, body["body"]))
        if self.lost:
            self.lost -= 1
        else:
            asyncio.get_running_loop().call_soon(
                self.subscribers[event_type.name].on_notify, Received(event_type.name, body, sender=self.sender)
            )


async def ready(_: AnyRequest) -> None:
    """Every position is reached."""


async def response(request: AnyRequest, _: str) -> AnyResponse:
    assert isinstance(request, Read)
    return ReadDone(replica="r1", rows=request.args, position=1)


async def write(asked: Sequence[Write]) -> Sequence[AnyResponse]:
    return [WriteDone(replica="r1", tx=one.tx, rows=(1,)) for one in asked]


class Open(RequestGuard):
    """Everybody may do everything."""

    def __init__(self) -> None:
        super().__init__("test", "shop", Permissions(), Path("audit.log"), frozenset())

    def check(self, sender: Sender, request: AnyRequest) -> None: ...


async def joined(line: Line) -> Caller:
    caller = Caller(cast(Any, line), "shop", ("b1",))
    answerer = Responder(cast(Any, line), "shop", ("b1",), ready, response, write, Open())
    await caller.start()
    await answerer.start()
    return caller


async def test_what_is_asked_in_one_turn_is_one_event_and_so_are_its_answers() -> None:
    line = Line()
    caller = await joined(line)

    done = await asyncio.gather(
        *(caller.request("shop/r1", Write(tx=f"t{n}", member=b"m"), TIMEOUT_S) for n in range(64)),
    )

    assert [one.tx for one in done if isinstance(one, WriteDone)] == [f"t{n}" for n in range(64)]
    assert len(line.events) == 2


async def test_a_lost_read_is_asked_again_and_a_lost_write_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "AGAIN_S", 0.02)
    line = Line()
    caller = await joined(line)
    line.lost = 3

    done = await caller.request("shop/r1", Read(sql="q", args=b"1"), TIMEOUT_S)
    assert isinstance(done, ReadDone)
    assert line.lost == 0, "three questions went astray"

    line = Line()  # the read may have been asked once more while its answer was on its way
    caller = await joined(line)
    line.lost = 1
    with pytest.raises(NotReachable):
        await caller.request("shop/r1", Write(tx="t", member=b"m"), 0.2)
    assert len(line.events) == 1, "asked once"


async def test_reads_that_were_asked_at_different_times_are_all_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "AGAIN_S", 0.1)
    line = Line()
    caller = await joined(line)
    line.lost = 2

    first = asyncio.ensure_future(caller.request("shop/r1", Read(sql="q", args=b"1"), TIMEOUT_S))
    await asyncio.sleep(0.05)
    second = asyncio.ensure_future(caller.request("shop/r1", Read(sql="q", args=b"2"), TIMEOUT_S))

    assert [one.rows for one in await asyncio.gather(first, second)] == [b"1", b"2"]


async def test_one_timer_serves_all_reads_however_long_they_go_unanswered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "AGAIN_S", 0.02)
    line = Line()
    caller = await joined(line)
    loop, armed = asyncio.get_running_loop(), 0
    call_at = loop.call_at

    def counted(when: float, callback: Any, *args: Any, **options: Any) -> asyncio.TimerHandle:
        nonlocal armed
        armed += callback == caller._send_again
        return call_at(when, callback, *args, **options)

    monkeypatch.setattr(loop, "call_at", counted)
    monkeypatch.setattr(loop, "call_later", lambda s, callback, *args: counted(loop.time() + s, callback, *args))
    line.lost = 10_000
    reads = []
    for n in range(10):
        reads.append(asyncio.ensure_future(caller.request("shop/r1", Read(sql="q", args=b"%d" % n), TIMEOUT_S)))
        await asyncio.sleep(0.003)
    await eventually(lambda: len(line.events) >= 200)
    line.lost = 0

    await asyncio.gather(*reads)

    assert armed <= len(line.events), "each time something is said again, the timer is set once"


async def test_a_question_leaves_nothing_for_the_garbage_collector() -> None:
    """Thousands per second pass here: what only the collector can free costs more than the question."""
    caller = await joined(Line())
    await caller.request("shop/r1", Write(tx="t", member=b"m"), TIMEOUT_S)
    gc.collect()
    gc.disable()
    try:
        for n in range(100):
            await caller.request("shop/r1", Write(tx=f"t{n}", member=b"m"), TIMEOUT_S)
            await caller.request("shop/r1", Read(sql="q", args=b"1"), TIMEOUT_S)
        assert gc.collect() < 100
    finally:
        gc.enable()


async def test_what_cannot_be_written_down_fails_alone() -> None:
    caller = await joined(Line())
    requests = [Read(sql="\ud800" if n == 3 else "q", args=b"") for n in range(7)]

    done = await asyncio.gather(*(caller.request("shop/r1", q, TIMEOUT_S) for q in requests), return_exceptions=True)

    assert [type(one) for one in done] == [ProtocolError if n == 3 else ReadDone for n in range(7)]


async def test_a_bundle_that_would_be_too_long_travels_in_parts() -> None:
    line = Line()
    caller = await joined(line)
    third = b"x" * (BUNDLE_BYTES_MAX // 3)

    done = await asyncio.gather(*(caller.request("shop/r1", Read(sql="q", args=third), TIMEOUT_S) for _ in range(8)))

    assert all(isinstance(one, ReadDone) and one.rows == third for one in done)
    assert all(len(body) <= BUNDLE_BYTES_MAX for _, body in line.events)
    assert {len(calls.undecoded(body)) for _, body in line.events} == {2}


async def test_a_question_that_cannot_be_read_is_answered_so_and_the_others_as_ever() -> None:
    line = Line()
    caller = await joined(line)

    class Unconfirmed(calls.ReplicaRequest[Any], frozen=True):
        """A question of a later version."""

    strange = asyncio.ensure_future(caller.request("shop/r1", cast(Any, Unconfirmed()), TIMEOUT_S))
    plain = asyncio.ensure_future(caller.request("shop/r1", Read(sql="q", args=b"1"), TIMEOUT_S))

    assert isinstance(await plain, ReadDone)
    with pytest.raises(ReplicaFailed, match="Unconfirmed"):
        await strange
    assert len(msgspec.msgpack.decode(line.events[0][1])) == 2


# ------------------------------------------------------------------------------------------------- who may respond


class Silent(Line):
    """A line on which no replica responds by itself; a test puts in what it wants the client to receive."""

    async def publish(self, event_type: EventType, body: dict[str, Any]) -> None:
        self.events.append((event_type.name, body["body"]))

    def request_id(self) -> bytes:
        ((request_id, _),) = calls.decode_requests(self.events[-1][1])
        return request_id

    def respond(self, caller: Caller, sender: Sender | None, request_id: bytes, response: AnyResponse) -> None:
        caller.on_notify(
            Received("rs.shop.response0", {"body": calls.encode_bundle([(request_id, response)])}, sender=sender)
        )


async def asked(line: Silent, to: str = "shop/r1") -> tuple[Caller, asyncio.Task[AnyResponse]]:
    caller = Caller(cast(Any, line), "shop", ("b1",))
    await caller.start()
    task = asyncio.ensure_future(caller.request(to, calls.Where(), TIMEOUT_S))
    await eventually(lambda: line.events)
    return caller, task


FORGERS = {
    "a writer": Sender("mallory", "writer"),
    "another replica of the set": Sender("shop/r2", "replica"),
    "a replica of another set": Sender("stock/r1", "replica"),
    "a site that is named like the set": Sender("shop", "writer"),
    "nobody": None,
}


@pytest.mark.parametrize("sender", FORGERS.values(), ids=FORGERS)
async def test_a_response_counts_only_from_the_replica_that_was_asked(sender: Sender | None) -> None:
    line = Silent()
    caller, task = await asked(line)
    forged = calls.Located(replica="r1", position=666, prepared=())

    line.respond(caller, sender, line.request_id(), forged)
    line.respond(
        caller, Sender("shop/r1", "replica"), line.request_id(), calls.Located(replica="r1", position=7, prepared=())
    )

    assert cast(calls.Located, await task).position == 7


async def test_a_replica_responds_under_its_own_name_only() -> None:
    line = Silent()
    caller, task = await asked(line, "*")

    line.respond(
        caller, Sender("shop/r2", "replica"), line.request_id(), calls.Located(replica="r1", position=666, prepared=())
    )
    line.respond(
        caller, Sender("shop/r2", "replica"), line.request_id(), calls.Located(replica="r2", position=7, prepared=())
    )

    assert cast(calls.Located, await task).replica == "r2"


async def test_each_replica_counts_once_for_a_quorum() -> None:
    line = Silent()
    caller = Caller(cast(Any, line), "shop", ("b1",))
    await caller.start()
    task = asyncio.ensure_future(caller.request_all(calls.Where(), TIMEOUT_S, 2))
    await eventually(lambda: line.events)

    for replica in ("r1", "r1", "r2"):
        located = calls.Located(replica=replica, position=1, prepared=())
        line.respond(caller, Sender(f"shop/{replica}", "replica"), line.request_id(), located)

    assert sorted(cast(calls.Located, one).replica for one in await task) == ["r1", "r2"]


async def test_a_response_of_another_kind_is_an_error_with_a_code() -> None:
    line = Silent()
    caller, task = await asked(line)

    line.respond(caller, Sender("shop/r1", "replica"), line.request_id(), calls.OperationDone(text="hello"))

    with pytest.raises(ReplicaFailed, match="responded to a Where with a OperationDone") as raised:
        await task
    assert (raised.value.code, raised.value.retry) == ("unexpected-response", Retry.ASK_FIRST)


async def test_among_the_responses_of_all_one_of_another_kind_is_that_of_a_replica_that_failed() -> None:
    line = Silent()
    caller = Caller(cast(Any, line), "shop", ("b1",))
    await caller.start()
    task = asyncio.ensure_future(caller.request_all(calls.Where(), TIMEOUT_S, 2))
    await eventually(lambda: line.events)

    located = calls.Located(replica="r2", position=1, prepared=())
    line.respond(caller, Sender("shop/r1", "replica"), line.request_id(), calls.OperationDone(text="hello"))
    line.respond(caller, Sender("shop/r2", "replica"), line.request_id(), located)

    failed, found = await task
    assert isinstance(failed, calls.Failed)
    assert (failed.code, found) == ("unexpected-response", located)


@pytest.mark.parametrize("kind", get_args(AnyRequest), ids=lambda kind: kind.__name__)
def test_every_request_says_which_kind_of_response_it_has(kind: type[calls.ReplicaRequest[Any]]) -> None:
    assert calls._response_to(kind) in get_args(AnyResponse)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NotReachable("x"), "not-reachable"),
        (ResourceRejected("db", "x"), "resource-rejected"),
        (OutcomeUnknown("t", "r1"), "outcome-unknown"),
        (NotStarted("x"), "not-started"),
        (LimitExceeded("x"), "limit-exceeded"),
        (QueriesLeft("db", "x", 1), "queries-left"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors_cross_the_wire_by_a_stable_code(error: TopsError, code: str) -> None:
    failed = calls.Failed.because(error)

    assert failed == calls.Failed(code=code, text=str(error), retry=error.retry.value)
    assert ReplicaFailed("shop/r1", failed).code == code


async def test_ids_of_requests_tell_nothing_of_the_next_one() -> None:
    line = Line()
    caller = await joined(line)

    await asyncio.gather(*(caller.request("shop/r1", Read(sql="q", args=b"1"), TIMEOUT_S) for _ in range(1000)))

    ids = [request_id for _, body in line.events for request_id, _ in calls.undecoded(body)]
    assert len(set(ids)) == 1000
    assert {len(request_id) for request_id in ids} == {16}
    ones = sum(int.from_bytes(request_id).bit_count() for request_id in set(ids))
    assert abs(ones - 64_000) < 1_500, "every bit is random"


async def test_a_request_that_its_sender_may_not_send_is_denied_and_not_done() -> None:
    line = Line()
    caller = Caller(cast(Any, line), "shop", ("b1",))

    class Deny(Open):
        def check(self, sender: Sender, request: AnyRequest) -> None:
            if isinstance(request, Write):
                raise PermissionDenied("no", who=sender.identity, verb="write", event_type="rs.shop")

    async def nothing(_: Sequence[Write]) -> Sequence[AnyResponse]:
        pytest.fail("it must not be done")

    answerer = Responder(cast(Any, line), "shop", ("b1",), ready, response, nothing, Deny())
    await caller.start()
    await answerer.start()

    with pytest.raises(PermissionDenied) as denied:
        await caller.request("shop/r1", Write(tx="t", member=b"m"), TIMEOUT_S)
    assert (denied.value.who, denied.value.verb, denied.value.event_type) == ("shop/r1", "write", "rs.shop")
    assert isinstance(await caller.request("shop/r1", Read(sql="q", args=b"1"), TIMEOUT_S), ReadDone)
    with pytest.raises(PermissionDenied):
        await caller.request_all(Write(tx="t", member=b"m"), TIMEOUT_S, 1)


async def test_a_read_that_is_sent_again_before_its_response_is_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "AGAIN_S", 0.02)
    done, go_on, repeated = 0, asyncio.Event(), asyncio.Event()

    class Counting(Line):
        async def publish(self, event_type: EventType, body: dict[str, Any]) -> None:
            await super().publish(event_type, body)
            if len(self.events) == 4:
                repeated.set()

    line = Counting()

    async def slow(request: AnyRequest, who: str) -> AnyResponse:
        nonlocal done
        done += 1
        await go_on.wait()
        return await response(request, who)

    caller = Caller(cast(Any, line), "shop", ("b1",))
    await caller.start()
    await Responder(cast(Any, line), "shop", ("b1",), ready, slow, write, Open()).start()
    reading = asyncio.ensure_future(caller.request("shop/r1", Read(sql="q", args=b"1"), TIMEOUT_S))
    await repeated.wait()
    await asyncio.sleep(0)  # the last one arrives
    go_on.set()

    assert isinstance(await reading, ReadDone)
    assert done == 1
