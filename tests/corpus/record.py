"""Writes into the corpus what happens now: `python -m tests.corpus.record [FEATURE …]`."""

import asyncio
import sys

from adapters import EmbeddedPostgres
from tests.corpus.cases import features
from tests.corpus.worlds import World


async def record(names: list[str]) -> None:
    async with EmbeddedPostgres(settings={"fsync": "off", "max_prepared_transactions": 20}) as server:
        for feature in features():
            if names and feature.name not in names:
                continue
            async with World(server, feature.schema) as world:
                outcomes = []
                for case in feature.cases:
                    outcomes.append((await world.run(case.change)).described)
                    if difference := await world.difference():
                        raise SystemExit(f"{feature.path}:{case.line + 1}: {difference}")
            feature.record(outcomes)
            print(f"{feature.name}: {len(outcomes)} cases")


if __name__ == "__main__":
    asyncio.run(record(sys.argv[1:]))
