"""A process for the kill test: appends without end and prints each sequence number once it is acknowledged."""

import asyncio
import sys
from functools import partial
from pathlib import Path

from tops.journal import Journal, JournalOptions


def record_for(sequence: int) -> bytes:
    return b"%d:" % sequence + b"r" * (sequence * 37 % 500)


async def main(directory: Path) -> None:
    journal = Journal.open(directory, JournalOptions(segment_bytes=20_000))
    while True:
        for _ in range(1 + journal.next_sequence % 7):
            sequence = journal.append(record_for(journal.next_sequence))
            journal.when_durable(sequence, partial(print, sequence, flush=True))
        if sequence % 50 == 0:
            await journal.drop_before(sequence - 200)
        await asyncio.sleep(0)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
