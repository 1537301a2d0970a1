"""The cluster's own certificate authority, as a folder.

    ca.key        the authority's private key, 0600; it never leaves this folder
    ca.crt        its certificate, which every node trusts
    crl.pem       the revocation list in force
    index.jsonl   what was issued and revoked, one line each, only ever appended to
    audit.log     the same acts in a hash chain
    nodes/NAME/   what one node needs and nothing else: copy it to that node's machine; for replicas nodes/SET.REPLICA/

The index is the authoritative record, and the revocation list is made from it. A crash between the two leaves an
outdated list; every later act, and a repeated `revoke`, publishes it again.
"""

import os
from collections.abc import Sequence
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Final

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from tops.model.errors import ConfigError
from tops.security import certificates
from tops.security.audit import AuditLog
from tops.security.files import PRIVATE, PUBLIC, locked, read_public, sync_folder, write_whole
from tops.security.identity import Identity, Kind, check_name
from tops.security.trust import (
    AUTHORITY_FILE,
    CERTIFICATE_FILE,
    KEY_FILE,
    REVOCATIONS_FILE,
    cluster_of_authority,
    load_certificate,
    load_key,
)

AUTHORITY_KEY_FILE: Final = "ca.key"
INDEX_FILE: Final = "index.jsonl"
AUDIT_FILE: Final = "audit.log"
NODES_FOLDER: Final = "nodes"


class Act(Enum):
    ISSUED = "issued"
    REVOKED = "revoked"


class IndexLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of the index."""

    act: Act
    serial: str  # hexadecimal
    at: datetime
    name: str
    kind: Kind
    role: str
    not_after: datetime


class Status(Enum):
    VALID = "valid"
    EXPIRED = "expired"
    REVOKED = "revoked"


class Issued(msgspec.Struct, frozen=True, kw_only=True):
    """One certificate as `tops keys show` lists it."""

    name: str
    kind: Kind
    role: str
    serial: str
    not_after: datetime
    status: Status
    revoked_at: datetime | None


class Authority:
    """Issues and revokes; each act is on disk when its method returns."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.certificate = load_certificate(folder / AUTHORITY_FILE)
        self.cluster = cluster_of_authority(self.certificate)
        self._key = load_key(folder / AUTHORITY_KEY_FILE)

    @classmethod
    def init(cls, folder: Path, cluster: str, now: datetime, valid_days: int = 3650) -> "Authority":
        """Make a new authority in `folder`; an existing one is never overwritten."""
        check_name("cluster", cluster)
        _check_days(valid_days)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(folder / ".lock"):
            if (folder / AUTHORITY_FILE).exists():
                raise ConfigError(f"{folder}: the folder has an authority already; choose another folder")
            key = Ed25519PrivateKey.generate()
            certificate = certificates.self_signed(key, cluster, now, valid_days)
            write_whole(folder / AUTHORITY_KEY_FILE, certificates.pem(key), PRIVATE)
            # Written after the key: the certificate marks a complete authority.
            write_whole(folder / AUTHORITY_FILE, certificate.public_bytes(Encoding.PEM), PUBLIC)
            authority = cls(folder)
            authority._record(now, "init", cluster, f"authority valid to {certificate.not_valid_after_utc:%Y-%m-%d}")
            authority._publish_revocations(now)
        return authority

    def issue(
        self,
        identity: Identity,
        hosts: Sequence[str],
        not_before: datetime,
        not_after: datetime,
        *,
        now: datetime,
        renew: bool = False,
    ) -> Path:
        """Certify `identity` and return the folder to copy to its machine.

        `renew` allows a second certificate for a name that has a valid one, with the same kind and role; the first
        stays valid, so that a running node stays connected.
        """
        if identity.cluster != self.cluster:
            raise ConfigError(f"this authority certifies the cluster {self.cluster!r}, not {identity.cluster!r}")
        if not_after <= not_before:
            raise ConfigError("the certificate would end before it begins")
        alternative_names = [certificates.host_name(host) for host in hosts]
        if identity.kind is Kind.BROKER and not hosts:
            raise ConfigError(f"broker {identity.name!r} needs at least one --host, which its clients will check")
        with locked(self.folder / ".lock"):
            self._check_free(identity, now, renew)
            key = Ed25519PrivateKey.generate()
            certificate = certificates.of_node(
                self._key, self.certificate, identity, key.public_key(), alternative_names, not_before, not_after
            )
            line = IndexLine(
                act=Act.ISSUED,
                serial=f"{certificate.serial_number:x}",
                at=now,
                name=identity.name,
                kind=identity.kind,
                role=identity.role,
                not_after=certificate.not_valid_after_utc,
            )
            # In the index before it exists anywhere: a certificate that is not in the index could not be revoked.
            self._append(line)
            self._record(now, "issue", identity.uri, f"serial {line.serial}")
            self._publish_revocations(now)
            return self._write_node(identity.name, key, certificate)

    def revoke(self, name_or_serial: str, now: datetime) -> list[Issued]:
        """End every certificate of a name, or the one of a serial number; repeating it publishes the list again."""
        with locked(self.folder / ".lock"):
            hit = [i for i in self.issued(now) if name_or_serial in (i.name, i.serial)]
            if not hit:
                raise ConfigError(f"{self.folder}: no certificate of that name or serial: {name_or_serial!r}")
            for issued in hit:
                if issued.status is not Status.REVOKED:
                    self._append(
                        IndexLine(
                            act=Act.REVOKED,
                            serial=issued.serial,
                            at=now,
                            name=issued.name,
                            kind=issued.kind,
                            role=issued.role,
                            not_after=issued.not_after,
                        )
                    )
                    self._record(now, "revoke", issued.name, f"serial {issued.serial}")
            self._publish_revocations(now)
            serials = {issued.serial for issued in hit}
            return [i for i in self.issued(now) if i.serial in serials]

    def issued(self, now: datetime) -> list[Issued]:
        """Everything ever issued, oldest first."""
        lines = self._index()
        revoked = {line.serial: line.at for line in lines if line.act is Act.REVOKED}
        return [
            Issued(
                name=line.name,
                kind=line.kind,
                role=line.role,
                serial=line.serial,
                not_after=line.not_after,
                status=_status(line, revoked, now),
                revoked_at=revoked.get(line.serial),
            )
            for line in lines
            if line.act is Act.ISSUED
        ]

    def _check_free(self, identity: Identity, now: datetime, renew: bool) -> None:
        for issued in self.issued(now):
            if issued.name != identity.name and issued.name.casefold() == identity.name.casefold():
                raise ConfigError(f"{identity.name!r} differs from {issued.name!r} only in case; choose another name")
            if issued.name != identity.name or issued.status is not Status.VALID:
                continue
            if not renew:
                raise ConfigError(f"{identity.name!r} has a valid certificate: give --renew, or revoke it first")
            if (issued.kind, issued.role) != (identity.kind, identity.role):
                raise ConfigError(
                    f"{identity.name!r} has a valid certificate as {issued.kind.value} with role {issued.role!r}: "
                    "revoke it before the name gets another kind or role"
                )

    def _write_node(self, name: str, key: Ed25519PrivateKey, certificate: x509.Certificate) -> Path:
        folder = self.folder / NODES_FOLDER / name.replace("/", ".")  # which no name contains
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(folder / KEY_FILE, certificates.pem(key), PRIVATE)
        write_whole(folder / CERTIFICATE_FILE, certificate.public_bytes(Encoding.PEM), PUBLIC)
        write_whole(folder / AUTHORITY_FILE, self.certificate.public_bytes(Encoding.PEM), PUBLIC)
        write_whole(folder / REVOCATIONS_FILE, read_public(self.folder / REVOCATIONS_FILE), PUBLIC)
        sync_folder(self.folder / NODES_FOLDER)
        return folder

    def _publish_revocations(self, now: datetime) -> None:
        lines = self._index()
        revoked = [(int(line.serial, 16), line.at) for line in lines if line.act is Act.REVOKED]
        # The index only grows and every revocation adds a line, so two different lists never have the same number.
        content = certificates.revocation_list(self._key, self.certificate, len(lines) + 1, revoked, now)
        write_whole(self.folder / REVOCATIONS_FILE, content, PUBLIC)
        for node in sorted((self.folder / NODES_FOLDER).glob(f"*/{CERTIFICATE_FILE}")):
            write_whole(node.parent / REVOCATIONS_FILE, content, PUBLIC)

    def _append(self, line: IndexLine) -> None:
        with open(self.folder / INDEX_FILE, "ab", opener=_private_opener) as file:
            # A crash may have torn the last line. The act ended there, so it did not happen.
            file.truncate(len(self._whole_lines()))
            file.write(msgspec.json.encode(line) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self.folder)

    def _index(self) -> list[IndexLine]:
        path = self.folder / INDEX_FILE
        lines = []
        for number, line in enumerate(self._whole_lines().splitlines(), start=1):
            try:
                lines.append(msgspec.json.decode(line, type=IndexLine))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ConfigError(f"{path}: line {number} can't be read: {error}; restore the file") from None
        return lines

    def _whole_lines(self) -> bytes:
        path = self.folder / INDEX_FILE
        content = read_public(path) if path.exists() else b""
        return content[: content.rfind(b"\n") + 1]

    def _record(self, now: datetime, act: str, subject: str, detail: str) -> None:
        at = now.timestamp()
        with AuditLog(self.folder / AUDIT_FILE, at) as audit:
            audit.administered(at, who=f"authority {self.cluster}", act=f"keys {act} {subject}", detail=detail)


def _status(line: IndexLine, revoked: dict[str, datetime], now: datetime) -> Status:
    if line.serial in revoked:
        return Status.REVOKED
    return Status.EXPIRED if line.not_after < now else Status.VALID


def _check_days(valid_days: int) -> None:
    if not 1 <= valid_days <= 36500:
        raise ConfigError(f"valid for {valid_days} days: must be between 1 and 36500")


def _private_opener(path: str, flags: int) -> int:
    return os.open(path, flags, PRIVATE)
