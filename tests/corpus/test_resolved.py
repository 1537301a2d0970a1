"""The corpus at an origin: where values are computed ahead, the rows are those that an execution leaves."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest

from adapters import EmbeddedPostgres
from adapters.changes import Change, Insert, Row
from adapters.postgres.origin import Executed, Rejected
from tests.corpus.cases import Feature, features
from tests.integration.origin.databases import OriginDatabase

CORPUS = features()


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(settings={"fsync": "off", "max_prepared_transactions": 20}) as started:
        yield started
        asyncio.run(started.crash("kill"))  # its data is thrown away


@pytest.fixture
async def database(server: EmbeddedPostgres) -> AsyncIterator[OriginDatabase]:
    made = await OriginDatabase.make(server)
    yield made
    await made.close()


@pytest.mark.parametrize("feature", CORPUS, ids=lambda feature: feature.name)
async def test_computed_rows_are_those_of_an_execution(database: OriginDatabase, feature: Feature) -> None:
    await database.set_up(feature.schema)
    await database.begin()
    for number, case in enumerate(feature.cases):
        where = f"{feature.path.name}:{case.line + 1}: {case.text}"
        (computed,) = await database.origin.resolve([case.changes])
        if computed is None:
            continue
        (again,) = await database.origin.resolve([case.changes])
        assert again is not None, where
        executed = await database.execute(*case.changes)
        if isinstance(executed, Rejected):
            vote = await database.apply(f"c{number}", computed)
            assert vote.excluded is not None, f"{where}: {executed}"
        else:
            assert difference(computed, again, executed) == "", where


def difference(computed: Executed, again: Executed, executed: Executed) -> str:
    """In what a computed write set is not that of an execution; what another computation changes is not compared."""
    if computed.rows != executed.rows:
        return f"{computed.rows} rows, not {executed.rows}"
    if [[list(row) for row in rows] for rows in computed.returned] != [
        [list(row) for row in rows] for rows in executed.returned
    ]:
        return f"returned {computed.returned}, not {executed.returned}"
    names = {name for name, _ in computed.write_set.sequences} ^ {name for name, _ in executed.write_set.sequences}
    if names:
        return f"sequences {names}"
    rows = zip(
        inserted(computed.write_set.changes),
        inserted(again.write_set.changes),
        inserted(executed.write_set.changes),
        strict=True,
    )
    for one, other, expected in rows:
        if one.keys() != expected.keys():
            return f"columns {list(one)}, not {list(expected)}"
        for name, value in one.items():
            if value == other[name] and value != expected[name]:
                return f"{name} is {value!r}, not {expected[name]!r}"
    return ""


def inserted(changes: Sequence[Change]) -> list[Row]:
    return [change.values for change in changes if isinstance(change, Insert)]
