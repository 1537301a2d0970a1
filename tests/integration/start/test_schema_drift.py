"""Tables that are changed on one replica only: the set says so within two looks, goes on, and says when it is over."""

import asyncio
from pathlib import Path

import pytest

from adapters import EmbeddedPostgres
from replication import ReplicaSet
from replication.operations.doctor import examine
from replication.replica.start import drift
from tests.integration.replication.inprocess import small_cluster
from tests.support.polling import eventually

WRITE_ALL = 'policy = "write-all"\ntables = "*"'
TABLES = "create table a (id int primary key, v int); create table b (id int primary key, v int default 0)"
TRIGGER = """
create function doubled() returns trigger language plpgsql as 'begin new.v := new.v * 2; return new; end';
create trigger doubling before insert on a for each row execute function doubled()
"""

ADDED = "alter table a add column w int"


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "LOOK_S", 0.3)


async def told(shop: ReplicaSet) -> dict[str, tuple[bool, str]]:
    return {r["replica"]: (r["in_sync"], r["schema_drift"]) for r in (await shop.status())["replicas"]}


@pytest.mark.parametrize(
    ("change", "back", "text"),
    [
        (
            "alter table b alter v set default 7",
            "alter table b alter v set default 0",
            "table b is defined differently on r1, r3 and r2",
        ),
        (TRIGGER, "drop trigger doubling on a", "table a is defined differently on r1, r3 and r2"),
        (
            "alter table a add column w int",
            "alter table a drop column w",
            "table a is defined differently on r1, r3 and r2",
        ),
        ("create table c (id int primary key)", "drop table c", "table c is missing on r1, r3"),
    ],
)
async def test_a_table_that_one_replica_has_changed_is_reported(
    server: EmbeddedPostgres, folder: Path, change: str, back: str, text: str
) -> None:
    async with small_cluster(server, folder, WRITE_ALL, schema=TABLES) as cluster, cluster.connect() as shop:
        await shop.wait_in_sync()
        assert all(found == (True, "") for found in (await told(shop)).values())
        await cluster.script("r2", change)

        async def is_reported() -> bool:
            found = await told(shop)
            named = all(text in warning and "r2" in warning for _, warning in found.values())
            return named and [in_sync for in_sync, _ in found.values()] == [True, False, True]

        await eventually(is_reported, 20.0, "the difference in the status")
        await shop.execute("insert into b (id, v) values (1, 1)")
        warned = [r["warning"] for r in (await shop.status())["replicas"]]
        assert all(text in warning for warning in warned)

        await cluster.script("r2", back)

        async def is_over() -> bool:
            return all(found == (True, "") for found in (await told(shop)).values())

        await eventually(is_over, 20.0, "equal schemas in the status")


async def test_a_definition_that_comes_to_one_replica_after_the_other_is_not_reported(
    server: EmbeddedPostgres, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with small_cluster(server, folder, WRITE_ALL, schema=TABLES) as cluster, cluster.connect() as shop:
        await shop.wait_in_sync()
        watch = cluster.agents["r1"].drift
        assert watch is not None
        found: list[dict[str, str]] = []  # by each look: what differs, reported or not
        reported: list[str] = []
        told_before, one_look = watch._tell, asyncio.Event()

        def tell(texts: list[str]) -> None:
            told_before(texts)
            found.append(dict(watch._last))
            reported.append(watch.warning)
            if found[-1]:
                monkeypatch.setattr(drift, "LOOK_S", 2.0)  # the next look comes after the other changes
                one_look.set()

        watch._tell = tell  # type: ignore[assignment, method-assign]
        first, *others = cluster.databases
        await cluster.script(first, ADDED)
        await asyncio.wait_for(one_look.wait(), 20.0)
        await asyncio.gather(*(cluster.script(r, ADDED) for r in others))
        count = len(found)

        async def has_looked() -> bool:
            return len(found) > count + 1

        await eventually(has_looked, 20.0, "two more looks")
        assert [look for look in found if look], "a look came between the two changes"
        assert set(reported) == {""}
        assert all(in_sync for in_sync, _ in (await told(shop)).values())


async def test_doctor_finds_a_default_that_differs(server: EmbeddedPostgres, folder: Path) -> None:
    async with small_cluster(server, folder, WRITE_ALL, schema=TABLES) as cluster:
        await cluster.script("r2", "alter table b alter v set default 7")

        found = await examine(cluster.cluster, cluster.cluster.replica_set("shop"))

        assert [
            (finding.level, finding.replica) for finding in found if "b is defined differently" in finding.text
        ] == [("error", "r2")]


def test_the_majority_is_right() -> None:
    found = {"r1": {"a": "x", "b": "1"}, "r2": {"a": "y", "b": "2"}, "r3": {"a": "x", "b": "3"}, "r4": {"a": "x"}}

    assert drift.outliers("a", found) == {"r2"}
    assert drift.outliers("b", found) == set(found), "nobody knows which one is meant"
    assert drift.differences({"r1": {"a": "x"}, "r2": {"a": "x"}}) == {}
