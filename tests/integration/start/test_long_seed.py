"""Five million rows are seeded with progress; a target that is killed on the way goes on and ends equal."""

import asyncio
import itertools
import json
import re
import time
from pathlib import Path

import pytest

from adapters import EmbeddedPostgres
from replication.client.replica_set import connect_by_file
from replication.model.config import Cluster
from replication.operations.processes import Processes, wait_ready
from tests.integration.replication.clusters import give_databases, toml
from tests.integration.start.seeding import _run
from tests.support.polling import eventually

ROWS = 5_000_000
FILL = f"""
create table big (id bigint primary key, n int not null, label text, at timestamptz);
insert into big select i, i % 1000, 'label ' || i, '2024-01-01Z'::timestamptz + i * interval '1 s'
  from generate_series(1, {ROWS}) i;
create index on big (n);
analyze big;
"""
KEYS = 'policy = "write-all"\nseed = "r1"\ntables = "*"'


@pytest.mark.long
async def test_a_seed_of_millions_of_rows_survives_two_kills_of_its_target(folder: Path) -> None:
    path = toml(folder, {"shop": KEYS}, brokers=1, replicas=2, schema="")
    cluster = Cluster.load(path)
    await give_databases(cluster)
    config = cluster.replica_set("shop")
    async with EmbeddedPostgres(cluster.data_of(config, config.replica[0]) / "postgres") as server:
        await _run(server.dsn, FILL)
    processes = Processes(cluster, folder / "logs")
    try:
        await processes.start_all()
        for share in (0.2, 0.5):
            await eventually(lambda share=share: _has_copied(cluster, share), 300.0, f"{share:.0%} of the copy")
            await processes.kill("shop/r2")
            await processes.start("shop/r2")
        began = time.monotonic()
        await eventually(lambda: _has_gone_on(folder), 60.0, "the rest of the copy")
        await wait_ready(cluster, ["shop"], processes, timeout_s=900.0)
        print(f"{ROWS:,} rows were copied and compared in {time.monotonic() - began:.0f} s")
        async with connect_by_file(cluster, "shop") as shop:
            await shop.execute("update big set n = $1 where id = $2", 7, 1)
            counts = await asyncio.gather(
                *(shop.fetchval("select count(*) from big", replica=name) for name in ("r1", "r2"))
            )
            assert counts == [ROWS, ROWS]
    finally:
        await processes.stop_all()


async def _has_gone_on(folder: Path) -> bool:
    """After both kills, with fewer pieces to take each time."""
    lines = (folder / "logs" / "shop-r2.log").read_text().splitlines()
    left = [json.loads(line)["pieces"] for line in lines if '"copy goes on"' in line]
    assert all(later < earlier for earlier, later in itertools.pairwise(left)), left
    return len(left) == 2


async def _has_copied(cluster: Cluster, share: float) -> bool:
    async with connect_by_file(cluster, "shop", timeout_s=5.0) as shop:
        told = {r["replica"]: r.get("not_started", "") for r in (await shop.status())["replicas"]}
    found = re.search(r"([\d,]+) of about ([\d,]+) rows copied, \d+ MB at [\d.]+ MB/s, about \d+ s left", told["r2"])
    return found is not None and int(found[1].replace(",", "")) > share * int(found[2].replace(",", ""))
