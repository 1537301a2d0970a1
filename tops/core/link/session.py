"""The reliable part of a link: what is sent is numbered and kept until the other end has received it, so that a broken
connection between two running nodes loses nothing and repeats nothing. The session ends with either incarnation.
"""

from collections import deque

import msgspec

from tops.model.errors import ProtocolError
from tops.protocol.messages import LinkMessage


class Frame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What was queued for a link at one moment. Number 0: only an acknowledgement."""

    number: int
    received: int  # the highest number that its sender acknowledges to have received
    messages: tuple[LinkMessage, ...] = ()


class LinkSession:
    """One end of a link between two incarnations of two nodes."""

    def __init__(self) -> None:
        self.sent = 0
        self.received = 0
        self.unacknowledged: deque[Frame] = deque()

    def pack(self, messages: tuple[LinkMessage, ...], acknowledged: int | None = None) -> Frame:
        """The next frame; it is kept until the other end acknowledges it. It acknowledges everything received, or up to
        `acknowledged`."""
        self.sent += 1
        frame = Frame(self.sent, self.received if acknowledged is None else acknowledged, messages)
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

    def resume(self, received_by_peer: int) -> list[Frame]:
        """After a reconnection: the frames that the other end has not received."""
        while self.unacknowledged and self.unacknowledged[0].number <= received_by_peer:
            self.unacknowledged.popleft()
        return list(self.unacknowledged)
