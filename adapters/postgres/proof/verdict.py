"""What the proof says about a statement or a change: it ships, or the reason why it is not proved."""

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Why something is not proved deterministic; part of the interface, listed in docs/write-sets.md."""

    COMMAND = "command"  # neither INSERT, UPDATE nor DELETE
    SHAPE = "shape"  # WITH, subqueries, joins, aggregates, LIMIT: what rows are touched may depend on the plan
    FUNCTION = "function"  # a function or operator that is not on the list
    CLOCK = "clock"  # CURRENT_TIMESTAMP, CURRENT_USER and the like
    SEQUENCE = "sequence"  # the next value of a sequence
    TEXT_CONVERSION = "text-conversion"  # a cast by way of text reads settings and clocks
    SYSTEM_COLUMN = "system-column"  # ctid, xmin, tableoid: about storage, not about data
    COLLATION = "collation"  # the order or the equality of text would depend on the operating system
    MAY_FAIL = "may-fail"  # a condition that raises an error for some rows does so or not by the plan
    SLOW = "slow"  # a function that no time-out ends would run in the session that applies all writes
    LITERAL = "literal"  # a constant whose text may mean something else at another time or place
    TYPE = "type"  # a type whose values can't be proved to be read the same way everywhere
    EXPRESSION = "expression"  # a kind of expression that the proof does not know
    UNIQUE_KEY = "unique-key"  # many rows get new values in a unique index: fails or not by physical order
    DEFAULT = "default"  # a column's default is not the same everywhere
    TRIGGER = "trigger"
    RULE = "rule"
    ROW_SECURITY = "row-security"
    TABLE_KIND = "table-kind"  # views, foreign, unlogged and temporary tables
    INHERITANCE = "inheritance"
    DEFERRABLE_KEY = "deferrable-key"
    CONSTRAINT = "constraint"  # a CHECK, also one of a domain, whose outcome is not the same everywhere
    GENERATED = "generated"  # a generated column whose expression is not proved
    INDEX = "index"  # an index whose expression, predicate or equality is not proved
    FOREIGN_KEY = "foreign-key"  # actions of foreign keys whose order would decide
    UNREADABLE = "unreadable"  # the printed tree has something that the parser does not know


_ADVICE = {
    Reason.FUNCTION: "compute the value first and pass it as a parameter",
    Reason.CLOCK: "compute the value first and pass it as a parameter",
    Reason.SEQUENCE: "give the value",
    Reason.DEFAULT: "give the column's value",
    Reason.LITERAL: "write a date or time as digits, with a numeric offset from UTC",
    Reason.TEXT_CONVERSION: "pass the value as a parameter of its own type",
    Reason.UNIQUE_KEY: "write one row at a time, by its full primary key",
    Reason.SHAPE: "read first, then write the rows by their primary key",
    Reason.MAY_FAIL: "read first, then write the rows by their primary key",
    Reason.SLOW: "give the pattern, or what is searched for, as a short literal",
    Reason.COLLATION: 'compare with =, or use COLLATE "C"',
    Reason.TRIGGER: "drop the trigger, or do its work in the application",
    Reason.RULE: "drop the rule, and do its work with a trigger or in the application",
    Reason.TABLE_KIND: "write to an ordinary table",
}


@dataclass(frozen=True, slots=True)
class Shipped:
    """Every replica with the same rows and schema ends with the same rows, or fails."""


@dataclass(frozen=True, slots=True)
class NotProved:
    """`detail` says what stands in the way, `place` where it was found: a column, a constraint, a clause."""

    reason: Reason
    detail: str
    place: str = ""

    def at(self, place: str, reason: Reason | None = None) -> "NotProved":
        """The same seen from further out, where another reason may say more."""
        return NotProved(reason or self.reason, self.detail, f"{place}: {self.place}" if self.place else place)

    @property
    def sentence(self) -> str:
        where = f" ({self.place})" if self.place else ""
        advice = _ADVICE.get(self.reason)
        return f"{self.detail}{where}{f'; {advice}' if advice else ''}"


Verdict = Shipped | NotProved
SHIPPED = Shipped()
