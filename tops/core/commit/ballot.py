"""Counting the votes on an epoch: who commits, and which members are left out.

Pure: votes go in, a verdict comes out. A voter may exclude members that it can't apply; all who commit must have
prepared exactly the same members, since a prepared database transaction commits as a whole.
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
    """A transaction whose commit was asked for. `members` None: whoever has a standing answer when its turn comes."""

    tx: TxId
    spec: TxSpec
    publisher: Address
    last_sequence: int
    events: tuple[Event, ...] | None
    logged_events: tuple[Event, ...]
    members: dict[str, Member] | None = None
    alone: bool = False  # after too many differing votes it is prepared by itself
    ask_late: bool = False  # it was not enough without those who were late, so they are asked as well
    started_with: frozenset[str] = frozenset()  # the voters that were asked before; they have joined
    who: str = ""  # the identity that is accountable for it
    size: int = 0  # of its events, in bytes; what the quota of that identity goes by

    def logged_bytes(self) -> int:
        """How many bytes it takes in an entry of a log; in a prepare it takes less."""
        return logged_bytes(self.tx, self.spec.event_type, self.spec.attributes, self.logged_events)


class Verdict(msgspec.Struct):
    """Commit `members - excluded` at `committing`; or, with `again`, prepare once more without `excluded`."""

    committing: frozenset[str]
    excluded: dict[TxId, Rejection]
    again: bool = False
    divergent: tuple[str, ...] = ()
    put_back: frozenset[TxId] = frozenset()  # of the excluded, those that are to be tried with more voters


def shortfall(
    ready: ReadyTx, required: frozenset[str], committing: Mapping[str, Member], predicates: Mapping[str, Predicate]
) -> Rejection | None:
    """Why this transaction may not commit at just these voters, or None.

    `required` are the voters that it started with: without constraints all of them are needed.
    """
    if not committing:
        nobody = Rejection(RejectionCode.CONSTRAINTS_UNMET, "no participant is there to commit it")
        return unmet(ready.spec.constraints, [], predicates) or nobody
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
    """Whether each of these transactions may commit at just these voters."""
    met: TxSpec | None = None  # of the one before: most share theirs
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
    gone: Mapping[str, str],
    required: frozenset[str],
    predicates: Mapping[str, Predicate],
    majority_first: bool,
) -> Verdict:
    """The verdict once everyone has voted or is gone.

    Without disagreement and without losses the members' constraints hold as they did before prepare. Otherwise voters
    that prepared the same work form a class, and a whole class commits if every remaining member can do without
    the rest. Replicas of one database prefer the larger class (the odd one out is sick), independent participants the
    class that excludes least (who can't is left out).
    """
    exclusions = {key: votes[key].excluded for key in sorted(votes)}
    differing, divergent = _differing_rows(members, votes)
    if not gone and not differing:
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
            break  # most replicas can't apply any of it, and would have to if a few did
        if rest and suffice(rest, required, committing, predicates):
            return Verdict(frozenset(keys), excluded, divergent=divergent)

    # Nobody can be dropped for everybody's sake: leave out the members that are in the way, and try the others again.
    excluded = {tx: rejection for e in [differing, *exclusions.values()] for tx, rejection in e.items()}
    present = {key: voters[key] for key in exclusions}
    # Replicas of a set are named; other participants are known to publishers only where a constraint names them.
    named = majority_first or any(needs_identity(m.spec.constraints) for m in members)
    why_gone = "; ".join(
        f"{(voters[key].identity if named else None) or 'a participant'}: {reason}"
        for key, reason in sorted(gone.items())
    )
    for m in members:
        if m.tx not in excluded and (lacking := shortfall(m, required, present, predicates)):
            text = f"{lacking.text} ({why_gone})" if why_gone else lacking.text
            excluded[m.tx] = msgspec.structs.replace(lacking, text=text)
    nothing_left = len(excluded) == len(members)
    return Verdict(frozenset() if nothing_left else frozenset(present), excluded, not nothing_left, divergent)


def _classes(
    members: Sequence[ReadyTx], votes: Mapping[str, EpochVoted], majority_first: bool
) -> list[tuple[str, ...]]:
    """Voters that prepared the same work: the same members with the same effect. Each commits its work as a whole, so
    no two of different classes ever commit together. Who counts no rows goes along with any that left out the same.
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
    """Members that changed another number of rows at some voters than at others, and who is the odd one out."""
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
