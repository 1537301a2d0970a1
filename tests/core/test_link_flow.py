"""What a link sends when: windows are kept, acknowledgements come in time, and backpressure stops the other end."""

from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tops.core.link.flow import Acknowledge, FlowLimits, LinkFlow
from tops.core.link.session import Frame
from tops.model.errors import ProtocolError

NARROW = FlowLimits(window_bytes=30, frame_bytes=20, acknowledge_frames=4, acknowledge_bytes=100)


def queue(flow: LinkFlow, *names: str, size: int = 10) -> None:
    for name in names:
        flow.queue(name, size)


def contents(flow: LinkFlow) -> list[tuple[Any, ...]]:
    return [frame.messages for frame in frames(flow)]


def frames(flow: LinkFlow) -> list[Frame]:
    found = []
    while (frame := flow.next_frame()) is not None:
        found.append(frame)
    return found


def take(flow: LinkFlow, frame: Frame, size: int = 10) -> tuple[Any, ...]:
    """What a driver does with a frame that has arrived."""
    flow.confirm(frame.received)
    messages = flow.session.unpack(frame)
    if frame.number and flow.received(size) is Acknowledge.NOW:
        flow.acknowledge()
    return messages


def test_queued_messages_share_frames_up_to_a_size() -> None:
    flow = LinkFlow(NARROW)
    queue(flow, "a", "b", "c")

    assert contents(flow) == [("a", "b"), ("c",)]


def test_a_full_window_keeps_messages_in_the_queue_until_they_are_acknowledged() -> None:
    flow = LinkFlow(NARROW)
    queue(flow, "a", "b", "c", "d", "e")

    sent = contents(flow)

    assert sent == [("a", "b"), ("c", "d")]
    assert (flow.queued_bytes, flow.pending_bytes) == (10, 50)
    assert flow.confirm(1)
    assert contents(flow) == [("e",)]


def test_an_acknowledgement_of_what_was_never_sent_ends_the_connection() -> None:
    with pytest.raises(ProtocolError):
        LinkFlow(NARROW).confirm(1)


@pytest.mark.parametrize(("count", "size"), [(4, 1), (1, 100)])
def test_enough_frames_or_bytes_make_an_acknowledgement_due_at_once(count: int, size: int) -> None:
    one, other = LinkFlow(NARROW), LinkFlow(NARROW)
    due = None
    for number in range(count):
        assert due is not Acknowledge.NOW
        queue(one, f"m{number}", size=1)
        (frame,) = frames(one)
        other.session.unpack(frame)
        due = other.received(size)

    assert due is Acknowledge.NOW
    assert other.acknowledge()
    assert frames(other) == [Frame(0, count)]


def test_a_frame_of_messages_carries_the_acknowledgement_and_none_is_due_then() -> None:
    one, other = LinkFlow(NARROW), LinkFlow(NARROW)
    queue(one, "a")
    take(other, frames(one)[0])
    queue(other, "b")

    (answer,) = frames(other)

    assert answer.received == 1
    assert not other.owes_acknowledgement
    take(one, answer)
    assert one.pending_bytes == 0


def test_backpressure_holds_every_acknowledgement_back_and_gives_it_when_it_ends() -> None:
    one, other = LinkFlow(NARROW), LinkFlow(NARROW)
    other.hold(True)
    for name in "abcdef":
        queue(one, name, size=5)
        for frame in frames(one):
            take(other, frame)
    queue(other, "x")

    (carried,) = frames(other)

    assert carried.received == 0
    assert not other.acknowledge()
    assert other.hold(False)
    assert frames(other) == [Frame(0, 6)]


def test_the_frames_that_a_broken_connection_lost_go_first_on_the_next_one() -> None:
    one, other = LinkFlow(NARROW), LinkFlow(NARROW)
    queue(one, "a", "b", size=20)
    first, lost = frames(one)
    take(other, first)
    queue(one, "c")

    one.connected(other.session.received)

    assert frames(one) == [lost, Frame(3, 0, cast(Any, ("c",)))]


def test_the_time_without_an_acknowledgement_counts_only_while_the_same_frame_waits() -> None:
    flow = LinkFlow(NARROW)
    queue(flow, "a", "b", size=20)
    frames(flow)

    assert flow.stalled_s(1.0) == 0.0
    assert flow.stalled_s(1.0) == 1.0
    flow.confirm(1)
    assert flow.stalled_s(1.0) == 0.0
    flow.confirm(2)
    assert flow.stalled_s(1.0) == 0.0
    assert flow.stalled_s(1.0) == 0.0


def test_a_flush_is_complete_only_when_its_last_frame_is_acknowledged() -> None:
    flow = LinkFlow(NARROW)
    queue(flow, "a", "b", size=20)

    assert not flow.all_arrived(1)
    frames(flow)
    assert not flow.all_arrived(2)
    flow.confirm(1)
    assert flow.all_arrived(1)
    assert not flow.all_arrived(2)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data())
def test_over_narrow_windows_and_breaking_connections_everything_arrives_once_in_order(data: Any) -> None:
    """Both ends send; connections break with frames in flight; acknowledgements are held back for a while."""
    ends = (LinkFlow(NARROW), LinkFlow(NARROW))
    sent: tuple[list[str], list[str]] = ([], [])
    arrived: tuple[list[Any], list[Any]] = ([], [])
    in_flight: tuple[list[Frame], list[Frame]] = ([], [])

    def arrive(at: int) -> None:
        arrived[at].extend(take(ends[at], in_flight[1 - at].pop(0)))

    def reconnect() -> None:
        for mine, theirs in ((0, 1), (1, 0)):
            in_flight[mine].clear()
            ends[mine].connected(ends[theirs].session.received)

    for _ in range(data.draw(st.integers(1, 40))):
        end = data.draw(st.integers(0, 1))
        match data.draw(st.sampled_from(["queue", "queue", "send", "arrive", "arrive", "hold", "release", "break"])):
            case "queue":
                sent[end].append(f"{end}:{len(sent[end])}")
                ends[end].queue(sent[end][-1], data.draw(st.integers(1, 40)))
            case "send":
                in_flight[end].extend(frames(ends[end]))
            case "arrive" if in_flight[1 - end]:
                arrive(end)
            case "hold":
                ends[end].hold(True)
            case "release":
                ends[end].hold(False)
            case "break":
                reconnect()
    for flow in ends:
        flow.hold(False)
    while in_flight[0] or in_flight[1] or any(flow.has_queued or flow.owes_acknowledgement for flow in ends):
        for end in (0, 1):
            if ends[end].owes_acknowledgement:
                ends[end].acknowledge()  # as the driver's delay does
            in_flight[end].extend(frames(ends[end]))
            while in_flight[1 - end]:
                arrive(end)

    assert (arrived[1], arrived[0]) == sent
    assert [flow.pending_bytes for flow in ends] == [0, 0]
