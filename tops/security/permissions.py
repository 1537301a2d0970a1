"""Which identity may do what to which event types.

A role is a list of rules that allow and a list that deny; a denial has priority, and what no rule allows is rejected.
The name that is checked must be the object of the act, taken from the decoded message itself and never from an
envelope, a header or a link's history. Four consequences for callers:

- each event of a transaction is checked for `PUBLISH` under its own type, and the transaction for `BEGIN` under its;
- a subscription to a parent type delivers its children, so each delivery is checked for `SUBSCRIBE` under the
  event's own type; decisions are cached, which makes that one lookup;
- brokers trust each other to check: only the broker to which a site is connected checks its messages;
- a message that only brokers send each other is rejected unless `require_broker` lets its sender pass.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from tops.model.errors import ConfigError, PermissionDenied
from tops.model.event_types import SETS_ROOT, set_of_log
from tops.security.identity import BROKER_ROLE, REPLICA_ROLE, Identity, Kind, check_name
from tops.security.patterns import EVERYTHING, NAME_MAX, Pattern, is_type_name

DECISIONS_MAX = 1024  # cached per identity
IDENTITIES_MAX = 4096


class Verb(Enum):
    """An act on an event type."""

    ADVERTISE = "advertise"
    PUBLISH = "publish"
    SUBSCRIBE = "subscribe"
    BEGIN = "begin"  # start a transaction that travels under the type
    PARTICIPATE = "participate"  # take part in distributed transactions: register, vote, relay decisions to peers
    FOLLOW = "follow"  # have durable subscriptions, under one's own identity
    READ = "read"  # send requests of a replica set that read
    WRITE = "write"  # send requests of a replica set that write
    RESPOND = "respond"  # receive requests of a replica set and respond to them
    ORIGINATE = "originate"  # submit rows that were captured where a statement was executed
    OPERATE = "operate"  # pause, resume, retry, barriers, repair; end what belongs to another identity
    RESOLVE = "resolve"  # request the outcome of a transaction in doubt of another identity
    ADMINISTER = "administer"  # change the cluster
    REPRESENT = "represent"  # act on behalf of another identity, with no more than the rights that both have

    __hash__ = object.__hash__  # part of a key that is looked up for every message; `Enum.__hash__` is slow


@dataclass(frozen=True, slots=True)
class Rule:
    """One verb on the event types that match."""

    verb: Verb
    pattern: Pattern

    @classmethod
    def parse(cls, text: str) -> "Rule":
        """`"publish orders.*"`: a verb, a space, a pattern."""
        word, _, pattern = text.partition(" ")
        try:
            verb = Verb(word)
        except ValueError:
            known = ", ".join(verb.value for verb in Verb)
            raise ConfigError(f"rule {text[:200]!r}: {word[:50]!r} is not a verb; there are {known}") from None
        return cls(verb, Pattern(pattern))


@dataclass(frozen=True, slots=True)
class Role:
    """A named set of rights."""

    name: str
    allow: tuple[Rule, ...] = ()
    deny: tuple[Rule, ...] = ()

    @classmethod
    def parse(cls, name: str, allow: Iterable[str] = (), deny: Iterable[str] = ()) -> "Role":
        """From the texts of a configuration file."""
        check_name("role", name)
        try:
            return cls(name, tuple(map(Rule.parse, allow)), tuple(map(Rule.parse, deny)))
        except ConfigError as error:
            raise ConfigError(f"role {name!r}: {error}") from None

    def allows(self, verb: Verb, event_type: str) -> bool:
        if event_type == EVERYTHING:
            # An act on the whole cluster needs the right on everything, without any exception.
            return any(r.verb is verb and r.pattern.text == EVERYTHING for r in self.allow) and not any(
                r.verb is verb for r in self.deny
            )
        if any(r.verb is verb and r.pattern.matches(event_type) for r in self.deny):
            return False
        return any(r.verb is verb and r.pattern.matches(event_type) for r in self.allow)


READER = (Verb.SUBSCRIBE, Verb.READ)
WRITER = (*READER, Verb.ADVERTISE, Verb.PUBLISH, Verb.BEGIN, Verb.WRITE, Verb.FOLLOW)
PARTICIPANT = (*WRITER, Verb.PARTICIPATE)
REPLICA = (*PARTICIPANT, Verb.RESPOND, Verb.ORIGINATE, Verb.RESOLVE)


SERVICE = (Verb.SUBSCRIBE, Verb.BEGIN, Verb.READ, Verb.WRITE, Verb.REPRESENT)


def _role(name: str, verbs: Iterable[Verb], pattern: str = EVERYTHING) -> Role:
    return Role(name, tuple(Rule(verb, Pattern(pattern)) for verb in verbs))


def replica_role(replica_set: str) -> Role:
    """The rights of a replica: only on the types of its own set."""
    return _role(REPLICA_ROLE, REPLICA, f"{SETS_ROOT}.{replica_set}.**")


DEFAULT_ROLES: Mapping[str, Role] = {
    role.name: role
    for role in (
        _role("reader", READER),
        _role("writer", WRITER),
        _role("participant", PARTICIPANT),
        replica_role("SET"),  # of each set its own
        _role("service", SERVICE),
        # Administrators use their own identities, so that the audit log names them.
        _role("admin", [verb for verb in Verb if verb is not Verb.REPRESENT]),
        # A broker acts for its sites, whose rights it has checked; brokers do not administer each other.
        _role(BROKER_ROLE, [v for v in Verb if v not in (Verb.OPERATE, Verb.ADMINISTER, Verb.REPRESENT)]),
    )
}
FIXED_ROLES = frozenset({BROKER_ROLE, REPLICA_ROLE})


class Permissions:
    """The roles of a cluster, and decisions on rights; replace the object to change the roles."""

    def __init__(self, roles: Iterable[Role] = ()) -> None:
        """`roles` are added to the default ones; one of the same name replaces it, except brokers' and replicas'."""
        self._roles = dict(DEFAULT_ROLES)
        for role in roles:
            if role.name in FIXED_ROLES:
                raise ConfigError(f"the role {role.name!r} is fixed: choose another name")
            self._roles[role.name] = role
        self._decisions: dict[Identity, dict[tuple[Verb, str], bool]] = {}

    def allowed(self, identity: Identity, verb: Verb, event_type: str) -> bool:
        """Whether `identity` may; for a name that no event type can have, such as a pattern, always False."""
        decisions = self._decisions.get(identity)
        if decisions is None:
            decisions = self._decisions_of(identity)
        key = (verb, event_type)
        known = decisions.get(key)
        if known is None:
            known = self._decide(identity, verb, event_type)
            if len(decisions) >= DECISIONS_MAX:
                # Only its own decisions are evicted: an identity that uses ever new names slows down no other.
                decisions.clear()
            decisions[key] = known
        return known

    def check(self, identity: Identity, verb: Verb, event_type: str) -> None:
        """Return if `identity` may, raise `PermissionDenied` if not; `EVERYTHING` stands for the whole cluster."""
        if not self.allowed(identity, verb, event_type):
            shown = event_type[:NAME_MAX]
            remedy = (
                f"give its role a rule `{verb.value} {shown}`, or issue a certificate with another role"
                if event_type == EVERYTHING or is_type_name(event_type)
                else "no rule can match that name, so choose one of printable characters without `*`"
            )
            raise PermissionDenied(
                f"{identity} may not {verb.value} {shown!r}: {remedy}",
                who=str(identity),
                verb=verb.value,
                event_type=shown,
            )

    def has_any(self, identity: Identity, verb: Verb) -> bool:
        """Whether `identity` has this verb on any event type at all."""
        role = self._roles.get(identity.role) if identity.kind is Kind.SITE else None
        return role is not None and any(rule.verb is verb for rule in role.allow)

    def forget(self, identity: Identity) -> None:
        """The last connection of this identity is closed: remove its cached decisions."""
        self._decisions.pop(identity, None)

    def _decide(self, identity: Identity, verb: Verb, event_type: str) -> bool:
        members = set_of_log(event_type) if verb is Verb.PARTICIPATE else ""
        if members and identity.replica_set != members and identity.kind is not Kind.BROKER:
            return False  # independent of roles: only the replicas of a set vote in its log
        role = replica_role(identity.replica_set) if identity.kind is Kind.REPLICA else self._roles.get(identity.role)
        if role is None or not (event_type == EVERYTHING or is_type_name(event_type)):
            return False
        return role.allows(verb, event_type)

    def _decisions_of(self, identity: Identity) -> dict[tuple[Verb, str], bool]:
        if len(self._decisions) >= IDENTITIES_MAX:
            self._decisions.clear()
        return self._decisions.setdefault(identity, {})


def require_broker(identity: Identity, what: str) -> None:
    """Raise PermissionDenied for a site that sends what only brokers send each other."""
    if identity.kind is not Kind.BROKER:
        raise PermissionDenied(f"{identity} may not send {what}: only brokers do", who=str(identity), verb=what)
