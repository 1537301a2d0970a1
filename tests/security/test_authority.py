import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from tests.security.security_keys import Keys, MakeKeys, load
from tops.model.errors import ConfigError, NotAuthenticated
from tops.security import Authority, Credentials, Identity, Kind, Trust, utc_now, verify_audit
from tops.security.authority import Status
from tops.security.certificates import of_node
from tops.security.trust import load_key


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_private_keys_can_be_read_by_their_owner_only(keys: Keys) -> None:
    folder = keys.node("s1")

    assert mode(keys.authority.folder / "ca.key") == 0o600
    assert mode(folder / "node.key") == 0o600
    assert mode(folder) == 0o700


def test_a_key_that_others_can_read_is_refused(keys: Keys) -> None:
    folder = keys.node("s1")
    (folder / "node.key").chmod(0o640)

    with pytest.raises(ConfigError, match="chmod 600"):
        Credentials.load(folder)


def test_a_second_init_leaves_the_first_authority_alone(keys: Keys) -> None:
    folder = keys.authority.folder
    before = (folder / "ca.key").read_bytes()

    with pytest.raises(ConfigError, match="already"):
        Authority.init(folder, "other", utc_now())

    assert (folder / "ca.key").read_bytes() == before


def test_an_init_that_was_cut_short_can_be_repeated(tmp_path: Path) -> None:
    (tmp_path / "ca.key").write_bytes(b"left by a crash before the certificate")

    authority = Authority.init(tmp_path, "shop", utc_now())

    assert authority.cluster == "shop"


def test_a_certificate_proves_the_identity_it_was_issued_for(keys: Keys) -> None:
    node = load(keys.node("s1", role="reader"))

    found = node.trust.verify(node.credentials.certificate_der, utc_now())

    assert found == Identity("shop", Kind.SITE, "s1", "reader")


def test_an_expired_certificate_is_refused(keys: Keys) -> None:
    node = load(keys.node("s1", begins=timedelta(days=-2), ends=timedelta(days=-1)))

    with pytest.raises(NotAuthenticated, match="not now"):
        node.trust.verify(node.credentials.certificate_der, utc_now())


def test_a_certificate_of_the_future_is_refused(keys: Keys) -> None:
    node = load(keys.node("s1", begins=timedelta(hours=1)))

    with pytest.raises(NotAuthenticated, match="not now"):
        node.trust.verify(node.credentials.certificate_der, utc_now())


def test_a_certificate_of_another_authority_of_the_same_cluster_name_is_refused(make_keys: MakeKeys) -> None:
    ours, foreign = load(make_keys(folder="a").node("s1")), load(make_keys(folder="b").node("s1"))

    with pytest.raises(NotAuthenticated, match="not issued"):
        ours.trust.verify(foreign.credentials.certificate_der, utc_now())


def test_the_authoritys_own_certificate_is_nobodys_identity(keys: Keys) -> None:
    node = load(keys.node("s1"))

    with pytest.raises(NotAuthenticated, match="not one of a node"):
        node.trust.verify(node.trust.authority.public_bytes(Encoding.DER), utc_now())


def test_a_certificate_for_another_cluster_is_refused_though_our_authority_signed_it(keys: Keys) -> None:
    node, key, now = load(keys.node("s1")), Ed25519PrivateKey.generate(), utc_now()
    elsewhere = Identity("bank", Kind.SITE, "s1", "admin")
    authority_key = load_key(keys.authority.folder / "ca.key")
    signed = of_node(
        authority_key, keys.authority.certificate, elsewhere, key.public_key(), [], now, now + timedelta(days=1)
    )

    with pytest.raises(NotAuthenticated, match="'bank'"):
        node.trust.verify(signed.public_bytes(Encoding.DER), now + timedelta(minutes=1))


@pytest.mark.parametrize("position", [10, 100, -1])
def test_a_certificate_with_one_flipped_bit_is_refused(keys: Keys, position: int) -> None:
    node = load(keys.node("s1"))
    forged = bytearray(node.credentials.certificate_der)
    forged[position] ^= 1

    with pytest.raises(NotAuthenticated):
        node.trust.verify(bytes(forged), utc_now())


def test_a_revoked_certificate_is_refused_after_a_reload_and_others_are_not(keys: Keys) -> None:
    revoked, other = load(keys.node("s1")), load(keys.node("s2"))

    keys.authority.revoke("s1", utc_now())

    assert other.trust.reload()
    with pytest.raises(NotAuthenticated, match="revoked"):
        other.trust.verify(revoked.credentials.certificate_der, utc_now())
    assert other.trust.verify(other.credentials.certificate_der, utc_now()).name == "s2"


def test_a_node_refuses_to_start_with_a_certificate_that_nobody_would_accept(keys: Keys) -> None:
    expired = load(keys.node("old", begins=timedelta(days=-2), ends=timedelta(days=-1)))
    revoked, fine = keys.node("gone"), keys.node("fine")
    keys.authority.revoke("gone", utc_now())

    load(fine).credentials.check(load(fine).trust, utc_now())
    for node in (expired, load(revoked)):
        with pytest.raises(ConfigError, match="every peer would reject"):
            node.credentials.check(node.trust, utc_now())


def test_revoking_by_serial_ends_one_certificate_of_a_renewed_name(keys: Keys) -> None:
    first = load(keys.node("s1"))
    second = load(keys.node("s1", renew=True))
    serials = [issued.serial for issued in keys.authority.issued(utc_now())]

    keys.authority.revoke(serials[0], utc_now())
    second.trust.reload()

    with pytest.raises(NotAuthenticated, match="revoked"):
        second.trust.verify(first.credentials.certificate_der, utc_now())
    assert second.trust.verify(second.credentials.certificate_der, utc_now()).name == "s1"


def test_an_older_revocation_list_does_not_bring_a_certificate_back(keys: Keys) -> None:
    revoked = load(keys.node("s1"))
    node = load(keys.node("s2"))
    old = (node.folder / "crl.pem").read_bytes()
    keys.authority.revoke("s1", utc_now())
    node.trust.reload()
    (node.folder / "crl.pem").write_bytes(old)

    with pytest.raises(ConfigError, match="older"):
        node.trust.reload()

    with pytest.raises(NotAuthenticated, match="revoked"):
        node.trust.verify(revoked.credentials.certificate_der, utc_now())


@pytest.mark.parametrize("content", [b"", b"garbage", b"-----BEGIN X509 CRL-----\nMIIB\n-----END X509 CRL-----\n"])
def test_a_damaged_revocation_list_leaves_the_old_one_in_force(keys: Keys, content: bytes) -> None:
    revoked, node = load(keys.node("s1")), load(keys.node("s2"))
    keys.authority.revoke("s1", utc_now())
    node.trust.reload()
    (node.folder / "crl.pem").write_bytes(content)

    with pytest.raises(ConfigError, match=r"crl\.pem"):
        node.trust.reload()

    with pytest.raises(NotAuthenticated, match="revoked"):
        node.trust.verify(revoked.credentials.certificate_der, utc_now())


def test_a_foreign_revocation_list_is_refused(make_keys: MakeKeys) -> None:
    ours, foreign = make_keys(folder="a").node("s1"), make_keys(folder="b").node("s1")

    with pytest.raises(ConfigError, match="not signed"):
        Trust(ours / "ca.crt", foreign / "crl.pem")


def test_a_node_without_a_revocation_list_does_not_start(keys: Keys) -> None:
    folder = keys.node("s1")
    (folder / "crl.pem").unlink()

    with pytest.raises(ConfigError, match=r"crl\.pem"):
        Trust.load(folder)


def test_a_name_with_a_valid_certificate_is_not_issued_again_by_accident(keys: Keys) -> None:
    keys.node("s1")

    with pytest.raises(ConfigError, match="--renew"):
        keys.node("s1")


def test_a_renewal_can_not_change_the_role(keys: Keys) -> None:
    keys.node("s1", role="reader")

    with pytest.raises(ConfigError, match="revoke it"):
        keys.node("s1", role="admin", renew=True)


def test_names_that_differ_only_in_case_are_refused(keys: Keys) -> None:
    keys.node("billing")

    with pytest.raises(ConfigError, match="case"):
        keys.node("Billing")


@pytest.mark.parametrize("host", ["", "a b", "-x", "999.1.1.1", "a..b", "ex*mple", "h" * 64, "host\n"])
def test_a_host_that_is_neither_name_nor_address_is_refused_and_nothing_is_issued(keys: Keys, host: str) -> None:
    with pytest.raises(ConfigError, match="host name"):
        keys.node("b1", Kind.BROKER, hosts=[host])

    assert keys.authority.issued(utc_now()) == []


def test_a_certificate_never_outlives_its_authority(keys: Keys) -> None:
    keys.node("s1", ends=timedelta(days=99999))

    assert keys.authority.issued(utc_now())[0].not_after <= keys.authority.certificate.not_valid_after_utc


def test_the_listing_tells_valid_expired_and_revoked_apart(keys: Keys) -> None:
    keys.node("valid")
    keys.node("expired", begins=timedelta(days=-2), ends=timedelta(days=-1))
    keys.node("revoked")
    keys.authority.revoke("revoked", utc_now())

    found = {issued.name: issued.status for issued in keys.authority.issued(utc_now())}

    assert found == {"valid": Status.VALID, "expired": Status.EXPIRED, "revoked": Status.REVOKED}


def test_a_line_that_a_crash_tore_is_cut_and_the_index_goes_on(keys: Keys) -> None:
    keys.node("s1")
    index = keys.authority.folder / "index.jsonl"
    index.write_bytes(index.read_bytes() + b'{"act":"issued","ser')

    keys.node("s2")

    assert [issued.name for issued in keys.authority.issued(utc_now())] == ["s1", "s2"]


def test_certificates_issued_at_once_are_all_in_the_index_and_the_audit_log(keys: Keys) -> None:
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(keys.node, [f"s{n}" for n in range(16)]))

    assert sorted(issued.name for issued in keys.authority.issued(utc_now())) == sorted(f"s{n}" for n in range(16))
    assert verify_audit(keys.authority.folder / "audit.log").records == 17


def test_a_damaged_index_is_reported_with_its_line(keys: Keys) -> None:
    keys.node("s1")
    index = keys.authority.folder / "index.jsonl"
    index.write_bytes(b"{}\n" + index.read_bytes())

    with pytest.raises(ConfigError, match="line 1"):
        keys.authority.issued(utc_now())


def test_a_repeated_revocation_publishes_a_list_that_a_crash_left_behind(keys: Keys) -> None:
    folder = keys.node("s1")
    before = (folder / "crl.pem").read_bytes()
    keys.authority.revoke("s1", utc_now())
    for path in (keys.authority.folder / "crl.pem", folder / "crl.pem"):
        path.write_bytes(before)

    keys.authority.revoke("s1", utc_now())

    assert len(load(folder).trust.revocations.serials) == 1


def test_every_act_of_the_authority_is_in_its_audit_log(keys: Keys) -> None:
    keys.node("s1")
    keys.authority.revoke("s1", utc_now())

    path = keys.authority.folder / "audit.log"

    assert verify_audit(path).records == 3
    assert [word in path.read_text() for word in ("keys init", "keys issue", "keys revoke")] == [True] * 3


def test_no_private_key_is_in_any_other_file_nor_in_a_repr(keys: Keys) -> None:
    node = load(keys.node("s1"))
    secrets = [
        line
        for path in (keys.authority.folder / "ca.key", node.folder / "node.key")
        for line in path.read_text().splitlines()
        if "PRIVATE" not in line
    ]

    others = [p for p in keys.authority.folder.rglob("*") if p.is_file() and p.suffix != ".key"]

    assert len(others) >= 7
    for text in [*(p.read_text() for p in others), repr(node.credentials), str(node.credentials)]:
        assert not any(secret in text for secret in secrets)
