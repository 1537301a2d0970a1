"""Printed node trees: what is read, and what is rejected rather than guessed."""

import pytest

from adapters.postgres.proof.expressions import Expressions
from adapters.postgres.proof.facts import Facts
from adapters.postgres.proof.functions import Collation, listed
from adapters.postgres.proof.tree import Node, Unreadable, parse
from adapters.postgres.proof.verdict import NotProved, Reason, Shipped
from adapters.postgres.sql.fixed_times import is_fixed_time, literal_at


def test_nodes_lists_and_constants_are_read() -> None:
    tree = parse("({OPEXPR :opno 96 :args ({VAR :varno 1} {CONST :constvalue 4 [ 1 0 -2 0 ]}) :rest <> :set (b 8 9)})")

    assert isinstance(tree, list)
    (operator,) = tree
    assert isinstance(operator, Node)
    assert [node.kind for node in operator.walk()] == ["OPEXPR", "VAR", "CONST"]
    assert operator.nodes("args")[1]["constvalue"] == ["1", "0", "-2", "0"]
    assert (operator["rest"], operator.numbers("set")) == (None, [8, 9])


def test_a_name_that_looks_like_a_field_or_a_node_is_a_name() -> None:
    tree = parse(r"{TARGETENTRY :resname :expr :expr {CONST :a \{VAR\ :varno\ 1\}} :resno 1}")

    assert isinstance(tree, Node)
    assert (tree["resname"], tree["resno"]) == (":expr", "1")
    assert [node.kind for node in tree.walk()] == ["TARGETENTRY", "CONST"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{VAR",
        "{VAR :varno 1",
        "{VAR :varno}",
        "{VAR varno 1}",
        "{VAR :varno 1 :varno 2}",
        "{VAR :varno 1} {VAR :varno 2}",
        "({VAR :varno 1}",
        "{CONST :constvalue 4}",
        "{CONST :constvalue 4 [ 1 2 }",
        "{VAR :name a\\\n}",
        "{VAR :name a\\",
        "(" * 5000,
    ],
    ids=lambda text: text[:25],
)
def test_what_is_no_tree_is_rejected(text: str) -> None:
    with pytest.raises(Unreadable):
        parse(text)


def test_a_field_of_another_kind_is_rejected() -> None:
    node = parse("{VAR :varno x :args {VAR :varno 1}}")
    assert isinstance(node, Node)

    for wrong in (lambda: node.number("varno"), lambda: node.nodes("args"), lambda: node["nosuch"]):
        with pytest.raises(Unreadable):
            wrong()


@pytest.mark.parametrize(
    ("text", "fixed"),
    [
        ("2026-01-01 10:00:00+02", True),
        ("2026-01-01T10:00:00.5Z", True),
        ("0044-03-15 BC", True),
        ("{2026-01-01,NULL}", True),
        ("[2026-01-01,infinity)", True),
        ("now", False),
        ("Today 12:00", False),
        ("2026-01-01 10:00 Europe/Berlin", False),
        ("2026-01-01 10:00 CET", False),
        ("1 Jan 2026", False),
        ("{now}", False),
        ("allballs", False),
    ],
)
def test_times_that_need_no_clock_and_no_time_zone_data(text: str, fixed: bool) -> None:
    assert is_fixed_time(text) is fixed


@pytest.mark.parametrize(
    ("sql", "found"),
    [
        ("'2026-01-01'", "2026-01-01"),
        ("'2026-01-01'::date", "2026-01-01"),
        ("'2026-01-01 '\n'now'", None),
        ("'2026-01-01 ' -- more\n 'now'", None),
        ("'2026''01'", None),
        ("E'\\x6eow'", None),
        ("$$now$$", None),
        ("42", None),
    ],
)
def test_only_a_plain_literal_is_taken_for_its_text(sql: str, found: str | None) -> None:
    assert literal_at(sql.encode(), 0) == found
    assert literal_at(sql.encode(), -1) is None


def test_equality_of_text_needs_a_deterministic_collation_and_order_needs_bytes() -> None:
    facts = Facts(None)  # type: ignore[arg-type]
    facts.deterministic_collations = {100: True, 7: False}
    check = Expressions(facts, lambda _: None).check_collation

    assert isinstance(check(100, Collation.EQUALITY), Shipped)
    assert isinstance(check(950, Collation.BYTES), Shipped)
    assert isinstance(check(7, Collation.ANY), Shipped)
    for oid, needed in ((7, Collation.EQUALITY), (100, Collation.BYTES), (999, Collation.EQUALITY)):
        verdict = check(oid, needed)
        assert isinstance(verdict, NotProved) and verdict.reason is Reason.COLLATION


def test_the_list_of_functions_has_nothing_that_depends_on_a_machine() -> None:
    names = {signature.partition("(")[0] for signature in listed()}

    assert len(listed()) > 500
    assert names.isdisjoint(
        {"now", "random", "nextval", "clock_timestamp", "to_char", "exp", "power", "sin", "ln", "to_tsvector", "format"}
        | {"concat", "xmlparse", "convert", "normalize", "quote_ident", "current_setting", "set_config", "pg_sleep"}
    )
    assert all(listed()[f"{name}(text)"].collation is Collation.BYTES for name in ("lower", "upper", "initcap"))
    assert listed()["text_lt(text,text)"].collation is Collation.BYTES
    assert listed()["texteq(text,text)"].collation is Collation.EQUALITY
    assert not listed()["int4div(integer,integer)"].total
