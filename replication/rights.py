"""Which right a client needs for each request to a replica: the second of the three tables of rights.

The table is complete: a request that has no entry is rejected, whoever sends it. The right is checked by the replica
that receives the request, under the name of the set's log and for the sender that the broker stamped on the request.
"""

import logging
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from replication import calls
from replication.calls import AnyQuestion
from tops.errors import ConfigError, PermissionDenied, TopsError
from tops.event_types import SETS_ROOT
from tops.messages import Sender
from tops.security import AuditLog, Identity, Permissions, Verb, kind_of_name

IDENTITIES_MAX = 4096

log = logging.getLogger("tops.replication")

REQUEST_RIGHTS: Mapping[type[calls.Question], Verb] = {
    calls.Describe: Verb.READ,
    calls.Where: Verb.READ,
    calls.Status: Verb.READ,
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
    calls.BarrierWanted: Verb.OPERATE,
    calls.BarrierSnapshot: Verb.OPERATE,
    calls.BarrierDone: Verb.OPERATE,
    calls.GuardWanted: Verb.OPERATE,
    calls.GuardDone: Verb.OPERATE,
    # What replicas ask each other: only they, and administrators, have the right to respond for the set.
    calls.OpenCopy: Verb.RESPOND,
    calls.CopyWanted: Verb.RESPOND,
    calls.CloseCopy: Verb.RESPOND,
    calls.GetSchema: Verb.RESPOND,
    calls.GetStartState: Verb.RESPOND,
    calls.GetTableFingerprint: Verb.RESPOND,
}


class RequestGuard:
    """Checks the requests that one replica receives; counts and audits those that it rejects."""

    def __init__(self, cluster: str, replica_set: str, permissions: Permissions, audit: Path) -> None:
        self.permissions = permissions
        self.rejected: Counter[str] = Counter()  # by verb
        self._cluster, self._event_type = cluster, f"{SETS_ROOT}.{replica_set}"
        self._identities: dict[Sender, Identity] = {}
        self._audit_path = audit
        self._audit: AuditLog | None = None

    def check(self, sender: Sender, request: AnyQuestion) -> None:
        """Returns if the sender may have this done, raises PermissionDenied if not."""
        try:
            self._check(sender, request)
        except PermissionDenied as error:
            self.rejected[error.verb] += 1
            self._write_audit(sender, request, error)
            raise

    def _check(self, sender: Sender, request: AnyQuestion) -> None:
        verb = REQUEST_RIGHTS.get(type(request))
        if verb is None:
            name = type(request).__name__
            raise PermissionDenied(f"no right is defined for {name!r} requests: they are rejected", who=sender.identity)
        identity = self._identity(sender)
        self.permissions.check(identity, verb, self._event_type)
        # A write under the id that another client is going to use would make that client's write count as a repeat.
        tx = getattr(request, "tx", None)
        if tx is not None and _identity_in(tx) != sender.identity:
            self.permissions.check(identity, Verb.OPERATE, self._event_type)

    def _identity(self, sender: Sender) -> Identity:
        known = self._identities.get(sender)
        if known is None:
            try:
                known = Identity(self._cluster, kind_of_name(sender.identity), sender.identity, sender.role)
            except ConfigError as error:
                raise PermissionDenied(f"requests come from sites and replicas: {error}", who=sender.identity) from None
            if len(self._identities) >= IDENTITIES_MAX:
                self._identities.clear()
            self._identities[sender] = known
        return known

    def _write_audit(self, sender: Sender, request: AnyQuestion, error: PermissionDenied) -> None:
        """Rate limited per party. The file is opened at the first rejection: most replicas never have one."""
        who = sender.on_behalf_of or sender.identity
        act = f"{type(request).__name__} {self._event_type}"
        try:
            if self._audit is None:
                self._audit_path.parent.mkdir(parents=True, exist_ok=True)
                self._audit = AuditLog(self._audit_path, time.time())
            self._audit.denied(time.time(), who=who, act=act, detail=str(error))
        except (TopsError, OSError) as problem:
            log.warning(
                "a rejected request could not be audited", extra={"who": who, "act": act, "reason": str(problem)}
            )

    def close(self) -> None:
        if self._audit is not None:
            self._audit.close()
            self._audit = None


def _identity_in(tx: str) -> str:
    """The identity that a transaction id begins with: ids begin with the name of a session."""
    return tx.partition(".")[0].partition(":")[0]
