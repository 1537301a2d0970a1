"""The form of the authority's certificates and revocation lists; pure functions from keys and times to X.509."""

import ipaddress
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tops.model.errors import ConfigError
from tops.security.identity import Identity, Kind

CLOCK_SKEW: Final = timedelta(minutes=5)  # a node whose clock is behind by up to this accepts new certificates


def self_signed(key: Ed25519PrivateKey, cluster: str, now: datetime, valid_days: int) -> x509.Certificate:
    # The random part keeps two authorities of one cluster name apart wherever issuers are compared by name.
    common_name = f"TOPS authority of {cluster[:20]} {x509.random_serial_number():x}"[:64]
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + timedelta(days=valid_days))
        .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"tops://{cluster}")]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        .add_extension(_key_usage(key_cert_sign=True, crl_sign=True), True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), False)
        .sign(key, None)
    )


def of_node(
    authority_key: Ed25519PrivateKey,
    authority: x509.Certificate,
    identity: Identity,
    public_key: Ed25519PublicKey,
    hosts: Sequence[x509.GeneralName],
    not_before: datetime,
    not_after: datetime,
) -> x509.Certificate:
    """A node's certificate; it is not valid longer than the authority's."""
    # Only brokers and replicas may act as servers, the latter for reads of their own set: a site's stolen key can't be
    # used to lure clients, and a client expects the kind and the name that it dials.
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if identity.kind is Kind.BROKER or (identity.kind is Kind.REPLICA and hosts):
        usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.name[:64])]))
        .issuer_name(authority.subject)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(not_before)
        .not_valid_after(min(not_after, authority.not_valid_after_utc))
        .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(identity.uri), *hosts]), False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        .add_extension(_key_usage(digital_signature=True), True)
        .add_extension(x509.ExtendedKeyUsage(usages), True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), False)
        .sign(authority_key, None)
    )


def revocation_list(
    authority_key: Ed25519PrivateKey,
    authority: x509.Certificate,
    number: int,
    revoked: Iterable[tuple[int, datetime]],
    now: datetime,
) -> bytes:
    """The PEM of a revocation list; `number` must be higher than that of every list with other content."""
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(authority.subject)
        .last_update(now - CLOCK_SKEW)
        # The list has no expiry of its own: a missed renewal must not stop a healthy cluster.
        .next_update(max(authority.not_valid_after_utc, now + CLOCK_SKEW))
        .add_extension(x509.CRLNumber(number), False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), False)
    )
    for serial, at in revoked:
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(at)
        builder = builder.add_revoked_certificate(entry.build())
    return builder.sign(authority_key, None).public_bytes(Encoding.PEM)


def pem(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _key_usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        encipher_only=False,
        decipher_only=False,
    )


def host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    labels = host.split(".")
    if len(host) > 253 or not all(_is_label(label) for label in labels) or ("." in host and labels[-1].isdigit()):
        raise ConfigError(f"{host!r} is neither an IP address nor a host name")
    return x509.DNSName(host)


def _is_label(label: str) -> bool:
    return (
        0 < len(label) <= 63
        and label.isascii()
        and label.replace("-", "").isalnum()
        and not (label.startswith("-") or label.endswith("-"))
    )
