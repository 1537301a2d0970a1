"""The order of row versions: total, the same everywhere, and fair to deletes."""

from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from replication.conflicts.clock import HybridClock
from replication.conflicts.tables import as_text, key_text
from replication.conflicts.versions import Base, Ranking, Version, base_of, on_top, to_json
from replication.model.values import pack_rows, unpack_rows

versions = st.builds(
    Version,
    generation=st.integers(1, 3),
    deleted=st.booleans(),
    edits=st.integers(1, 4),
    clock=st.integers(1, 5),
    site=st.sampled_from(["r1", "r2", "r3"]),
)


@given(st.lists(versions, min_size=1, max_size=6), st.sampled_from(["last-writer", "first-writer", "site-priority"]))
def test_the_highest_version_is_the_same_in_any_order(found: list[Version], resolver: str) -> None:
    rank = Ranking(resolver, ["r1", "r2", "r3"]).rank

    forwards, backwards = max(found, key=rank), max(reversed(found), key=rank)

    assert rank(forwards) == rank(backwards)


def test_a_delete_beats_a_later_update_and_loses_against_a_new_row() -> None:
    rank = Ranking("last-writer", []).rank
    deleted, updated = Version(1, True, 2, 10, "r1"), Version(1, False, 2, 99, "r2")

    assert rank(deleted) > rank(updated)
    assert rank(Version(2, False, 3, 11, "r1")) > rank(deleted)


@given(st.integers(-100, 100), st.lists(st.integers(-9, 9), max_size=5))
def test_increments_are_kept_whatever_base_wins(value: int, adds: list[int]) -> None:
    version = Version()
    for amount in adds:
        version = version.added({"n": amount})

    base = base_of({"n": value}, version.adds)

    assert on_top(base, version.adds) == {"n": value}
    assert on_top({"n": value}, version.adds) == {"n": value + sum(adds)}


def test_a_row_that_waits_for_the_log_is_kept_whole() -> None:
    version = Version(2, False, 3, 10, "r1").added({"n": Decimal("1.5")})

    assert Base.of(Base(version, {"a": "x", "b": None}).text) == Base(version, {"a": "x", "b": None})
    assert Base.of(Base(version, None).text).image is None


def test_a_clock_never_goes_back_and_follows_what_it_sees() -> None:
    now = [1_000]
    clock = HybridClock(lambda: now[0])
    first = clock.tick()
    now[0] = 500

    second = clock.tick()
    clock.see(second + 10_000 * 2**16)

    assert second > first
    assert clock.tick() > second + 10_000 * 2**16
    assert clock.skew_ms > 9_000


def test_numbers_beyond_sixty_four_bits_and_decimals_travel_whole() -> None:
    rows = [{"a": 2**70, "b": Decimal("1.10"), "c": None, "d": [Decimal(1), {"e": b"x"}]}]

    assert unpack_rows(pack_rows(rows)) == rows


@given(st.text(min_size=1), st.one_of(st.integers(), st.booleans(), st.text(), st.binary()))
def test_a_key_is_written_down_as_the_database_writes_its_values(name: str, value: object) -> None:
    assert key_text({name: value}) == to_json({name: as_text(value)})
