import datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from tops.model.errors import ConfigError, NotAuthenticated
from tops.security.identity import Identity, Kind, identity_of_certificate, identity_of_uri


def certificate(*names: x509.GeneralName, subject: tuple[str, ...] = ("b1",)) -> x509.Certificate:
    key = Ed25519PrivateKey.generate()
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in subject]))
        .issuer_name(x509.Name([]))
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=1))
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), False)
    return builder.sign(key, None)


def uri(text: str) -> x509.GeneralName:
    return x509.UniformResourceIdentifier(text)


names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}", fullmatch=True)


@given(names, names, names.filter(lambda role: role not in ("broker", "replica")))
def test_an_identity_survives_its_uri(cluster: str, name: str, role: str) -> None:
    identity = Identity(cluster, Kind.SITE, name, role)

    assert identity_of_uri(identity.uri) == identity


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tops://shop/2/site/s1",
        "tops://shop/2/site/s1?role=",
        "tops://shop/2/site/s1?role=admin&role=reader",
        "tops://shop/2/site/s1?role=reader#admin",
        "tops://shop/2/site/s1?role=reader\n",
        "tops://shop/2/site/s1/?role=reader",
        "tops://shop/2/site/../s1?role=reader",
        "tops://shop/2/site/s%31?role=reader",
        "tops://shop/2/Site/s1?role=reader",
        "TOPS://shop/site/s1?role=reader",
        "tops://shop:1/2/site/s1?role=reader",
        "tops://user@shop/2/site/s1?role=reader",
        "tops://shop/2/client/s1?role=reader",
        "tops://shop/2/site/s１?role=reader",
        f"tops://shop/2/site/{'s' * 64}?role=reader",
        " tops://shop/2/site/s1?role=reader",
        "tops://shop/3/site/s1?role=reader",
        "tops://shop/2/site/shop/r1?role=reader",
        "tops://shop/2/replica/r1?role=replica",
        "tops://shop/2/replica/a/b/c?role=replica",
    ],
)
def test_a_uri_that_could_be_read_in_two_ways_is_refused(text: str) -> None:
    with pytest.raises(NotAuthenticated):
        identity_of_uri(text)


@pytest.mark.parametrize(
    "text",
    [
        "tops://shop/2/site/s1?role=broker",
        "tops://shop/2/broker/b1?role=admin",
        "tops://shop/2/site/s1?role=replica",
        "tops://shop/2/replica/shop/r1?role=admin",
    ],
)
def test_the_roles_and_kinds_of_brokers_and_replicas_go_together(text: str) -> None:
    with pytest.raises(NotAuthenticated, match="role"):
        identity_of_uri(text)


def test_the_distinguished_name_is_never_read() -> None:
    found = identity_of_certificate(
        certificate(uri("tops://shop/2/site/s1?role=reader"), subject=("admin", "tops://shop/2/site/root?role=admin"))
    )

    assert found == Identity("shop", Kind.SITE, "s1", "reader")


@pytest.mark.parametrize(
    "alternatives",
    [
        [],
        [x509.DNSName("s1")],
        [uri("tops://shop/2/site/s1?role=reader"), uri("tops://shop/2/site/s1?role=admin")],
        [uri("tops://shop/2/site/s1?role=reader"), uri("tops://shop/2/site/s1?role=reader")],
        [uri("tops://shop/2/site/s1?role=reader"), uri("https://example.org/")],
    ],
)
def test_a_certificate_with_no_identity_or_several_is_refused(alternatives: list[x509.GeneralName]) -> None:
    with pytest.raises(NotAuthenticated):
        identity_of_certificate(certificate(*alternatives))


@pytest.mark.parametrize("name", ["", "-a", "a.b", "a/b", "..", "a b", "a\x00", "ä", "a" * 64])
def test_a_name_that_is_not_plain_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        Identity("shop", Kind.SITE, name, "reader")


def test_replicas_of_different_sets_never_have_the_same_name() -> None:
    one, other = (Identity("c", Kind.REPLICA, name, "replica") for name in ("a-b/c", "a/b-c"))

    assert one.name != other.name
    assert (one.replica_set, other.replica_set) == ("a-b", "a")
    assert identity_of_uri(one.uri) == one


@pytest.mark.parametrize("text", ["tops://shop/site/s1?role=reader", "tops://shop/broker/b1?role=broker"])
def test_a_certificate_of_the_earlier_format_is_rejected_with_the_command_that_issues_it_again(text: str) -> None:
    with pytest.raises(NotAuthenticated, match="tops keys issue"):
        identity_of_uri(text)
