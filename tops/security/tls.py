"""TLS between nodes: version 1.3, certificates on both sides, the authority's revocation list always checked.

Session tickets are off: a resumed session skips the certificate, so a revoked node could reconnect with one.
"""

import hashlib
import ssl
from collections.abc import Callable
from datetime import datetime
from typing import Protocol

from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from tops.model.errors import ConfigError, NotAuthenticated
from tops.security.files import as_private_file
from tops.security.handshake import Channel
from tops.security.identity import Identity, Kind
from tops.security.trust import Credentials, Revocations, Trust

_BINDING_LABEL = b"tops channel binding 1"


class TlsConnection(Protocol):
    """What `transport.get_extra_info("ssl_object")` gives after the TLS handshake: an `ssl.SSLObject`."""

    def getpeercert(self, binary_form: bool = False) -> object: ...

    def get_channel_binding(self, cb_type: str = "tls-unique") -> bytes | None: ...

    def version(self) -> str | None: ...


class Keys(Protocol):
    """The part of `NodeKeys` that is needed here: keys that may be replaced at any time."""

    credentials: Credentials
    trust: Trust


def server_context(keys: Keys, rejected: Callable[[str], None] | None = None) -> ssl.SSLContext:
    """The context for a listener; it follows renewed keys and new revocations without a restart.

    OpenSSL keeps every revocation list that a context ever got. So each list gets a context of its own, and every
    handshake is moved to the current one before certificates are checked. `rejected` is called with the reason of a
    failed TLS handshake, which is not reported elsewhere since no connection results.
    """
    if not is_of_server(keys.credentials):
        raise ConfigError(
            f"{keys.credentials.identity} can't listen: only a broker's certificate is for a server, and a replica's "
            "that was issued with --host"
        )
    context = _context(ssl.PROTOCOL_TLS_SERVER, keys.credentials, keys.trust)
    present: tuple[tuple[bytes, Revocations], ssl.SSLContext] = (_shown_by(keys), context)

    def follow(connection: ssl.SSLObject, _name: str | None, _context_then: ssl.SSLContext) -> int | None:
        nonlocal present
        if _shown_by(keys) != present[0]:
            try:
                present = (_shown_by(keys), _context(ssl.PROTOCOL_TLS_SERVER, keys.credentials, keys.trust))
            except (ConfigError, OSError):
                return ssl.ALERT_DESCRIPTION_INTERNAL_ERROR
        connection.context = present[1]
        return None

    context.sni_callback = follow
    if rejected is not None:
        context.sslobject_class = _reporting(rejected)
    return context


def is_of_server(credentials: Credentials) -> bool:
    """Whether a node may listen with this certificate."""
    if credentials.identity.kind not in (Kind.BROKER, Kind.REPLICA):
        return False
    certificate = x509.load_der_x509_certificate(credentials.certificate_der)
    usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    return ExtendedKeyUsageOID.SERVER_AUTH in usages


def _shown_by(keys: Keys) -> tuple[bytes, Revocations]:
    return keys.credentials.certificate_der, keys.trust.revocations


def _reporting(rejected: Callable[[str], None]) -> type[ssl.SSLObject]:
    class Reporting(ssl.SSLObject):
        def do_handshake(self) -> None:
            try:
                super().do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise  # not done yet
            except ssl.SSLError as error:
                rejected(str(error))
                raise

    return Reporting


def client_context(credentials: Credentials, trust: Trust) -> ssl.SSLContext:
    """The context for one outgoing connection; make a new one each time, so that revocations are up to date."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, credentials, trust)


def _context(protocol: int, credentials: Credentials, trust: Trust) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.check_hostname = protocol == ssl.PROTOCOL_TLS_CLIENT
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_TICKET
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0
    try:
        # Not from the node's folder: it may hold a renewed certificate by now, while our own handshake still shows
        # the one that this process loaded, and peers insist that the two are the same.
        with as_private_file(credentials.secret_pem(), credentials.folder) as path:
            context.load_cert_chain(path)
        context.load_verify_locations(cafile=trust.authority_path)
        context.load_verify_locations(cafile=trust.revocations_path)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"{credentials.folder}: the keys can't be used for TLS: {error}") from None
    context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF | ssl.VERIFY_X509_STRICT
    return context


def peer_identity(connection: TlsConnection, trust: Trust, now: datetime) -> Identity:
    """The identity of the other side, by the certificate of its TLS handshake and the current revocations.

    Call it again after `trust.reload()` has returned True, to find connections whose certificate was revoked since.
    """
    return trust.verify(_peer_certificate(connection), now)


def peer_expiry(connection: TlsConnection) -> datetime:
    """When the certificate of the other side expires."""
    return x509.load_der_x509_certificate(_peer_certificate(connection)).not_valid_after_utc


def tls_channel(connection: TlsConnection) -> Channel:
    """The value that binds the TOPS handshake to exactly this TLS connection.

    It is the client's Finished message: an authenticator over the whole TLS handshake, keyed by its secrets, which both
    sides know and no other connection has. Python offers no keying material exporter. The TOPS handshake also compares
    the peer's certificate with that of TLS.
    """
    if connection.version() != "TLSv1.3":
        raise NotAuthenticated(f"the connection uses {connection.version()}, not TLS 1.3")
    finished = connection.get_channel_binding("tls-unique")
    if not finished:
        raise NotAuthenticated("the TLS handshake is not finished")
    return Channel(
        binding=hashlib.sha256(_BINDING_LABEL + finished).digest(),
        peer_certificate=_peer_certificate(connection),
        peer_is_loopback=False,
    )


def _peer_certificate(connection: TlsConnection) -> bytes:
    certificate = connection.getpeercert(binary_form=True)
    if not isinstance(certificate, bytes):
        raise NotAuthenticated("the other side presented no certificate")
    return certificate
