"""Counting the votes on an epoch: which voters commit, and which members are excluded.

Pure functions: votes go in, a verdict comes out. A voter may exclude members that it can't apply; all voters that
commit must have prepared exactly the same members, since a prepared database transaction commits as a whole.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tops.core.commit.census import Member
from tops.model.constraints import Predicate, constrains_participants, needs_identity, unmet
from tops.model.ids import TxId
from tops.model.rejections import Rejection, RejectionCode
from tops.model.sizes import logged_bytes
from tops.protocol.messages import Address, EpochVoted, Event, TxSpec


class ReadyTx(msgspec.Struct):
    """A transaction whose commit was requested. `members` None: its voters are the standing registrations that exist
    when it is prepared."""

    tx: TxId
    spec: TxSpec
    publisher: Address
    last_sequence: int
    events: tuple[Event, ...] | None
    logged_events: tuple[Event, ...]
    members: dict[str, Member] | None = None
    alone: bool = False  # after too many differing votes it is prepared by itself
    include_late: bool = False  # without the late voters its constraints failed, so it needs their votes as well
    started_with: frozenset[str] = frozenset()  # the voters of an earlier prepare; they have joined
    who: str = ""  # the identity that is accountable for it
    size: int = 0  # of its events, in bytes; what the quota of that identity goes by

    def logged_bytes(self) -> int:
        """Its size in an entry of a log, in bytes; in a prepare it takes less."""
        return logged_bytes(self.tx, self.spec.event_type, self.spec.attributes, self.logged_events)


class Verdict(msgspec.Struct):
    """Commit `members - excluded` at `committing`; or, with `again`, prepare once more without `excluded`."""

    committing: frozenset[str]
    excluded: dict[TxId, Rejection]
    again: bool = False
    divergent: tuple[str, ...] = ()
    put_back: frozenset[TxId] = frozenset()  # of the excluded, those that are prepared again with more voters


def shortfall(
    ready: ReadyTx, required: frozenset[str], committing: Mapping[str, Member], predicates: Mapping[str, Predicate]
) -> Rejection | None:
    """Why this transaction may not commit at exactly these voters, or None.

    `required` are the voters that it started with: without constraints all of them are needed.
    """
    if not committing:
        no_voter = Rejection(RejectionCode.CONSTRAINTS_UNMET, "no participant can commit it")
        return unmet(ready.spec.constraints, [], predicates) or no_voter
    constraints = ready.spec.constraints
    if not constrains_participants(constraints):
        missing = required - committing.keys()
        if missing:
            return Rejection(RejectionCode.CONSTRAINTS_UNMET, f"{len(missing)} participant(s) dropped out")
    for key, member in (ready.members or {}).items():
        if not member.counts and key not in committing:
            return Rejection(RejectionCode.OWN_RESOURCES, "the publisher's own resources did not prepare")
    if not constraints:
        return None
    return unmet(constraints, [m.identity for m in committing.values() if m.counts], predicates)


def suffice(
    members: Iterable[ReadyTx],
    required: frozenset[str],
    committing: Mapping[str, Member],
    predicates: Mapping[str, Predicate],
) -> bool:
    """Whether each of these transactions may commit at exactly these voters."""
    met: TxSpec | None = None  # of the transaction before: most share their specification
    for member in members:
        if member.spec is met and member.members is None:
            continue
        if shortfall(member, required, committing, predicates) is not None:
            return False
        met = member.spec
    return True


def count_votes(
    members: Sequence[ReadyTx],
    voters: Mapping[str, Member],
    votes: Mapping[str, EpochVoted],
    lost: Mapping[str, str],
    required: frozenset[str],
    predicates: Mapping[str, Predicate],
    majority_first: bool,
) -> Verdict:
    """The verdict once every voter has voted or is lost.

    Without disagreement and without losses the members' constraints hold as they did before prepare. Otherwise voters
    that prepared the same work form a class, and a whole class commits if the constraints of every remaining member
    hold without the other classes. Replicas of one database prefer the larger class (the outlier is unhealthy),
    independent participants the class that excludes the fewest members.
    """
    exclusions = {key: votes[key].excluded for key in sorted(votes)}
    differing, divergent = _differing_rows(members, votes)
    if not lost and not differing:
        if not any(exclusions.values()):
            return Verdict(frozenset(exclusions), {})
        first = next(iter(exclusions.values()))
        if all(e.keys() == first.keys() for e in exclusions.values()):
            return Verdict(frozenset(exclusions), dict(first))

    for keys in _classes(members, votes, majority_first):
        excluded = dict(exclusions[keys[0]])
        committing = {key: voters[key] for key in keys}
        rest = [m for m in members if m.tx not in excluded]
        if not rest and majority_first:
            break  # most replicas can't apply any of it, and would have to apply what a few committed
        if rest and suffice(rest, required, committing, predicates):
            return Verdict(frozenset(keys), excluded, divergent=divergent)

    # No class can commit without the others: exclude the members that cause this, and prepare the rest once more.
    excluded = {tx: rejection for e in [differing, *exclusions.values()] for tx, rejection in e.items()}
    present = {key: voters[key] for key in exclusions}
    # The text names the replicas of a set; publishers may know other participants only where a constraint names them.
    named = majority_first or any(needs_identity(m.spec.constraints) for m in members)
    why_lost = "; ".join(
        f"{(voters[key].identity if named else None) or 'a participant'}: {reason}"
        for key, reason in sorted(lost.items())
    )
    for m in members:
        if m.tx not in excluded and (lacking := shortfall(m, required, present, predicates)):
            text = f"{lacking.text} ({why_lost})" if why_lost else lacking.text
            excluded[m.tx] = msgspec.structs.replace(lacking, text=text)
    nothing_left = len(excluded) == len(members)
    return Verdict(frozenset() if nothing_left else frozenset(present), excluded, not nothing_left, divergent)


def _classes(
    members: Sequence[ReadyTx], votes: Mapping[str, EpochVoted], majority_first: bool
) -> list[tuple[str, ...]]:
    """Classes of voters that prepared the same work: the same members with the same effect. Each voter commits its work
    as a whole, so voters of different classes never commit together. A voter that counts no rows fits any class that
    excludes the same members.
    """
    by_work: dict[tuple[frozenset[TxId], tuple[tuple[int, ...], ...]], list[str]] = {}
    uncounted: dict[frozenset[TxId], list[str]] = {}
    for key, vote in sorted(votes.items()):
        if vote.rows:
            rows = tuple(r for m, r in zip(members, vote.rows, strict=True) if m.tx not in vote.excluded)
            by_work.setdefault((frozenset(vote.excluded), rows), []).append(key)
        else:
            uncounted.setdefault(frozenset(vote.excluded), []).append(key)
    for excluded, keys in uncounted.items():
        alike = [c for (e, _), c in by_work.items() if e == excluded]
        for c in alike or [by_work.setdefault((excluded, ()), [])]:
            c += keys
    classes = [(len(excluded), tuple(sorted(keys))) for (excluded, _), keys in by_work.items()]
    if majority_first:
        return [keys for _, keys in sorted(classes, key=lambda c: (-len(c[1]), *c))]
    return [keys for _, keys in sorted(classes, key=lambda c: (c[0], -len(c[1]), c[1]))]


def _differing_rows(
    members: Sequence[ReadyTx], votes: Mapping[str, EpochVoted]
) -> tuple[dict[TxId, Rejection], tuple[str, ...]]:
    """Members that changed another number of rows at some voters than at others, and which voters are outliers."""
    if len({vote.rows for vote in votes.values() if vote.rows}) <= 1:
        return {}, ()
    differing, divergent = {}, []
    for index, member in enumerate(members):
        rows = {
            key: vote.rows[index] for key, vote in sorted(votes.items()) if vote.rows and member.tx not in vote.excluded
        }
        if len(set(rows.values())) <= 1:
            continue
        usual = Counter(rows.values()).most_common(1)[0][0]
        text = "it changed another number of rows at some replicas than at others"
        differing[member.tx] = Rejection(RejectionCode.ROWS_DIFFER, text)
        for key, count in rows.items():
            if count != usual:
                divergent.append(f"{key} changed {count} rows in {member.tx} where others changed {usual}")
    return differing, tuple(divergent)
