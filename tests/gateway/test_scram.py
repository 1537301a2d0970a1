"""SCRAM-SHA-256: the exchange of RFC 7677, and what does not prove the password."""

import base64
import hashlib
import hmac

import pytest

from replication.gateway.scram import Failed, ScramServer, State, Verifier

CLIENT_NONCE, SERVER_NONCE = "rOprNGfwEbeRWgbNEkqO", "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
SALT = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
FIRST = f"n,,n=user,r={CLIENT_NONCE}".encode()


def server(password: str = "pencil", *, is_known: bool = True) -> ScramServer:
    return ScramServer(Verifier.of(password, SALT), SERVER_NONCE, is_known=is_known)


def test_the_exchange_of_the_standard() -> None:
    ours = server()

    assert ours.on_first(FIRST) == f"r={CLIENT_NONCE}{SERVER_NONCE},s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096".encode()
    final = f"c=biws,r={CLIENT_NONCE}{SERVER_NONCE},p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
    assert ours.on_final(final.encode()) == b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
    assert ours.state is State.DONE


def proof(ours: ScramServer, password: str) -> bytes:
    """What a client sends that takes this for the password."""
    told = ours.on_first(FIRST).decode()
    without = f"c=biws,r={CLIENT_NONCE}{SERVER_NONCE}"
    message = f"n=user,r={CLIENT_NONCE},{told},{without}".encode()
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), SALT, 4096)
    key = hmac.digest(salted, b"Client Key", "sha256")
    signature = hmac.digest(hashlib.sha256(key).digest(), message, "sha256")
    return (
        f"{without},p={base64.b64encode(bytes(a ^ b for a, b in zip(key, signature, strict=True))).decode()}".encode()
    )


def test_the_password_is_proved_and_no_other() -> None:
    ours = server()
    ours.on_final(proof(ours, "pencil"))
    assert ours.state is State.DONE

    other = server()
    with pytest.raises(Failed, match="password authentication failed"):
        other.on_final(proof(other, "pen"))
    assert other.state is State.FAILED


def test_an_unknown_user_fails_at_the_end_as_a_wrong_password_does() -> None:
    ours = server(is_known=False)

    with pytest.raises(Failed, match="password authentication failed"):
        ours.on_final(proof(ours, "pencil"))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"n,,",
        b"n,,n=user",
        b"n,a=other,n=user,r=x",
        b"p=tls-unique,,n=user,r=x",
        b"n,,m=1,n=user,r=x",
        b"\xff,,r=x",
    ],
)
def test_a_malformed_first_message_fails(text: bytes) -> None:
    ours = server()

    with pytest.raises(Failed):
        ours.on_first(text)
    assert ours.state is State.FAILED


@pytest.mark.parametrize(
    "change",
    [(b"c=biws", b"c=eSws"), (SERVER_NONCE.encode(), b"x"), (b",p=", b",p=!"), (b",p=", b",q="), (b",p=", b",p=AAAA")],
)
def test_a_final_message_that_was_changed_fails(change: tuple[bytes, bytes]) -> None:
    ours = server()
    final = proof(ours, "pencil").replace(*change)

    with pytest.raises(Failed):
        ours.on_final(final)


def test_messages_out_of_turn_fail() -> None:
    with pytest.raises(Failed, match="out of turn"):
        server().on_final(b"c=biws,r=x,p=x")
    ours = server()
    ours.on_first(FIRST)
    with pytest.raises(Failed, match="out of turn"):
        ours.on_first(FIRST)
