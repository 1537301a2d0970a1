"""What a write sets in motion beyond its own expressions: constraints, generated columns, indexes, foreign keys.

These are evaluated by the server whatever the statement says, so a table whose own definition is not proved takes no
shipped statement and no row change.
"""

from collections.abc import Iterable

from adapters.postgres.proof.expressions import Expressions
from adapters.postgres.proof.facts import ACTIONS, Column, Facts, ForeignKey, Index, TableFacts
from adapters.postgres.proof.tree import Node
from adapters.postgres.proof.verdict import SHIPPED, NotProved, Reason, Verdict

_KINDS = {"v": "a view", "m": "a materialized view", "f": "a foreign table", "p": "a partitioned table"}
_PERSISTENCE = {"u": "an unlogged table", "t": "a temporary table"}

_SUMMED = frozenset({"smallint", "integer", "bigint", "numeric", "real", "double precision", "interval"})


class Tables:
    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        # A constant of the schema is part of what replicas must have in common; one that a row is filled with is not
        # taken on trust if it was made from a clock when the table was.
        self._conditions = Expressions(facts, lambda _: "")
        self._values = Expressions(facts, lambda _: None)

    def check_write(self, table: TableFacts) -> Verdict:
        """Whether a row written to the table is checked, completed and indexed the same way everywhere."""
        kind = _KINDS.get(table.kind) or _PERSISTENCE.get(table.persistence)
        for applies, reason, detail in (
            (kind is not None or table.kind != "r", Reason.TABLE_KIND, f"{table.name} is {kind or 'no table'}"),
            (table.inherits, Reason.INHERITANCE, f"{table.name} is a parent, child or partition of another table"),
            (table.has_rules, Reason.RULE, f"{table.name} has rules"),
            (table.row_security, Reason.ROW_SECURITY, f"{table.name} has row-level security"),
            (bool(table.triggers), Reason.TRIGGER, f"{table.name} has trigger {', '.join(table.triggers)}"),
            (
                bool(table.deferrable_keys),
                Reason.DEFERRABLE_KEY,
                f"{table.name} has deferrable key {', '.join(table.deferrable_keys)}",
            ),
        ):
            if applies:
                return NotProved(reason, detail)
        return _first(
            *(
                _placed(self._conditions.check(check), f"constraint {name} of {table.name}", Reason.CONSTRAINT)
                for name, check in table.checks
            ),
            *(self._check_generated(table, column) for column in table.columns.values() if column.is_generated),
            *(self._check_index(table, index) for index in table.indexes),
        )

    def _check_generated(self, table: TableFacts, column: Column) -> Verdict:
        place = f"generated column {column.name} of {table.name}"
        if column.expression is None:
            return NotProved(Reason.GENERATED, "a generated column without an expression", place)
        return _placed(self._values.check(column.expression), place, Reason.GENERATED)

    def _check_index(self, table: TableFacts, index: Index) -> Verdict:
        place = f"index {index.name} of {table.name}"
        nodes: list[Node] = [*index.expressions, *([index.predicate] if index.predicate is not None else [])]
        verdict = _first(*(self._conditions.check(node) for node in nodes))
        if isinstance(verdict, NotProved) or not index.is_unique:
            return _placed(verdict, place, Reason.INDEX)
        pairs = zip(index.own_equality, index.collations, strict=False)
        return _placed(_first(*(self._check_equality(oid, collation) for oid, collation in pairs)), place, Reason.INDEX)

    def _check_equality(self, oid: int, collation: int) -> Verdict:
        allowed = self._facts.functions.allowed(oid)
        if allowed is None:
            return NotProved(Reason.FUNCTION, f"{self._facts.functions.name(oid)} decides what is equal")
        return self._conditions.check_collation(collation, allowed.collation)

    def check_default(self, table: TableFacts, column: Column) -> Verdict:
        """Whether a row that leaves the column out gets the same value everywhere."""
        place = f"default of column {column.name} of {table.name}"
        if column.is_identity:
            return NotProved(Reason.DEFAULT, "the next value of an identity column's sequence", place)
        if column.expression is None or column.is_generated:
            # Without a default of its own, the column gets NULL or its domain's default.
            return _placed(self._check_domain_default(column.type), place, Reason.DEFAULT)
        return _placed(self._values.check(column.expression), place, Reason.DEFAULT)

    def _check_domain_default(self, oid: int) -> Verdict:
        facts = self._facts.types[oid]
        if facts.default is not None:
            return self._values.check(facts.default)
        return self._check_domain_default(facts.of[0]) if facts.kind == "domain" else SHIPPED

    def check_values(self, table: TableFacts, names: Iterable[str]) -> Verdict:
        """Whether texts of these columns' values are read the same way everywhere."""
        by_name = {column.name: column for column in table.columns.values()}
        return _first(
            *(
                _placed(self._conditions.check_type(by_name[name].type), f"column {name} of {table.name}")
                for name in names
                if name in by_name
            )
        )

    def check_sum(self, table: TableFacts, names: Iterable[str]) -> Verdict:
        """Whether an amount added to these columns makes the same sum everywhere."""
        by_name = {column.name: column for column in table.columns.values()}
        for name in names:
            facts = self._facts.types[by_name[name].type]
            while facts.kind == "domain":
                facts = self._facts.types[facts.of[0]]
            if facts.name not in _SUMMED:
                return NotProved(Reason.TYPE, f"a sum of type {facts.name}", f"column {name} of {table.name}")
        return SHIPPED

    def check_delete(self, table: TableFacts) -> Verdict:
        return self._check_actions(table, [key for key in _to(table) if key.on_delete in ACTIONS])

    def check_update(self, table: TableFacts, assigned: frozenset[int]) -> Verdict:
        if any(column.is_generated for column in table.columns.values()):
            assigned = assigned | {column.number for column in table.columns.values() if column.is_generated}
        changed = [key for key in _to(table) if key.on_update in ACTIONS and key.referenced_columns & assigned]
        return self._check_actions(table, changed)

    def _check_actions(self, table: TableFacts, first: list[ForeignKey]) -> Verdict:
        """Actions run row by row, in an order that the plan decides. Where every table is reached in one way only, and
        no foreign key between those tables is left over, no row is touched twice and no check sees half of the work:
        then the order does not matter."""
        if not first:
            return SHIPPED
        reached, used = {table.oid}, list(first)
        for key in used:
            if key.referring not in reached:
                reached.add(key.referring)
                used += [next_key for next_key in table.foreign_keys if _follows(next_key, key.referring)]
        inside = [key for key in table.foreign_keys if key.referring in reached and key.referenced in reached]
        if len(inside) != max(len(reached) - 1, 1):
            names = ", ".join(sorted(key.name for key in inside))
            return NotProved(Reason.FOREIGN_KEY, f"the order of the actions of foreign keys {names} would decide")
        return _first(
            *(self.check_write(self._facts.tables[oid]) for oid in sorted(reached)),
            *(self._check_action(key) for key in used),
        )

    def _check_action(self, key: ForeignKey) -> Verdict:
        place = f"foreign key {key.name}"
        for oid in sorted(key.equalities):
            if self._facts.functions.allowed(oid) is None:
                return NotProved(Reason.FOREIGN_KEY, f"{self._facts.functions.name(oid)} decides what is equal", place)
        if "d" not in (key.on_delete, key.on_update):
            return SHIPPED
        referring = self._facts.tables[key.referring]
        columns = [referring.columns[number] for number in sorted(key.referring_columns)]
        return _first(*(_placed(self.check_default(referring, column), place) for column in columns))


def _to(table: TableFacts) -> list[ForeignKey]:
    return [key for key in table.foreign_keys if key.referenced == table.oid]


def _follows(key: ForeignKey, oid: int) -> bool:
    return key.referenced == oid and key.has_action


def _first(*verdicts: Verdict) -> Verdict:
    return next((verdict for verdict in verdicts if isinstance(verdict, NotProved)), SHIPPED)


def _placed(verdict: Verdict, place: str, reason: Reason | None = None) -> Verdict:
    return verdict.at(place, reason) if isinstance(verdict, NotProved) else verdict
