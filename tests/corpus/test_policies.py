"""The corpus through real sets, under every policy, beside plain PostgreSQL: brokers, agents, the log, three databases.

In the short round every feature runs under one policy, and policies take their turn; in the long round under all.
"""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from adapters import EmbeddedPostgres
from tests.corpus.cases import Case, Feature, features
from tests.corpus.sets import CorpusSet
from tests.integration.origin.policies import POLICIES

CORPUS = features()
SHARE = 0.85  # of the corpus is executed, or fails as it fails in plain PostgreSQL
SHORT = [(feature, list(POLICIES)[place % len(POLICIES)]) for place, feature in enumerate(CORPUS)]
LONG = [(feature, policy) for policy in POLICIES for feature in CORPUS]


def _name(value: object) -> str:
    return value.name if isinstance(value, Feature) else str(value)


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    settings: dict[str, str | int] = {"fsync": "off", "max_prepared_transactions": 100, "max_connections": 200}
    with EmbeddedPostgres(settings=settings) as started:
        yield started


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="tops-corpus-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


async def check(server: EmbeddedPostgres, folder: Path, feature: Feature, policy: str, *, restart: bool) -> None:
    async with CorpusSet(server, folder, policy, feature) as world:
        for number, case in enumerate(feature.cases):
            if restart and number == len(feature.cases) // 2:
                await world.restart("r2")
            result, problem = await world.run(case)

            where = f"{feature.path.name}:{case.line + 1} under {policy}: {case.text}"
            assert problem == "", where
            assert result.described == case.under(policy), f"{where}: {result.text}"
        await world.shop.wait_in_sync()
        assert await world.difference() == "", f"{feature.name} under {policy}, at the end"


@pytest.mark.parametrize(("feature", "policy"), SHORT, ids=_name)
async def test_a_set_does_what_postgresql_does_and_its_replicas_are_equal(
    server: EmbeddedPostgres, folder: Path, feature: Feature, policy: str
) -> None:
    await check(server, folder, feature, policy, restart=False)


@pytest.mark.long
@pytest.mark.parametrize(("feature", "policy"), LONG, ids=_name)
async def test_under_every_policy_with_a_restart_in_between(
    server: EmbeddedPostgres, folder: Path, feature: Feature, policy: str
) -> None:
    await check(server, folder, feature, policy, restart=True)


@pytest.mark.parametrize("policy", POLICIES)
def test_most_of_the_corpus_is_executed_or_fails_as_in_postgresql(policy: str) -> None:
    cases = [case for feature in CORPUS for case in feature.cases]

    assert sum(not _is_rejected(case, policy) for case in cases) >= SHARE * len(cases)


def _is_rejected(case: Case, policy: str) -> bool:
    return case.under(policy).startswith("rejected")
