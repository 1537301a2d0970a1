"""Who this node is on the network: its keys, or the secret in their place, and the handshake on a fresh connection."""

import ssl
from dataclasses import dataclass
from pathlib import Path

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
    Secret,
    Trust,
    client_context,
    find_secret,
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
    def with_keys(cls, folder: Path, incarnation: int, insecure: str | None = None) -> "Self":
        """Raises ConfigError when the keys can't be used, also when they are expired or revoked."""
        credentials, trust = Credentials.load(folder), Trust.load(folder)
        credentials.check(trust, utc_now())
        return cls(Party.secured(credentials, trust, incarnation, insecure), credentials, trust)

    @classmethod
    def without_keys(
        cls,
        cluster: str,
        kind: Kind,
        name: str,
        incarnation: int,
        site_role: str,
        insecure: str | None = None,
        secret: Secret | None = None,
    ) -> "Self":
        """`secret` is what a broker expects of who connects to it; whoever connects finds the other's by itself."""
        return cls(Party.insecure(cluster, kind, name, incarnation, site_role, insecure, secret), None, None)

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
        party = self.party
        if self.trust is None:
            # Looked up each time: a broker that was set up anew has another. It exists before its broker listens.
            party = party.knowing(find_secret(socket.address))
        initiator = Initiator(party, _channel(socket, peer_host), fresh_nonce(), expected)
        await socket.send_bytes(initiator.hello())
        proof, peer = initiator.on_welcome(await receive_bytes(socket, HANDSHAKE_TIMEOUT_S), utc_now())
        await socket.send_bytes(proof)
        return peer


def _channel(socket: Socket, peer_host: str) -> Channel:
    tls = socket.get_extra_info("ssl_object")
    return plain_channel(peer_host, socket.address) if tls is None else tls_channel(tls)
