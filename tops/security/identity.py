"""The identity of a node: the one name, kind and role that its certificate states.

The identity is a single URI in the certificate's subject alternative names, `tops://CLUSTER/2/KIND/NAME?role=ROLE`,
where 2 is the version of this format. A replica's name is `SET/REPLICA`: no name contains a slash, so that two replicas
of different sets never have the same name. The distinguished name is only for people and is never read, so neither its
order nor a repeated attribute can make a certificate ambiguous.
"""

import re
from dataclasses import dataclass
from enum import Enum

from cryptography import x509

from tops.model.errors import ConfigError, NotAuthenticated

NAME_MAX = 63

_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_-]{{0,{NAME_MAX - 1}}}", re.ASCII)
_URI = re.compile(
    rf"tops://(?P<cluster>{_NAME.pattern})/2/(?P<kind>broker|site|replica)/"
    rf"(?P<name>{_NAME.pattern}(?:/{_NAME.pattern})?)\?role=(?P<role>{_NAME.pattern})",
    re.ASCII,
)
_URI_OF_FORMAT_1 = re.compile(r"tops://[^/]+/(?:broker|site)/[^/]+", re.ASCII)


class Kind(Enum):
    """The kind of a node in the overlay; only a broker may send messages for others."""

    BROKER = "broker"
    SITE = "site"
    REPLICA = "replica"


BROKER_ROLE, REPLICA_ROLE = "broker", "replica"
_ROLES_OF_KINDS = {Kind.BROKER: BROKER_ROLE, Kind.REPLICA: REPLICA_ROLE}  # and of no others
CANONICAL_MAX = 2 * NAME_MAX + 1


def replica_name(replica_set: str, replica: str) -> str:
    """The canonical name of a replica."""
    return f"{replica_set}/{replica}"


def kind_of_name(name: str) -> Kind:
    """The kind of a node that is no broker, by its canonical name."""
    return Kind.REPLICA if "/" in name else Kind.SITE


def role_of_kind(kind: Kind, otherwise: str) -> str:
    """The role of the kind; sites have any other."""
    return _ROLES_OF_KINDS.get(kind, otherwise)


@dataclass(frozen=True, slots=True)
class Identity:
    """An authenticated identity, or one that this node vouches for; an invalid one can't be made."""

    cluster: str
    kind: Kind
    name: str  # canonical: of a replica SET/REPLICA
    role: str

    def __post_init__(self) -> None:
        check_name("cluster", self.cluster)
        check_name("role", self.role)
        parts = self.name.split("/")
        if len(parts) != (2 if self.kind is Kind.REPLICA else 1):
            wanted = "SET/REPLICA" if self.kind is Kind.REPLICA else "NAME"
            raise ConfigError(f"{self.kind.value} {self.name[:CANONICAL_MAX]!r}: a {self.kind.value} is named {wanted}")
        for part in parts:
            check_name("name", part)
        # A site with the brokers' role could send messages for every other site; one with a replica's role has no set.
        if self.role != role_of_kind(self.kind, self.role) or (
            self.role in _ROLES_OF_KINDS.values() and self.kind not in _ROLES_OF_KINDS
        ):
            raise ConfigError(
                f"{self.kind.value} {self.name!r} can't have the role {self.role!r}: "
                f"only brokers have the role {BROKER_ROLE!r}, and only replicas the role {REPLICA_ROLE!r}"
            )

    @property
    def replica_set(self) -> str:
        """The set that this is a replica of; empty for others."""
        return self.name.partition("/")[0] if self.kind is Kind.REPLICA else ""

    @property
    def uri(self) -> str:
        return f"tops://{self.cluster}/2/{self.kind.value}/{self.name}?role={self.role}"

    def __str__(self) -> str:
        return f"{self.kind.value} {self.name} ({self.role})"


def check_name(field: str, value: str) -> None:
    """Raise ConfigError for a name that would be ambiguous in a path, a URI or a transaction id."""
    if not _NAME.fullmatch(value):
        raise ConfigError(
            f"{field} {value[: NAME_MAX + 1]!r} is not usable: up to {NAME_MAX} ASCII letters, digits, '-' and '_', "
            "the first a letter or digit"
        )


def identity_of_uri(uri: str) -> Identity:
    """The identity that `uri` states exactly: no case folding, no percent decoding, no remainder."""
    match = _URI.fullmatch(uri)
    if match is None and _URI_OF_FORMAT_1.match(uri):
        raise NotAuthenticated(
            f"{uri[:200]!r} is of an earlier format: issue the certificate again with `tops keys issue NAME`, and a "
            "replica's with `tops keys issue --kind replica --set SET --replica REPLICA`"
        )
    if match is None:
        raise NotAuthenticated(f"{uri[:200]!r} is not an identity of the form tops://CLUSTER/2/KIND/NAME?role=ROLE")
    try:
        return Identity(match["cluster"], Kind(match["kind"]), match["name"], match["role"])
    except ConfigError as error:
        raise NotAuthenticated(str(error)) from None


def identity_of_certificate(certificate: x509.Certificate) -> Identity:
    """The identity in `certificate`, whose signature the caller checks; NotAuthenticated if it is ambiguous."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        raise NotAuthenticated("the certificate states no TOPS identity") from None
    except (x509.DuplicateExtension, ValueError) as error:
        raise NotAuthenticated(f"the certificate's extensions can't be read: {error}") from None
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    if len(uris) != 1:
        raise NotAuthenticated(f"the certificate states {len(uris)} identities instead of one")
    return identity_of_uri(uris[0])
