"""Numbers whose hashes collide: put into a dict in their order, most of them walk along a long row of full places."""

import random
import struct
from collections.abc import Iterator

FULL, MORE = 0.55, 0.1  # of the places of the dict
PROBE_SHIFT = 5  # by which CPython uses up a hash, until only the row below is left


def _row(bits: int) -> list[int]:
    """Places in the order in which a dict of 2**bits places is searched, once the hash is used up."""
    row_key, row = 1, []
    for _ in range(int(FULL * 2**bits)):
        row.append(row_key)
        row_key = (5 * row_key + 1) & (2**bits - 1)
    return row


def _long_ways(row: list[int], bits: int, length: int) -> Iterator[int]:
    """Numbers of that many bits that come to the beginning of the row when they are looked for."""
    positions, mask = {row_key: position for position, row_key in enumerate(row)}, 2**bits - 1
    drawn = random.Random(1)
    while True:
        number = drawn.getrandbits(length) | 1 << length - 1
        row_key, rest = number & mask, number
        while rest and row_key in positions:
            rest >>= PROBE_SHIFT
            row_key = (5 * row_key + rest + 1) & mask
        if positions.get(row_key, len(row)) < len(row) // 2:
            yield number


def colliding(bits: int, *, apart: bool = False) -> list[int]:
    """In ascending order; with `apart` no two of them are neighbours."""
    row = _row(bits)
    ways = _long_ways(row, bits, 2 * bits + 2 if apart else bits + 14)
    more = {next(ways) for _ in range(int(MORE * 2**bits))}
    return sorted(row_key | row_key << bits if apart else row_key for row_key in row) + sorted(more)


def encoded_map(numbers: list[int]) -> bytes:
    """A map of MessagePack with these keys."""
    pairs = [struct.pack(">BQB", 0xCF, number, 0) for number in numbers]
    return struct.pack(">BI", 0xDF, len(pairs)) + b"".join(pairs)
