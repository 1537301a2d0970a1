"""Whether a rewritten INSERT, UPDATE or DELETE does the same on every replica.

INSERT: rows made of proved values, in the order in which the statement lists them. What ON CONFLICT finds is one row by
a unique key, and the rows are taken one after the other, so conflicts are met in the same order everywhere.

UPDATE and DELETE of one table: the condition selects the same rows everywhere, because it is proved and can't fail, and
each row's new values depend on that row alone. The order of the rows differs from replica to replica, so nothing may
depend on it: constraints are checked per row, foreign keys at the end of the statement. A unique index is checked row
by row against rows that are not updated yet, so its columns are assigned only where a key fixes at most one row. An
error in a new value fails the statement everywhere, since the same rows are updated everywhere.
"""

from adapters.postgres.proof.expressions import Expressions
from adapters.postgres.proof.facts import Facts, TableFacts
from adapters.postgres.proof.tables import Tables
from adapters.postgres.proof.tree import Node, Unreadable, Value, nodes_of
from adapters.postgres.proof.verdict import SHIPPED, NotProved, Reason, Verdict

_UPDATE, _INSERT, _DELETE = "2", "3", "4"
_COMMANDS = {"1": "SELECT", "5": "MERGE", "6": "a utility command"}
_VALUES, _VIEW = "5", "v"  # the kind of an entry of the range table, and of the table behind it
_ATTRIBUTES_FROM = -7  # a set of columns counts from the lowest system column
# Fields of a query that are looked at, or that change nothing. All others must be empty, also those of later versions.
_READ = frozenset(
    {"commandType", "canSetTag", "resultRelation", "rtable", "rteperminfos", "jointree", "targetList", "override"}
    | {"onConflict", "returningList", "limitOption", "constraintDeps", "stmt_location", "stmt_len"}
)
_EMPTY: tuple[Value, ...] = (None, "false", "0", [])
_NAMES = {
    "cteList": "WITH",
    "hasModifyingCTE": "WITH",
    "hasSubLinks": "a subquery",
    "hasAggs": "an aggregate",
    "hasWindowFuncs": "a window function",
    "hasTargetSRFs": "a function that returns many rows",
    "limitCount": "LIMIT",
    "sortClause": "ORDER BY",
    "setOperations": "UNION, INTERSECT or EXCEPT",
    "querySource": "a rule",
}


def target_of(query: Node) -> int:
    """The id of the table that a query writes to; 0 for one that writes to none."""
    place = query.number("resultRelation")
    tables = query.nodes("rtable")
    return tables[place - 1].number("relid") if 0 < place <= len(tables) else 0


def inserted_values(query: Node) -> list[Node] | None:
    """The expressions of all columns of all rows of an INSERT … VALUES, defaults among them; None if it is more than
    that."""
    if query.text("commandType") != _INSERT or query["onConflict"] is not None:
        return None
    if any(name not in _READ and value not in _EMPTY for name, value in query.fields.items()):
        return None
    entries, place, source = query.nodes("rtable"), query.number("resultRelation"), query.node("jointree")
    sources = [entry for number, entry in enumerate(entries, 1) if number != place]
    if source is None or source["quals"] is not None or any(entry.text("rtekind") != _VALUES for entry in sources):
        return None
    return query.nodes("targetList") + [node for entry in sources for node in _listed(entry["values_lists"])]


class Commands:
    """The proof of one statement: `expressions` knows its text, `facts` holds what its tree mentions."""

    def __init__(self, facts: Facts, expressions: Expressions) -> None:
        self._facts, self._expressions = facts, expressions
        self._tables = Tables(facts)

    def check(self, query: Node) -> Verdict:
        command = query.text("commandType")
        if command not in (_INSERT, _UPDATE, _DELETE):
            return NotProved(Reason.COMMAND, f"{_COMMANDS.get(command, 'the command')} is no INSERT, UPDATE or DELETE")
        if any(entry.fields.get("relkind") == _VIEW for entry in query.nodes("rtable")):
            return NotProved(Reason.TABLE_KIND, "a view")
        table = self._facts.tables[target_of(query)]
        verdict = self._tables.check_write(table)
        if isinstance(verdict, NotProved):
            return verdict
        for name, value in query.fields.items():
            if name not in _READ and value not in _EMPTY:
                return NotProved(Reason.SHAPE, _NAMES.get(name, f"a clause of kind {name}"))
        if command == _INSERT:
            verdict = self._check_insert(query, table)
        else:
            verdict = self._check_by_row(query, table, deletes=command == _DELETE)
        if isinstance(verdict, NotProved):
            return verdict
        return self._check_list(query.nodes("returningList"), "RETURNING")

    # ------------------------------------------------------------------------------------------------------- INSERT

    def _check_insert(self, query: Node, table: TableFacts) -> Verdict:
        conflict = query.node("onConflict")
        excluded = conflict.number("exclRelIndex") if conflict is not None else 0
        sources = [
            entry
            for place, entry in enumerate(query.nodes("rtable"), 1)
            if place not in (query.number("resultRelation"), excluded)
        ]
        if any(entry.text("rtekind") != _VALUES for entry in sources) or len(sources) > 1:
            return NotProved(Reason.SHAPE, "INSERT … SELECT")
        source = query.node("jointree")
        if source is None or source["quals"] is not None:
            return NotProved(Reason.SHAPE, "INSERT with a condition")
        verdict = self._check_targets(query, table)
        if isinstance(verdict, NotProved):
            return verdict
        for node in (node for entry in sources for node in _listed(entry["values_lists"])):
            verdict = self._expressions.check(node)
            if isinstance(verdict, NotProved):
                return verdict.at("VALUES")
        return SHIPPED if conflict is None else self._check_conflict(conflict, table)

    def _check_targets(self, query: Node, table: TableFacts) -> Verdict:
        given = _inserted_columns(query)
        for entry in query.nodes("targetList"):
            column = table.columns.get(entry.number("resno"))
            verdict = self._check_entry(entry)
            if isinstance(verdict, NotProved) and column is not None:
                if given is not None and column.number not in given:
                    return verdict.at(f"default of column {column.name} of {table.name}", Reason.DEFAULT)
                return verdict.at(f"column {column.name} of {table.name}")
            if isinstance(verdict, NotProved):
                return verdict
        return SHIPPED

    def _check_conflict(self, conflict: Node, table: TableFacts) -> Verdict:
        assigned = conflict.nodes("onConflictSet")
        verdict = self._check_list(assigned, "DO UPDATE")
        where = conflict.node("onConflictWhere")
        if isinstance(verdict, NotProved) or not assigned:
            return verdict
        if where is not None:  # evaluated for the one row in conflict, so it may fail: it does everywhere
            verdict = self._expressions.check(where)
            if isinstance(verdict, NotProved):
                return verdict.at("DO UPDATE … WHERE")
        return self._tables.check_update(table, frozenset(entry.number("resno") for entry in assigned))

    # ------------------------------------------------------------------------------------------- UPDATE and DELETE

    def _check_by_row(self, query: Node, table: TableFacts, *, deletes: bool) -> Verdict:
        source = query.node("jointree")
        entries = query.nodes("rtable")
        if source is None or len(entries) != 1 or len(source.nodes("fromlist")) != 1:
            return NotProved(Reason.SHAPE, "more than one table")
        condition = source.node("quals")
        if condition is not None:
            verdict = self._expressions.check(condition, total=True)
            if isinstance(verdict, NotProved):
                return verdict.at("WHERE")
        if deletes:
            return self._tables.check_delete(table)
        targets = query.nodes("targetList")
        verdict = self._check_list(targets, "SET")
        if isinstance(verdict, NotProved):
            return verdict
        assigned = frozenset(entry.number("resno") for entry in targets)
        unique = table.unique_columns & assigned
        if unique and not _is_one_row(condition, table):
            names = ", ".join(table.columns[number].name for number in sorted(unique))
            return NotProved(Reason.UNIQUE_KEY, f"column {names} of a unique index is assigned in many rows")
        return self._tables.check_update(table, assigned)

    # -------------------------------------------------------------------------------------------------- expressions

    def _check_list(self, entries: list[Node], clause: str) -> Verdict:
        for entry in entries:
            verdict = self._check_entry(entry)
            if isinstance(verdict, NotProved):
                return verdict.at(clause)
        return SHIPPED

    def _check_entry(self, entry: Node) -> Verdict:
        expression = entry.node("expr")
        if entry.kind != "TARGETENTRY" or expression is None:
            raise Unreadable(f"{entry.kind} where a target is expected")
        return self._expressions.check(expression)


def _listed(rows: Value) -> list[Node]:
    """All values of all rows of VALUES."""
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise Unreadable("VALUES without rows")
    return [node for row in rows if isinstance(row, list) for node in nodes_of(row)]


def _inserted_columns(query: Node) -> frozenset[int] | None:
    """The columns that the statement itself gives; None where the server does not print them in this way."""
    if "rteperminfos" not in query.fields:
        return None
    target = query.nodes("rtable")[query.number("resultRelation") - 1]
    info = query.nodes("rteperminfos")[target.number("perminfoindex") - 1]
    return frozenset(number + _ATTRIBUTES_FROM for number in info.numbers("insertedCols"))


def _is_one_row(condition: Node | None, table: TableFacts) -> bool:
    """Whether the condition fixes all columns of a unique index by its own equality, and so at most one row."""
    fixed = {pair for conjunct in _conjuncts(condition) for pair in _fixed(conjunct)}
    return any(
        index.is_unique
        and not index.is_exclusion
        and index.predicate is None
        and not index.expressions
        and all(
            any((column, function) in fixed for function in functions)
            for column, functions in zip(index.columns, index.equalities, strict=False)
        )
        for index in table.indexes
    )


def _conjuncts(condition: Node | None) -> list[Node]:
    if condition is None:
        return []
    if condition.kind == "BOOLEXPR" and condition.text("boolop") == "and":
        return [part for inner in condition.nodes("args") for part in _conjuncts(inner)]
    return [condition]


def _fixed(conjunct: Node) -> list[tuple[int, int]]:
    """`column = value` or `value = column`, as the column and the function of the operator."""
    if conjunct.kind != "OPEXPR" or len(args := conjunct.nodes("args")) != 2:
        return []
    function = conjunct.number("opfuncid")
    return [
        (_bare(one).number("varattno"), function)
        for one, other in (args, args[::-1])
        if _bare(one).kind == "VAR" and not any(node.kind == "VAR" for node in other.walk())
    ]


def _bare(node: Node) -> Node:
    """A varchar is compared as text: the value is the same."""
    while node.kind == "RELABELTYPE" and (inner := node.node("arg")) is not None:
        node = inner
    return node
