"""What only agents write: statements of their own and tables of schema `tops`; a client that sends one is rejected.

A client's statement must be proved deterministic; these are known by their text and argued here. They only touch the
schema `tops`, apart from a repair, which is meant to change one replica alone. Agents put such changes beside a
client's, behind the place where these come in, or publish them where only replicas publish.
"""

from collections.abc import Iterable
from functools import lru_cache

from adapters.changes import (
    SETTLED,
    SUMS,
    Change,
    Delete,
    Insert,
    InvalidChange,
    Member,
    RowChange,
    Statement,
    Update,
    changes_digest,
    split_table_name,
)
from replication.conflicts.tables import CLOCKS, WRITE_SETS
from replication.model.events import UNREADABLE
from replication.rpc.control import key_problem, names_tx
from tops.model.ids import identity_in
from tops.model.sizes import TEXT_MAX

# Rows by their full primary key, as far as they are still what the sender saw: every replica is at the same log index.
DROP_TOMBSTONES = (
    f"delete from {CLOCKS} where deleted and (table_name, key, clock, site) in "
    "(select * from unnest($1::text[], $2::text[], $3::bigint[], $4::text[]))"
)
DROP_SUMS = (
    f"delete from {SUMS} s where (table_name, key) in (select * from unnest($1::text[], $2::text[])) "
    f"and not exists (select from {CLOCKS} c where c.table_name = s.table_name and c.key = s.key)"
)
# All replicas forget the write sets up to the same log index.
DROP_WRITE_SETS = f"delete from {WRITE_SETS} where number <= $1"
# Carried out by the replica that is repaired, and by no other.
REPAIR_CALL = "select tops.repair_row($1, $2)"

OWN_STATEMENTS = frozenset({DROP_TOMBSTONES, DROP_SUMS, DROP_WRITE_SETS, REPAIR_CALL})
KEY_TTL_MAX_S = 10 * 365 * 86_400
_SCHEMA = "tops"


def reserved(member: Member) -> str | None:
    """Why a transaction that is no control transaction may not have this; None if it may."""
    if not member.origin:
        if member.sequences:
            return "only a write set that was captured at an origin advances sequences"
        if misused := _key_problem(member):
            return misused
    for change in member.changes:
        if problem := _reserved(change, captured=bool(member.origin)):
            return problem
    return None


def check_client(member: Member) -> None:
    """InvalidChange if a client, who is no origin, may not ask for this."""
    if member.origin or member.control is not None:
        raise InvalidChange("only agents name an origin, and only operators send barriers and repairs")
    check_logged(member)


def check_logged(member: Member) -> None:
    """InvalidChange if this may not be in the log, whoever has executed it."""
    problem = reserved(member)
    if problem is not None:
        raise InvalidChange(problem)


def check_expects_no_version(changes: Iterable[Change], where: str) -> None:
    """InvalidChange if a change expects the version of its row, and nobody would look at it."""
    for change in changes:
        if not isinstance(change, Insert | Statement) and change.expect_version is not None:
            raise InvalidChange(f"expect_version of table {change.table} can't be checked {where}")


def _key_problem(member: Member) -> str:
    """What is wrong with the id or the key of a client's transaction. An empty one may have the id of another
    transaction of the same identity as its key: that is how a client asks what became of it, and settles that it never
    comes."""
    key = member.idempotency_key
    if len(member.tx) > TEXT_MAX:
        return f"the id of the transaction has {len(member.tx)} characters; at most {TEXT_MAX} are allowed"
    if not 0 < member.key_ttl_s <= KEY_TTL_MAX_S:
        return f"key_ttl_s is {member.key_ttl_s}: it must be between 1 and {KEY_TTL_MAX_S} seconds"
    if not key:
        return ""
    asked = names_tx(key)
    if asked and not member.changes:
        if identity_in(asked) != identity_in(member.tx):
            return f"transaction {asked} is another client's: only that client or an operator settles it"
    elif problem := key_problem(key):
        return problem
    # A key that claims to stand for something else would make another client's write count as its repetition.
    if member.content not in ("", changes_digest(member), SETTLED if not member.changes else ""):
        return f"the idempotency key {key!r} does not stand for the changes that it comes with"
    return ""


def _reserved(change: Change, *, captured: bool) -> str | None:
    if isinstance(change, Statement):
        if change == UNREADABLE:
            return "the write can't be read, or its statement is empty"
        return "the statement is one that only agents run" if change.sql in OWN_STATEMENTS else None
    if not captured and _is_agents(change):
        return "a change of a write set that names no origin"
    try:
        return f"table {change.table} is an agent's own memory" if _is_own(change.table) else None
    except InvalidChange as error:
        return str(error)


def _is_agents(change: RowChange) -> bool:
    """Whether the change says what only agents add to one."""
    if change.captured:
        return True
    if isinstance(change, Update):
        return bool(change.sum_key) or change.expect_row is not None
    return isinstance(change, Delete) and change.expect_row is not None


@lru_cache(maxsize=1_000)
def _is_own(table: str) -> bool:
    return split_table_name(table)[0] == _SCHEMA
