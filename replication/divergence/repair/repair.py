"""Plans how replicas become equal again, and carries the plan out batch by batch.

Planning reads the differences that a check wrote and touches no database. Carrying out goes through a `RepairWriter`,
which refuses to write over a row that is no longer what the check saw.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby

from replication.divergence.results.model import Basis, Difference, Kind, LoggedWrite
from replication.tables.endpoints import Key, RepairWriter, RowChange, Values
from replication.tables.errors import RowMoved
from tops.model.errors import ConfigError

BATCH_ROWS = 500
_Version = tuple[tuple[str, str | None], ...] | None


class Strategy(Enum):
    """Whose version of a row wins."""

    LOG = "log"  # what the log wrote last; where it says nothing, the primary, the newest version, a majority
    MAJORITY = "majority"  # what most replicas hold
    PRIMARY = "primary"  # what the primary holds
    NEWEST = "newest"  # what the log wrote last; without a log, the largest value of a column that grows


@dataclass(frozen=True, slots=True)
class Undecided:
    """A row that the strategy can't decide; a person must."""

    table: str
    key: Key
    reason: str


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """A row that the plan would delete or overwrite although an acknowledged transaction wrote it, or may have."""

    table: str
    key: Key
    replicas: tuple[str, ...]
    risk: str
    tx: str = ""  # empty: the log says nothing about the row
    number: int | None = None  # its log index

    @property
    def told(self) -> str:
        return f"{self.table} [{', '.join(self.key)}] on {', '.join(self.replicas)}: the plan {self.risk}"


@dataclass(slots=True)
class Plan:
    """Counts of what would be written; the changes themselves are streamed."""

    actions: dict[str, Counter[str]] = field(default_factory=dict)  # replica -> insert | update | delete -> rows
    sources: Counter[str] = field(default_factory=Counter)  # what the wanted rows rely on, a `Basis` -> rows
    undecided: list[Undecided] = field(default_factory=list)
    undecided_rows: int = 0
    acknowledged: list[Acknowledged] = field(default_factory=list)  # written only by force
    acknowledged_rows: int = 0
    examples: list[RowChange] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(actions.total() for actions in self.actions.values())

    def add(self, change: RowChange) -> None:
        self.actions.setdefault(change.replica, Counter())[action_of(change)] += 1
        self.sources[change.basis] += 1
        if len(self.examples) < 20:
            self.examples.append(change)

    def leave(self, undecided: Undecided) -> None:
        self.undecided_rows += 1
        if len(self.undecided) < 20:
            self.undecided.append(undecided)

    def protect(self, acknowledged: Acknowledged) -> None:
        self.acknowledged_rows += 1
        if len(self.acknowledged) < 20:
            self.acknowledged.append(acknowledged)


@dataclass(slots=True)
class Repaired:
    """What was done."""

    written: int = 0
    moved: int = 0  # changed since the check, left alone
    transactions: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Choice:
    """What every replica should hold."""

    wanted: _Version
    source: str | None  # a replica that holds it; None: no row, or one that only the log holds
    basis: Basis


def action_of(change: RowChange) -> str:
    if change.wanted is None:
        return "delete"
    return "insert" if change.seen is None else "update"


class Planner:
    """Decides, row by row, what every replica should hold.

    A row that an acknowledged transaction wrote is not deleted and not overwritten, unless by `force`: such changes are
    listed in the plan and not made. With the strategy LOG the row is undecided then. `of_set`: the replicas are those
    of a running set. Its log can give rows back; and a row that it says nothing about may be older than the log."""

    def __init__(
        self,
        replicas: Sequence[str],
        strategy: Strategy,
        *,
        primary: str = "",
        newest_by: str = "",
        force: bool = False,
        of_set: bool = False,
    ) -> None:
        if strategy is Strategy.PRIMARY and primary not in replicas:
            raise ConfigError(f"--by primary needs --primary, one of {', '.join(replicas)}")
        self._replicas, self._strategy = replicas, strategy
        self.primary, self._newest_by = primary, newest_by
        self.force, self._of_set = force, of_set
        self.plan = Plan()

    def changes(self, differences: Iterable[Difference]) -> Iterator[RowChange]:
        """The changes that make the rows equal; the plan counts them as they pass."""
        repairable = (d for d in differences if d.kind is not Kind.IN_FLIGHT)
        for (table, key), found in groupby(repairable, key=lambda d: (d.table, d.key)):
            for change in self._of_row(table, key, list(found)):
                self.plan.add(change)
                yield change

    def whole(self, differences: Iterable[Difference]) -> Plan:
        """The plan for all of the differences."""
        for _ in self.changes(differences):
            pass
        return self.plan

    def _of_row(self, table: str, key: Key, found: Sequence[Difference]) -> Iterator[RowChange]:
        versions = _versions(self._replicas, found)
        choice = self._choice(versions, found[0])
        if isinstance(choice, str):
            self.plan.leave(Undecided(table, key, choice))
            return
        differing = tuple(replica for replica, seen in versions.items() if seen != choice.wanted)
        if not self.force and (risk := self._risk(choice, found[0])):
            self._hold_back(Undecided(table, key, _why_left(choice, risk)), differing, risk, found[0].logged)
            return
        for replica in differing:
            seen, wanted = _values(versions[replica]), _values(choice.wanted)
            yield RowChange(replica, table, key, seen, wanted, choice.source, choice.basis.value)

    def _risk(self, choice: _Choice, difference: Difference) -> str:
        """What is lost if the choice is wrong; empty if the log supports it, or nothing can be lost."""
        logged, is_delete = difference.logged, choice.wanted is None
        if logged is not None and logged.known:
            if difference.basis is Basis.LOG and choice.wanted == _frozen(difference.expected):
                return ""
            verb = "deletes" if is_delete else "overwrites"
            return f"{verb} what transaction {logged.tx} wrote at log index {logged.number}"
        if not is_delete or choice.basis is Basis.NEWEST:  # a version that says "deleted" was written by a transaction
            return ""
        if logged is not None:
            return f"deletes a row that transaction {logged.tx} may have written at log index {logged.number}"
        if self._of_set or self._strategy is Strategy.LOG:
            return "deletes a row that the log says nothing about: it may be older than the log"
        return ""

    def _hold_back(self, row: Undecided, replicas: tuple[str, ...], risk: str, logged: LoggedWrite | None) -> None:
        if self._strategy is Strategy.LOG:
            self.plan.leave(row)
            return
        tx, number = (logged.tx, logged.number) if logged is not None else ("", None)
        self.plan.protect(Acknowledged(row.table, row.key, replicas, risk, tx, number))

    def _choice(self, versions: Mapping[str, _Version], difference: Difference) -> _Choice | str:
        """What is right and who holds it, or why that can't be said."""
        match self._strategy:
            case Strategy.LOG:
                return self._by_order_of_truth(versions, difference)
            case Strategy.PRIMARY:
                return self._held_by(self.primary, versions, Basis.PRIMARY)
            case Strategy.MAJORITY:
                return self._majority(versions)
            case Strategy.NEWEST:
                return self._newest(versions, difference)

    def _held_by(self, replica: str, versions: Mapping[str, _Version], basis: Basis) -> _Choice:
        wanted = versions[replica]
        return _Choice(wanted, None if wanted is None else replica, basis)

    def _by_order_of_truth(self, versions: Mapping[str, _Version], difference: Difference) -> _Choice | str:
        """The reference of the check is found in this order; a primary may be named for the repair alone."""
        if difference.basis is Basis.LOG:
            return self._logged(difference)
        if self.primary in versions:
            return self._held_by(self.primary, versions, Basis.PRIMARY)
        if difference.basis is Basis.NEWEST:
            return self._held_by(difference.reference[0], versions, Basis.NEWEST)
        return self._majority(versions)

    def _logged(self, difference: Difference) -> _Choice | str:
        wanted = _frozen(difference.expected)
        if wanted is None or difference.reference:
            return _Choice(wanted, None if wanted is None else difference.reference[0], Basis.LOG)
        if self._of_set:
            return _Choice(wanted, None, Basis.LOG)
        return "no replica holds the version that the log wrote last"

    def _majority(self, versions: Mapping[str, _Version]) -> _Choice | str:
        (first, most), *others = Counter(versions.values()).most_common(2)
        if others and others[0][1] == most:
            return f"{most} replica(s) each hold two different versions: no majority"
        winner = next(r for r, version in versions.items() if version == first)
        return self._held_by(winner, versions, Basis.MAJORITY)

    def _newest(self, versions: Mapping[str, _Version], difference: Difference) -> _Choice | str:
        if difference.basis is Basis.LOG:
            return self._logged(difference)
        if difference.basis is Basis.NEWEST:
            return self._held_by(difference.reference[0], versions, Basis.NEWEST)
        if not self._newest_by:
            return "the log has nothing on this row; name a column that grows with --newest-by"
        if any(version is None for version in versions.values()):
            return "the row is missing somewhere: without the log, a delete and a lost insert look the same"
        ages = {r: _age(dict(version or ()).get(self._newest_by)) for r, version in versions.items()}
        newest = max(ages.values())
        holders = [replica for replica, age in ages.items() if age == newest]
        if len({versions[replica] for replica in holders}) > 1:
            return f"two versions have the same {self._newest_by}"
        return self._held_by(holders[0], versions, Basis.NEWEST)


def _why_left(choice: _Choice, risk: str) -> str:
    return (
        f"decided by {choice.basis.value}, the repair {risk}; to copy the row from a replica that holds it: "
        "--by primary --primary REPLICA; to write it nevertheless: --force"
    )


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
