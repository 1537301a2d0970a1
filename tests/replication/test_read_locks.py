"""A row has one name, however its key is written; where only the database could tell, it has none."""

from decimal import Decimal
from uuid import UUID

import pytest

from adapters.changes import Row
from adapters.postgres.sql.literals import SqlType
from replication.conflicts.read_locks import spelled
from replication.conflicts.tables import TableShape

IDENT = "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"


BASES = {"bigint": "int8", "integer": "int4", "character varying": "varchar", "character": "bpchar"}


def shape(*, is_loose: bool = False, **types: str) -> TableShape:
    """A table whose key has these columns."""
    names = {column: declared.partition("(")[0] for column, declared in types.items()}
    key_types = {
        column: SqlType(
            name,
            "",
            is_integer=name in ("bigint", "integer"),
            is_uuid=name == "uuid",
            base=BASES.get(name, name),
            is_loose=is_loose,
            declared=types[column],
        )
        for column, name in names.items()
    }
    return TableShape("things", tuple(types), (), {}, types, key_types=key_types)


@pytest.mark.parametrize(
    ("sql_type", "spellings"),
    [
        ("bigint", [7, "7", "007"]),
        ("text", ["7"]),
        ("character varying(20)", ["seven"]),
        ("uuid", [IDENT, IDENT.upper(), UUID(IDENT)]),
    ],
)
def test_spellings_of_one_key_name_one_row(sql_type: str, spellings: list[object]) -> None:
    names = {spelled(shape(id=sql_type), {"id": value}) for value in spellings}

    assert len(names) == 1
    assert None not in names


@pytest.mark.parametrize(
    ("sql_type", "value"),
    [
        ("numeric", Decimal("1.50")),
        ("character(5)", "a"),
        ("citext", "A"),
        ("integer", "seven"),
        ("integer", "0x7"),
        ("integer", 2**31),
        ("integer", None),
        ("character varying(3)", "abc "),
        ("date", "20260101"),
        ("boolean", "yes"),
    ],
)
def test_a_key_that_has_several_spellings_names_no_row(sql_type: str, value: object) -> None:
    assert spelled(shape(id=sql_type), {"id": value}) is None


def test_a_text_whose_collation_takes_others_for_equal_names_no_row() -> None:
    assert spelled(shape(id="text", is_loose=True), {"id": "Ann"}) is None


def test_every_column_of_a_key_counts() -> None:
    pair = shape(a="integer", b="text")
    rows: list[Row] = [{"a": 1, "b": "x"}, {"b": "x", "a": 1}, {"a": 1, "b": "y"}, {"a": 1}]

    names = [spelled(pair, row) for row in rows]

    assert names[0] == names[1] != names[2]
    assert names[3] is None
