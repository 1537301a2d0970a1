"""Simulated clusters with routing transactions of each kind keep every promise, with faults."""

import pytest

from tops.model.routing import TxKind
from tops.sim.routing.runner import run_kind, run_seed

REGRESSIONS = {
    TxKind.STATIC: (661,),
    TxKind.DYNAMIC: (16, 75, 154, 237, 270),
    TxKind.ISOLATED: (105, 163, 239, 575, 827, 843, 1331, 1438),
}
SEEDS = 300


@pytest.mark.parametrize("kind", TxKind)
def test_no_promise_is_broken_in_300_runs(kind: TxKind) -> None:
    transactions = 0

    for seed in [*range(SEEDS), *REGRESSIONS[kind]]:
        result, _ = run_kind(seed, kind)
        assert result.violations == [], f"{kind.value} {seed}"
        transactions += result.transactions

    assert transactions > SEEDS


@pytest.mark.long
@pytest.mark.parametrize("kind", TxKind)
def test_no_promise_is_broken_in_20000_runs(kind: TxKind) -> None:
    bad = {seed: found for seed in range(20_000) if (found := run_kind(seed, kind)[0].violations)}

    assert bad == {}


def test_without_transactions_too_short_a_wait_sends_updates_astray() -> None:
    short = [run_kind(seed, TxKind.ISOLATED, wait_s=0.01)[0] for seed in range(10)]
    long = [run_kind(seed, TxKind.ISOLATED, wait_s=0.5)[0] for seed in range(10)]

    assert any("each_regular_update_reaches_one_agent" in found for result in short for found in result.violations)
    assert [result.violations for result in long] == [[]] * len(long)


def test_a_seed_replays_exactly() -> None:
    assert run_seed(7)[0].digest == run_seed(7)[0].digest
