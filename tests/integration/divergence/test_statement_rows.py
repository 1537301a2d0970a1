"""What the text of a shipped statement tells about the one row that it changed."""

import pytest

from adapters.changes import Delete, Insert, RowChange, Statement, Update
from replication.divergence.explain.statement_rows import as_row_change

KEY = frozenset({"id"})


@pytest.mark.parametrize(
    ("sql", "args", "change"),
    [
        ("update t set v = $1, w = 'x' where id = $2", (5, 1), Update("t", {"id": 1}, {"v": 5, "w": "x"})),
        ("update t set v = v + 1, w = null where id = 1", (), Update("t", {"id": 1}, {"w": None}, {"v": None})),
        ("update t as o set v = -5 where o.id = 1 returning v", (), Update("t", {"id": 1}, {"v": -5})),
        ("delete from s.t where id = $1", ("a",), Delete("s.t", {"id": "a"})),
        ("insert into t (id, v) values ($1, true)", (1,), Insert("t", {"id": 1, "v": True})),
    ],
)
def test_constants_and_parameters_by_the_whole_key_are_a_row_change(
    sql: str, args: tuple[object, ...], change: RowChange
) -> None:
    assert as_row_change(Statement(sql, args), KEY) == change


@pytest.mark.parametrize(
    "sql",
    [
        "update t set v = 1",
        "update t set v = 1 where id = 1 and v = 2",
        "update t set v = 1 where id > 1",
        "update t set v = 1 where id = 1 or id = 2",
        "update t set v = 1 where id operator(s.=) 1",
        "update t set id = 2 where id = 1",
        "update t set (v, w) = (1, 2) where id = 1",
        "update t set v = 1 from u where id = 1",
        "delete from t using u where id = 1",
        "insert into t (id, v) values (1, now())",
        "insert into t (id, v) values (1, 2), (2, 3)",
        "insert into t (id, v) values (1, 2) on conflict do nothing",
        "insert into t (v) values (1)",
        "insert into t values (1, 2)",
        "with d as (delete from u) update t set v = 1 where id = 1",
        "update t set v = 1 where id = 1; delete from t",
        "not SQL",
    ],
)
def test_whatever_may_do_something_else_is_left_open(sql: str) -> None:
    assert as_row_change(Statement(sql), KEY) is None
