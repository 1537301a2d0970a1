"""How much a connection receives: a result that is too large ends while it arrives, not when it is in memory."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Meter(asyncio.Protocol):
    """Stands between a connection's transport and its protocol while a result is bounded, and counts what passes."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport, self._protocol = transport, transport.get_protocol()
        self._left = 0
        self.exceeded = False

    @contextmanager
    def bounded(self, bytes_max: int) -> Iterator[None]:
        """In this block no more than `bytes_max` are received. The connection is aborted at the first byte beyond them,
        and the server ends the query: what the driver raises then means that the result is too large."""
        self._left = bytes_max
        self._transport.set_protocol(self)
        try:
            yield
        finally:
            self._transport.set_protocol(self._protocol)

    def data_received(self, data: bytes) -> None:
        self._left -= len(data)
        if self._left < 0:
            self.exceeded = True
            self._transport.abort()
            return
        self._protocol.data_received(data)  # type: ignore[attr-defined]

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received()  # type: ignore[attr-defined, no-any-return]

    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()
