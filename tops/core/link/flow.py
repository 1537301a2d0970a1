"""When one end of a link sends what: a window for what is in flight, acknowledgements, and backpressure.

The driver queues messages and takes the next frame until there is none. At most `window_bytes` are in flight
unacknowledged; the rest stays in the queue, whose size the driver's owner watches. An owner under backpressure
withholds acknowledgements: the other end fills its window and stops sending, while everything that it has sent is still
read. So responses to heartbeats, votes and decisions still arrive.
"""

from collections import deque
from enum import Enum
from typing import Any, Final

import msgspec

from tops.core.link.session import Frame, LinkSession
from tops.model.errors import ProtocolError


class FlowLimits(msgspec.Struct, frozen=True):
    window_bytes: int = 4 * 2**20
    frame_bytes: int = 256 * 2**10  # a frame of this size gets no more messages
    acknowledge_frames: int = 16  # received without an acknowledgement until one is due at once
    acknowledge_bytes: int = 2**20  # the same in bytes: less than a window, or a full one waits for the delay


DEFAULT_LIMITS: Final = FlowLimits()
# The most that may arrive while acknowledgements are held back, in windows: one, and a last frame that began within it.
HELD_WINDOWS_MAX: Final = 4


class Acknowledge(Enum):
    """When an acknowledgement is due, if nothing is sent that carries one."""

    NOW = "now"
    SOON = "soon"  # within the driver's delay


class LinkFlow:
    """One end of a link, across connections."""

    def __init__(self, limits: FlowLimits = DEFAULT_LIMITS) -> None:
        self.limits = limits
        self.session = LinkSession()
        self.queued_bytes = 0
        self._queue: deque[tuple[Any, int]] = deque()  # messages with their sizes
        self._in_flight: deque[tuple[int, int]] = deque()  # number and size of frames not acknowledged yet
        self._in_flight_bytes = 0
        self._repeated: deque[Frame] = deque()  # what a new connection carries first
        self._acknowledged = 0  # the last acknowledged number that was sent to the other end
        self._unacknowledged_bytes = 0  # received since then
        self._acknowledgement_due = False
        self._holding = False
        self._oldest_in_flight = 0  # its number at the last check, and for how long it has been the oldest
        self._stalled_s = 0.0

    # -------------------------------------------------------------------------------------------------------- sending

    @property
    def has_queued(self) -> bool:
        return bool(self._queue)

    @property
    def pending_bytes(self) -> int:
        """Bytes that this end holds for the other: queued, and sent but not acknowledged."""
        return self.queued_bytes + self._in_flight_bytes

    def queue(self, message: Any, size: int) -> None:
        """One message for the other end, encoded or not, of `size` bytes."""
        self._queue.append((message, size))
        self.queued_bytes += size

    def next_frame(self) -> Frame | None:
        """The next frame for the connection; None if there is nothing to send, or the window is full."""
        if self._repeated:
            # In front of everything else: the other end takes frames by number, without gaps.
            return self._repeated.popleft()
        if self._queue and self._in_flight_bytes < self.limits.window_bytes:
            return self._new_frame()
        if self._acknowledgement_due:
            self._note_acknowledged()
            return Frame(0, self._acknowledged)
        return None

    def _new_frame(self) -> Frame:
        queue, frame_bytes = self._queue, self.limits.frame_bytes
        message, size = queue.popleft()
        messages = [message]
        while queue and size < frame_bytes:
            message, more = queue.popleft()
            size += more
            messages.append(message)
        self.queued_bytes -= size
        if not self._holding:
            self._note_acknowledged()
        # While acknowledgements are withheld, a frame must not carry one either.
        frame = self.session.pack(tuple(messages), self._acknowledged)
        self._in_flight.append((frame.number, size))
        self._in_flight_bytes += size
        return frame

    def all_arrived(self, upto: int) -> bool:
        """Whether nothing is queued, and the other end has acknowledged every frame up to this one."""
        return not self._queue and not (self._in_flight and self._in_flight[0][0] <= upto)

    def stalled_s(self, passed_s: float) -> float:
        """For how long the other end has acknowledged nothing of what is in flight; to be called regularly, with the
        time since the last call."""
        oldest = self._in_flight[0][0] if self._in_flight else 0
        if oldest != self._oldest_in_flight:
            self._oldest_in_flight, self._stalled_s = oldest, 0.0
        elif oldest:
            self._stalled_s += passed_s
        return self._stalled_s

    def abandon(self) -> None:
        """Another link replaces this one: drop what is queued or in flight."""
        self._queue.clear()
        self._in_flight.clear()
        self.queued_bytes = self._in_flight_bytes = 0

    # ------------------------------------------------------------------------------------------------------ receiving

    def connected(self, received_by_peer: int) -> None:
        """A new connection of the same session: the frames that the other end has not received are sent again."""
        self._acknowledgement_due = False
        self.confirm(received_by_peer)
        self._repeated = deque(self.session.resume(received_by_peer))

    def confirm(self, received_by_peer: int) -> bool:
        """The other end has received every frame up to this one. Returns whether that is more than before."""
        if received_by_peer > self.session.sent:
            raise ProtocolError("the other end acknowledges a frame that was never sent")
        frames = self._in_flight
        if not frames or frames[0][0] > received_by_peer:
            return False
        while frames and frames[0][0] <= received_by_peer:
            self._in_flight_bytes -= frames.popleft()[1]
        return True

    def received(self, size: int) -> Acknowledge | None:
        """A frame of `size` bytes was unpacked from the session, and its messages were processed."""
        self._unacknowledged_bytes += size
        if self._holding and self._unacknowledged_bytes > HELD_WINDOWS_MAX * self.limits.window_bytes:
            raise ProtocolError("the peer continues to send although its window is full")
        frames = self.session.received - self._acknowledged
        if not frames:
            return None
        due = frames >= self.limits.acknowledge_frames or self._unacknowledged_bytes >= self.limits.acknowledge_bytes
        return Acknowledge.NOW if due else Acknowledge.SOON

    def acknowledge(self) -> bool:
        """Acknowledge with the next frame, or with one of its own. Returns whether that is allowed now."""
        if self._holding:
            return False
        self._acknowledgement_due = True
        return True

    @property
    def owes_acknowledgement(self) -> bool:
        return self.session.received > self._acknowledged

    def hold(self, holding: bool) -> bool:
        """Withhold acknowledgements, or no longer. Returns whether one is due because of the change."""
        released = self._holding and not holding
        self._holding = holding
        if released:
            self._acknowledgement_due = True
        return released

    def _note_acknowledged(self) -> None:
        self._acknowledged = self.session.received
        self._unacknowledged_bytes = 0
        self._acknowledgement_due = False
