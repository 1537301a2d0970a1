"""Constraints: what must hold among the distributed participants for a transaction to commit.

Constraints are data, so that they travel with `begin`. They are tested when the census closes, when a participant
drops out, before prepare and after the votes, always against the participants that are left at that moment.
A transaction without participant constraints demands what the thesis does: every participant that joined must commit.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache

import msgspec

from tops.model.errors import InvalidTransaction
from tops.model.rejections import Rejection, RejectionCode
from tops.model.transactions import TxType


class Constraint(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A condition on the set of participants; the subclasses define which."""


class MinParticipants(Constraint, frozen=True, tag="min"):
    n: int


class MaxParticipants(Constraint, frozen=True, tag="max"):
    """At most `n` are accepted; later replies to the census are rejected."""

    n: int


class Required(Constraint, frozen=True, tag="required"):
    """All of these identities take part and commit."""

    ids: frozenset[str]


class OnlyFrom(Constraint, frozen=True, tag="only"):
    """Only these identities may take part."""

    ids: frozenset[str]


class AtLeast(Constraint, frozen=True, tag="at_least"):
    """At least `k` of these identities take part and commit."""

    k: int
    ids: frozenset[str]


class Deadline(Constraint, frozen=True, tag="deadline"):
    """The transaction is decided within `seconds` of `begin`, or it aborts."""

    seconds: float


class Named(Constraint, frozen=True, tag="named"):
    """A predicate registered by name at the coordinator; it gets the identities that are left."""

    name: str
    arguments: tuple[str | int | float, ...] = ()


AnyConstraint = MinParticipants | MaxParticipants | Required | OnlyFrom | AtLeast | Deadline | Named
Predicate = Callable[[Collection[str], tuple[str | int | float, ...]], bool]

_ABOUT_IDENTITY = (Required, OnlyFrom, AtLeast, Named)


def needs_identity(constraints: Sequence[AnyConstraint]) -> bool:
    """Whether the coordinator needs the identities of participants; otherwise they stay pseudonymous."""
    return any(isinstance(c, _ABOUT_IDENTITY) for c in constraints)


def constrains_participants(constraints: Sequence[AnyConstraint]) -> bool:
    """Whether the constraints define which participants are enough; if not, all that joined are needed."""
    return bool(constraints) and any(not isinstance(c, Deadline | OnlyFrom | MaxParticipants) for c in constraints)


def check_prompt(constraints: Sequence[AnyConstraint]) -> None:
    """Raise InvalidTransaction if `decide_when_met` could decide by two sets of voters without a common member."""
    if not any(isinstance(c, AtLeast) and 2 * c.k > len(c.ids) for c in constraints):
        raise InvalidTransaction(
            "decide_when_met needs AtLeast more than half of the identities that it names, so that any two decisions "
            "have a common voter"
        )


def admits(constraints: Sequence[AnyConstraint], identity: str | None, members: int) -> bool:
    """Whether one more participant by that identity may join a census that has `members` already."""
    for c in constraints:
        if isinstance(c, OnlyFrom) and identity not in c.ids:
            return False
        if isinstance(c, MaxParticipants) and members >= c.n:
            return False
    return True


@lru_cache(maxsize=1024)
def only_from(constraints: tuple[AnyConstraint, ...]) -> frozenset[str] | None:
    """The identities that may take part; None if any identity may."""
    if not constraints:
        return None
    lists = [c.ids for c in constraints if isinstance(c, OnlyFrom)]
    return lists[0] if len(lists) == 1 else _intersection(lists)


def deadline_of(constraints: Sequence[AnyConstraint]) -> float | None:
    """The tightest deadline in seconds after `begin`, if any."""
    if not constraints:
        return None
    return min((c.seconds for c in constraints if isinstance(c, Deadline)), default=None)


@lru_cache(maxsize=1024)
def check_consistent(constraints: tuple[AnyConstraint, ...], tx_type: TxType) -> None:
    """Raise InvalidTransaction for constraints that no set of participants could meet."""
    if tx_type is TxType.LOCAL and any(not isinstance(c, Deadline) for c in constraints):
        raise InvalidTransaction("a local transaction has no distributed participants for constraints to count")
    at_most = min((c.n for c in constraints if isinstance(c, MaxParticipants)), default=None)
    only = _intersection([c.ids for c in constraints if isinstance(c, OnlyFrom)])
    for c in constraints:
        needed, pool = _demand(c)
        if needed < 0 or (isinstance(c, Deadline) and not c.seconds > 0):
            raise InvalidTransaction(f"{c} can't be met by any number of participants")
        if pool is not None and needed > len(pool):
            raise InvalidTransaction(f"{c} needs more participants than it names")
        if only is not None and needed > len(only if pool is None else only & pool):
            raise InvalidTransaction(f"{c} can't be met by the participants that OnlyFrom admits: {sorted(only)}")
        if at_most is not None and needed > at_most:
            raise InvalidTransaction(f"{c} contradicts MaxParticipants({at_most})")


def unmet(
    constraints: Sequence[AnyConstraint],
    identities: Sequence[str | None],
    predicates: Mapping[str, Predicate],
) -> Rejection | None:
    """Why these participants are not enough, or None if they are; deadlines are the coordinator's timers."""
    if not constraints:
        return None
    named = {i for i in identities if i is not None}
    for c in constraints:
        match c:
            case MinParticipants(n):
                if len(identities) < n:
                    return _unmet(f"{len(identities)} of at least {n} participants")
            case MaxParticipants(n):
                if len(identities) > n:
                    return _unmet(f"{len(identities)} participants where at most {n} are allowed")
            case Required(ids):
                if not ids <= named:
                    return _unmet(f"required participants missing: {', '.join(sorted(ids - named))}")
            case OnlyFrom(ids):
                if not named <= ids or len(named) < len(identities):
                    others = ", ".join(sorted(named - ids)) or "a participant without a name"
                    text = f"a participant is not on the list of those allowed: {others}"
                    return Rejection(RejectionCode.PARTICIPANT_NOT_ALLOWED, text)
            case AtLeast(k, ids):
                if len(ids & named) < k:
                    missing = ", ".join(sorted(ids - named))
                    return _unmet(f"{len(ids & named)} of at least {k} of the listed participants; missing: {missing}")
            case Named(name, arguments):
                predicate = predicates.get(name)
                if predicate is None:
                    return _unmet(f"no predicate {name!r} is registered at the coordinator")
                if not predicate(sorted(named), arguments):
                    return _unmet(f"predicate {name!r} does not hold")
            case Deadline():
                pass
    return None


def _unmet(text: str) -> Rejection:
    return Rejection(RejectionCode.CONSTRAINTS_UNMET, text)


def _demand(c: AnyConstraint) -> tuple[int, frozenset[str] | None]:
    """How many participants a constraint needs at least, and from which pool."""
    match c:
        case MinParticipants(n) | MaxParticipants(n):
            return (n if isinstance(c, MinParticipants) else min(n, 0)), None
        case Required(ids):
            return len(ids), ids
        case AtLeast(k, ids):
            return k, ids
    return 0, None


def _intersection(sets: Sequence[frozenset[str]]) -> frozenset[str] | None:
    if not sets:
        return None
    return frozenset.intersection(*sets)
