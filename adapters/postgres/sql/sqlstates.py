"""What PostgreSQL's error codes mean for a transaction; no other module reads them."""

import asyncio

import asyncpg

from adapters.changes import InvalidChange, NotDeterministic
from adapters.resource import Exclusion, Why

WRONG_COUNT = "TP001"  # raised by tops.affected: the fast path's expectation did not hold
WRONG_VERSION = "TP002"  # raised by tops.expect_version
CAPTURED_NOTICE = "TP003"  # sent by tops.captured_so_far: the last key that was noted
ROWS_NOTICE = "TP000"  # sent by tops.affected: how many rows a change affected

UNKNOWN_ID = "42704"
BUSY_ID = "55000"
NOT_SUPPORTED = NOT_PREPARABLE = "0A000"

_CONSTRAINTS = {
    "23502": "not-null",
    "23503": "foreign-key",
    "23505": "unique",
    "23514": "check",
    "23P01": "exclusion",
    "23001": "restrict",
}
# Locks, time, space, shutdowns: they say something about this moment, not about a member.
_PASSING_CLASSES = frozenset({"40", "53", "57", "58", "XX"})
_PASSING = frozenset({"25006", "55006", "55P03"})  # read-only for now, in use, locked


def sqlstate(error: BaseException) -> str:
    return getattr(error, "sqlstate", None) or ""


def is_connection_loss(error: BaseException) -> bool:
    """The session is gone, and with it the answer."""
    if isinstance(error, asyncpg.PostgresError):
        code = sqlstate(error)
        return code.startswith("08") or code in ("57P01", "57P02", "57P03", "57P05")
    if isinstance(error, ValueError):  # asyncpg's complaint about an argument, made before anything was sent
        return False
    return isinstance(error, OSError | asyncio.TimeoutError | asyncpg.InterfaceError | asyncpg.InternalClientError)


def is_transient(error: BaseException) -> bool:
    """Not the fault of any member: the whole epoch is refused and may be tried again."""
    return sqlstate(error)[:2] in _PASSING_CLASSES or sqlstate(error) in _PASSING


def is_schema_change(error: BaseException) -> bool:
    """Possibly our memory of the catalogue is old."""
    return sqlstate(error)[:2] in ("42", "0A") or sqlstate(error) == "26000"


def exclusion(error: asyncpg.PostgresError | InvalidChange, *, captured: bool = False) -> Exclusion:
    """Why a member is left out, in words that are the same on every replica, whatever its language setting.

    `captured`: at its origin every row was the expected one and every constraint held, so that something came in
    between: it is to be executed again, which then meets the constraint itself or another row."""
    if isinstance(error, NotDeterministic):
        return Exclusion(why=Why.INVALID, sqlstate=NOT_SUPPORTED, message=str(error), proof=error.reason)
    if isinstance(error, InvalidChange):
        return Exclusion(why=Why.INVALID, sqlstate="", message=str(error))
    code = sqlstate(error)
    kind = _CONSTRAINTS.get(code)
    if kind is not None:
        table = getattr(error, "table_name", None) or "?"
        name = getattr(error, "constraint_name", None) or getattr(error, "column_name", None) or "?"
        why = Why.CONFLICT if captured else Why.CONSTRAINT
        return Exclusion(why=why, sqlstate=code, message=f"{kind} constraint {name} of table {table}")
    if captured and code == WRONG_COUNT:
        return Exclusion(why=Why.CONFLICT, sqlstate=code, message="a row is not the one that the origin had found")
    # Alone, a change that must hit a row is the only one whose count is checked.
    why = Why.VERSION if code in (WRONG_VERSION, WRONG_COUNT) else Why.ERROR
    return Exclusion(why=why, sqlstate=code, message=str(getattr(error, "message", None) or error))
