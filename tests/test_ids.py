"""Ids of writes that a replica commits first: what they tell, and how many of them are taken apart at once."""

import pytest

from adapters.changes import InvalidChange, Member, own_key
from replication.conflicts.own_statements import check_client
from replication.rpc.control import KEY_LENGTH_MAX, check_key
from replication.rpc.rejections import WriteRejected
from tops.model.ids import TxId, counted, counted_all, counted_id, parts_of_counted
from tops.model.sizes import TEXT_MAX


def test_a_counted_id_tells_its_series_and_number_its_key_and_its_replica() -> None:
    plain, keyed = counted_id("till.7", "life", 255, "", "r1"), counted_id("till.7", "life", 255, "order@1 ~ä", "r1")

    assert counted(plain) == ("till.7.life.@r1", 255)
    assert counted(keyed) is None, "it is known by its key"
    assert (parts_of_counted(plain), parts_of_counted(keyed)) == (("", "r1"), ("order@1 ~ä", "r1"))


@pytest.mark.parametrize(
    "other",
    [
        "t1",
        "",
        "a.1.7",
        "a.000000000A@r1",
        "a.00000000001@r1",
        "a.0000000001",
        ".0000000001@r1",
        "a.+00000001a@r1",
        "a.00_0000001@r1",
        "a.٠٠٠٠٠٠٠٠٠١@r1",
    ],
)
def test_other_ids_are_not_counted_alone_or_among_others(other: str) -> None:
    ours = [str(counted_id("a", "1", number, "", "r1")) for number in range(3)]

    assert counted(other) is None
    assert counted_all([*ours, other]) is None and counted_all([other, *ours]) is None


def test_ids_that_look_alike_have_not_both_series_and_number_in_common() -> None:
    alike = ["a.0000000001@b", "a@b.0000000001@", "a.@b.0000000001@", "a.0000000001@b.", "a.0000000001.0000000001@b"]

    assert len({counted(tx) for tx in alike}) == len(alike)
    assert None not in {counted(tx) for tx in alike}


def test_many_are_taken_apart_like_each_of_them() -> None:
    one_writer = [str(counted_id("a", "1", number, "", "r1")) for number in (5, 3, 900, 3)]
    several = [*one_writer, str(counted_id("b", "1", 5, "", "r1")), str(counted_id("a", "1", 5, "", "r2"))]

    for ids in (one_writer, several):
        assert counted_all(ids) == [counted(tx) for tx in ids]


@pytest.mark.parametrize("key", ["tops-barrier|x", own_key(counted_id("a", "1", 1, "", "r1"))])
def test_an_application_may_not_use_a_key_that_is_ours(key: str) -> None:
    with pytest.raises(WriteRejected, match=r"not for applications|id of a transaction"):
        check_key(key)


def test_a_key_is_bounded_and_the_longest_one_fits_an_id() -> None:
    check_key("😀" * KEY_LENGTH_MAX)
    assert len(counted_id("a" * 200, "1" * 16, 1, "😀" * KEY_LENGTH_MAX, "r" * 200)) <= TEXT_MAX
    with pytest.raises(WriteRejected, match="20000 characters; at most 255"):
        check_key("x" * 20_000)


def test_a_replica_takes_no_overlong_id_from_a_client() -> None:
    check_client(Member(TxId("a.1.1"), ()))
    with pytest.raises(InvalidChange, match=f"5000 characters; at most {TEXT_MAX}"):
        check_client(Member(TxId("x" * 5000), ()))


@pytest.mark.parametrize("key", ["order-1", "tx:order-1", "tx:", "tx", "a.1.0000000001@r1"])
def test_any_other_key_is_fine(key: str) -> None:
    check_key(key)
