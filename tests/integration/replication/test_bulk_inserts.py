"""Inserts of thousands of rows in one statement, as applications and their libraries send them."""

from pathlib import Path

import pytest

from adapters import EmbeddedPostgres
from tests.integration.replication.clusters import rows_everywhere
from tests.integration.replication.inprocess import small_cluster

ROWS = 5_000


@pytest.mark.parametrize("policy", ["quorum", "primary-site"])
async def test_five_thousand_rows_are_inserted_with_literals_with_parameters_and_with_arrays(
    server: EmbeddedPostgres, folder: Path, policy: str
) -> None:
    schema = "create table bulk (id int primary key, name text, at timestamptz default now())"
    keys = f'policy = "{policy}"' + ('\nprimary = "r1"' if policy == "primary-site" else "")
    literals = ",".join(f"({number}, 'it''s {number}', now())" for number in range(ROWS))
    parameters = ",".join(f"(${2 * row + 1}, ${2 * row + 2})" for row in range(ROWS))
    values = [value for row in range(ROWS, 2 * ROWS) for value in (row, f"row {row}")]
    async with (
        small_cluster(server, folder, keys, schema=schema) as cluster,
        cluster.connect(timeout_s=60.0) as shop,
    ):
        await shop.execute(f"insert into bulk (id, name, at) values {literals}")
        await shop.execute(f"insert into bulk (id, name) values {parameters}", *values)
        arrays = "insert into bulk (id, name) select * from unnest($1::int[], $2::text[])"
        await shop.execute(arrays, list(range(2 * ROWS, 3 * ROWS)), ["x"] * ROWS)
        await shop.wait_in_sync()

        found = await rows_everywhere(shop, "select count(*), md5(string_agg(b::text, '' order by id)) from bulk b")
        assert found["r1"][0][0] == 3 * ROWS
        assert found["r1"] == found["r2"] == found["r3"]
