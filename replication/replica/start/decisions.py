"""The start of a set as seen from one replica, without I/O: from what all replicas report, what is to be done next.

    new --fingerprint--> compared --all equal--> agreed --all agreed on one basis--> started
     ^                      | ^                    |
     +----direct write------+ +---another left-----+

Safe because a basis names the attempts of all replicas, attempts are never used twice, and a replica leaves AGREED only
when another one is at a later attempt: the first one to leave a basis has not agreed to it, so nobody starts on it.
"""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from replication.replica.start.comparing import Difference, differences
from replication.replica.start.fingerprint import Fingerprint


class State(Enum):
    """How far a replica's database has come; durable there."""

    NEW = "new"  # nothing is known of its data
    COMPARED = "compared"  # its fingerprint is true; a direct write ends that
    AGREED = "agreed"  # its data can't change; ended by the start, or by a replica that is at another attempt
    STARTED = "started"  # for good


@dataclass(frozen=True, slots=True)
class Report:
    """What one replica says of itself. `fingerprint` is there from COMPARED on, but for databases of old versions."""

    state: State
    attempt: str = ""
    basis: str = ""
    fingerprint: Fingerprint | None = None
    problem: str = ""  # why it is not further


@dataclass(frozen=True, slots=True)
class Wait:
    """Ask again later."""

    reason: str


@dataclass(frozen=True, slots=True)
class Differ:
    """All have reported, and they are not equal."""

    differences: tuple[Difference, ...]


@dataclass(frozen=True, slots=True)
class Agree:
    """Lock the data, and store this basis."""

    basis: str


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Go back to COMPARED under a new attempt."""


@dataclass(frozen=True, slots=True)
class Start:
    """Join the log from index 0."""


@dataclass(frozen=True, slots=True)
class TakeCopy:
    """The set has begun without this replica. `replaceable`: its rows are the set's initial ones."""

    sources: tuple[str, ...]
    replaceable: bool = False


Decision = Wait | Differ | Agree | Withdraw | Start | TakeCopy


def basis_of(attempts: Mapping[str, str]) -> str:
    """The attempts of all replicas as one name."""
    listed = "\n".join(f"{name} {attempt}" for name, attempt in sorted(attempts.items()))
    return hashlib.blake2b(listed.encode(), digest_size=16).hexdigest()


def decide(
    own: str,
    listed: Collection[str],
    reports: Mapping[str, Report],
    *,
    decided: int,
    log_is_whole: bool,
    tables: Collection[str] = (),
) -> Decision:
    """What replica `own`, which has not started, does next. `reports` are those that came, its own among them;
    `decided` is the log's last index."""
    mine = reports[own]
    started = tuple(name for name in sorted(reports) if reports[name].state is State.STARTED)
    if started:
        return _join(mine, [reports[name] for name in started], started, log_is_whole)
    if decided > 0:
        return Wait(
            f"the set's log is at index {decided} and no replica that has followed it responds: start one of them"
        )
    if mine.state is State.NEW:
        return Wait(mine.problem or "its data are being compared")
    silent = sorted(set(listed) - reports.keys())
    if mine.state is State.AGREED:
        attempts = {name: report.attempt for name, report in reports.items()}
        if not silent and basis_of(attempts) != mine.basis:
            return Withdraw()
        if silent:
            return Wait(f"the data are equal; no response from {', '.join(silent)}")
        late = [name for name in sorted(listed) if reports[name].basis != mine.basis]
        return Wait(f"the data are equal; waiting for {', '.join(late)} to confirm it") if late else Start()
    return _compare(listed, reports, silent, tables)


def _join(mine: Report, theirs: Collection[Report], sources: tuple[str, ...], log_is_whole: bool) -> Decision:
    has_agreed = mine.state is State.AGREED and any(report.basis == mine.basis for report in theirs)
    if has_agreed and log_is_whole:
        return Start()
    return TakeCopy(sources, replaceable=has_agreed)


def _compare(
    listed: Collection[str], reports: Mapping[str, Report], silent: Collection[str], tables: Collection[str]
) -> Decision:
    found = {
        name: r.fingerprint for name, r in reports.items() if r.fingerprint is not None and r.state is not State.NEW
    }
    if differing := differences(found, tuple(tables)):
        return Differ(tuple(differing))
    if silent:
        return Wait(f"no response from {', '.join(sorted(silent))}: all replicas of the set are compared first")
    late = [
        f"{name} ({reports[name].problem or 'its data are being compared'})" for name in sorted(listed - found.keys())
    ]
    if late:
        return Wait(f"waiting for {', '.join(late)}")
    return Agree(basis_of({name: reports[name].attempt for name in listed}))
