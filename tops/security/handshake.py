"""How two nodes prove their identities to each other, once per connection, before any other message.

    initiator                                     acceptor
      START    -- Hello(introduction) ------------>  START
      WAITING  <- Welcome(introduction, signature) - WAITING
      DONE     -- Proof(signature) --------------->  DONE

Both sign the same transcript: the protocol's version, both introductions (cluster, name, kind, incarnation, nonce,
certificate, and the principal), the side that signs, and the binding to this connection. A fresh nonce from each side
prevents replayed messages, the named side prevents reflected ones, and the binding prevents relayed ones.
With keys a signature is made with the certificate's key. Without, it is an HMAC with the secret of the broker that was
dialled (`tops.security.secret`): both sides prove that they know it, and neither sends it.
Any mismatch ends the machine in FAILED, and the caller closes the connection.

No I/O, no clock, no randomness: frames, the time and a fresh nonce (`fresh_nonce`) are arguments.
"""

import hmac
import secrets
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum
from typing import Annotated, TypeVar

import msgspec

from tops.model.errors import ConfigError, NotAuthenticated
from tops.model.ids import NodeId, node_id
from tops.protocol.messages import Principal, Sender
from tops.security.identity import CANONICAL_MAX, NAME_MAX, Identity, Kind, check_name, kind_of_name, role_of_kind
from tops.security.listen import accepts_insecure, is_loopback
from tops.security.secret import Secret
from tops.security.trust import Credentials, Trust, fingerprint

PROTOCOL = 2
NONCE_BYTES = 32
SIGNATURE_BYTES = 64
CERTIFICATE_BYTES_MAX = 4096
FRAME_BYTES_MAX = 6 * 1024

_LABEL = "tops handshake"

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_MAX)]
CanonicalName = Annotated[str, msgspec.Meta(min_length=1, max_length=CANONICAL_MAX)]
Instance = Annotated[str, msgspec.Meta(max_length=NAME_MAX)]  # empty: the one session of its identity
Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Certificate = Annotated[bytes, msgspec.Meta(max_length=CERTIFICATE_BYTES_MAX)]  # empty: a node without keys
Signature = Annotated[bytes, msgspec.Meta(max_length=SIGNATURE_BYTES)]  # an HMAC from a node without keys


class Introduction(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A node's claims about itself; they do not count before its signature is verified."""

    protocol: int
    cluster: Name
    name: CanonicalName
    kind: Kind
    incarnation: Annotated[int, msgspec.Meta(ge=0)]
    nonce: Nonce
    certificate: Certificate
    instance: Instance
    on_behalf_of: Principal | None = None  # the identity for which this session acts; the acceptor checks the right to


class Hello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="hello"):
    introduction: Introduction


class Welcome(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="welcome"):
    introduction: Introduction
    signature: Signature


class Proof(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="proof"):
    signature: Signature


@dataclass(frozen=True, slots=True)
class Channel:
    """The underlying connection: what is unique to it, and what it shows of the other side."""

    binding: bytes  # equal on both sides; with TLS unique to the connection, without TLS the dialled address
    peer_certificate: bytes | None  # of the TLS handshake; None without TLS
    peer_is_loopback: bool


def plain_channel(peer_host: str, dialled: str = "") -> Channel:
    """A connection without TLS, from or to `peer_host`; `dialled` is the address that the initiator dialled.

    The acceptor takes it from the `Host` header, and only if it is one of its own addresses: so a program that took the
    port of another broker can't relay a handshake to this one.
    """
    return Channel(binding=dialled.encode(), peer_certificate=None, peer_is_loopback=is_loopback(peer_host))


@dataclass(frozen=True, slots=True)
class Party:
    """One side of every handshake of a node; use `secured` or `insecure`."""

    identity: Identity
    incarnation: int
    credentials: Credentials | None
    trust: Trust | None
    site_role: str  # the role of sites without keys; unused with keys
    plain_accepted: bool
    secret: Secret | None = None  # of the broker that is dialled or dials; unused with keys
    instance: str = ""  # which session of its identity; empty: the only one
    on_behalf_of: Principal | None = None

    @classmethod
    def secured(
        cls,
        credentials: Credentials,
        trust: Trust,
        incarnation: int,
        plain_words: str | None = None,
        instance: str = "",
    ) -> "Party":
        """A node with keys; it accepts only peers with keys."""
        if credentials.identity.cluster != trust.cluster:
            raise ConfigError(
                f"{credentials.folder}: the certificate is for the cluster {credentials.identity.cluster!r}, "
                f"the authority for {trust.cluster!r}"
            )
        _check_instance(credentials.identity.kind, instance)
        plain_accepted = accepts_insecure(plain_words)
        return cls(credentials.identity, incarnation, credentials, trust, "", plain_accepted, instance=instance)

    @classmethod
    def insecure(
        cls,
        cluster: str,
        kind: Kind,
        name: str,
        incarnation: int,
        site_role: str,
        plain_words: str | None = None,
        secret: Secret | None = None,
        instance: str = "",
    ) -> "Party":
        """A node without keys: it trusts the names of peers that know the secret, only on loopback unless `plain_words`
        is given.

        `site_role` is the role of every site that connects, and of this node if it is a site. A handshake needs a
        secret: a site gets one for each broker that it dials (`knowing`).
        """
        _check_instance(kind, instance)
        identity = Identity(cluster, kind, name, role_of_kind(kind, site_role))
        return cls(identity, incarnation, None, None, site_role, accepts_insecure(plain_words), secret, instance)

    def renewed(self, credentials: Credentials) -> "Party":
        """This party with another certificate of the same identity; handshakes that have begun keep the old one."""
        return replace(self, credentials=credentials)

    def acting_for(self, principal: Principal | None) -> "Party":
        """This party in a session for another identity, or for itself; ConfigError for an identity that can't be
        represented."""
        if principal is not None:
            _check_principal(self.identity, principal)
        return replace(self, on_behalf_of=principal)

    def knowing(self, secret: Secret) -> "Party":
        """This party at the broker that has this secret."""
        return replace(self, secret=secret)

    def introduction(self, nonce: bytes) -> Introduction:
        certificate = self.credentials.certificate_der if self.credentials else b""
        own = self.identity
        return Introduction(
            PROTOCOL,
            own.cluster,
            own.name,
            own.kind,
            self.incarnation,
            nonce,
            certificate,
            self.instance,
            self.on_behalf_of,
        )

    def sign(self, transcript: bytes) -> bytes:
        if self.credentials is not None:
            return self.credentials.sign(transcript)
        if self.secret is None:
            raise NotAuthenticated(f"{self.identity} has neither keys nor a secret to prove its identity with")
        return self.secret.proof(transcript)


@dataclass(frozen=True, slots=True)
class Peer:
    """The other side, with a verified identity."""

    identity: Identity
    incarnation: int
    instance: str = ""
    on_behalf_of: Principal | None = None

    @property
    def node(self) -> NodeId:
        """The name of this session in the overlay."""
        return node_id(self.identity.name, self.instance)

    @property
    def principal(self) -> Identity | None:
        """The identity that this session acts for; None if it acts for itself."""
        return None if self.on_behalf_of is None else identity_of(self.identity.cluster, self.on_behalf_of)

    @property
    def sender(self) -> Sender:
        """The stamp of this session's messages."""
        return Sender(self.identity.name, self.identity.role, self.instance, self.incarnation, self.on_behalf_of)


class Side(Enum):
    INITIATOR = "initiator"
    ACCEPTOR = "acceptor"


class State(Enum):
    START = "start"  # nothing was sent; ends with the first frame out
    WAITING = "waiting"  # ends with the other side's frame
    DONE = "done"  # the identity of the other side is verified
    FAILED = "failed"  # final: the connection must be closed


def fresh_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


class Initiator:
    """The side that connected; the other must be a broker, or what `kind` says, and `expected` if a name was given."""

    def __init__(
        self,
        party: Party,
        channel: Channel,
        nonce: bytes,
        expected: str | None = None,
        kind: Kind = Kind.BROKER,
    ) -> None:
        self.state = State.START
        self._party, self._channel, self._expected, self._kind = party, channel, expected, kind
        self._own = party.introduction(nonce)

    def hello(self) -> bytes:
        with _failing(self, State.START):
            _check_channel(self._party, self._channel)
            frame = msgspec.msgpack.encode(Hello(self._own))
        self.state = State.WAITING
        return frame

    def on_welcome(self, frame: bytes, now: datetime) -> tuple[bytes, Peer]:
        """The proof to send, and the other side."""
        with _failing(self, State.WAITING):
            welcome = _decode(frame, Welcome)
            theirs = welcome.introduction
            identity = _believed(self._party, self._channel, self._own, theirs, now)
            kind = self._kind.value
            if identity.kind is not self._kind:
                raise NotAuthenticated(f"{identity} responded where a {kind} is expected")
            if self._expected is not None and identity.name != self._expected:
                raise NotAuthenticated(f"{kind} {identity.name!r} responded where {self._expected!r} is expected")
            _check_signature(
                self._party, theirs, welcome.signature, _transcript(Side.ACCEPTOR, self._own, theirs, self._channel)
            )
            proof = Proof(self._party.sign(_transcript(Side.INITIATOR, self._own, theirs, self._channel)))
        self.state = State.DONE
        return msgspec.msgpack.encode(proof), Peer(identity, theirs.incarnation, theirs.instance)


class Acceptor:
    """The side that was connected to."""

    def __init__(self, party: Party, channel: Channel, nonce: bytes) -> None:
        self.state = State.START
        self._party, self._channel = party, channel
        self._own = party.introduction(nonce)
        self._claimed: tuple[Introduction, Identity] | None = None

    def on_hello(self, frame: bytes, now: datetime) -> bytes:
        """The welcome to send; the other side is not authenticated yet."""
        with _failing(self, State.START):
            _check_channel(self._party, self._channel)
            theirs = _decode(frame, Hello).introduction
            self._claimed = theirs, _believed(self._party, self._channel, self._own, theirs, now)
            signature = self._party.sign(_transcript(Side.ACCEPTOR, theirs, self._own, self._channel))
        self.state = State.WAITING
        return msgspec.msgpack.encode(Welcome(self._own, signature))

    def on_proof(self, frame: bytes) -> Peer:
        with _failing(self, State.WAITING):
            proof = _decode(frame, Proof)
            if self._claimed is None:
                raise NotAuthenticated("a proof came before a hello")
            theirs, identity = self._claimed
            _check_signature(
                self._party, theirs, proof.signature, _transcript(Side.INITIATOR, theirs, self._own, self._channel)
            )
        self.state = State.DONE
        return Peer(identity, theirs.incarnation, theirs.instance, theirs.on_behalf_of)


class _failing:
    """Reject a frame in the wrong state; any error inside ends the machine."""

    def __init__(self, machine: Initiator | Acceptor, expected: State) -> None:
        self._machine, self._expected = machine, expected

    def __enter__(self) -> None:
        if self._machine.state is not self._expected:
            found, self._machine.state = self._machine.state, State.FAILED
            raise NotAuthenticated(f"a handshake frame came out of order: the handshake is {found.value}")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._machine.state = State.FAILED


_Frame = TypeVar("_Frame", Hello, Welcome, Proof)


def _decode(frame: bytes, expected: type[_Frame]) -> _Frame:
    if len(frame) > FRAME_BYTES_MAX:
        raise NotAuthenticated(f"a handshake frame of {len(frame)} bytes is over the limit of {FRAME_BYTES_MAX}")
    try:
        return msgspec.msgpack.decode(frame, type=expected)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise NotAuthenticated(f"not a {expected.__name__} frame of the handshake") from None


def _check_channel(party: Party, channel: Channel) -> None:
    if channel.peer_certificate is None and not (channel.peer_is_loopback or party.plain_accepted):
        raise NotAuthenticated("a connection from another machine without TLS is not accepted")
    if channel.peer_certificate is not None and (party.trust is None or not channel.binding):
        raise NotAuthenticated("a TLS connection needs keys and a channel binding on this side")


def _believed(party: Party, channel: Channel, own: Introduction, theirs: Introduction, now: datetime) -> Identity:
    """The identity that `theirs` claims, after every check that needs no signature."""
    if theirs.protocol != PROTOCOL:
        raise NotAuthenticated(f"the other side has version {theirs.protocol} of the protocol, this one {PROTOCOL}")
    if theirs.cluster != own.cluster:
        raise NotAuthenticated(f"the other side is of the cluster {theirs.cluster!r}, this one of {own.cluster!r}")
    if hmac.compare_digest(theirs.nonce, own.nonce) or theirs.name == own.name:
        raise NotAuthenticated(f"{own.name!r} is connected to itself, or to a program that echoes its frames")
    identity = _identified(party, channel, theirs, now)
    try:
        _check_instance(theirs.kind, theirs.instance)
        if theirs.on_behalf_of is not None:
            _check_principal(identity, theirs.on_behalf_of)
    except ConfigError as error:
        raise NotAuthenticated(str(error)) from None
    return identity


def _identified(party: Party, channel: Channel, theirs: Introduction, now: datetime) -> Identity:
    """The identity in the certificate; without keys the name is trusted."""
    if party.trust is None:
        return _believed_without_keys(party, theirs)
    if not theirs.certificate:
        raise NotAuthenticated(f"{theirs.name!r} has no keys, and this cluster needs them; issue some with `tops keys`")
    if channel.peer_certificate is not None and not hmac.compare_digest(
        fingerprint(theirs.certificate), fingerprint(channel.peer_certificate)
    ):
        raise NotAuthenticated("the certificate is not the one of the TLS connection")
    identity = party.trust.verify(theirs.certificate, now)
    if (identity.name, identity.kind) != (theirs.name, theirs.kind):
        raise NotAuthenticated(f"{theirs.kind.value} {theirs.name!r} presented the certificate of {identity}")
    return identity


def _believed_without_keys(party: Party, theirs: Introduction) -> Identity:
    if theirs.certificate:
        raise NotAuthenticated(f"{theirs.name!r} has keys and this side has none; configure them")
    try:
        return Identity(theirs.cluster, theirs.kind, theirs.name, role_of_kind(theirs.kind, party.site_role))
    except ConfigError as error:
        raise NotAuthenticated(str(error)) from None


def _check_instance(kind: Kind, instance: str) -> None:
    """Sites may have several sessions, a broker or a replica only one."""
    if not instance:
        return
    if kind is not Kind.SITE:
        raise ConfigError(f"a {kind.value} has one session: it can't be the instance {instance[:NAME_MAX]!r}")
    check_name("instance", instance)


def identity_of(cluster: str, principal: Principal) -> Identity:
    """The identity for which a service acts; ConfigError if it is neither a site nor a replica."""
    return Identity(cluster, kind_of_name(principal.identity), principal.identity, principal.role)


def _check_principal(own: Identity, principal: Principal) -> None:
    """A service is a site, and acts for sites and replicas."""
    if own.kind is not Kind.SITE:
        raise ConfigError(f"{own} can't act on behalf of another identity: only sites do")
    identity_of(own.cluster, principal)


def _check_signature(party: Party, theirs: Introduction, signature: bytes, transcript: bytes) -> None:
    if party.trust is not None:
        party.trust.verify_signature(theirs.certificate, signature, transcript)
    elif party.secret is None or not party.secret.proves(signature, transcript):
        where = party.secret.path if party.secret is not None else "none"
        raise NotAuthenticated(
            f"{theirs.kind.value} {theirs.name!r} does not know the secret that this side has in {where}: "
            "another program uses the broker's port, or one side has an old copy; copy the broker's file again"
        )


def _transcript(signer: Side, initiator: Introduction, acceptor: Introduction, channel: Channel) -> bytes:
    # MessagePack encodes the length of every part: two different transcripts never have the same bytes.
    return msgspec.msgpack.encode((_LABEL, PROTOCOL, signer, initiator, acceptor, channel.binding))
