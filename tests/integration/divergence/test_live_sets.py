"""Checks of running replica sets while they are being written: every planted difference is found, and no other."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from adapters import EmbeddedPostgres
from replication.divergence.model import Verdict
from tests.integration.divergence.conftest import kinds
from tests.integration.divergence.sets import CheckedSet, checked_set, writing

POLICIES = {
    "quorum": 'policy = "quorum"\nwrite_quorum = 2',
    "peer-to-peer": 'policy = "peer-to-peer"',
    "primary-site": 'policy = "primary-site"\nprimary = "r1"',
    "serializable": 'policy = "serializable"',
}
ROWS = 20_000
PLANTED = {
    "r1": ("UPDATE t SET v = -5 WHERE id = 10", "INSERT INTO t (id, v) VALUES (-7, 1)"),
    "r2": ("DELETE FROM t WHERE id = 20", "UPDATE t SET label = NULL, at = at + interval '1 us' WHERE id = 21"),
    "r3": ("UPDATE t SET label = label || ' ' WHERE id = 30", "INSERT INTO t (id, v) VALUES (9000000000, 1)"),
}
EXPECTED = {
    (("10",), "r1", "changed", ("v",)),
    (("-7",), "r1", "extra", ()),
    (("20",), "r2", "missing", ()),
    (("21",), "r2", "changed", ("label", "at")),
    (("30",), "r3", "changed", ("label",)),
    (("9000000000",), "r3", "extra", ()),
}


async def planted(checked: CheckedSet) -> None:
    for replica, statements in PLANTED.items():
        await checked.on(replica, *statements)


@pytest.mark.parametrize("policy", POLICIES)
async def test_planted_differences_are_found_and_no_others_while_writers_go_on(
    cluster_server: EmbeddedPostgres, folder: Path, spark: SparkSession, policy: str
) -> None:
    async with checked_set(cluster_server, folder, spark, POLICIES[policy], rows=ROWS) as checked:
        async with writing(checked, (1001, ROWS)) as writers:
            clean = await checked.compare()
            await planted(checked)
            result = await checked.compare()

    assert all(one.written > 50 for one in writers)
    assert clean.verdict is Verdict.EQUAL, clean.headline
    assert {replica.position is not None for replica in clean.replicas} == {True}
    assert len({replica.position for replica in result.replicas}) == 1
    found = [d for d in checked.differences(result) if d.kind.value != "in flight"]
    assert kinds(found) == EXPECTED
    assert result.verdict is Verdict.DIFFERENT
