"""What only agents write: statements of their own and tables of schema `tops`; a client that sends one is rejected.

Agents put such changes beside a client's, behind the place where these come in, or publish them where nobody but a
replica publishes.
"""

from functools import lru_cache

from replication.certification import PRUNE
from replication.conflicts.pruning import DROP, DROP_SUMS
from replication.divergence.at_replica import REPAIR_CALL
from tops.changes import Change, InvalidChange, Member, Statement, is_captured, split_table_name

OWN_STATEMENTS = frozenset({PRUNE, DROP, DROP_SUMS, REPAIR_CALL})
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
