"""An INSERT of listed values is taken apart by its own text; anything else is left alone."""

import pytest

from adapters.postgres.origin.insert_text import insert_text


def test_values_are_cut_out_with_their_parameters_by_number() -> None:
    text = insert_text(
        """insert into s."tä" (a, "values") /* values (9) */ values
        ($1, 'ü,(x' || lower(E'\\'')), (default, array[1, f(2, $2)] -- the last one
        ) returning a, "values" as c, *;"""
    )

    assert text is not None
    assert (text.schema, text.table, text.columns) == ("s", "tä", ("a", "values"))
    assert text.rows == (
        (("", 1, ""), ("'ü,(x' || lower(E'\\'')",)),
        (None, ("array[1, f(2, ", 2, ")]")),
    )
    assert text.returned == (("a", "a"), ("c", "values"), ("", None))


def test_a_row_of_defaults_gives_nothing() -> None:
    text = insert_text("insert into t default values")

    assert text is not None
    assert (text.columns, text.rows, text.returned) == (None, ((),), ())


@pytest.mark.parametrize(
    "sql",
    [
        "insert into t select 1",
        "insert into t (values (1))",
        "insert into t values (1), (2) union all select 3",
        "insert into t values (1) order by 1",
        "insert into t values (1) limit 1",
        "insert into t values (1) on conflict do nothing",
        "with a as (select 1) insert into t values (1)",
        "insert into t as x values (1)",
        "insert into t (a[1]) values (1)",
        "insert into t (a.b) values (1)",
        "insert into t overriding user value values (1)",
        "insert into t values (1) returning a + 1",
        "insert into t values (1) returning t.a",
        "insert into t values (1) returning values",
        "update t set a = 1",
        "select 1",
    ],
)
def test_what_has_another_form_has_no_parts(sql: str) -> None:
    assert insert_text(sql) is None
