"""What the gateway does with a statement, by its text. When in doubt, a statement is not passed to the database."""

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

from pglast import ast
from pglast.enums import TransactionStmtKind, VariableSetKind
from pglast.visitors import Visitor

from adapters.changes import InvalidChange
from adapters.sql import NotParsed, Parsed, check_query, check_statement, parse

OWN_SETTINGS = ("tops.consistency", "tops.max_lag")
# A client that changed these would get other results, or other rights, than the gateway thinks.
_KEPT_SETTINGS = (
    "session_replication_role", "row_security", "role", "session_authorization", "default_transaction_read_only",
    "transaction_read_only", "default_transaction_isolation", "statement_timeout",
    "idle_in_transaction_session_timeout",
)  # fmt: skip


class What(Enum):
    READ = "read"  # passes to the replica's database
    WRITE = "write"  # goes to the set
    SESSION = "session"  # changes the session alone: passes to the database, and keeps the session
    BEGIN = "begin"
    END = "end"  # COMMIT, ROLLBACK
    OWN_SET = "own set"  # one of the gateway's own settings
    OWN_SHOW = "own show"
    EMPTY = "empty"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class Statement:
    what: What
    tag: str = ""  # of a write, without its count; of a setting, its name
    value: str | None = None  # of a setting; None: its default
    sqlstate: str = ""
    text: str = ""  # why it is rejected
    hint: str = ""


_LATER = "write transactions are not available through the gateway: send each write outside of a transaction"


def _rejected(text: str, hint: str = "", sqlstate: str = "0A000") -> Statement:
    return Statement(What.REJECTED, text=text, hint=hint, sqlstate=sqlstate)


@lru_cache(maxsize=5_000)
def classify(sql: str) -> tuple[Statement, ...]:
    """The statements of a text, in order."""
    try:
        parsed = parse(sql)
    except NotParsed as error:
        return (_rejected(str(error), sqlstate="42601"),)
    except InvalidChange as error:
        return (_rejected(str(error), sqlstate="54001"),)
    if len(parsed) > 1 and any(_one(each, "").what is not What.READ for each in parsed):
        return (_rejected("several statements in one message must be queries", "send one statement at a time"),)
    return tuple(_one(each, sql if len(parsed) == 1 else "") for each in parsed) or (Statement(What.EMPTY),)


def _one(parsed: Parsed, sql: str) -> Statement:
    node = parsed.node
    match node:
        case ast.TransactionStmt():
            return _transaction(node)
        case ast.VariableSetStmt():
            return _setting(node)
        case ast.VariableShowStmt(name=str(name)) if name in OWN_SETTINGS:
            return Statement(What.OWN_SHOW, name)
        case ast.DeallocateStmt():
            return Statement(What.SESSION, "DEALLOCATE")
        case ast.DiscardStmt():
            return Statement(What.SESSION, "DISCARD")
        case ast.ClosePortalStmt():
            return Statement(What.SESSION, "CLOSE CURSOR")
        case ast.ListenStmt() | ast.NotifyStmt() | ast.UnlistenStmt():
            return _rejected("LISTEN and NOTIFY reach one replica only", "use a subscription of the library")
        case ast.CopyStmt():
            return _rejected("COPY is not available through the gateway", "send INSERT or SELECT statements")
        case ast.PrepareStmt() | ast.ExecuteStmt():
            return _rejected("PREPARE and EXECUTE are not available as statements", "use the driver's prepared ones")
    if _writes(node):
        return _write(node, sql)
    if parsed.is_query:
        try:
            if sql:
                check_query(sql)
        except InvalidChange as error:
            return _rejected(str(error))
        if isinstance(node, ast.SelectStmt) and _locks(node):
            return _rejected("SELECT … FOR UPDATE locks rows at one replica only", _LATER)
        return Statement(What.READ)
    return _rejected(
        "this statement is not replicated: definitions are changed at each replica by an operator",
        "run it on every replica's database while the application is quiet",
    )


def _write(node: ast.Node, sql: str) -> Statement:
    tags: dict[type, str] = {
        ast.InsertStmt: "INSERT 0", ast.UpdateStmt: "UPDATE", ast.DeleteStmt: "DELETE", ast.MergeStmt: "MERGE",
        ast.SelectStmt: "SELECT", ast.TruncateStmt: "TRUNCATE TABLE",
    }  # fmt: skip
    try:
        if sql:
            check_statement(sql)
    except InvalidChange as error:
        return _rejected(str(error))
    return Statement(What.WRITE, tags[type(node)])


def _transaction(node: ast.TransactionStmt) -> Statement:
    match node.kind:
        case TransactionStmtKind.TRANS_STMT_BEGIN | TransactionStmtKind.TRANS_STMT_START:
            for option in node.options or ():
                if option.defname == "transaction_read_only" and not _is_true(option.arg):
                    return _rejected("a transaction through the gateway is read-only", _LATER)
            return Statement(What.BEGIN)
        case TransactionStmtKind.TRANS_STMT_COMMIT | TransactionStmtKind.TRANS_STMT_ROLLBACK:
            return Statement(What.END)
        case (
            TransactionStmtKind.TRANS_STMT_SAVEPOINT
            | TransactionStmtKind.TRANS_STMT_RELEASE
            | TransactionStmtKind.TRANS_STMT_ROLLBACK_TO
        ):
            return Statement(What.SESSION, "SAVEPOINT")
    return _rejected("prepared transactions belong to the replicas' agents")


def _is_true(arg: Any) -> bool:
    value = getattr(arg, "val", arg)
    return bool(getattr(value, "ival", None) or getattr(value, "boolval", None))


def _setting(node: ast.VariableSetStmt) -> Statement:
    name = (node.name or "").lower()
    if name in OWN_SETTINGS:
        if node.kind == VariableSetKind.VAR_SET_VALUE and len(node.args or ()) == 1:
            value = node.args[0].val  # type: ignore[index]
            return Statement(What.OWN_SET, name, str(getattr(value, "sval", None) or getattr(value, "fval", None)
                                                     or getattr(value, "ival", "")))  # fmt: skip
        return Statement(What.OWN_SET, name)
    if name.startswith("tops.") or name in _KEPT_SETTINGS:
        return _rejected(f"the setting {name} can't be changed through the gateway", sqlstate="42501")
    if name in ("transaction", "session characteristics"):
        for option in node.args or ():
            if getattr(option, "defname", "") == "transaction_read_only" and not _is_true(option.arg):
                return _rejected("a transaction through the gateway is read-only", _LATER)
    return Statement(What.SESSION, "SET")


class _Found(Visitor):
    """Whether a statement changes rows or locks them, wherever in its tree it says so."""

    def __init__(self) -> None:
        self.writes = self.locks = False

    def visit_InsertStmt(self, *_: Any) -> None:
        self.writes = True

    visit_UpdateStmt = visit_DeleteStmt = visit_MergeStmt = visit_TruncateStmt = visit_InsertStmt

    def visit_LockingClause(self, *_: Any) -> None:
        self.locks = True


def _writes(node: ast.Node) -> bool:
    if isinstance(node, ast.ExplainStmt):
        return False  # it would only analyse; with ANALYZE the database rejects it as read-only
    found = _Found()
    found(node)
    return found.writes


def _locks(node: ast.Node) -> bool:
    found = _Found()
    found(node)
    return found.locks
