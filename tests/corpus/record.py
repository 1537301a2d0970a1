"""Writes into the corpus what happens now: `python -m tests.corpus.record [FEATURE …] [--policy POLICY …] [--proof]`.

With `--proof`, only the first column; otherwise both. Under policies that are not named, the second stays as it is.
"""

import argparse
import asyncio
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from adapters import EmbeddedPostgres
from tests.corpus.cases import Feature, features
from tests.corpus.sets import CorpusSet
from tests.corpus.worlds import World
from tests.integration.origin.policies import POLICIES

NEW = "?"  # in the place of an outcome: not recorded yet


async def record(names: Sequence[str], policies: Sequence[str]) -> None:
    settings: dict[str, str | int] = {"fsync": "off", "max_prepared_transactions": 100, "max_connections": 200}
    with tempfile.TemporaryDirectory(prefix="tops-corpus-") as folder:
        async with EmbeddedPostgres(settings=settings) as server:
            for feature in features():
                if not names or feature.name in names:
                    proved = await _proved(server, feature)
                    by_policy = {name: [case.under(name) for case in feature.cases] for name in POLICIES}
                    for name in policies:
                        by_policy[name] = await _in_set(server, Path(folder), name, feature)
                    feature.record(proved, _merged(by_policy))


async def _proved(server: EmbeddedPostgres, feature: Feature) -> list[str]:
    outcomes = []
    async with World(server, feature.schema) as world:
        for case in feature.cases:
            outcomes.append((await world.run(*case.changes)).described)
            if difference := await world.difference():
                raise SystemExit(f"{feature.path}:{case.line + 1}: {difference}")
    return outcomes


async def _in_set(server: EmbeddedPostgres, folder: Path, policy: str, feature: Feature) -> list[str]:
    outcomes = []
    async with CorpusSet(server, folder, policy, feature) as world:
        for case in feature.cases:
            result, problem = await world.run(case)
            outcomes.append(result.described)
            if problem:
                print(f"{feature.path.name}:{case.line + 1}: {policy}: {case.text}: {problem}", flush=True)
    print(f"{feature.name}: {policy}: {dict(Counter(outcome.split()[0] for outcome in outcomes))}", flush=True)
    return outcomes


def _merged(by_policy: dict[str, list[str]]) -> list[str]:
    """What most policies do, and which do something else."""
    merged = []
    for outcomes in zip(*by_policy.values(), strict=True):
        known = [outcome for outcome in outcomes if outcome != NEW] or [NEW]
        usual = Counter(known).most_common(1)[0][0]
        others = [
            f"{name}: {outcome}"
            for name, outcome in zip(by_policy, outcomes, strict=True)
            if outcome not in (usual, NEW)
        ]
        merged.append("; ".join([usual, *others]))
    return merged


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("features", nargs="*")
    parser.add_argument("--policy", action="append", choices=list(POLICIES))
    parser.add_argument("--proof", action="store_true")
    asked = parser.parse_args()
    asyncio.run(record(asked.features, [] if asked.proof else asked.policy or list(POLICIES)))
