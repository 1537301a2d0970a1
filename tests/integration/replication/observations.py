"""What readers saw beside what writers were told, and the checker that compares the two.

Every transaction of a writer moves money between two accounts, notes the transfer, and sets the writer's register to
the transfer's number. Readers take the total, the transfers and the registers in one query. Where a consistency sees
everything acknowledged, each writer's register is then a single-writer register, which is linearizable exactly if the
rules below hold.
"""

from dataclasses import dataclass, field

QUERY = """
select (select sum(balance) from accounts)::bigint as total, (select array_agg(id) from transfers) as transfers,
       (select array_agg(key || '=' || items) from lists) as registers
"""


@dataclass(frozen=True)
class Seen:
    """One read: between `began` and `ended` it saw this."""

    consistency: str
    began: float
    ended: float
    total: int
    transfers: frozenset[str]
    registers: dict[str, int]
    replica: str = ""


@dataclass
class Observations:
    """Told: when a writer was told that its transfer is committed; begun: when it set out to write it."""

    total: int
    begun: dict[str, float] = field(default_factory=dict)
    told: dict[str, float] = field(default_factory=dict)
    rejected: set[str] = field(default_factory=set)
    seen: list[Seen] = field(default_factory=list)


def transfer_id(writer: int, step: int) -> str:
    return f"{writer}-{step}"


def violations(found: Observations) -> list[str]:
    """Every read that saw something that no order of the transactions explains."""
    problems: list[str] = []
    reads = sorted(found.seen, key=lambda seen: seen.ended)
    for seen in reads:
        problems += [f"{seen.consistency} at {seen.replica}: {problem}" for problem in _alone(found, seen)]
    return problems + _going_back(reads)


def _alone(found: Observations, seen: Seen) -> list[str]:
    problems = []
    if seen.total != found.total:
        problems.append(f"a total of {seen.total}: a transfer is half applied")
    lost = {ident for ident, at in found.told.items() if at < seen.began} - seen.transfers
    if lost:
        problems.append(f"acknowledged transfers are not there: {sorted(lost)[:3]}")
    ghosts = {ident for ident in seen.transfers if ident in found.rejected or found.begun[ident] > seen.ended}
    if ghosts:
        problems.append(f"transfers are there that were refused or not begun: {sorted(ghosts)[:3]}")
    for writer in {ident.partition("-")[0] for ident in seen.transfers}:
        steps = [int(ident.partition("-")[2]) for ident in seen.transfers if ident.partition("-")[0] == writer]
        if seen.registers.get(writer) != max(steps):
            problems.append(f"register {writer} is {seen.registers.get(writer)}, the last transfer {max(steps)}")
    return problems


def _going_back(reads: list[Seen]) -> list[str]:
    """A read that begins after another has ended sees at least as much."""
    problems = []
    ended = 0
    before: set[str] = set()
    for seen in sorted(reads, key=lambda seen: seen.began):
        while ended < len(reads) and reads[ended].ended < seen.began:
            before |= reads[ended].transfers
            ended += 1
        if before - seen.transfers:
            gone = sorted(before - seen.transfers)[:3]
            problems.append(f"{seen.consistency} at {seen.replica}: seen before, and gone: {gone}")
    return problems
