"""Which right a client needs for each request to a replica: the second of the three tables of rights.

The table is complete: a request that has no entry is rejected, whoever sends it. The right is checked by the replica
that receives the request, under the name of the set's log and for the sender that the broker stamped on the request.
"""

import itertools
import logging
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replication.rpc import calls
from replication.rpc.calls import AnyRequest
from tops.model.errors import ConfigError, LimitExceeded, NotListed, PermissionDenied, TopsError
from tops.model.event_types import SETS_ROOT
from tops.protocol.messages import Principal, Sender
from tops.security import AuditLog, Identity, Kind, Permissions, Verb, identity_of

IDENTITIES_MAX = 4096

log = logging.getLogger("tops.replication")

REQUEST_RIGHTS: Mapping[type[calls.ReplicaRequest[Any]], Verb] = {
    calls.Describe: Verb.READ,
    calls.Where: Verb.READ,
    calls.Status: Verb.READ,
    calls.GetDirectAddress: Verb.READ,
    calls.Read: Verb.READ,
    calls.LockedRead: Verb.READ,
    calls.Judgement: Verb.READ,
    calls.Held: Verb.READ,
    calls.Conflicts: Verb.READ,
    calls.Write: Verb.WRITE,
    calls.Execute: Verb.WRITE,
    calls.Pause: Verb.OPERATE,
    calls.Resume: Verb.OPERATE,
    calls.RetryErrors: Verb.OPERATE,
    calls.Reload: Verb.OPERATE,
    calls.Quarantine: Verb.OPERATE,
    calls.CheckDone: Verb.OPERATE,
    calls.PrepareBarrier: Verb.OPERATE,
    calls.BarrierSnapshot: Verb.OPERATE,
    calls.BarrierDone: Verb.OPERATE,
    calls.GuardRows: Verb.OPERATE,
    calls.GuardDone: Verb.OPERATE,
    # What replicas ask each other: only they, and administrators, have the right to respond for the set.
    calls.OpenCopy: Verb.RESPOND,
    calls.GetCopyChunk: Verb.RESPOND,
    calls.CloseCopy: Verb.RESPOND,
    calls.GetSchema: Verb.RESPOND,
    calls.GetStartState: Verb.RESPOND,
    calls.GetTableFingerprint: Verb.RESPOND,
    calls.GetSchemaDigests: Verb.RESPOND,
}

# What a replica may ask before it is in the set's list: to find the set, to copy it, and to catch up with its log.
JOINING = frozenset({calls.Describe, calls.Where, calls.Status, calls.Judgement}) | {
    request for request, verb in REQUEST_RIGHTS.items() if verb is Verb.RESPOND
}

# Cheap, or for operators: they have slots of their own, so that a set under load can be looked at and administered.
ADMINISTRATIVE = frozenset({calls.Describe, calls.Where, calls.Status, calls.GetDirectAddress}) | {
    request for request, verb in REQUEST_RIGHTS.items() if verb in (Verb.OPERATE, Verb.RESPOND)
}


class RequestGuard:
    """Checks the requests that one replica receives; counts and audits those that it rejects."""

    def __init__(
        self, cluster: str, replica_set: str, permissions: Permissions, audit: Path, members: frozenset[str]
    ) -> None:
        """`members`: the identities of the replicas in the set's list."""
        self.permissions, self.members = permissions, members
        self._replica_set = replica_set
        self.rejected: Counter[str] = Counter()  # by verb
        self.over_quota: Counter[str] = Counter()  # by the kind of the request
        self._cluster, self._event_type = cluster, f"{SETS_ROOT}.{replica_set}"
        self._identities: dict[Sender, tuple[Identity, ...]] = {}
        self._audit_path = audit
        self._audit: AuditLog | None = None

    def check(self, sender: Sender, request: AnyRequest) -> None:
        """Returns if the sender may have this done, raises PermissionDenied if not."""
        try:
            self._check(sender, request)
        except PermissionDenied as error:
            self.rejected[error.verb] += 1
            self._write_audit(sender, request, error)
            raise

    def note_over_quota(self, sender: Sender, request: AnyRequest, error: LimitExceeded) -> None:
        self.over_quota[type(request).__name__] += 1
        self._write_audit(sender, request, error)

    def _check(self, sender: Sender, request: AnyRequest) -> None:
        verb = REQUEST_RIGHTS.get(type(request))
        if verb is None:
            name = type(request).__name__
            raise PermissionDenied(f"no right is defined for {name!r} requests: they are rejected", who=sender.identity)
        identities = self._identities_of(sender)
        # A write under the id that another client is going to use would make that client's write count as a repeat.
        tx = getattr(request, "tx", None)
        verbs = (verb,) if tx is None or _is_own(tx, sender) else (verb, Verb.OPERATE)
        for identity, needed in itertools.product(identities, verbs):
            self.permissions.check(identity, needed, self._event_type)
        for identity in identities:
            if identity.kind is Kind.REPLICA and identity.name not in self.members and type(request) not in JOINING:
                raise NotListed(
                    f"{identity.name} is not in the list of replicas of {self._replica_set!r}: it may copy the set and "
                    "ask for its status; add it to the file, and run `tops rs apply`",
                    who=identity.name,
                    verb=verb.value,
                    event_type=self._event_type,
                )

    def _identities_of(self, sender: Sender) -> tuple[Identity, ...]:
        """Whom the sender acts for, and the sender itself: each of them needs the right."""
        known = self._identities.get(sender)
        if known is None:
            own, principal = Principal(sender.identity, sender.role), sender.on_behalf_of
            try:
                known = tuple(identity_of(self._cluster, each) for each in (principal, own) if each is not None)
            except ConfigError as error:
                raise PermissionDenied(f"requests come from sites and replicas: {error}", who=sender.identity) from None
            if len(self._identities) >= IDENTITIES_MAX:
                self._identities.clear()
            self._identities[sender] = known
        return known

    def _write_audit(self, sender: Sender, request: AnyRequest, error: TopsError) -> None:
        """Rate limited per party. The file is opened at the first rejection: most replicas never have one."""
        who = sender.accountable
        act = f"{type(request).__name__} {self._event_type}"
        through = f" (through {sender.node})" if sender.on_behalf_of is not None else ""
        try:
            if self._audit is None:
                self._audit_path.parent.mkdir(parents=True, exist_ok=True)
                self._audit = AuditLog(self._audit_path, time.time())
            self._audit.denied(time.time(), who=who, act=act, detail=f"{error}{through}")
        except (TopsError, OSError) as problem:
            log.warning(
                "a rejected request could not be audited", extra={"who": who, "act": act, "reason": str(problem)}
            )

    def close(self) -> None:
        if self._audit is not None:
            self._audit.close()
            self._audit = None


def _is_own(tx: str, sender: Sender) -> bool:
    """Whether the sender's identity began the transaction: ids begin with the name of a session. One service has
    sessions for many principals, and what one of them began is not another's."""
    session = tx.partition(".")[0]
    return session == sender.node or (sender.on_behalf_of is None and session.partition(":")[0] == sender.identity)
