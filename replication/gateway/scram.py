"""SCRAM-SHA-256 (RFC 7677), the server's side: a password is proved without being sent.

    FIRST   waits for the client's first message
    FINAL   waits for the client's proof
    DONE    proved; FAILED ends every other way

No I/O and no randomness. An unknown user goes through the same steps with a salt of its own, so that neither text nor
time tells which names exist.
"""

import base64
import hashlib
import hmac
from dataclasses import dataclass
from enum import Enum

ITERATIONS = 4096
SALT_BYTES = 16


@dataclass(frozen=True, slots=True, repr=False)
class Verifier:
    """What the gateway keeps of a password."""

    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int = ITERATIONS

    @classmethod
    def of(cls, password: str, salt: bytes) -> "Verifier":
        salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, ITERATIONS)
        client_key = hmac.digest(salted, b"Client Key", "sha256")
        return cls(salt, hashlib.sha256(client_key).digest(), hmac.digest(salted, b"Server Key", "sha256"))


class State(Enum):
    FIRST = "first"  # ends with the client's first message
    FINAL = "final"  # ends with its proof
    DONE = "done"  # final
    FAILED = "failed"  # final


class Failed(Exception):
    """The exchange does not prove the password."""


class ScramServer:
    """One exchange. `verifier` is any one, and `is_known` false, for a user that does not exist."""

    def __init__(self, verifier: Verifier, nonce: str, *, is_known: bool) -> None:
        self.state = State.FIRST
        self._verifier, self._nonce, self._is_known = verifier, nonce, is_known
        self._first_bare = self._server_first = ""

    def on_first(self, text: bytes) -> bytes:
        """The server's first message."""
        if self.state is not State.FIRST:
            raise self._failed("a SCRAM message out of turn")
        try:
            header, bare = _split_header(text.decode("ascii"))
            fields = dict(part.split("=", 1) for part in bare.split(","))
            client_nonce = fields["r"]
        except (UnicodeDecodeError, ValueError, KeyError):
            raise self._failed("malformed SCRAM message") from None
        if header not in ("n", "y") or "m" in fields or not client_nonce:
            raise self._failed("channel binding and mandatory extensions are not supported")
        self._header = header
        self._first_bare = bare
        verifier = self._verifier
        salt = base64.b64encode(verifier.salt).decode()
        self._server_first = f"r={client_nonce}{self._nonce},s={salt},i={verifier.iterations}"
        self._full_nonce = client_nonce + self._nonce
        self.state = State.FINAL
        return self._server_first.encode()

    def on_final(self, text: bytes) -> bytes:
        """The server's last message, which proves that it knows the password, too."""
        if self.state is not State.FINAL:
            raise self._failed("a SCRAM message out of turn")
        try:
            without_proof, _, proof_text = text.decode("ascii").rpartition(",p=")
            proof = base64.b64decode(proof_text, validate=True)
            fields = dict(part.split("=", 1) for part in without_proof.split(","))
            binding = base64.b64decode(fields["c"], validate=True)
            nonce = fields["r"]
        except (UnicodeDecodeError, ValueError, KeyError):
            raise self._failed("malformed SCRAM message") from None
        if binding != f"{self._header},,".encode() or nonce != self._full_nonce or len(proof) != 32:
            raise self._failed("malformed SCRAM message")
        message = f"{self._first_bare},{self._server_first},{without_proof}".encode()
        verifier = self._verifier
        signature = hmac.digest(verifier.stored_key, message, "sha256")
        client_key = bytes(a ^ b for a, b in zip(proof, signature, strict=True))
        proved = hmac.compare_digest(hashlib.sha256(client_key).digest(), verifier.stored_key)
        if not (proved and self._is_known):
            raise self._failed("password authentication failed")
        self.state = State.DONE
        return b"v=" + base64.b64encode(hmac.digest(verifier.server_key, message, "sha256"))

    def _failed(self, text: str) -> Failed:
        self.state = State.FAILED
        return Failed(text)


def _split_header(text: str) -> tuple[str, str]:
    """The binding flag, and the message without the header; an authorization identity is not accepted."""
    flag, authzid, bare = text.split(",", 2)
    if authzid:
        raise ValueError("an authorization identity")
    return flag, bare
