"""What a table looks like on one replica, and what several replicas have in common.

Types are folded into a few value kinds; a kind decides how a value is written as canonical text (`canonical.py`) and
how a server hashes it (`checksums.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec

from replication.tables.endpoints import Engine
from replication.tables.errors import CheckRejected

ABSENT = "absent"


class SchemaDifference(msgspec.Struct, frozen=True):
    """A column that the replicas do not define alike."""

    table: str
    column: str
    definitions: dict[str, str]  # by replica; "absent" where there is no such column


class ValueKind(Enum):
    """How values of a column are compared, whatever the database calls the type."""

    BOOLEAN = "boolean"
    INTEGER = "integer"
    NUMERIC = "numeric"
    FLOAT4 = "float4"
    FLOAT8 = "float8"
    TEXT = "text"
    CHAR = "char"  # trailing blanks do not count
    BYTES = "bytes"
    DATE = "date"
    TIME = "time"
    TIMESTAMP = "timestamp"
    TIMESTAMPTZ = "timestamptz"
    UUID = "uuid"
    JSON = "json"
    OTHER = "other"  # compared by the server's own text form


@dataclass(frozen=True, slots=True)
class Column:
    """One column as one replica defines it."""

    name: str
    declared: str
    kind: ValueKind
    nullable: bool = True
    generated: bool = False


@dataclass(frozen=True, slots=True)
class TableSchema:
    """One table as one replica defines it, with the figures that planning a check needs."""

    engine: Engine
    schema: str  # "main" for SQLite
    name: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]  # the primary key, else a unique index without NULLs; empty: none
    rows_estimate: int
    pages: int = 0
    key_follows_storage: bool = False  # ranges of the key are read cheaply from the index
    key_low: int | None = None  # smallest and largest value of a single integer key
    key_high: int | None = None

    @property
    def qualified(self) -> str:
        return f"{quoted(self.schema)}.{quoted(self.name)}"

    def column(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)

    @property
    def integer_key(self) -> bool:
        return len(self.key) == 1 and self.column(self.key[0]).kind is ValueKind.INTEGER


def quoted(name: str) -> str:
    """An SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """An SQL string constant; both engines take backslashes as they are."""
    return "'" + text.replace("'", "''") + "'"


@dataclass(frozen=True, slots=True)
class CommonTable:
    """What all compared replicas have of one table: the columns in one order, with kinds that fit all of them."""

    label: str  # the table as the user calls it
    key: tuple[str, ...]
    columns: tuple[Column, ...]  # key columns first
    schemas: Mapping[str, TableSchema]
    differences: tuple[SchemaDifference, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    @property
    def integer_key(self) -> bool:
        return all(schema.integer_key for schema in self.schemas.values())

    @property
    def rows_estimate(self) -> int:
        return max(schema.rows_estimate for schema in self.schemas.values())


def generated_in(table: CommonTable) -> frozenset[str]:
    """The columns whose values follow from the others, everywhere."""
    return frozenset(column.name for column in table.columns if column.generated)


def common_table(label: str, schemas: Mapping[str, TableSchema], common_columns_only: bool) -> CommonTable:
    """What to compare, or a refusal that says which replicas disagree and how to go on."""
    keys = {name: schema.key for name, schema in schemas.items()}
    keyless = [name for name, key in keys.items() if not key]
    if keyless:
        raise CheckRejected(
            f"table {label} has no primary key and no unique index without NULLs on {', '.join(keyless)}: "
            "rows can't be told apart; add a key"
        )
    if len(set(keys.values())) > 1:
        raise CheckRejected(f"table {label}: the replicas have different keys: {_by_replica(keys)}; make them the same")
    names = {name: {column.name for column in schema.columns} for name, schema in schemas.items()}
    shared = set.intersection(*names.values())
    uneven = sorted(set.union(*names.values()) - shared)
    if uneven and not common_columns_only:
        where = "; ".join(f"{c} only on {', '.join(r for r in schemas if c in names[r])}" for c in uneven)
        raise CheckRejected(
            f"table {label}: the replicas have different columns ({where}); align them, or compare what they share "
            "with --common-columns"
        )
    first = next(iter(schemas.values()))
    key = first.key
    ordered = [*key, *(c.name for c in first.columns if c.name in shared and c.name not in key)]
    columns = tuple(_common_column([s.column(name) for s in schemas.values()]) for name in ordered)
    return CommonTable(label, key, columns, schemas, _differences(label, schemas, uneven, ordered))


def _common_column(columns: Sequence[Column]) -> Column:
    kinds = {column.kind for column in columns}
    return Column(
        columns[0].name,
        columns[0].declared,
        kinds.pop() if len(kinds) == 1 else _common_kind(kinds),
        any(column.nullable for column in columns),
        any(column.generated for column in columns),
    )


def _common_kind(kinds: set[ValueKind]) -> ValueKind:
    """The kind in which values of both can be equal: 1 and 1.0 are, whichever type holds them."""
    for family, common in _FAMILIES:
        if kinds <= family:
            return common
    return ValueKind.TEXT


_FAMILIES = (
    ({ValueKind.INTEGER, ValueKind.NUMERIC}, ValueKind.NUMERIC),
    ({ValueKind.INTEGER, ValueKind.BOOLEAN}, ValueKind.BOOLEAN),
    ({ValueKind.FLOAT4, ValueKind.FLOAT8}, ValueKind.FLOAT4),
    ({ValueKind.TEXT, ValueKind.CHAR}, ValueKind.CHAR),
    ({ValueKind.TEXT, ValueKind.OTHER}, ValueKind.OTHER),
    ({ValueKind.TEXT, ValueKind.UUID}, ValueKind.UUID),
    ({ValueKind.TEXT, ValueKind.JSON}, ValueKind.JSON),
)


def _differences(
    label: str, schemas: Mapping[str, TableSchema], uneven: Sequence[str], shared: Sequence[str]
) -> tuple[SchemaDifference, ...]:
    """Columns defined unlike. Between engines only the kinds are compared: their type names never agree."""
    found = []
    for name in uneven:
        declared = {
            replica: next((c.declared for c in schema.columns if c.name == name), ABSENT)
            for replica, schema in schemas.items()
        }
        found.append(SchemaDifference(label, name, declared))
    for name in shared:
        columns = {replica: schema.column(name) for replica, schema in schemas.items()}
        by_engine: dict[Engine, set[str]] = {}
        for replica, column in columns.items():
            by_engine.setdefault(schemas[replica].engine, set()).add(column.declared.lower())
        alike = all(len(declared) == 1 for declared in by_engine.values())
        kinds = {column.kind for column in columns.values()}
        if not alike or (len(kinds) > 1 and not any(kinds <= family for family, _ in _FAMILIES)):
            found.append(SchemaDifference(label, name, {replica: c.declared for replica, c in columns.items()}))
    return tuple(found)


def _by_replica(values: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{replica}: ({', '.join(value)})" for replica, value in values.items())
