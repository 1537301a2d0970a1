"""The key material of a running node: its own key and certificate, and what it needs to verify others.

`Credentials` prove this node's identity; `Trust` verifies the identities of others, with the cluster's authority and
its revocation list. `NodeKeys` are both, from one folder, and follow its files without a restart.
The authority's private key is never needed here: it stays where `tops keys` runs.
"""

import hashlib
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from tops.model.errors import ConfigError, NotAuthenticated
from tops.security.files import check_not_writable, read_private, read_public
from tops.security.identity import Identity, check_name, identity_of_certificate

KEY_FILE = "node.key"
CERTIFICATE_FILE = "node.crt"
AUTHORITY_FILE = "ca.crt"
REVOCATIONS_FILE = "crl.pem"


def utc_now() -> datetime:
    return datetime.now(UTC)


def fingerprint(certificate_der: bytes) -> bytes:
    """Identifies a certificate, for comparison by two sides."""
    return hashlib.sha256(certificate_der).digest()


def load_certificate(path: Path) -> x509.Certificate:
    try:
        certificates = x509.load_pem_x509_certificates(read_public(path))
    except ValueError as error:
        raise ConfigError(f"{path}: not a PEM certificate: {error}") from None
    if len(certificates) != 1:
        raise ConfigError(f"{path}: holds {len(certificates)} certificates instead of one")
    return certificates[0]


def load_key(path: Path) -> Ed25519PrivateKey:
    try:
        key = load_pem_private_key(read_private(path), password=None)
    except (ValueError, TypeError):
        # The parser's error may quote the file, which is secret.
        raise ConfigError(f"{path}: not an unencrypted PEM private key") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path}: the key is not an Ed25519 key")
    return key


@dataclass(frozen=True, slots=True)
class Credentials:
    """This node's own proof of identity; neither printing nor logging it shows the key."""

    folder: Path
    identity: Identity
    not_after: datetime  # exported as a metric: a node with an expired certificate is disconnected
    certificate_der: bytes = field(repr=False)
    _key: Ed25519PrivateKey = field(repr=False)

    @classmethod
    def load(cls, folder: Path) -> "Credentials":
        """Read the folder that `tops keys issue` wrote for one node."""
        check_not_writable(folder)
        certificate = load_certificate(folder / CERTIFICATE_FILE)
        key = load_key(folder / KEY_FILE)
        if certificate.public_key() != key.public_key():
            raise ConfigError(f"{folder}: {KEY_FILE} does not belong to {CERTIFICATE_FILE}")
        try:
            identity = identity_of_certificate(certificate)
        except NotAuthenticated as error:
            raise ConfigError(f"{folder / CERTIFICATE_FILE}: {error}") from None
        return cls(folder, identity, certificate.not_valid_after_utc, certificate.public_bytes(Encoding.DER), key)

    def secret_pem(self) -> bytes:
        """Key and certificate as they were loaded, for TLS."""
        certificate = x509.load_der_x509_certificate(self.certificate_der).public_bytes(Encoding.PEM)
        return self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) + certificate

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)

    def check(self, trust: "Trust", now: datetime) -> None:
        """Raise ConfigError for a certificate that peers would reject: expired, revoked, or of another authority."""
        try:
            trust.verify(self.certificate_der, now)
        except NotAuthenticated as error:
            raise ConfigError(f"{self.folder}: every peer would reject this node: {error}; issue a new one") from None


@dataclass(frozen=True, slots=True)
class Revocations:
    """One revocation list of the authority, its signature checked."""

    number: int  # grows with every list that the authority publishes
    serials: frozenset[int]


class Trust:
    """Verifies certificates: those that the authority has issued and not revoked, while they are valid."""

    def __init__(self, authority_path: Path, revocations_path: Path) -> None:
        self.authority_path, self.revocations_path = authority_path, revocations_path
        self.authority = load_certificate(authority_path)
        self.cluster = cluster_of_authority(self.authority)
        self.revocations = load_revocations(revocations_path, self.authority)

    @classmethod
    def load(cls, folder: Path) -> "Trust":
        return cls(folder / AUTHORITY_FILE, folder / REVOCATIONS_FILE)

    def reload(self) -> bool:
        """Read the revocation list again; True if a newer one is now in force.

        On an error the current list stays in force. An older list is an error: with it, revoked certificates would be
        valid again.
        """
        fresh = load_revocations(self.revocations_path, self.authority)
        if fresh.number < self.revocations.number:
            raise ConfigError(
                f"{self.revocations_path}: revocation list {fresh.number} is older than number "
                f"{self.revocations.number}, which stays in force; copy the newest from the authority"
            )
        changed = fresh != self.revocations
        self.revocations = fresh
        return changed

    def verify(self, certificate_der: bytes, now: datetime) -> Identity:
        """The identity in the certificate, or `NotAuthenticated`; it does not prove that the peer has the key."""
        try:
            certificate = x509.load_der_x509_certificate(certificate_der)
            certificate.verify_directly_issued_by(self.authority)
            public_key = certificate.public_key()
            constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
        except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound, x509.DuplicateExtension):
            raise NotAuthenticated(f"the certificate was not issued by the authority of {self.cluster!r}") from None
        if constraints.ca or not isinstance(public_key, Ed25519PublicKey):
            raise NotAuthenticated("the certificate is not one of a node")
        for checked in (certificate, self.authority):
            if not checked.not_valid_before_utc <= now <= checked.not_valid_after_utc:
                raise NotAuthenticated(
                    f"the certificate is valid from {checked.not_valid_before_utc:%Y-%m-%d %H:%M} "
                    f"to {checked.not_valid_after_utc:%Y-%m-%d %H:%M} UTC, not now"
                )
        if certificate.serial_number in self.revocations.serials:
            raise NotAuthenticated(f"the certificate {certificate.serial_number:x} is revoked")
        identity = identity_of_certificate(certificate)
        if identity.cluster != self.cluster:
            raise NotAuthenticated(f"the certificate is for the cluster {identity.cluster!r}, not {self.cluster!r}")
        return identity

    def verify_signature(self, certificate_der: bytes, signature: bytes, message: bytes) -> None:
        """Raise NotAuthenticated unless the certificate's key has signed `message`; `verify` checks the certificate."""
        public_key = x509.load_der_x509_certificate(certificate_der).public_key()
        if not isinstance(public_key, Ed25519PublicKey):
            raise NotAuthenticated("the certificate is not one of a node")
        try:
            public_key.verify(signature, message)
        except InvalidSignature:
            raise NotAuthenticated("the signature does not fit what was signed") from None


class NodeKeys:
    """The keys of one running node; `reload` activates renewed keys and new revocations."""

    def __init__(self, credentials: Credentials, trust: Trust) -> None:
        self.credentials, self.trust = credentials, trust

    @classmethod
    def load(cls, folder: Path) -> "NodeKeys":
        """Raises ConfigError when the keys can't be used, also when they are expired or revoked."""
        keys = cls(Credentials.load(folder), Trust.load(folder))
        keys.credentials.check(keys.trust, utc_now())
        return keys

    def reload(self) -> None:
        """Read the folder again. Compare `trust.revocations` with the former value: open connections may have to end.

        On an error (ConfigError) the part that could not be read stays as it was. Open connections keep the certificate
        with which they were made; new ones use the new one.
        """
        self.trust.reload()
        fresh = Credentials.load(self.credentials.folder)
        if fresh.certificate_der != self.credentials.certificate_der:
            if fresh.identity != self.credentials.identity:
                raise ConfigError(
                    f"{fresh.folder}: the new certificate is of {fresh.identity}, and this node runs as "
                    f"{self.credentials.identity}: restart it to become another"
                )
            fresh.check(self.trust, utc_now())
            self.credentials = fresh


def cluster_of_authority(authority: x509.Certificate) -> str:
    """The cluster that an authority certifies for, from its single URI `tops://CLUSTER`."""
    try:
        names = authority.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        raise ConfigError("the authority's certificate names no cluster; was it made by `tops keys init`?") from None
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    if len(uris) != 1 or not uris[0].startswith("tops://"):
        raise ConfigError("the authority's certificate names no cluster; was it made by `tops keys init`?")
    cluster = uris[0].removeprefix("tops://")
    check_name("cluster", cluster)
    return cluster


def load_revocations(path: Path, authority: x509.Certificate) -> Revocations:
    """Read and check a revocation list; a missing one is an error, so that it can't be missed by mistake."""
    try:
        crl = x509.load_pem_x509_crl(read_public(path))
        number = crl.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
    except (ValueError, x509.ExtensionNotFound) as error:
        raise ConfigError(f"{path}: not a PEM revocation list: {error}") from None
    public_key = authority.public_key()
    if not isinstance(public_key, Ed25519PublicKey) or not crl.is_signature_valid(public_key):
        raise ConfigError(f"{path}: the revocation list is not signed by the authority that this node trusts")
    return Revocations(number, frozenset(revoked.serial_number for revoked in crl))
