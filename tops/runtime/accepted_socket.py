"""The accepting end of a connection: reads only little until it knows who is there."""

from aiohttp import web


class AcceptedSocket(web.WebSocketResponse):
    """A WebSocket whose largest message can be raised once, when the other end is authenticated.

    The library fixes the size when the connection begins, in a reader that can't be changed; this puts another reader
    in its place, by the library's own step.
    """

    def read_up_to(self, size: int, request: web.Request) -> None:
        """From here on messages may be this large. The other end must be silent now: what is half read is lost."""
        assert self._writer is not None, "the connection was not prepared"
        self._max_msg_size = size
        request.protocol._payload_parser = None
        self._post_start(request, self._ws_protocol, self._writer)
