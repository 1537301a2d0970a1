"""Random statements on random schemas: replicas never differ silently, and without the proof they soon do."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from adapters import EmbeddedPostgres
from adapters.changes import Statement
from adapters.postgres.proof import MakeProver, Prover
from tests.contract.harness import AlwaysShip
from tests.corpus.worlds import World
from tests.generator.schemas import random_schema
from tests.generator.statements import random_statement

PER_SCHEMA, TOGETHER = 200, 5


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(settings={"fsync": "off", "max_prepared_transactions": 20}) as started:
        yield started


@dataclass(slots=True)
class Run:
    """`problem` is the first difference or disagreement; empty if there is none."""

    statements: int = 0
    executed: int = 0
    problem: str = ""


async def run(server: EmbeddedPostgres, seed: int, prover: MakeProver, together: int) -> Run:
    dice = random.Random(seed)
    tables, schema = random_schema(dice)
    result = Run()
    async with World(server, schema, prover) as world:
        assert await world.difference() == "", f"seed {seed}: the replicas begin with the same rows:\n{schema}"
        while result.statements < PER_SCHEMA:
            batch = [random_statement(dice, tables) for _ in range(together)]
            outcomes = await world.run_together([[Statement(sql)] for sql in batch])
            result.statements += len(batch)
            result.executed += sum(outcome.is_executed for outcome in outcomes)
            apart = [f"{o.described}: {sql}" for o, sql in zip(outcomes, batch, strict=True) if not o.agree]
            difference = await world.difference()
            if difference or apart:
                result.problem = f"seed {seed}: {difference} {apart}\nafter {'; '.join(batch)}\non {schema}"
                break
    return result


async def check(server: EmbeddedPostgres, seeds: range) -> None:
    statements = executed = 0
    for seed in seeds:
        done = await run(server, seed, Prover, TOGETHER)
        assert done.problem == ""
        statements, executed = statements + done.statements, executed + done.executed
    assert executed > 0.15 * statements, "most of what is drawn is rejected: the test says nothing"


async def test_two_thousand_statements_leave_the_replicas_equal(server: EmbeddedPostgres) -> None:
    await check(server, range(10))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(1000, 1250, 25))
async def test_fifty_thousand_statements_leave_the_replicas_equal(server: EmbeddedPostgres, first: int) -> None:
    await check(server, range(first, first + 25))


@pytest.mark.parametrize("seed", range(3))
async def test_without_the_proof_a_difference_is_found_within_a_hundred_statements(
    server: EmbeddedPostgres, seed: int
) -> None:
    found = await run(server, seed, AlwaysShip, 1)

    assert found.problem != ""
    assert found.statements <= 100
