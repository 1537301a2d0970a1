import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.statistics import Better, Figure, percentile

rates = st.floats(min_value=0.01, max_value=1e6)


def test_a_percentile_is_a_value_that_was_measured() -> None:
    ordered = [1.0, 2.0, 3.0, 4.0]

    assert percentile(ordered, 50) == 2.0
    assert percentile(ordered, 51) == 3.0
    assert percentile(ordered, 100) == 4.0
    assert percentile(ordered, 0) == 1.0


def test_a_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_more_throughput_than_the_peer_is_a_ratio_above_one() -> None:
    assert Figure.of_pairs([(200.0, 100.0)], Better.HIGHER).ratio == 2.0


def test_less_latency_than_the_peer_is_a_ratio_above_one() -> None:
    assert Figure.of_pairs([(1.0, 3.0)], Better.LOWER).ratio == 3.0


def test_a_ratio_compares_runs_of_one_pair_and_never_across_pairs() -> None:
    drifting = [(100.0, 50.0), (10.0, 5.0), (1000.0, 500.0)]

    figure = Figure.of_pairs(drifting, Better.HIGHER)

    assert (figure.low, figure.ratio, figure.high) == (2.0, 2.0, 2.0)


def test_a_record_has_what_readers_of_results_rely_on() -> None:
    record = Figure.of_pairs([(3.0, 1.0), (2.0, 1.0), (4.0, 2.0)], Better.HIGHER).record()

    assert record == {"ratio": 2.0, "ours": 3.0, "theirs": 1.0, "runs": 3, "low": 2.0, "high": 3.0}


def test_a_figure_without_pairs_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one pair"):
        Figure.of_pairs([], Better.HIGHER)


@given(st.lists(st.tuples(rates, rates), min_size=1, max_size=9), st.sampled_from(Better))
def test_the_ratio_lies_between_the_worst_and_the_best_pair(pairs: list[tuple[float, float]], better: Better) -> None:
    figure = Figure.of_pairs(pairs, better)

    assert figure.low <= figure.ratio <= figure.high


@given(st.lists(rates, min_size=1), st.floats(min_value=0, max_value=100))
def test_a_percentile_is_not_below_its_share_of_the_values(values: list[float], percent: float) -> None:
    found = percentile(sorted(values), percent)

    assert sum(value <= found for value in values) * 100 >= percent * len(values) * (1 - 1e-9)
