"""The comparison with plain PostgreSQL notices what it is for, and nothing that no statement determines."""

import pytest

from tests.corpus.comparison import named, split, unlike

PLAIN = ["(1,a,x,10:01)", "(2,b,y,10:02)", "(3,c,z,10:03)"]
LATER = ["(1,a,x,11:01)", "(2,b,y,11:02)", "(3,c,z,11:03)"]  # the same statement, at another time


def test_rows_that_differ_where_plain_databases_differ_are_alike() -> None:
    here = ["(1,a,x,12:01)", "(2,b,y,12:02)", "(3,c,z,12:03)"]

    assert unlike("t", split(here), split(PLAIN), split(LATER)) == ""
    assert unlike("t", split(PLAIN), split(PLAIN), split(PLAIN)) == ""
    assert unlike("t", [], [], []) == ""


@pytest.mark.parametrize(
    "here",
    [
        PLAIN[:2],
        [*PLAIN[:2], "(3,c,Z,10:03)"],
        ["(1,b,x,10:01)", "(2,a,y,10:02)", "(3,c,z,10:03)"],
        ["(2,a,x,10:01)", "(1,b,y,10:02)", "(3,c,z,10:03)"],
        ["(1,a,x,10:01,)", *PLAIN[1:]],
    ],
    ids=["a row less", "a value", "values changed places", "keys changed places", "a value more"],
)
def test_what_plain_databases_agree_on_is_the_same_in_the_set(here: list[str]) -> None:
    assert unlike("t", split(here), split(PLAIN), split(LATER)) != ""


def test_values_that_changed_places_are_noticed_beside_a_column_that_the_order_of_rows_decides() -> None:
    one = named([{"id": 1, "v": "a", "place": 1}, {"id": 2, "v": "b", "place": 2}])
    other = named([{"id": 1, "v": "a", "place": 2}, {"id": 2, "v": "b", "place": 1}])
    swapped = named([{"id": 1, "v": "b", "place": 1}, {"id": 2, "v": "a", "place": 2}])

    assert unlike("rows", one, one, other) == ""
    assert unlike("rows", swapped, one, other) == "rows: columns ['id', 'v'] are " + (
        "[('1', \"'b'\"), ('2', \"'a'\")] only in the set, [('1', \"'a'\"), ('2', \"'b'\")] only in PostgreSQL"
    )


def test_numbers_and_their_texts_are_not_alike() -> None:
    assert unlike("rows", named([{"n": "1"}]), named([{"n": 1}]), named([{"n": 1}])) != ""
