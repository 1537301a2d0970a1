"""The session of a link: each frame is numbered and kept until the other side has acknowledged it, so that a broken
connection between two running nodes loses nothing and repeats nothing. A session ends with the incarnation of either
node.
"""

from collections import deque

import msgspec

from tops.model.errors import ProtocolError
from tops.protocol.messages import LinkMessage

ACKNOWLEDGE_EVERY = 16


class Frame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """All that was queued for a link at one moment. Number 0: only an acknowledgement."""

    number: int
    received: int  # the highest number that the sender has received from the other side
    messages: tuple[LinkMessage, ...] = ()


class LinkSession:
    """One side of a link between two incarnations of two nodes."""

    def __init__(self) -> None:
        self.sent = 0
        self.received = 0
        self.unacknowledged: deque[Frame] = deque()
        self._told = 0

    def pack(self, messages: tuple[LinkMessage, ...]) -> Frame:
        """The next frame; it is kept until the other side has acknowledged it."""
        self.sent += 1
        self._told = self.received
        frame = Frame(self.sent, self.received, messages)
        self.unacknowledged.append(frame)
        return frame

    def unpack(self, frame: Frame) -> tuple[LinkMessage, ...]:
        """The messages of a frame that is new; nothing for one that is repeated.

        A frame that comes after a lost one is a `ProtocolError`: a new connection is needed.
        """
        while self.unacknowledged and self.unacknowledged[0].number <= frame.received:
            self.unacknowledged.popleft()
        if frame.number > self.received + 1:
            raise ProtocolError(f"frame {frame.number} came after frame {self.received}")
        if frame.number <= self.received:
            return ()
        self.received = frame.number
        return frame.messages

    def acknowledgement(self) -> Frame | None:
        """A frame that only acknowledges what was received, when there are no messages to send."""
        if self.received - self._told < ACKNOWLEDGE_EVERY:
            return None
        self._told = self.received
        return Frame(0, self.received)

    def resume(self, received_by_peer: int) -> list[Frame]:
        """After a reconnection: the frames that the other side has not received."""
        while self.unacknowledged and self.unacknowledged[0].number <= received_by_peer:
            self.unacknowledged.popleft()
        return list(self.unacknowledged)
