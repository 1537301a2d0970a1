"""Opens a connection to a broker, for sites and for other brokers."""

import logging
from http import HTTPStatus

import aiohttp
from yarl import URL

from tops.model.errors import ConfigError, NotAuthenticated
from tops.model.sizes import FRAME_BYTES_MAX
from tops.runtime.links.identity import Self
from tops.runtime.links.sockets import DialledSocket

Session = aiohttp.ClientSession
# What a connection may end with that does not stand, or breaks.
DIAL_ERRORS = (aiohttp.ClientError, OSError, RuntimeError, TimeoutError)

log = logging.getLogger("tops.site")


def client_session() -> aiohttp.ClientSession:
    """What `open_socket` needs."""
    return aiohttp.ClientSession(ws_response_class=DialledSocket)


async def open_socket(
    session: aiohttp.ClientSession, url: str, own: Self, heartbeat_s: float, path: str = "/link"
) -> DialledSocket:
    """A connection to a path of a broker, or of another node that listens, by its `ws://` or `wss://` address."""
    tls = None
    if url.startswith("wss:"):
        try:
            own.reload()  # the certificate may have been renewed while the node was unreachable
        except ConfigError as error:
            log.warning("keys not reloaded", extra={"node": own.party.identity.name, "reason": str(error)})
        tls = own.client_tls()
    try:
        socket = await session.ws_connect(
            f"{url.rstrip('/')}{path}",
            heartbeat=heartbeat_s,
            max_msg_size=FRAME_BYTES_MAX,
            compress=0,
            ssl=tls if tls is not None else True,
            timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
        )
    except aiohttp.WSServerHandshakeError as error:
        if error.status == HTTPStatus.MISDIRECTED_REQUEST:
            raise NotAuthenticated(
                f"{url}: the broker there does not have this host name: use its own, or add this one to its 'hosts'"
            ) from None
        raise
    assert isinstance(socket, DialledSocket), "the session was not made by `client_session`"
    socket.address = URL(url).host_port_subcomponent or ""
    socket.read_up_to(FRAME_BYTES_MAX)
    return socket
