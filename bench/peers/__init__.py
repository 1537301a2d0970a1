"""The systems that users would otherwise choose, each behind the port of `bench.systems`, durable and on loopback.

`run` is `tops bench peers`: all of them on workload W. NATS is a peer of the overlay and not among them.
"""

from collections.abc import Sequence
from contextlib import AsyncExitStack

import uvloop

from bench.harness import QUICK_BUDGET_S, Budget, Contender, Load, alternate, say, start_all
from bench.peers.galera import Galera
from bench.peers.logical import LogicalReplication
from bench.peers.pgpool import Pgpool
from bench.peers.single import SinglePostgres
from bench.peers.streaming import Mode, StreamingReplication
from bench.peers.two_phase import HandWrittenTwoPhaseCommit
from bench.results import Result, result, spread
from bench.systems import System
from bench.workloads import Dataset, SingleRowUpdate, Totals

CLIENTS = (1, 16, 64)
ROUNDS = 5
DRAIN_FIRST_ID = 1_000_000_000  # beyond every id that a workload gives


def all_peers(*, profile: bool = False) -> list[System]:
    """A fresh instance of each, the plainest first."""
    return [
        SinglePostgres(),
        *(StreamingReplication(mode) for mode in Mode),
        LogicalReplication(),
        HandWrittenTwoPhaseCommit(profile=profile),
        Galera(),
        Pgpool(),
    ]


def run(quick: bool, profile: bool = False) -> Result:
    """W with 1, 16 and 64 clients on every peer that runs here, in turn."""
    return uvloop.run(_run(quick, profile))


async def _run(quick: bool, profile: bool) -> Result:
    budget = Budget(QUICK_BUDGET_S if quick else None)
    dataset = Dataset()
    loads = [Load(clients, 0.5, 2.0) if quick else Load(clients, 2.0, 6.0) for clients in CLIENTS]
    async with AsyncExitStack() as stack:
        contenders, missing = await start_all(stack, all_peers(profile=profile), dataset)
        runs = await alternate(contenders, SingleRowUpdate(dataset), loads, 1 if quick else ROUNDS, budget)
        drains = await _drains(contenders, [20_000] if quick else [100_000] * 3, budget)
        shortened = [f"{ROUNDS - 1} of {ROUNDS} rounds", "two thirds of every run's duration"] if quick else []
        return await result(
            "peers",
            contenders,
            runs,
            measures={"logical.drain_tps": spread(drains)} if drains else {},
            missing=missing,
            left_out=[*shortened, *budget.left_out],
        )


async def _drains(contenders: Sequence[Contender], sizes: Sequence[int], budget: Budget) -> list[float]:
    """How fast logical subscribers work off a backlog: what they sustain, whatever the publisher does."""
    rates: list[float] = []
    first_id = DRAIN_FIRST_ID
    for contender in contenders:
        system = contender.system
        if not isinstance(system, LogicalReplication):
            continue
        for size in sizes:
            if not budget.fits(10.0, "drain of a logical backlog"):
                continue
            rates.append(await system.drain_rate(size, first_id))
            contender.credit(Totals(entries=size))
            await contender.verify()
            first_id += size
            say(f"logical, backlog of {size:,} transactions: {rates[-1]:,.0f} per second")
    return rates
