"""Whether an expression has the same value on every replica, given the same row and parameters.

Every kind of node must be known here and every function on the list; what is left out is not proved. With `total` the
expression must not be able to fail either: the server evaluates a condition for as many rows as its plan asks for, so
that an error in it comes or does not come by the plan, while the rows that it selects are the same.
"""

from collections.abc import Callable

from adapters.postgres.proof.facts import Facts
from adapters.postgres.proof.functions import Collation
from adapters.postgres.proof.tree import Node, Unreadable
from adapters.postgres.proof.verdict import SHIPPED, NotProved, Reason, Verdict
from adapters.postgres.sql.fixed_times import is_fixed_time

_BYTE_ORDERED = frozenset({950, 951})  # the collations "C" and "POSIX", whatever the database's own is
# Types whose order is that of their values on every machine; texts have it under "C" only.
_ORDERED = frozenset(
    {"smallint", "integer", "bigint", "numeric", "real", "double precision", "date", "uuid", "boolean", "bytea"}
    | {"timestamp without time zone", "timestamp with time zone", "time without time zone", "interval"}
)
_TEXTS = frozenset({"text", "character varying", "character"})
_READ_ALIKE = frozenset({"smallint", "integer", "bigint", "numeric", "boolean", "uuid"})
_WRITTEN_ALIKE = _READ_ALIKE | {"date", "timestamp without time zone", "time without time zone", "jsonb"}
_TYPE_FIELDS = {
    "VAR": "vartype",
    "CONST": "consttype",
    "PARAM": "paramtype",
    "FUNCEXPR": "funcresulttype",
    "OPEXPR": "opresulttype",
    "RELABELTYPE": "resulttype",
    "COERCEVIAIO": "resulttype",
}
_LIKE = frozenset({850, 851, 1569, 1570, 1631, 1632, 2005, 2006})  # LIKE and NOT LIKE: they fail only by their pattern
_BACKSLASH = "92"
_SHORT_BYTES = 256
# What only passes on, chooses between or gathers the values of its parts.
_NEUTRAL = frozenset(
    {"BOOLEXPR", "NULLTEST", "BOOLEANTEST", "RELABELTYPE", "COLLATEEXPR", "COALESCEEXPR", "CASEEXPR", "CASEWHEN"}
    | {"CASETESTEXPR", "ARRAYEXPR", "COERCETODOMAINVALUE"}
)

Literal = Callable[[Node], str | None]


class Expressions:
    """Checks expressions against what is known; `literal` finds the text of a constant in the statement, None if the
    constant does not come from there."""

    def __init__(self, facts: Facts, literal: Literal, *, of_client: bool = False) -> None:
        """`of_client`: a client has written the expressions. One that may hold up a replica's own session is not proved
        then: it is executed once, in a session that may be given up."""
        self._facts, self._literal, self._of_client = facts, literal, of_client

    def check(self, node: Node, *, total: bool = False) -> Verdict:
        found: Verdict = SHIPPED
        for inner in node.inner():  # first, since the innermost culprit says most
            found = self.check(inner, total=total)
            if isinstance(found, NotProved):
                break
        if isinstance(found, NotProved) and found.reason is not Reason.TYPE:
            return found
        own = self._check_itself(node, total)  # says more than the type of an argument
        return own if isinstance(own, NotProved) else found

    def _check_itself(self, node: Node, total: bool) -> Verdict:
        match node.kind:
            case "VAR":
                return _check_var(node)
            case "CONST":
                return self._check_constant(node)
            case "PARAM":
                return self.check_type(node.number("paramtype"))
            case "FUNCEXPR":
                if node.text("funcretset") != "false":
                    return NotProved(Reason.SHAPE, "a function that returns many rows")
                return self._check_function(node, node.number("funcid"), total)
            case "OPEXPR" | "DISTINCTEXPR" | "NULLIFEXPR" | "SCALARARRAYOPEXPR":
                return self._check_function(node, node.number("opfuncid"), total)
            case "MINMAXEXPR":
                return self._check_order(node)
            case "COERCETODOMAIN":
                return self._check_domain(node.number("resulttype"), total)
            case "SUBSCRIPTINGREF":
                # An element that is not there reads as NULL; an assignment, which has a source, may fail.
                writes = node["refassgnexpr"] is not None
                return NotProved(Reason.MAY_FAIL, "an assignment to an element") if total and writes else SHIPPED
            case "SQLVALUEFUNCTION":
                return NotProved(Reason.CLOCK, "CURRENT_DATE, CURRENT_TIMESTAMP, CURRENT_USER or the like")
            case "NEXTVALUEEXPR":
                return NotProved(Reason.SEQUENCE, "the next value of an identity column's sequence")
            case "COERCEVIAIO":
                return self._check_conversion(node, total)
            case "ARRAYCOERCEEXPR":
                return NotProved(Reason.TEXT_CONVERSION, "a cast of an array, element by element")
            case "SUBLINK":
                return NotProved(Reason.SHAPE, "a subquery")
            case kind if kind in _NEUTRAL:
                return SHIPPED
            case kind:
                return NotProved(Reason.EXPRESSION, f"an expression of kind {kind}")

    def _check_function(self, node: Node, oid: int, total: bool) -> Verdict:
        allowed = self._facts.functions.allowed(oid)
        if allowed is None:
            name = self._facts.functions.name(oid)
            return NotProved(Reason.FUNCTION, f"{name} is not known to give the same result everywhere")
        if total and not allowed.total and not _is_safe_like(node, oid):
            return NotProved(Reason.MAY_FAIL, "a condition with a function or operator that may fail")
        if self._of_client and allowed.slow and not all(map(_is_short, node.nodes("args")[1:])):
            return NotProved(Reason.SLOW, "a function or operator that no time-out ends, with arguments of any length")
        return self.check_collation(node.number("inputcollid"), allowed.collation)

    def check_collation(self, oid: int, needed: Collation) -> Verdict:
        if needed is Collation.ANY or oid in _BYTE_ORDERED:
            return SHIPPED
        if needed is Collation.EQUALITY and self._facts.deterministic_collations.get(oid, False):
            return SHIPPED
        what = "equality of text" if needed is Collation.EQUALITY else "order or case of text"
        return NotProved(Reason.COLLATION, f"the {what} depends on a collation of the operating system or library")

    def _check_order(self, node: Node) -> Verdict:
        name = self._type_name(node.number("minmaxtype"))
        if name in _TEXTS:
            return self.check_collation(node.number("inputcollid"), Collation.BYTES)
        return SHIPPED if name in _ORDERED else NotProved(Reason.TYPE, f"GREATEST or LEAST of type {name}")

    def _check_conversion(self, node: Node, total: bool) -> Verdict:
        """A cast by way of text: safe where the type's text is the same under the settings that every session pins."""
        source, target = self._name_of_type(node.node("arg")), self._type_name(node.number("resulttype"))
        if source in _WRITTEN_ALIKE and target in _TEXTS:
            return SHIPPED
        if source in _TEXTS and target in _READ_ALIKE:
            return NotProved(Reason.MAY_FAIL, f"a condition with a cast to {target}") if total else SHIPPED
        return NotProved(Reason.TEXT_CONVERSION, f"a cast from {source} to {target} by way of text")

    def _name_of_type(self, node: Node | None) -> str:
        field = _TYPE_FIELDS.get(node.kind) if node is not None else None
        return self._type_name(node.number(field)) if node is not None and field is not None else "an expression"

    def _type_name(self, oid: int) -> str:
        facts = self._facts.types.get(oid)
        return facts.name if facts is not None else f"type {oid}"

    def _check_domain(self, oid: int, total: bool) -> Verdict:
        if total:
            return NotProved(Reason.MAY_FAIL, "a condition with a cast to a domain")
        return self.check_type(oid)

    def _check_constant(self, node: Node) -> Verdict:
        if node.text("constisnull") == "true":
            return SHIPPED
        oid = node.number("consttype")
        verdict = self.check_type(oid)
        if isinstance(verdict, NotProved) or not self.holds_time(oid):
            return verdict
        text = self._literal(node)
        if text is None:
            return NotProved(Reason.LITERAL, "a date or time that was computed when the schema was made")
        return SHIPPED if is_fixed_time(text) else NotProved(Reason.LITERAL, f"'{text}' may be another time elsewhere")

    def check_type(self, oid: int) -> Verdict:
        """Whether texts of the type are read the same way everywhere, and its checks have the same outcome."""
        facts = self._facts.types.get(oid)
        if facts is None:
            raise Unreadable(f"type {oid} was not loaded")
        if facts.kind == "other":
            return NotProved(Reason.TYPE, f"type {facts.name}")
        of_schema = Expressions(self._facts, lambda _: "")
        for name, check in facts.checks:
            verdict = of_schema.check(check)
            if isinstance(verdict, NotProved):
                return verdict.at(f"constraint {name} of domain {facts.name}", Reason.CONSTRAINT)
        for part in facts.of:
            verdict = self.check_type(part)
            if isinstance(verdict, NotProved):
                return verdict
        return SHIPPED

    def holds_time(self, oid: int) -> bool:
        facts = self._facts.types[oid]
        return facts.kind == "time" or any(map(self.holds_time, facts.of))


def _check_var(node: Node) -> Verdict:
    if node.number("varlevelsup") != 0:
        return NotProved(Reason.SHAPE, "a column of an outer query")
    if node.number("varattno") <= 0:
        return NotProved(Reason.SYSTEM_COLUMN, "a system column or a whole row")
    return SHIPPED


def _is_safe_like(node: Node, oid: int) -> bool:
    """LIKE fails where an escape ends the pattern: not where a constant pattern has none."""
    if oid not in _LIKE:
        return False
    pattern = node.nodes("args")[1]
    value = pattern.fields.get("constvalue") if pattern.kind == "CONST" else None
    return isinstance(value, list) and _BACKSLASH not in value


def _is_short(argument: Node) -> bool:
    """Whether an argument is a constant so short that a function of it and of a long value ends soon."""
    if argument.kind != "CONST":
        return False
    value = argument.fields.get("constvalue")
    return not isinstance(value, list) or len(value) <= _SHORT_BYTES
