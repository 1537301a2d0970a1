"""Identities, certificates, permissions, limits and the audit log; a library that brokers and sites call. It imports
only `tops.model`.

At start:        `check_listen`, then `NodeKeys.load`, whose parts make `Party.secured`;
                 or `make_secret` for `Party.insecure` on loopback.
Per connection:  `ConnectionBudget.admit`, TLS by `server_context` or `client_context`, then `Initiator` or `Acceptor`.
Per message:     `FrameLimits`, `KeyedBuckets`, `Permissions.check` on the event type that the message names.
While running:   `NodeKeys.reload` on a timer, then `peer_identity` on the open connections if the revocations changed.
Rejections:      `AuditLog.denied`. Logging: `install_redaction`, `register_secret`.
"""

from tops.security.audit import AuditLog
from tops.security.audit import verify as verify_audit
from tops.security.authority import Authority
from tops.security.decisions import decision_checker, decision_signer
from tops.security.files import check_private_folder
from tops.security.handshake import FRAME_BYTES_MAX as HANDSHAKE_BYTES_MAX
from tops.security.handshake import Acceptor, Channel, Initiator, Party, Peer, fresh_nonce, identity_of, plain_channel
from tops.security.identity import Identity, Kind, kind_of_name, replica_name
from tops.security.limits import ConnectionBudget, FrameLimits, KeyedBuckets, Ticket, TokenBucket, network_of
from tops.security.listen import PLAIN_WORDS, check_connect, check_listen, is_loopback, split_address
from tops.security.patterns import EVERYTHING, Pattern
from tops.security.permissions import DEFAULT_ROLES, Permissions, Role, Rule, Verb, require_broker
from tops.security.redaction import RedactingFilter, install_redaction, redact, register_secret
from tops.security.secret import Secret, find_secret, make_secret
from tops.security.tls import client_context, is_of_server, peer_expiry, peer_identity, server_context, tls_channel
from tops.security.tokens import TokenKind, Tokens, make_token, request_subject
from tops.security.trust import Credentials, NodeKeys, Trust, utc_now

__all__ = [
    "DEFAULT_ROLES",
    "EVERYTHING",
    "HANDSHAKE_BYTES_MAX",
    "PLAIN_WORDS",
    "Acceptor",
    "AuditLog",
    "Authority",
    "Channel",
    "ConnectionBudget",
    "Credentials",
    "FrameLimits",
    "Identity",
    "Initiator",
    "KeyedBuckets",
    "Kind",
    "NodeKeys",
    "Party",
    "Pattern",
    "Peer",
    "Permissions",
    "RedactingFilter",
    "Role",
    "Rule",
    "Secret",
    "Ticket",
    "TokenBucket",
    "TokenKind",
    "Tokens",
    "Trust",
    "Verb",
    "check_connect",
    "check_listen",
    "check_private_folder",
    "client_context",
    "decision_checker",
    "decision_signer",
    "find_secret",
    "fresh_nonce",
    "identity_of",
    "install_redaction",
    "is_loopback",
    "is_of_server",
    "kind_of_name",
    "make_secret",
    "make_token",
    "network_of",
    "peer_expiry",
    "peer_identity",
    "plain_channel",
    "redact",
    "register_secret",
    "replica_name",
    "request_subject",
    "require_broker",
    "server_context",
    "split_address",
    "tls_channel",
    "utc_now",
    "verify_audit",
]
