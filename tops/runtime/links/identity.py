"""This node's identity on the network: its keys, or the secret instead of them, and the handshake on a connection."""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from tops.core.commit.decision_sender import CheckProof, Sign
from tops.model.errors import ConfigError, NotAuthenticated
from tops.model.ids import NodeId, node_id
from tops.protocol.messages import Principal
from tops.runtime.links.link import receive_bytes
from tops.runtime.links.sockets import Socket
from tops.security import (
    Acceptor,
    Channel,
    Initiator,
    Kind,
    NodeKeys,
    Party,
    Peer,
    Secret,
    Trust,
    client_context,
    decision_checker,
    decision_signer,
    find_secret,
    fresh_nonce,
    peer_expiry,
    peer_identity,
    plain_channel,
    server_context,
    tls_channel,
    utc_now,
)

HANDSHAKE_TIMEOUT_S = 10.0
RELOAD_S = 5.0  # between two checks of the key files

log = logging.getLogger("tops.security")


@dataclass(slots=True)
class Self:
    """This node's part in handshakes, and its TLS contexts."""

    party: Party
    keys: NodeKeys | None = None

    @property
    def trust(self) -> Trust | None:
        return self.keys.trust if self.keys is not None else None

    @classmethod
    def with_keys(cls, folder: Path, incarnation: int, insecure: str | None = None, instance: str = "") -> "Self":
        """With keys from a folder; ConfigError if they can't be used, are expired or revoked."""
        keys = NodeKeys.load(folder)
        return cls(Party.secured(keys.credentials, keys.trust, incarnation, insecure, instance), keys)

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
        instance: str = "",
    ) -> "Self":
        """Without keys. `secret` is what a broker expects of nodes that connect; a connecting node finds the broker's
        secret by itself."""
        return cls(Party.insecure(cluster, kind, name, incarnation, site_role, insecure, secret, instance))

    def acting_for(self, principal: Principal | None) -> "Self":
        """This node in a session for another identity; brokers accept that only from services."""
        return Self(self.party.acting_for(principal), self.keys)

    @property
    def node(self) -> NodeId:
        """The name of this session in the overlay."""
        return node_id(self.party.identity.name, self.party.instance)

    def accepting(self, site_role: str, secret_of: str) -> "Self":
        """This node as one that accepts connections. Without keys every site has this role there, and proves that it
        knows the secret of the broker at `secret_of`."""
        if self.trust is not None:
            return self
        return Self(replace(self.party, site_role=site_role, secret=find_secret(secret_of)))

    def reload(self) -> None:
        """Use renewed keys and new revocations from here on; if that fails, ConfigError, and the old ones stay in
        use."""
        if self.keys is not None:
            self.keys.reload()
            self.party = self.party.renewed(self.keys.credentials)

    def decision_signer(self) -> Sign | None:
        """Signs decisions of this node as a coordinator; None without keys."""
        keys = self.keys
        return None if keys is None else decision_signer(lambda: keys.credentials)

    def decision_checker(self) -> CheckProof | None:
        """Checks a decision that a participant relays; None without keys, where names are trusted."""
        return None if self.keys is None else decision_checker(self.keys.trust)

    def server_tls(self, rejected: Callable[[str], None]) -> ssl.SSLContext | None:
        """`rejected` is called with the reason when a TLS handshake failed."""
        return None if self.keys is None else server_context(self.keys, rejected)

    def client_tls(self) -> ssl.SSLContext | None:
        return None if self.keys is None else client_context(self.keys.credentials, self.keys.trust)

    def peer_expiry(self, socket: Socket) -> datetime | None:
        """When the certificate at the other end of a connection ends; None without keys."""
        return None if self.keys is None else peer_expiry(socket.get_extra_info("ssl_object"))

    @asynccontextmanager
    async def watching(self, socket: Socket) -> AsyncIterator[None]:
        """Watch the key files while this connection exists, and close it if the certificate of the other end is revoked
        or has expired."""
        watch = None if self.keys is None else asyncio.ensure_future(self._watch(socket, self.keys))
        try:
            yield
        finally:
            if watch is not None:
                watch.cancel()

    async def _watch(self, socket: Socket, keys: NodeKeys) -> None:
        enforced, problem = keys.trust.revocations, ""
        expiry = peer_expiry(socket.get_extra_info("ssl_object"))
        while True:
            await asyncio.sleep(RELOAD_S)
            try:
                self.reload()
                problem = ""
            except ConfigError as error:
                if problem != (problem := str(error)):
                    log.warning("keys not reloaded", extra={"node": self.party.identity.name, "reason": problem})
            if keys.trust.revocations != enforced or utc_now() > expiry:
                enforced = keys.trust.revocations
                try:
                    peer_identity(socket.get_extra_info("ssl_object"), keys.trust, utc_now())
                except NotAuthenticated as error:
                    fields = {"node": self.party.identity.name, "reason": str(error)}
                    log.warning("certificate revoked or expired", extra=fields)
                    await socket.close(code=1008, message=b"the certificate of the other end is revoked or has expired")

    async def accept(self, socket: Socket, peer_host: str) -> Peer:
        """The accepting side of the handshake; NotAuthenticated or ProtocolError if it fails."""
        acceptor = Acceptor(self.party, _channel(socket, peer_host), fresh_nonce())
        await socket.send_bytes(acceptor.on_hello(await receive_bytes(socket, HANDSHAKE_TIMEOUT_S), utc_now()))
        return acceptor.on_proof(await receive_bytes(socket, HANDSHAKE_TIMEOUT_S))

    async def introduce(
        self,
        socket: Socket,
        peer_host: str,
        expected: str | None = None,
        *,
        kind: Kind = Kind.BROKER,
        secret_of: str = "",
    ) -> Peer:
        """The connecting side of the handshake; the other must be of this `kind`. Without keys, both know the secret
        of the broker that was dialled, or of the one at `secret_of`."""
        party = self.party
        if self.trust is None:
            # Read each time: a broker that was set up again has another secret. The secret exists before the broker
            # listens.
            party = party.knowing(find_secret(secret_of or socket.address))
        initiator = Initiator(party, _channel(socket, peer_host), fresh_nonce(), expected, kind)
        await socket.send_bytes(initiator.hello())
        proof, peer = initiator.on_welcome(await receive_bytes(socket, HANDSHAKE_TIMEOUT_S), utc_now())
        await socket.send_bytes(proof)
        return peer


def _channel(socket: Socket, peer_host: str) -> Channel:
    tls = socket.get_extra_info("ssl_object")
    return plain_channel(peer_host, socket.address) if tls is None else tls_channel(tls)
