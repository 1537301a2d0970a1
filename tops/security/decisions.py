"""A coordinator's signature on a decision, and how a participant checks a decision that a peer relays.

A proof is the signature with the signer's certificate: a participant in doubt can check it without the coordinator,
which is silent.
"""

from collections.abc import Callable
from datetime import datetime

import msgspec

from tops.model.errors import NotAuthenticated
from tops.security.identity import Kind
from tops.security.trust import Credentials, Trust, utc_now


class SignedBy(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The content of a proof."""

    signature: bytes
    certificate: bytes


_decoder = msgspec.msgpack.Decoder(SignedBy)


def decision_signer(credentials: Callable[[], Credentials]) -> Callable[[bytes], bytes]:
    """Signs a broker's decisions; the credentials are read each time, since they are renewed."""

    def sign(text: bytes) -> bytes:
        own = credentials()
        return msgspec.msgpack.encode(SignedBy(own.sign(text), own.certificate_der))

    return sign


def decision_checker(trust: Trust, now: Callable[[], datetime] = utc_now) -> Callable[[bytes, str, bytes], str]:
    """Returns a function that checks a proof: why it does not show that this broker wrote a text, or empty."""

    def check(text: bytes, broker: str, proof: bytes) -> str:
        if not proof:
            return "it carries no signature"
        try:
            signed = _decoder.decode(proof)
            identity = trust.verify(signed.certificate, now())
            if identity.kind is not Kind.BROKER or identity.name != broker:
                return f"the signature is that of {identity}, not of broker {broker!r}"
            trust.verify_signature(signed.certificate, signed.signature, text)
        except msgspec.MsgspecError:
            return "its signature can't be read"
        except NotAuthenticated as error:
            return str(error)
        return ""

    return check
