"""Writes as data: what is refused before it reaches a database, and what survives the wire."""

from decimal import Decimal

import pytest

from adapters.changes import (
    OWN,
    Delete,
    Insert,
    InvalidChange,
    Member,
    NotDeterministic,
    Statement,
    Update,
    Upsert,
    check_not_volatile,
    content_digest,
    decode_member,
    encode_member,
    joined_table_name,
    known_by_id,
    members_digest,
    own_key,
    split_table_name,
)
from tops.model.ids import TxId

VOLATILE = [
    "update t set a = now()",
    "update t set a = NOW ( )",
    "insert into t values (random())",
    "insert into t values (nextval('s'))",
    "insert into t values (gen_random_uuid())",
    "update t set a = current_timestamp",
    "update t set a = pg_catalog.clock_timestamp()",
    'update t set a = "now"()',
    "update t set a = 'now'::timestamptz",
    "update t set a = timestamp 'today'",
    "update t set a = cast('tomorrow' as date)",
    "update t set a = /* now() is fine here */ random()",
    "update t set a = 'it''s' || random()",
    "delete from t where id in (select id from t limit 1)",
    "update t set a = 1 where ctid = '(0,1)'",
    "update t set who = current_user",
    "insert into t select * from u tablesample system (10)",
]
DETERMINISTIC = [
    "update t set a = $1 where id = $2",
    "update t set a = 'now()'",
    "update t set a = 'random()' -- random()",
    "update t set a = $$now()$$",
    "update t set a = $tag$ now() $$ random() $tag$",
    "update t set a = E'\\'now()'",
    'update t set "now" = 1',
    "update t set now = 1",
    "delete from t where id in (select id from t order by id limit 1)",
    "/* a /* nested random() */ comment */ update t set a = 1",
    "with moved as (delete from t returning *) insert into u select * from moved",
    "update t set a = 'today'",
]


@pytest.mark.parametrize("sql", VOLATILE)
def test_a_statement_that_names_something_volatile_is_rejected_where_there_is_no_proof(sql: str) -> None:
    with pytest.raises(NotDeterministic):
        check_not_volatile(sql)


@pytest.mark.parametrize("sql", DETERMINISTIC)
def test_a_statement_that_does_the_same_everywhere_is_let_through(sql: str) -> None:
    check_not_volatile(sql)


def test_a_member_survives_the_wire_with_every_kind_of_change() -> None:
    member = Member(
        tx=TxId("b1.1.7"),
        changes=(
            Insert("t", {"id": 1, "b": b"\x00", "n": None}),
            Update("t", {"id": 1}, {"x": [1, 2]}, {"y": 2}, 5),
            Upsert("t", {"id": 1}, {"x": {"a": 1}}),
            Delete("t", {"id": 1}, 7),
            Statement("update t set a = $1", ("x",)),
        ),
        idempotency_key="k",
    )

    assert decode_member(encode_member(member)) == member


def test_a_member_known_by_its_id_is_shorter_on_the_wire_and_whole_behind_it() -> None:
    plain = Member(TxId("client.1.7"), (Insert("t", {"id": 1}),))
    known = known_by_id(plain, plain.tx)

    assert decode_member(encode_member(known)) == known
    assert encode_member(known).count(b"client.1.7") == 1
    assert (known.key, plain.key) == (own_key("client.1.7"), "")


@pytest.mark.parametrize(
    ("key", "content"), [("", ""), ("k", ""), ("k", "digest"), ("k", OWN), ("tx:another", OWN), ("tx:t", "digest")]
)
def test_any_other_key_travels_as_it_is(key: str, content: str) -> None:
    member = Member(TxId("t"), (), key, 60, content)

    assert decode_member(encode_member(member)) == member


def test_digests_tell_contents_apart_and_ignore_the_order_of_names() -> None:
    one = Member(TxId("a"), (Update("t", {"id": 1}, {"x": 1, "y": Decimal("1.0")}),))
    same = Member(TxId("b"), (Update("t", {"id": 1}, {"y": Decimal("1.0"), "x": 1}),))
    other = Member(TxId("a"), (Update("t", {"id": 1}, {"x": 2, "y": Decimal("1.0")}),))

    assert content_digest(one) == content_digest(same) != content_digest(other)
    assert members_digest([one, other]) != members_digest([other, one])


@pytest.mark.parametrize(
    ("written", "parts"),
    [
        ("acct", (None, "acct")),
        ("audit.acct", ("audit", "acct")),
        ('"a.b"', (None, "a.b")),
        ('"a.b"."c""d"', ("a.b", 'c"d')),
        ("my table", (None, "my table")),
        ("it's", (None, "it's")),
    ],
)
def test_table_names_are_taken_apart_at_dots_outside_quotes(written: str, parts: tuple[str | None, str]) -> None:
    assert split_table_name(written) == parts


@pytest.mark.parametrize("written", ["", ".", "a.", "a.b.c", 'a"b', '"a', '""'])
def test_broken_table_names_are_refused(written: str) -> None:
    with pytest.raises(InvalidChange):
        split_table_name(written)


@pytest.mark.parametrize(
    ("schema", "name", "joined"),
    [
        ("public", "t", "t"),
        ("shop", "t", "shop.t"),
        ("shop", "a.b", 'shop."a.b"'),
        ("public", 'say "x"', '"say ""x"""'),
    ],
)
def test_a_table_has_one_name_that_can_be_taken_apart_again(schema: str, name: str, joined: str) -> None:
    assert joined_table_name(schema, name) == joined
    assert split_table_name(joined) == (None if schema == "public" else schema, name)


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, "\ud800", object(), [2**70], {"a": "\udfff"}])
def test_a_value_that_can_t_travel_is_an_invalid_change(value: object) -> None:
    member = Member(TxId("t"), (Insert("t", {"id": 1, "v": value}),))

    for encode in (encode_member, content_digest):
        with pytest.raises(InvalidChange):
            encode(member)
