"""The long rounds: a million rows per replica, and a hundred thousand differences in bounded memory."""

import random

import pytest

from tests.integration.divergence.conftest import Databases, kinds
from tests.integration.divergence.test_planted_differences import CHANGES, EVERY_TYPE


@pytest.mark.long
async def test_two_hundred_differences_among_a_million_rows(databases: Databases) -> None:
    await databases.everywhere(EVERY_TYPE.replace("generate_series(1, 3000)", "generate_series(1, 1000000)"), "ANALYZE")
    generator = random.Random(3)
    keys = iter(generator.sample(range(1, 1_000_001), 400))
    expected = set()
    columns = list(CHANGES.items())
    for number in range(120):
        column, change = columns[number % len(columns)]
        key, replica = next(keys), f"r{number % 3 + 1}"
        change = "NULL" if number >= 2 * len(columns) else change
        await databases.on(replica, f"UPDATE everything SET {column} = {change} WHERE id = {key}")
        also = ("doubled",) if column == "number" else ()
        expected.add(((str(key),), replica, "changed", (column, *also)))
    for number in range(40):
        key, replica = next(keys), f"r{number % 3 + 1}"
        await databases.on(replica, f"DELETE FROM everything WHERE id = {key}")
        expected.add(((str(key),), replica, "missing", ()))
    for number in range(40):
        key, replica = (number - 20) * 10**9 - 1, f"r{number % 3 + 1}"
        await databases.on(replica, f"INSERT INTO everything (id) VALUES ({key})")
        expected.add(((str(key),), replica, "extra", ()))
    assert len(expected) == 200

    result = await databases.compare("everything")

    assert kinds(databases.differences(result)) == expected
    assert result.tables[0].rows_read < 1_500_000


@pytest.mark.long
async def test_a_hundred_thousand_differences_fit_in_bounded_memory(databases: Databases) -> None:
    await databases.everywhere(
        "CREATE TABLE t (id bigint PRIMARY KEY, v text)",
        "INSERT INTO t SELECT i, repeat(md5(i::text), 8) FROM generate_series(1, 1000000) i",
        "ANALYZE t",
    )
    await databases.on("r2", "UPDATE t SET v = reverse(v) WHERE id % 10 = 0")

    result = await databases.compare("t")

    assert result.tables[0].counts == {"r2": {"changed": 100_000}}
    assert result.peak_memory_mb < 3_000
    assert sum(1 for _ in databases.differences(result)) == 100_000


async def test_ten_thousand_differences_are_all_reported(databases: Databases) -> None:
    await databases.everywhere(
        "CREATE TABLE t (id bigint PRIMARY KEY, v text)",
        "INSERT INTO t SELECT i, md5(i::text) FROM generate_series(1, 20000) i",
    )
    await databases.on("r2", "UPDATE t SET v = reverse(v) WHERE id % 2 = 0")

    result = await databases.compare("t")

    assert result.tables[0].counts == {"r2": {"changed": 10_000}}
    assert {int(d.key[0]) for d in databases.differences(result)} == set(range(2, 20_001, 2))
