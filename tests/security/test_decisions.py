"""Signatures on decisions, with real keys: what a participant believes, and what not."""

from datetime import timedelta

import msgspec
import pytest

from tests.security.security_keys import Keys, MakeKeys, load
from tops.security import Kind, decision_checker, decision_signer, utc_now

TEXT = b"what was decided"


def test_the_coordinators_signature_is_believed(keys: Keys) -> None:
    broker, participant = load(keys.broker()), load(keys.node("alice"))

    proof = decision_signer(lambda: broker.credentials)(TEXT)

    assert decision_checker(participant.trust)(TEXT, "b1", proof) == ""


def test_a_signature_on_something_else_is_not_believed(keys: Keys) -> None:
    broker, participant = load(keys.broker()), load(keys.node("alice"))

    proof = decision_signer(lambda: broker.credentials)(TEXT)

    assert "does not fit" in decision_checker(participant.trust)(TEXT + b"!", "b1", proof)


@pytest.mark.parametrize(("name", "kind"), [("b2", Kind.BROKER), ("b1", Kind.SITE)])
def test_the_signer_must_be_the_broker_that_coordinates(keys: Keys, name: str, kind: Kind) -> None:
    signer, participant = load(keys.node(name, kind)), load(keys.node("alice"))

    proof = decision_signer(lambda: signer.credentials)(TEXT)

    assert "not of broker 'b1'" in decision_checker(participant.trust)(TEXT, "b1", proof)


def test_a_broker_of_another_authority_is_not_believed(keys: Keys, make_keys: MakeKeys) -> None:
    stranger, participant = load(make_keys(folder="other").broker()), load(keys.node("alice"))

    proof = decision_signer(lambda: stranger.credentials)(TEXT)

    assert "not issued by the authority" in decision_checker(participant.trust)(TEXT, "b1", proof)


def test_the_signature_of_a_revoked_broker_is_not_believed(keys: Keys) -> None:
    broker, participant = load(keys.broker()), load(keys.node("alice"))
    proof = decision_signer(lambda: broker.credentials)(TEXT)

    keys.authority.revoke("b1", now=utc_now())
    participant.trust.reload()

    assert "revoked" in decision_checker(participant.trust)(TEXT, "b1", proof)


def test_the_signature_of_an_expired_certificate_is_not_believed(keys: Keys) -> None:
    broker, participant = load(keys.broker()), load(keys.node("alice"))
    proof = decision_signer(lambda: broker.credentials)(TEXT)

    later = decision_checker(participant.trust, lambda: utc_now() + timedelta(days=2))

    assert "not now" in later(TEXT, "b1", proof)


@pytest.mark.parametrize(
    "proof", [b"", b"\xff", b"x" * 600, msgspec.msgpack.encode((b"s", b"c")), msgspec.msgpack.encode((b"s", b"c", 1))]
)
def test_anything_else_is_not_believed_either(keys: Keys, proof: bytes) -> None:
    participant = load(keys.node("alice"))

    assert decision_checker(participant.trust)(TEXT, "b1", proof) != ""


def test_a_signature_of_another_length_is_not_believed(keys: Keys) -> None:
    broker, participant = load(keys.broker()), load(keys.node("alice"))

    proof = msgspec.msgpack.encode((b"short", broker.credentials.certificate_der))

    assert "does not fit" in decision_checker(participant.trust)(TEXT, "b1", proof)
