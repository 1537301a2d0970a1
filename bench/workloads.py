"""What a benchmark asks of a system: the data it starts with, the operations, and what must be true afterwards.

An operation is plain data and names no database: each system's client translates it. Every operation says what it
adds to the totals of a node, so that one rule checks every workload: a node holds what was committed, no less and
no more. Speed is measured elsewhere (`bench.harness`).
"""

import random
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, count, repeat
from typing import Protocol

import msgspec

ZIPF_EXPONENT = 0.99  # the skew of YCSB
READ_SHARE = {"A": 0.50, "B": 0.95, "C": 1.00}


@dataclass(frozen=True, slots=True)
class Dataset:
    """The rows every system starts with: `accounts(id, bal, pad)`; `transfers` and `entries` start empty."""

    rows: int = 100_000
    pad_bytes: int = 80

    def accounts(self) -> Iterator[tuple[int, int, str]]:
        pad = "x" * self.pad_bytes
        return ((key, 0, pad) for key in range(1, self.rows + 1))


class Totals(msgspec.Struct, frozen=True):
    """What one node holds. `digest` covers whole rows and is comparable among the nodes of one system only."""

    balance: int = 0
    transfers: int = 0
    entries: int = 0
    digest: str = ""


class Add(msgspec.Struct, frozen=True):
    """Add `amount` to one account."""

    key: int
    amount: int = 1

    @property
    def effect(self) -> Totals:
        return Totals(balance=self.amount)


class Transfer(msgspec.Struct, frozen=True):
    """Move money between two accounts and record it, as one transaction: two updates and an insert.

    Clients update the accounts in the order of their keys, as a bank would, so that no system is charged for
    deadlocks that its application caused.
    """

    id: int
    source: int
    target: int
    amount: int = 1

    @property
    def effect(self) -> Totals:
        return Totals(transfers=1)

    def updates(self) -> tuple[Add, Add]:
        """The two account changes, in the order of their keys."""
        legs = Add(self.source, -self.amount), Add(self.target, self.amount)
        return legs if self.source < self.target else (legs[1], legs[0])


class Read(msgspec.Struct, frozen=True):
    """Read one account by its key."""

    key: int

    @property
    def effect(self) -> Totals:
        return Totals()


class Append(msgspec.Struct, frozen=True):
    """Insert one new row with a key of its own."""

    id: int
    payload: str

    @property
    def effect(self) -> Totals:
        return Totals(entries=1)


Operation = Add | Transfer | Read | Append


class Workload(Protocol):
    """An endless stream of operations per client; the same random source gives the same keys."""

    name: str

    def operations(self, source: random.Random) -> Iterator[Operation]: ...


class SingleRowUpdate:
    """W: one transaction adds 1 to one uniformly chosen account."""

    name = "W"

    def __init__(self, dataset: Dataset) -> None:
        self._rows = dataset.rows

    def operations(self, source: random.Random) -> Iterator[Operation]:
        while True:
            yield Add(1 + int(source.random() * self._rows))


class BankTransfer:
    """One transaction moves 1 between two different accounts and inserts the record of it."""

    name = "transfer"

    def __init__(self, dataset: Dataset) -> None:
        self._rows = dataset.rows
        self._ids = count(1)  # shared by all clients: a transfer's id occurs once

    def operations(self, source: random.Random) -> Iterator[Operation]:
        while True:
            first, second = source.sample(range(1, self._rows + 1), 2)
            yield Transfer(next(self._ids), first, second)


class Ycsb:
    """YCSB's core mixes on our table: A reads 50 %, B 95 %, C 100 %; the rest adds 1. Keys follow Zipf's law."""

    def __init__(self, mix: str, dataset: Dataset) -> None:
        self.name = f"ycsb-{mix.lower()}"
        self._read_share = READ_SHARE[mix]
        self._keys = ZipfKeys(dataset.rows)

    def operations(self, source: random.Random) -> Iterator[Operation]:
        while True:
            key = self._keys.draw(source)
            yield Read(key) if source.random() < self._read_share else Add(key)


class AppendOnly:
    """One transaction inserts one row of 100 bytes."""

    name = "append"

    def __init__(self) -> None:
        self._ids = count(1)
        self._payload = "x" * 100

    def operations(self, source: random.Random) -> Iterator[Operation]:
        return (Append(id, self._payload) for id in self._ids)


class HotRow:
    """Every transaction adds 1 to the same account."""

    name = "hot"

    def operations(self, source: random.Random) -> Iterator[Operation]:
        return repeat(Add(1))


class ZipfKeys:
    """Keys 1…n where the r-th most popular is drawn with weight r^-0.99; popular keys are scattered over the table."""

    def __init__(self, rows: int) -> None:
        self._cumulative = list(accumulate(rank**-ZIPF_EXPONENT for rank in range(1, rows + 1)))
        self._key_of_rank = list(range(1, rows + 1))
        # Neighbouring keys share pages: unscattered, one page would take most of the load. The seed is part of
        # the workload: every run meets the same popular keys.
        random.Random(rows).shuffle(self._key_of_rank)

    def draw(self, source: random.Random) -> int:
        rank = bisect_right(self._cumulative, source.random() * self._cumulative[-1])
        return self._key_of_rank[min(rank, len(self._key_of_rank) - 1)]
