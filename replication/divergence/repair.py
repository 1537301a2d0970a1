"""Plans how replicas become equal again, and carries the plan out batch by batch.

Planning reads the differences that a check wrote and touches no database. Carrying out goes through a `RepairWriter`,
which refuses to write over a row that is no longer what the check saw.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby

from replication.divergence.errors import RowMoved
from replication.divergence.model import Basis, Difference, Kind
from replication.divergence.ports import Key, RepairWriter, RowChange, Values
from tops.errors import ConfigError

BATCH_ROWS = 500
_Version = tuple[tuple[str, str | None], ...] | None


class Strategy(Enum):
    """Whose version of a row wins."""

    MAJORITY = "majority"  # what most replicas hold
    PRIMARY = "primary"  # what the primary holds
    NEWEST = "newest"  # what the log wrote last; without a log, the largest value of a column that grows


@dataclass(frozen=True, slots=True)
class Undecided:
    """A row that the strategy can't decide; a person must."""

    table: str
    key: Key
    reason: str


@dataclass(slots=True)
class Plan:
    """Counts of what would be written; the changes themselves are streamed."""

    actions: dict[str, Counter[str]] = field(default_factory=dict)  # replica -> insert | update | delete -> rows
    undecided: list[Undecided] = field(default_factory=list)
    undecided_rows: int = 0
    examples: list[RowChange] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(actions.total() for actions in self.actions.values())

    def add(self, change: RowChange) -> None:
        self.actions.setdefault(change.replica, Counter())[action_of(change)] += 1
        if len(self.examples) < 20:
            self.examples.append(change)

    def leave(self, undecided: Undecided) -> None:
        self.undecided_rows += 1
        if len(self.undecided) < 20:
            self.undecided.append(undecided)


@dataclass(slots=True)
class Repaired:
    """What was done."""

    written: int = 0
    moved: int = 0  # changed since the check, left alone
    transactions: list[str] = field(default_factory=list)


def action_of(change: RowChange) -> str:
    if change.wanted is None:
        return "delete"
    return "insert" if change.seen is None else "update"


class Planner:
    """Decides, row by row, what every replica should hold."""

    def __init__(self, replicas: Sequence[str], strategy: Strategy, *, primary: str = "", newest_by: str = "") -> None:
        if strategy is Strategy.PRIMARY and primary not in replicas:
            raise ConfigError(f"--by primary needs --primary, one of {', '.join(replicas)}")
        self._replicas, self._strategy = replicas, strategy
        self.primary, self._newest_by = primary, newest_by
        self.plan = Plan()

    def changes(self, differences: Iterable[Difference]) -> Iterator[RowChange]:
        """The changes that make the rows equal; the plan counts them as they pass."""
        repairable = (d for d in differences if d.kind is not Kind.IN_FLIGHT)
        for (table, key), found in groupby(repairable, key=lambda d: (d.table, d.key)):
            for change in self._of_row(table, key, list(found)):
                self.plan.add(change)
                yield change

    def _of_row(self, table: str, key: Key, found: Sequence[Difference]) -> Iterator[RowChange]:
        versions = _versions(self._replicas, found)
        winner, reason = self._winner(versions, found)
        if winner is None:
            self.plan.leave(Undecided(table, key, reason))
            return
        wanted = versions[winner]
        for replica, seen in versions.items():
            if seen != wanted:
                source = None if wanted is None else winner
                yield RowChange(replica, table, key, _values(seen), _values(wanted), source)

    def _winner(self, versions: Mapping[str, _Version], found: Sequence[Difference]) -> tuple[str | None, str]:
        """A replica that holds the right version, or why there is none."""
        match self._strategy:
            case Strategy.PRIMARY:
                return self.primary, ""
            case Strategy.MAJORITY:
                (first, most), *others = Counter(versions.values()).most_common(2)
                if others and others[0][1] == most:
                    return None, f"{most} replica(s) each hold two different versions: no majority"
                return next(r for r, version in versions.items() if version == first), ""
            case Strategy.NEWEST:
                return self._newest(versions, found[0])

    def _newest(self, versions: Mapping[str, _Version], difference: Difference) -> tuple[str | None, str]:
        if difference.basis is Basis.LOG:
            if difference.reference:
                return difference.reference[0], ""
            return None, "no replica holds the version that the log wrote last"
        if not self._newest_by:
            return None, "the log has nothing on this row; name a column that grows with --newest-by"
        if any(version is None for version in versions.values()):
            return None, "the row is missing somewhere: without the log, a delete and a lost insert look the same"
        ages = {r: _age(dict(version or ()).get(self._newest_by)) for r, version in versions.items()}
        newest = max(ages.values())
        holders = [replica for replica, age in ages.items() if age == newest]
        if len({versions[replica] for replica in holders}) > 1:
            return None, f"two versions have the same {self._newest_by}"
        return holders[0], ""


def _age(text: str | None) -> tuple[bool, float, str]:
    """Numbers by size, timestamps by their canonical text, NULL before everything."""
    try:
        return text is not None, float(text or 0), ""
    except ValueError:
        return True, 0.0, text or ""


def _versions(replicas: Sequence[str], found: Sequence[Difference]) -> dict[str, _Version]:
    """Every replica's version: what its own difference says, else the reference."""
    reference = _frozen(found[0].expected)
    actual = {difference.replica: _frozen(difference.actual) for difference in found}
    return {replica: actual.get(replica, reference) for replica in replicas if replica in actual or found[0].reference}


def _frozen(values: Values | None) -> _Version:
    return None if values is None else tuple(values.items())


def _values(version: _Version) -> Values | None:
    return None if version is None else dict(version)


async def carry_out(changes: Iterable[RowChange], writer: RepairWriter) -> Repaired:
    """Apply the changes in batches per replica; a row that moved meanwhile is left alone, the others go on."""
    done = Repaired()
    waiting: dict[str, list[RowChange]] = {}
    for change in changes:
        batch = waiting.setdefault(change.replica, [])
        batch.append(change)
        if len(batch) == BATCH_ROWS:
            await _apply(waiting.pop(change.replica), writer, done)
    for batch in waiting.values():
        await _apply(batch, writer, done)
    return done


async def _apply(batch: Sequence[RowChange], writer: RepairWriter, done: Repaired) -> None:
    remaining = list(batch)
    while remaining:
        try:
            applied = await writer.apply(remaining)
        except RowMoved as moved:
            remaining = [change for change in remaining if (change.table, change.key) != (moved.table, moved.key)]
            done.moved += 1
        else:
            done.written += applied.written
            done.transactions += applied.transactions
            return
