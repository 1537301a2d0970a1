"""Lists that are cut to the size of a message."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from adapters.parcels import parcels


@given(st.lists(st.binary(max_size=8)), st.integers(1, 20))
def test_nothing_is_lost_or_turned_round_and_no_list_could_take_the_next_item(items: list[bytes], limit: int) -> None:
    cut = [list(parcel) for parcel in parcels(items, len, limit)]

    assert [item for parcel in cut for item in parcel] == items
    for parcel, following in itertools.pairwise(cut):
        assert len(b"".join(parcel)) <= limit or len(parcel) == 1
        assert len(b"".join([*parcel, following[0]])) > limit


def test_an_item_that_is_too_long_is_alone() -> None:
    assert list(parcels([b"a", b"bbbb", b"c"], len, 3)) == [[b"a"], [b"bbbb"], [b"c"]]
