"""What only agents write: statements of their own and tables of schema `tops`; a client that sends one is rejected.

Agents put such changes beside a client's, behind the place where these come in, or publish them where nobody but a
replica publishes. The statements are not proved deterministic, but argued here: they only touch the schema `tops`,
apart from a repair, which is meant to change one replica alone.
"""

from functools import lru_cache

from replication.certification import PRUNE
from replication.conflicts.tables import CLOCKS
from tops.changes import SUMS, Change, InvalidChange, Member, Statement, is_captured, split_table_name

# Rows by their full primary key, as far as they are still what the sender saw: every replica is at the same log index.
DROP_TOMBSTONES = (
    f"delete from {CLOCKS} where deleted and (table_name, key, clock, site) in "
    "(select * from unnest($1::text[], $2::text[], $3::bigint[], $4::text[]))"
)
DROP_SUMS = (
    f"delete from {SUMS} s where (table_name, key) in (select * from unnest($1::text[], $2::text[])) "
    f"and not exists (select from {CLOCKS} c where c.table_name = s.table_name and c.key = s.key)"
)
# Carried out by the replica that is repaired, and by no other.
REPAIR_CALL = "select tops.repair_row($1, $2)"

OWN_STATEMENTS = frozenset({PRUNE, DROP_TOMBSTONES, DROP_SUMS, REPAIR_CALL})
_SCHEMA = "tops"


def reserved(member: Member) -> str | None:
    """Why a client may not ask for this; None if it may."""
    for change in member.changes:
        if is_captured(change) and not member.origin:
            return "a change of a write set that names no origin"
        if problem := _reserved(change):
            return problem
    return None


def check_client(member: Member) -> None:
    problem = reserved(member)
    if problem is not None:
        raise InvalidChange(problem)


def _reserved(change: Change) -> str | None:
    if isinstance(change, Statement):
        return "the statement is one that only agents run" if change.sql in OWN_STATEMENTS else None
    return f"table {change.table} is an agent's own memory" if _is_own(change.table) else None


@lru_cache(maxsize=1_000)
def _is_own(table: str) -> bool:
    return split_table_name(table)[0] == _SCHEMA
