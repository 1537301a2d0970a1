"""Where the time of a transaction goes: clocks around the parts of a broker and of an agent, read by the harness.

Sums and counts lie in a small file that all processes of a cluster map into their memory, so that reading them costs
the measured processes nothing. A transaction that is prepared with others waits for all of them, so a batch's time
counts in full for each of its members.
"""

import mmap
import time
from collections.abc import Awaitable, Callable
from enum import IntEnum
from pathlib import Path
from typing import Any

from bench.policies.catalog import PolicyCase

VARIABLE = "TOPS_BENCH_TRACE"  # the folder with one file per process
_SLOT_BYTES = 16
Weight = Callable[..., float]


def _once(*_: object) -> float:
    return 1.0


class Clock(IntEnum):
    """What is timed; each has a sum of seconds and a count."""

    PREPARE = 0  # at the database
    COMMIT = 1
    WRITE = 2  # a local-first write, its share of a group included
    APPLY = 3  # a batch from the log
    PARTICIPANT = 4  # prepare and finish as the replica's participant sees them
    COORDINATOR = 5  # the broker's machine
    BROKER = 6  # everything a broker does with what arrives, the machine included
    DISK = 7  # one sync of the journal


class Trace:
    """The clocks of one process."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_SLOT_BYTES * len(Clock)))
        with path.open("r+b") as file:
            self._values: memoryview[float] = memoryview(mmap.mmap(file.fileno(), 0)).cast("d")

    def add(self, clock: Clock, seconds: float, weight: float = 1.0) -> None:
        values, place = self._values, 2 * clock
        values[place] += seconds * weight
        values[place + 1] += weight

    def read(self) -> list[float]:
        return list(self._values)

    def around(self, owner: Any, method: str, clock: Clock, weight: Weight = _once) -> None:
        """Time every call of a method; `weight` is given the call's arguments and says for how many it counts."""
        original = getattr(owner, method)

        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(*arguments, **options)
            finally:
                self.add(clock, time.perf_counter() - began, weight(*arguments))

        setattr(owner, method, timed)

    def around_async(
        self, owner: Any, method: str, clock: Clock, weight: Callable[..., float] = lambda *_: 1.0
    ) -> None:
        """The same for a coroutine."""
        original: Callable[..., Awaitable[Any]] = getattr(owner, method)

        async def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return await original(*arguments, **options)
            finally:
                self.add(clock, time.perf_counter() - began, weight(*arguments))

        setattr(owner, method, timed)


class TraceReader:
    """The harness's side: what all processes of a cluster spent since it last looked."""

    def __init__(self, folder: Path, replicas: int, case: PolicyCase) -> None:
        self._folder, self._replicas, self._case = folder, replicas, case
        self._before = [0.0] * (2 * len(Clock))
        self._client_before = time.process_time()

    def phases(self, operations: int) -> dict[str, float]:
        """Seconds per operation, by the names of `bench.systems.PHASES`; what a write takes counts by their share."""
        now: list[float] = [
            sum(values) for values in zip(*(Trace(p).read() for p in self._folder.iterdir()), strict=True)
        ]
        spent = [after - before for after, before in zip(now, self._before, strict=True)]
        client_s = time.process_time() - self._client_before
        self._before, self._client_before = now, self._client_before + client_s

        def mean(clock: Clock) -> float:
            return spent[2 * clock] / (spent[2 * clock + 1] or 1.0)

        def total(clock: Clock) -> float:
            return spent[2 * clock]

        if not operations:
            return {}
        writes = min(self._transactions(spent) / operations, 1.0)
        database = mean(Clock.PREPARE) + mean(Clock.COMMIT) + mean(Clock.WRITE)
        database += mean(Clock.APPLY) if self._case.applied_first else 0.0
        return {
            "site": client_s / operations,
            "broker": max(total(Clock.BROKER) - total(Clock.COORDINATOR), 0.0) / operations,
            "coordinator": total(Clock.COORDINATOR) / operations,
            "executor": writes * max(2 * mean(Clock.PARTICIPANT) - database, 0.0),
            "database": writes * database,
            "disk": writes * mean(Clock.DISK) if self._case.logged_first else 0.0,
        }

    def _transactions(self, spent: list[float]) -> float:
        """Prepared and applied at every replica, written at one."""
        everywhere = spent[2 * Clock.PREPARE + 1] or (spent[2 * Clock.APPLY + 1] if self._case.applied_first else 0.0)
        return everywhere / self._replicas or spent[2 * Clock.WRITE + 1]
