"""Who a node is: the one name, kind and role that its certificate states.

The identity lives in a single URI of the certificate's subject alternative names,
`tops://CLUSTER/KIND/NAME?role=ROLE`. The distinguished name is decoration for people and is never read, so neither
its order nor a repeated attribute can make a certificate mean two things.
"""

import re
from dataclasses import dataclass
from enum import Enum

from cryptography import x509

from tops.errors import ConfigError, NotAuthenticated

NAME_MAX = 63

_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_-]{{0,{NAME_MAX - 1}}}", re.ASCII)
_URI = re.compile(
    rf"tops://(?P<cluster>{_NAME.pattern})/(?P<kind>broker|site)/(?P<name>{_NAME.pattern})\?role=(?P<role>{_NAME.pattern})",
    re.ASCII,
)


class Kind(Enum):
    """What a node is in the overlay; only a broker may speak for others."""

    BROKER = "broker"
    SITE = "site"


BROKER_ROLE = "broker"


@dataclass(frozen=True, slots=True)
class Identity:
    """An authenticated party, or one that this node vouches for; made whole or not at all."""

    cluster: str
    kind: Kind
    name: str
    role: str

    def __post_init__(self) -> None:
        for field, value in (("cluster", self.cluster), ("name", self.name), ("role", self.role)):
            check_name(field, value)
        # A site that held the brokers' role could speak for every other site.
        if (self.kind is Kind.BROKER) != (self.role == BROKER_ROLE):
            raise ConfigError(
                f"{self.kind.value} {self.name!r} can't have the role {self.role!r}: "
                f"brokers have the role {BROKER_ROLE!r}, and nobody else has it"
            )

    @property
    def uri(self) -> str:
        return f"tops://{self.cluster}/{self.kind.value}/{self.name}?role={self.role}"

    def __str__(self) -> str:
        return f"{self.kind.value} {self.name} ({self.role})"


def check_name(field: str, value: str) -> None:
    """Refuse a name that could be read in two ways in a path, a URI or a transaction id."""
    if not _NAME.fullmatch(value):
        raise ConfigError(
            f"{field} {value[: NAME_MAX + 1]!r} is not usable: up to {NAME_MAX} ASCII letters, digits, '-' and '_', "
            "the first a letter or digit"
        )


def identity_of_uri(uri: str) -> Identity:
    """The identity that `uri` states, to the letter; no case folding, no percent decoding, nothing left over."""
    match = _URI.fullmatch(uri)
    if match is None:
        raise NotAuthenticated(f"{uri[:200]!r} is not an identity of the form tops://CLUSTER/KIND/NAME?role=ROLE")
    try:
        return Identity(match["cluster"], Kind(match["kind"]), match["name"], match["role"])
    except ConfigError as error:
        raise NotAuthenticated(str(error)) from None


def identity_of_certificate(certificate: x509.Certificate) -> Identity:
    """The identity in `certificate`, whose signature the caller has checked or will; ambiguity is refused."""
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
