"""The corpus of statements, then replicas that lose half of their rows: a repair brings them back from the log."""

from collections import Counter
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from adapters import EmbeddedPostgres
from replication.divergence.explain.set_link import linked
from replication.divergence.repair.repair import Strategy
from replication.divergence.results.model import Verdict
from tests.corpus.cases import Feature, features
from tests.corpus.sets import CorpusSet
from tests.corpus.worlds import Contents, contents_of
from tests.integration.divergence.sets import CheckedSet

CORPUS = {feature.name: feature for feature in features()}
SHORT = ("triggers",)
# The same rows at two of three replicas, so that a majority lacks them.
LOSE_HALF = """
do $$ declare one regclass; begin
    set local session_replication_role = replica;
    for one in select c.oid from pg_class c where c.relkind = 'r' and c.relnamespace::regnamespace::text
            not in ('tops', 'pg_catalog', 'information_schema')
        and exists (select from pg_index i where i.indrelid = c.oid and i.indisprimary) loop
        execute format('delete from only %s as lost where hashtext(lost::text) %% 2 = 0', one);
    end loop;
end $$
"""


async def check_repairs(server: EmbeddedPostgres, folder: Path, spark: SparkSession, feature: Feature) -> None:
    async with CorpusSet(server, folder, "quorum", feature) as world:
        for case in feature.cases:
            await world.run(case)
        small = world.cluster
        before = await contents(world)
        for replica in ("r2", "r3"):
            await small.script(replica, LOSE_HALF)
        halved = await contents(world)
        async with linked(small.cluster, "shop") as link:
            checked = CheckedSet(small, link, spark, folder / "runs", tables=())

            await checked.repair(await checked.compare(), Strategy.LOG)
            by_log = await contents(world)
            # Rows that are older than the log: an operator says which replica is right.
            found = await checked.compare()
            await checked.repair(found, Strategy.LOG, primary="r1")
            again = await checked.compare()
            at_last = await contents(world)

    assert halved["r2"] != before["r1"], "something was lost"
    assert by_log["r1"] == at_last["r1"] == before["r1"], "the replica that has lost nothing is as it was"
    for replica in ("r2", "r3"):
        for table, rows in by_log[replica].items():
            assert not Counter(rows) - Counter(before["r1"][table]), f"{replica}.{table}: rows that were nowhere"
            assert not Counter(halved[replica][table]) - Counter(rows), f"{replica}.{table}: rows that were there"
    assert again.verdict is not Verdict.DIFFERENT, again.headline
    assert at_last == before


async def contents(world: CorpusSet) -> dict[str, Contents]:
    return {
        name: await contents_of(reader) for name, reader in zip(world.cluster.databases, world.readers, strict=True)
    }


@pytest.mark.parametrize("name", SHORT)
async def test_a_default_repair_after_the_corpus_loses_no_acknowledged_row(
    cluster_server: EmbeddedPostgres, folder: Path, spark: SparkSession, name: str
) -> None:
    await check_repairs(cluster_server, folder, spark, CORPUS[name])


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in CORPUS if name not in SHORT])
async def test_a_default_repair_after_any_part_of_the_corpus_loses_no_acknowledged_row(
    cluster_server: EmbeddedPostgres, folder: Path, spark: SparkSession, name: str
) -> None:
    await check_repairs(cluster_server, folder, spark, CORPUS[name])
