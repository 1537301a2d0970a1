"""Who this node is on the network: its keys or the lack of them, and the handshake on a fresh connection."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from tops.ids import NodeId, node_id
from tops.runtime.link import receive_bytes
from tops.runtime.sockets import Socket
from tops.security import (
    Acceptor,
    Channel,
    Credentials,
    Initiator,
    Kind,
    Party,
    Peer,
    Trust,
    client_context,
    fresh_nonce,
    plain_channel,
    server_context,
    tls_channel,
    utc_now,
)

HANDSHAKE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Self:
    """This node's part in handshakes, and its TLS contexts."""

    party: Party
    credentials: Credentials | None
    trust: Trust | None

    @classmethod
    def with_keys(cls, folder: Path, incarnation: int, insecure: str | None = None, instance: str = "") -> "Self":
        """Raises ConfigError when the keys can't be used, also when they are expired or revoked."""
        credentials, trust = Credentials.load(folder), Trust.load(folder)
        credentials.check(trust, utc_now())
        return cls(Party.secured(credentials, trust, incarnation, insecure, instance), credentials, trust)

    @classmethod
    def without_keys(
        cls,
        cluster: str,
        kind: Kind,
        name: str,
        incarnation: int,
        site_role: str,
        insecure: str | None = None,
        instance: str = "",
    ) -> "Self":
        return cls(Party.insecure(cluster, kind, name, incarnation, site_role, insecure, instance), None, None)

    @property
    def node(self) -> NodeId:
        """What this session goes by in the overlay."""
        return node_id(self.party.identity.name, self.party.instance)

    def server_tls(self) -> ssl.SSLContext | None:
        if self.credentials is None or self.trust is None:
            return None
        return server_context(self.credentials, self.trust)

    def client_tls(self) -> ssl.SSLContext | None:
        if self.credentials is None or self.trust is None:
            return None
        return client_context(self.credentials, self.trust)

    async def accept(self, socket: Socket, peer_host: str) -> Peer:
        """The accepting side of the handshake; NotAuthenticated or ProtocolError if it fails."""
        acceptor = Acceptor(self.party, _channel(socket, peer_host), fresh_nonce())
        await socket.send_bytes(acceptor.on_hello(await receive_bytes(socket, HANDSHAKE_TIMEOUT_S), utc_now()))
        return acceptor.on_proof(await receive_bytes(socket, HANDSHAKE_TIMEOUT_S))

    async def introduce(self, socket: Socket, peer_host: str, expected: str | None = None) -> Peer:
        """The connecting side of the handshake; the other must be a broker."""
        initiator = Initiator(self.party, _channel(socket, peer_host), fresh_nonce(), expected)
        await socket.send_bytes(initiator.hello())
        proof, peer = initiator.on_welcome(await receive_bytes(socket, HANDSHAKE_TIMEOUT_S), utc_now())
        await socket.send_bytes(proof)
        return peer


def _channel(socket: Socket, peer_host: str) -> Channel:
    tls = socket.get_extra_info("ssl_object")
    return plain_channel(peer_host) if tls is None else tls_channel(tls)
