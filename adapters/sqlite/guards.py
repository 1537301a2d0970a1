"""What a client's SQL may be and do in a SQLite file: one statement, told by its words, and held by the authorizer.

SQLite has no logins. Its authorizer is asked about everything that a statement would touch, whatever its spelling, and
its answer stands; the words only make for clearer messages.
"""

import sqlite3

from adapters.changes import InvalidChange, tokens

_WRITES = frozenset({"insert", "replace", "update", "delete", "with", "select"})
_READS = frozenset({"select", "with", "values", "explain"})
_LOOKS = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE})
_CHANGES = frozenset({sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE})
# The rest computes. These load code, take files apart or read their pages.
_FUNCTIONS_DENIED = frozenset({"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"})
OWN_PREFIX = "tops_"
# Declares virtual tables to this connection: to do so later, within a statement, would look like making a table.
KNOW_TABLES = "pragma table_list"


def check_query(sql: str) -> None:
    """Reject what is no query: a read must not write."""
    _check(sql, _READS, "a read")


def check_statement(sql: str) -> None:
    """Reject what is no statement that changes rows."""
    _check(sql, _WRITES, "a replicated statement")


def _check(sql: str, verbs: frozenset[str], what: str) -> None:
    found = list(tokens(sql))
    if not found:
        raise InvalidChange("the statement is empty")
    verb = found[0][1]
    if verb not in verbs:
        raise InvalidChange(f"{what} starts with one of {', '.join(sorted(verbs))}, not with {verb!r}: {sql[:200]}")
    if ("other", ";") in found[:-1]:
        raise InvalidChange(f"one statement at a time: {sql[:200]}")


def looks_only(action: int, first: str | None, second: str | None, _: str | None, __: str | None) -> int:
    """An authorizer: reads of tables that are not the adapter's, and functions that compute."""
    if action == sqlite3.SQLITE_READ and (first or "").lower().startswith(OWN_PREFIX):
        return sqlite3.SQLITE_DENY
    fine = action in _LOOKS or _is_internal(action, first) or is_computing(action, second)
    return sqlite3.SQLITE_OK if fine else sqlite3.SQLITE_DENY


def changes_rows(action: int, first: str | None, second: str | None) -> bool:
    """Whether an action is one of those that a client's write is made of."""
    return action in _LOOKS or action in _CHANGES or _is_internal(action, first) or is_computing(action, second)


def _is_internal(action: int, pragma: str | None) -> bool:
    """What a search index asks for by itself."""
    return action == sqlite3.SQLITE_PRAGMA and pragma == "data_version"


def is_computing(action: int, function: str | None) -> bool:
    return action == sqlite3.SQLITE_FUNCTION and (function or "").lower() not in _FUNCTIONS_DENIED
