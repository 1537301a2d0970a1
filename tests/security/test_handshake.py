"""The handshake's machines, frame by frame; every hostile frame is made from real ones of a real exchange."""

from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.security.security_keys import Keys, MakeKeys, load
from tops.model.errors import ConfigError, NotAuthenticated
from tops.security import (
    PLAIN_WORDS,
    Acceptor,
    Channel,
    Identity,
    Initiator,
    Kind,
    Party,
    Secret,
    fresh_nonce,
    make_secret,
    plain_channel,
    utc_now,
)
from tops.security.handshake import FRAME_BYTES_MAX, PROTOCOL, Hello, Proof, Side, State, Welcome, _transcript

LOCAL = plain_channel("127.0.0.1")
REMOTE = plain_channel("192.0.2.7")


@dataclass
class Pair:
    """A site and a broker that know each other."""

    site: Party
    broker: Party

    def initiator(self, channel: Channel = LOCAL, expected: str | None = None) -> Initiator:
        return Initiator(self.site, channel, fresh_nonce(), expected)

    def acceptor(self, channel: Channel = LOCAL) -> Acceptor:
        return Acceptor(self.broker, channel, fresh_nonce())


@pytest.fixture
def pair(keys: Keys) -> Pair:
    site, broker = load(keys.node("s1")), load(keys.broker())
    return Pair(Party.secured(site.credentials, site.trust, 3), Party.secured(broker.credentials, broker.trust, 5))


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Secret:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return make_secret(["127.0.0.1:7420"])


@pytest.fixture
def insecure_pair(secret: Secret) -> Pair:
    return Pair(
        Party.insecure("shop", Kind.SITE, "s1", 3, site_role="writer", secret=secret),
        Party.insecure("shop", Kind.BROKER, "b1", 5, site_role="reader", secret=secret),
    )


def test_both_sides_learn_name_role_and_incarnation(pair: Pair) -> None:
    initiator, acceptor = pair.initiator(expected="b1"), pair.acceptor()

    proof, broker = initiator.on_welcome(acceptor.on_hello(initiator.hello(), utc_now()), utc_now())
    site = acceptor.on_proof(proof)

    assert (broker.identity, broker.incarnation) == (Identity("shop", Kind.BROKER, "b1", "broker"), 5)
    assert (site.identity, site.incarnation) == (Identity("shop", Kind.SITE, "s1", "writer"), 3)
    assert initiator.state is acceptor.state is State.DONE


def test_a_replayed_proof_does_not_open_a_second_connection(pair: Pair) -> None:
    initiator, acceptor = pair.initiator(), pair.acceptor()
    hello = initiator.hello()
    proof, _ = initiator.on_welcome(acceptor.on_hello(hello, utc_now()), utc_now())
    acceptor.on_proof(proof)

    second = pair.acceptor()
    second.on_hello(hello, utc_now())

    with pytest.raises(NotAuthenticated, match="signature"):
        second.on_proof(proof)
    assert second.state is State.FAILED


def test_a_proof_is_taken_once(pair: Pair) -> None:
    initiator, acceptor = pair.initiator(), pair.acceptor()
    proof, _ = initiator.on_welcome(acceptor.on_hello(initiator.hello(), utc_now()), utc_now())
    acceptor.on_proof(proof)

    with pytest.raises(NotAuthenticated, match="out of order"):
        acceptor.on_proof(proof)
    assert acceptor.state is State.FAILED


def test_a_replayed_welcome_does_not_pass_for_a_broker(pair: Pair) -> None:
    first = pair.initiator()
    old_welcome = pair.acceptor().on_hello(first.hello(), utc_now())
    second = pair.initiator()
    second.hello()

    with pytest.raises(NotAuthenticated, match="signature"):
        second.on_welcome(old_welcome, utc_now())


def test_a_reflected_hello_is_refused(pair: Pair) -> None:
    acceptor = pair.acceptor()
    welcome = acceptor.on_hello(pair.initiator().hello(), utc_now())
    echoed = msgspec.msgpack.encode(Hello(msgspec.msgpack.decode(welcome, type=Welcome).introduction))

    with pytest.raises(NotAuthenticated, match="itself"):
        pair.acceptor().on_hello(echoed, utc_now())


def test_the_acceptors_signature_is_no_proof_of_the_initiator(pair: Pair) -> None:
    acceptor = pair.acceptor()
    welcome = msgspec.msgpack.decode(acceptor.on_hello(pair.initiator().hello(), utc_now()), type=Welcome)

    with pytest.raises(NotAuthenticated, match="signature"):
        acceptor.on_proof(msgspec.msgpack.encode(Proof(welcome.signature)))


def test_brokers_that_connect_to_each_other_at_once_can_not_be_played_against_each_other(keys: Keys) -> None:
    parties = [
        Party.secured(node.credentials, node.trust, 1) for node in (load(keys.broker("b1")), load(keys.broker("b2")))
    ]
    out = Initiator(parties[0], LOCAL, fresh_nonce())
    into = Acceptor(parties[0], LOCAL, fresh_nonce())
    other = Acceptor(parties[1], LOCAL, fresh_nonce())

    welcome = other.on_hello(out.hello(), utc_now())
    stolen = msgspec.msgpack.decode(welcome, type=Welcome)
    into.on_hello(msgspec.msgpack.encode(Hello(stolen.introduction)), utc_now())

    with pytest.raises(NotAuthenticated, match="signature"):
        into.on_proof(msgspec.msgpack.encode(Proof(stolen.signature)))


@pytest.mark.parametrize("relayed", ["initiator", "acceptor"])
def test_a_handshake_relayed_to_another_connection_is_refused(pair: Pair, relayed: str) -> None:
    here = replace(LOCAL, binding=b"one connection")
    there = replace(LOCAL, binding=b"another connection")
    initiator, acceptor = pair.initiator(here), pair.acceptor(there if relayed == "acceptor" else here)
    welcome = acceptor.on_hello(initiator.hello(), utc_now())
    if relayed == "acceptor":
        with pytest.raises(NotAuthenticated, match="signature"):
            initiator.on_welcome(welcome, utc_now())
        return
    other = pair.acceptor(there)
    other.on_hello(pair.initiator(there).hello(), utc_now())
    proof, _ = initiator.on_welcome(welcome, utc_now())

    with pytest.raises(NotAuthenticated, match="signature"):
        other.on_proof(proof)


def test_another_cluster_is_refused(pair: Pair, make_keys: MakeKeys) -> None:
    foreign = load(make_keys("bank", "bank").node("s1"))
    party = Party.secured(foreign.credentials, foreign.trust, 1)

    with pytest.raises(NotAuthenticated, match="'bank'"):
        pair.acceptor().on_hello(Initiator(party, LOCAL, fresh_nonce()).hello(), utc_now())


def test_the_same_cluster_of_another_authority_is_refused(pair: Pair, make_keys: MakeKeys) -> None:
    foreign = load(make_keys("shop", "other").node("s1"))
    party = Party.secured(foreign.credentials, foreign.trust, 1)

    with pytest.raises(NotAuthenticated, match="not issued"):
        pair.acceptor().on_hello(Initiator(party, LOCAL, fresh_nonce()).hello(), utc_now())


def test_somebody_elses_certificate_without_its_key_is_refused(pair: Pair, keys: Keys) -> None:
    admin, mallory = load(keys.node("root", role="admin")), load(keys.node("mallory"))
    claimed = replace(
        mallory.credentials, identity=admin.credentials.identity, certificate_der=admin.credentials.certificate_der
    )
    thief, acceptor = Initiator(Party.secured(claimed, mallory.trust, 1), LOCAL, fresh_nonce()), pair.acceptor()
    proof, _ = thief.on_welcome(acceptor.on_hello(thief.hello(), utc_now()), utc_now())

    with pytest.raises(NotAuthenticated, match="signature"):
        acceptor.on_proof(proof)


@pytest.mark.parametrize("change", [{"name": "root"}, {"kind": Kind.BROKER}])
def test_a_name_or_kind_that_the_certificate_does_not_state_is_refused(pair: Pair, change: dict[str, object]) -> None:
    hello = msgspec.msgpack.decode(pair.initiator().hello(), type=Hello)
    forged = Hello(msgspec.structs.replace(hello.introduction, **change))

    with pytest.raises(NotAuthenticated, match="presented the certificate of"):
        pair.acceptor().on_hello(msgspec.msgpack.encode(forged), utc_now())


@pytest.mark.parametrize("change", [{"incarnation": 99}, {"nonce": bytes(32)}])
def test_a_hello_changed_on_the_way_is_noticed_by_both(pair: Pair, change: dict[str, object]) -> None:
    initiator, acceptor = pair.initiator(), pair.acceptor()
    hello = msgspec.msgpack.decode(initiator.hello(), type=Hello)
    changed = Hello(msgspec.structs.replace(hello.introduction, **change))
    welcome = acceptor.on_hello(msgspec.msgpack.encode(changed), utc_now())

    with pytest.raises(NotAuthenticated, match="signature"):
        initiator.on_welcome(welcome, utc_now())


def test_another_version_of_the_protocol_is_refused_by_name(pair: Pair) -> None:
    hello = msgspec.msgpack.decode(pair.initiator().hello(), type=Hello)
    newer = Hello(msgspec.structs.replace(hello.introduction, protocol=PROTOCOL + 1))

    with pytest.raises(NotAuthenticated, match=f"version {PROTOCOL + 1}"):
        pair.acceptor().on_hello(msgspec.msgpack.encode(newer), utc_now())


def test_expired_and_revoked_certificates_are_refused(pair: Pair, keys: Keys) -> None:
    expired = load(keys.node("old", begins=timedelta(days=-2), ends=timedelta(days=-1)))
    revoked = load(keys.node("gone"))
    keys.authority.revoke("gone", utc_now())
    assert pair.broker.trust is not None
    pair.broker.trust.reload()

    for node, why in ((expired, "not now"), (revoked, "revoked")):
        hello = Initiator(Party.secured(node.credentials, node.trust, 1), LOCAL, fresh_nonce()).hello()
        with pytest.raises(NotAuthenticated, match=why):
            pair.acceptor().on_hello(hello, utc_now())


def test_a_site_that_answers_as_a_broker_is_refused(pair: Pair, keys: Keys) -> None:
    other = load(keys.node("s2"))
    impostor = Acceptor(Party.secured(other.credentials, other.trust, 1), LOCAL, fresh_nonce())
    initiator = pair.initiator()

    with pytest.raises(NotAuthenticated, match="where a broker is expected"):
        initiator.on_welcome(impostor.on_hello(initiator.hello(), utc_now()), utc_now())


def test_a_broker_of_another_name_than_expected_is_refused(pair: Pair) -> None:
    initiator = pair.initiator(expected="b2")

    with pytest.raises(NotAuthenticated, match="'b2' is expected"):
        initiator.on_welcome(pair.acceptor().on_hello(initiator.hello(), utc_now()), utc_now())


def test_every_truncation_and_every_extension_of_every_frame_is_refused(pair: Pair) -> None:
    initiator, acceptor = pair.initiator(), pair.acceptor()
    hello = initiator.hello()
    welcome = acceptor.on_hello(hello, utc_now())
    proof, _ = initiator.on_welcome(welcome, utc_now())

    def refused_by_acceptor(frame: bytes) -> None:
        with pytest.raises(NotAuthenticated):
            pair.acceptor().on_hello(frame, utc_now())

    def refused_by_initiator(frame: bytes) -> None:
        fresh = pair.initiator()
        fresh.hello()
        with pytest.raises(NotAuthenticated):
            fresh.on_welcome(frame, utc_now())

    for frame, rejected in ((hello, refused_by_acceptor), (welcome, refused_by_initiator)):
        for length in range(len(frame)):
            rejected(frame[:length])
        rejected(frame + b"\x00")
    for length in range(len(proof)):
        waiting = pair.acceptor()
        waiting.on_hello(hello, utc_now())
        with pytest.raises(NotAuthenticated):
            waiting.on_proof(proof[:length])


def test_an_oversized_frame_is_refused_for_its_size_before_it_is_decoded(pair: Pair) -> None:
    acceptor = pair.acceptor()

    with pytest.raises(NotAuthenticated, match=f"over the limit of {FRAME_BYTES_MAX}"):
        acceptor.on_hello(pair.initiator().hello() + bytes(FRAME_BYTES_MAX), utc_now())


def test_the_two_sides_never_sign_the_same_words(pair: Pair) -> None:
    site, broker = pair.site.introduction(fresh_nonce()), pair.broker.introduction(fresh_nonce())

    signed = {
        _transcript(side, *parts, LOCAL) for side in Side for parts in ((site, broker), (broker, site), (site, site))
    }

    assert len(signed) == 6


@settings(max_examples=300)
@given(frame=st.one_of(st.binary(max_size=200), st.integers(1, 3000).map(lambda depth: b"\x91" * depth)))
def test_garbage_is_refused_in_every_state_and_ends_the_handshake(frame: bytes) -> None:
    party = Party.insecure("shop", Kind.BROKER, "b1", 1, site_role="reader")
    fresh = Acceptor(party, LOCAL, fresh_nonce())
    waiting = Initiator(party, LOCAL, fresh_nonce())
    waiting.hello()

    with pytest.raises(NotAuthenticated):
        fresh.on_hello(frame, utc_now())
    with pytest.raises(NotAuthenticated):
        waiting.on_welcome(frame, utc_now())

    assert fresh.state is waiting.state is State.FAILED


def test_after_a_failure_even_the_right_frame_is_refused(pair: Pair) -> None:
    initiator, acceptor = pair.initiator(), pair.acceptor()
    with pytest.raises(NotAuthenticated):
        acceptor.on_hello(b"garbage", utc_now())

    with pytest.raises(NotAuthenticated, match="out of order"):
        acceptor.on_hello(initiator.hello(), utc_now())


def test_frames_out_of_turn_are_refused(pair: Pair) -> None:
    initiator, acceptor = pair.initiator(), pair.acceptor()
    hello = initiator.hello()
    welcome = acceptor.on_hello(hello, utc_now())

    with pytest.raises(NotAuthenticated, match="out of order"):
        pair.acceptor().on_proof(welcome)
    with pytest.raises(NotAuthenticated, match="out of order"):
        pair.initiator().on_welcome(welcome, utc_now())
    with pytest.raises(NotAuthenticated, match="out of order"):
        acceptor.on_hello(hello, utc_now())
    with pytest.raises(NotAuthenticated, match="not a Welcome"):
        initiator.on_welcome(hello, utc_now())


def test_without_keys_names_are_believed_on_loopback_with_the_configured_role(insecure_pair: Pair) -> None:
    initiator, acceptor = insecure_pair.initiator(), insecure_pair.acceptor()

    proof, broker = initiator.on_welcome(acceptor.on_hello(initiator.hello(), utc_now()), utc_now())
    site = acceptor.on_proof(proof)

    assert broker.identity.role == "broker"
    assert site.identity == Identity("shop", Kind.SITE, "s1", "reader")


def test_without_keys_another_machine_is_refused_on_both_sides(insecure_pair: Pair) -> None:
    hello = insecure_pair.initiator().hello()

    with pytest.raises(NotAuthenticated, match="without TLS"):
        insecure_pair.acceptor(REMOTE).on_hello(hello, utc_now())
    with pytest.raises(NotAuthenticated, match="without TLS"):
        insecure_pair.initiator(REMOTE).hello()


def test_tls_without_keys_or_without_a_binding_proves_nothing(pair: Pair, insecure_pair: Pair) -> None:
    unbound = Channel(binding=b"", peer_certificate=b"certificate", peer_is_loopback=False)

    for some in (pair.initiator(unbound), insecure_pair.initiator(replace(unbound, binding=b"binding"))):
        with pytest.raises(NotAuthenticated, match="needs keys and a channel binding"):
            some.hello()


@pytest.mark.parametrize("proof", [b"", bytes(32), bytes(64)])
def test_without_keys_and_without_the_secret_nobody_gets_in(insecure_pair: Pair, proof: bytes) -> None:
    acceptor = insecure_pair.acceptor()
    acceptor.on_hello(insecure_pair.initiator().hello(), utc_now())

    with pytest.raises(NotAuthenticated, match="does not know the secret"):
        acceptor.on_proof(msgspec.msgpack.encode(Proof(proof)))


def test_without_keys_a_program_that_took_the_brokers_port_is_recognised_and_learns_nothing(
    insecure_pair: Pair, secret: Secret
) -> None:
    another = Secret(Path("another"), b"another secret of thirty-two bytes")
    impostor = Pair(insecure_pair.site, insecure_pair.broker.knowing(another)).acceptor()
    initiator = insecure_pair.initiator()

    hello = initiator.hello()
    with pytest.raises(NotAuthenticated, match="does not know the secret"):
        initiator.on_welcome(impostor.on_hello(hello, utc_now()), utc_now())

    assert secret.path.read_bytes().strip() not in hello


def test_without_keys_a_handshake_is_bound_to_the_address_that_was_dialled(insecure_pair: Pair) -> None:
    squatted, real = plain_channel("127.0.0.1", "127.0.0.1:7421"), plain_channel("127.0.0.1", "127.0.0.1:7420")
    initiator, acceptor = insecure_pair.initiator(squatted), insecure_pair.acceptor(real)

    with pytest.raises(NotAuthenticated, match="does not know the secret"):
        initiator.on_welcome(acceptor.on_hello(initiator.hello(), utc_now()), utc_now())


def test_a_party_with_neither_keys_nor_a_secret_does_not_shake_hands(insecure_pair: Pair) -> None:
    bare = Party.insecure("shop", Kind.BROKER, "b1", 1, site_role="reader")

    with pytest.raises(NotAuthenticated, match="neither keys nor a secret"):
        Acceptor(bare, LOCAL, fresh_nonce()).on_hello(insecure_pair.initiator().hello(), utc_now())


def test_with_the_plain_words_another_machine_is_believed(secret: Secret) -> None:
    site = Party.insecure("shop", Kind.SITE, "s1", 1, "writer", PLAIN_WORDS, secret)
    broker = Party.insecure("shop", Kind.BROKER, "b1", 1, "writer", PLAIN_WORDS, secret)

    welcome = Acceptor(broker, REMOTE, fresh_nonce()).on_hello(
        Initiator(site, REMOTE, fresh_nonce()).hello(), utc_now()
    )

    assert msgspec.msgpack.decode(welcome, type=Welcome).introduction.name == "b1"
    with pytest.raises(ConfigError, match="is not valid"):
        Party.insecure("shop", Kind.SITE, "s1", 1, "writer", "yes")


def test_a_side_with_keys_and_a_side_without_do_not_meet_in_the_middle(pair: Pair, insecure_pair: Pair) -> None:
    with pytest.raises(NotAuthenticated, match="has no keys"):
        pair.acceptor().on_hello(insecure_pair.initiator().hello(), utc_now())
    with pytest.raises(NotAuthenticated, match="has keys"):
        insecure_pair.acceptor().on_hello(pair.initiator().hello(), utc_now())
    initiator = pair.initiator()
    hello = msgspec.msgpack.decode(initiator.hello(), type=Hello)
    stripped = Hello(msgspec.structs.replace(hello.introduction, certificate=b""))
    welcome = insecure_pair.acceptor().on_hello(msgspec.msgpack.encode(stripped), utc_now())
    with pytest.raises(NotAuthenticated, match="has no keys"):
        initiator.on_welcome(welcome, utc_now())


def test_a_site_without_keys_can_not_take_the_brokers_role_by_configuration() -> None:
    with pytest.raises(ConfigError, match="role"):
        Party.insecure("shop", Kind.SITE, "s1", 1, site_role="broker")
