"""No program decides by the words of a reason or an error: what it decides by is a code, a type or a field.

The check reads the source. It looks for names that hold words for people (`reason`, `message`, `str(error)`, …) where
they are searched, compared or taken apart. Who means the text of something else, such as a statement, is on the list.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("tops", "replication", "adapters")

# Names and attributes that hold words for people.
WORDS = frozenset(
    {"reason", "refusal", "refused", "rejected", "rejection", "excuse", "lacking", "problem", "detail", "last_error"}
    | {"text", "message", "sentence", "said", "error"}
)
# Also names of sets of ids, in which something may be looked up.
AMBIGUOUS = frozenset(["refused", "rejected", "lacking"])
# What an exception is called where it is caught, or kept.
ERRORS = frozenset(
    {"error", "exc", "exception", "err", "e", "failure", "failed", "refused", "rejected", "aborted", "stale"}
)
SEARCHES = frozenset(
    {"startswith", "endswith", "find", "rfind", "index", "rindex", "count", "__contains__"}
    | {"partition", "rpartition", "split", "rsplit", "removeprefix", "removesuffix"}
)
PATTERNS = frozenset(["match", "fullmatch", "search", "findall", "finditer"])
SAME_WORDS = frozenset(["lower", "upper", "casefold", "strip", "lstrip", "rstrip", "splitlines", "replace", "encode"])

# File and function -> why it may. An entry that nothing needs any more fails.
ALLOWED: dict[tuple[str, str], str] = {
    # Words are told again only when they are others: what is logged depends on them, and nothing else.
    ("tops/runtime/links/identity.py", "Self._watch"): "logs a problem once",
    ("tops/server/broker.py", "Broker.reload_keys"): "logs a problem once",
    ("replication/replica/start/starter.py", "Starter._note"): "logs a problem once",
    ("replication/cli/up.py", "_essence"): "prints a progress on the terminal less often than its figures change",
    # Words are changed before they leave, whatever they are.
    ("tops/security/redaction.py", "redact"): "takes secrets out of any text",
    ("tops/security/redaction.py", "_without_private_keys"): "takes secrets out of any text",
    ("replication/http/sets.py", "SetRoutes._rejection"): "keeps the paths of files from clients",
    # Spark passes on nothing of an error but its text.
    ("replication/divergence/read/task_errors.py", "failure_in"): "encoded by the task, and no words",
    # No words for people: a text of another kind.
    ("tops/core/commit/decision_sender.py", "DecisionSender._decision"): "bytes that are signed",
    ("tops/security/patterns.py", "Pattern.__post_init__"): "the text of a pattern of a role",
    ("tops/security/permissions.py", "Rule.parse"): "the text of a rule of a role",
    ("tops/security/permissions.py", "Role.allows"): "the text of a pattern of a role",
    ("replication/divergence/repair/writer.py", "_sqlite_value"): "a value of a row",
    ("replication/gateway/scram.py", "_split_header"): "a message of SCRAM",
    ("replication/gateway/values.py", "_numeric_to"): "a value of a row",
    ("replication/gateway/values.py", "_text"): "a value of a row",
    ("replication/model/touched_rows.py", "loose"): "a value of a row",
    ("replication/model/touched_rows.py", "_number"): "a value of a row",
    ("replication/tables/canonical.py", "marked"): "a value of a row",
    ("replication/tables/canonical.py", "is_marked"): "a value of a row",
    ("replication/tables/canonical.py", "digested"): "a value of a row",
    ("replication/tables/canonical.py", "numeric_text"): "a value of a row",
    ("replication/tables/canonical.py", "_in_microseconds"): "a value of a row",
    ("adapters/postgres/sql/fixed_times.py", "is_fixed_time"): "a value of a row",
    ("adapters/postgres/sql/fixed_times.py", "names_a_clock"): "a value of a row",
    ("adapters/postgres/sql/literals.py", "quote"): "a value of a row",
    ("adapters/postgres/copy/schema_dump.py", "_statements"): "a script of SQL",
    ("adapters/postgres/origin/session.py", "_holds_clock"): "a string in a statement",
    (
        "adapters/postgres/proof/printed.py",
        "rewritten_tree.listen",
    ): "a tree of nodes, sent as a notice",
    ("adapters/postgres/proof/tree.py", "parse"): "a tree of nodes as PostgreSQL prints it",
    ("adapters/postgres/proof/tree.py", "_Reader.__init__"): "a tree of nodes as PostgreSQL prints it",
}


@dataclass(frozen=True)
class Decision:
    """A place in the source that decides by words."""

    file: str
    function: str
    line: int
    code: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function or 'the module'}: {self.code}"


def holds_words(node: ast.expr) -> bool:
    """Whether an expression is a text for people, as far as its name tells."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.rpartition("_")[2] in WORDS  # not a constant's
        case ast.Call(func=ast.Name(id="str" | "repr"), args=[one]):
            return is_error(one)
        case ast.Call(func=ast.Attribute(value=inner, attr=attr)):
            return attr in SAME_WORDS and holds_words(inner)
        case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=str(name)), *_]):
            return name in WORDS
        case ast.Subscript(value=ast.Attribute(attr="args", value=owner)):
            return is_error(owner)
        case ast.Subscript(slice=ast.Constant(value=str(name))):
            return name in WORDS
        case ast.Subscript(value=inner):
            return holds_words(inner)
        case ast.JoinedStr(values=values):
            return any(
                isinstance(v, ast.FormattedValue) and (holds_words(v.value) or is_error(v.value)) for v in values
            )
        case ast.BoolOp(values=values):
            return any(map(holds_words, values))
        case ast.NamedExpr(target=target, value=value):
            return holds_words(target) or holds_words(value)
        case ast.IfExp(body=body, orelse=orelse):
            return holds_words(body) or holds_words(orelse)
    return False


def is_error(node: ast.expr) -> bool:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.rpartition("_")[2] in ERRORS
    return False


def is_presence(node: ast.expr) -> bool:
    """Whether something is compared with nothing: whether there are words at all is no matter of which."""
    return isinstance(node, ast.Constant) and node.value in (None, "", b"")


def decides(node: ast.AST) -> bool:
    """Whether this node decides by words."""
    match node:
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            operands = [left, *comparators]
            for op, one, other in zip(ops, operands, operands[1:], strict=False):
                if isinstance(op, ast.In | ast.NotIn) and (_may_hold(one, other) or holds_words(one)):
                    return True
                if isinstance(op, ast.Eq | ast.NotEq) and (holds_words(one) or holds_words(other)):
                    return not (is_presence(one) or is_presence(other))
        case ast.Call(func=ast.Attribute(value=ast.Name(id="re")), args=[_, *texts]):
            return any(map(holds_words, texts))
        case ast.Call(func=ast.Attribute(value=value, attr=attr), args=args):
            if attr in SEARCHES:
                return holds_words(value)
            return attr in PATTERNS and any(map(holds_words, args))
        case ast.Match(subject=subject, cases=cases):
            return holds_words(subject) and any(_has_text(case.pattern) for case in cases)
    return False


def _may_hold(part: ast.expr, whole: ast.expr) -> bool:
    """Whether a part is looked for in words: an id in a set of ids with such a name is none, a fixed text is."""
    if isinstance(whole, ast.Name | ast.Attribute):
        name = whole.id if isinstance(whole, ast.Name) else whole.attr
        if name.rpartition("_")[2] in AMBIGUOUS:
            fixed = isinstance(part, ast.Name | ast.Attribute) and ast.unparse(part).rpartition(".")[2].isupper()
            return fixed or isinstance(part, ast.Constant | ast.JoinedStr)
    return holds_words(whole)


def _has_text(pattern: ast.pattern) -> bool:
    values = [n.value for n in ast.walk(pattern) if isinstance(n, ast.MatchValue)]
    return any(isinstance(v, ast.Constant) and isinstance(v.value, str) and v.value for v in values)


def decisions_in(source: str, file: str) -> Iterator[Decision]:
    """Every place of a file that decides by words."""

    def walk(node: ast.AST, function: str) -> Iterator[Decision]:
        for child in ast.iter_child_nodes(node):
            inner = function
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{function}.{child.name}" if function else child.name
            if decides(child):
                yield Decision(file, function, getattr(child, "lineno", 0), ast.unparse(child).splitlines()[0])
            yield from walk(child, inner)

    return walk(ast.parse(source), "")


def decisions() -> list[Decision]:
    """Every place of the product that decides by words."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return [found for path in paths for found in decisions_in(path.read_text(), str(path.relative_to(ROOT)))]


def test_nothing_is_decided_by_words() -> None:
    found = [decision for decision in decisions() if (decision.file, decision.function) not in ALLOWED]

    assert not found, "these decide by a text for people; use a code, a type or a field:\n" + "\n".join(map(str, found))


def test_whatever_is_allowed_is_needed() -> None:
    needed = {(decision.file, decision.function) for decision in decisions()}

    assert set(ALLOWED) <= needed


PLANTED = {
    "a part of a reason": "if NOT_ALLOWED in reason: pass",
    "a part of an attribute": 'if "participant" in outcome.reason: pass',
    "a part of an error's text": 'if "ERROR: " in str(error): pass',
    "a part of an error's argument": 'if "gone" in error.args[0]: pass',
    "a part of an error in another text": 'if "gone" in f"{error}": pass',
    "a part in lower case": 'if "gone" in str(error).lower(): pass',
    "a part of what was refused": 'if "not-started" in done.refused: pass',
    "one of some words": 'found = message in ("paused", "gone")',
    "a part that is not there": 'found = "gone" not in self._problem',
    "the beginning": 'if reason.startswith("census:"): pass',
    "the end": 'if vote.excluded.message.endswith("again"): pass',
    "the whole": 'if text == "paused": pass',
    "another whole": "if refused.message != EXPECTED: pass",
    "the words before a colon": 'code, _, rest = reason.partition(": ")',
    "words without their beginning": 'rest = reason.removeprefix("census: ")',
    "a place in it": 'place = str(error).find("gone")',
    "a pattern of ours": "said = _SAID.fullmatch(reason)",
    "a pattern in a class": "said = NotDeterministic.SAID.match(text)",
    "a pattern of the moment": 'said = re.search(r"LostConnection: (.*)", str(error))',
    "a pattern of an element": 'said = _SAID.match(row["reason"])',
    "words or nothing": 'if "gone" in (reason or ""): pass',
    "a case": 'match reason:\n    case "paused":\n        pass',
}
INNOCENT = {
    "whether there is a reason": 'if reason == "" or reason is None or not reason: pass',
    "an id in a set": "found = tx in outcomes.refused",
    "a code": "if rejection.code is RejectionCode.TOO_LARGE: pass",
    "an SQLSTATE": 'if error.sqlstate.startswith("40"): pass',
    "a text that is passed on": 'raise Failed(f"{reason}; {error}")',
    "a text that is cut": "short = reason[:100]",
    "a case of a code": "match rejection.code:\n    case RejectionCode.VERSION:\n        pass",
}


@pytest.mark.parametrize("code", PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_decision_is_found(code: str) -> None:
    planted = f"class Machine:\n    def act(self):\n{_indented(code)}"

    assert [(d.function, d.line) for d in decisions_in(planted, "planted.py")] == [("Machine.act", 3)]


@pytest.mark.parametrize("code", INNOCENT.values(), ids=INNOCENT.keys())
def test_what_decides_by_no_words_is_not_found(code: str) -> None:
    assert list(decisions_in(code, "planted.py")) == []


def _indented(code: str) -> str:
    return "\n".join(f"        {line}" for line in code.splitlines())
