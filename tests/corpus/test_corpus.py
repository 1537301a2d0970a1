"""Every statement of the corpus, on three replicas that differ in all but their rows: equal, or rejected."""

from collections.abc import Iterator

import pytest

from adapters import EmbeddedPostgres
from tests.contract.harness import AlwaysShip
from tests.corpus.cases import Feature, features
from tests.corpus.worlds import World

CORPUS = features()


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(settings={"fsync": "off", "max_prepared_transactions": 20}) as started:
        yield started


@pytest.mark.parametrize("feature", CORPUS, ids=lambda feature: feature.name)
async def test_replicas_are_equal_after_every_statement(server: EmbeddedPostgres, feature: Feature) -> None:
    async with World(server, feature.schema) as world:
        assert await world.difference() == "", "the replicas begin with the same rows"
        for case in feature.cases:
            where = f"{feature.path.name}:{case.line + 1}: {case.text}"
            assert (await world.run(*case.changes)).described == case.expected, where
            assert await world.difference() == "", where


async def test_without_the_proof_the_same_corpus_makes_replicas_differ(server: EmbeddedPostgres) -> None:
    """The comparison notices what it is for: silent differences, one at least per kind of trap."""
    differing = set()
    for feature in CORPUS:
        async with World(server, feature.schema, prover=AlwaysShip) as world:
            for case in feature.cases:
                outcome = await world.run(*case.changes)
                if outcome.described == "executed" and await world.difference():
                    differing.add(feature.name)
                    break

    assert differing >= {"defaults", "functions", "order", "triggers", "views"}


def test_the_corpus_is_large_enough() -> None:
    cases = [case for feature in CORPUS for case in feature.cases]

    assert len(cases) >= 250
    for feature in CORPUS:
        texts = [case.text for case in feature.cases]
        assert len(set(texts)) == len(texts), f"{feature.name}: no case is there twice"
