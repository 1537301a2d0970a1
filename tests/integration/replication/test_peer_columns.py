"""Columns that PostgreSQL fills in or adds to in its own way, in a set whose sites write without asking each other."""

from pathlib import Path
from typing import Any

import pytest

from adapters import EmbeddedPostgres
from adapters.changes import Insert, Row, Update, Upsert
from replication import ReplicaSet
from replication.rpc.rejections import WriteRejected
from tests.integration.replication.clusters import rows_everywhere
from tests.integration.replication.inprocess import SmallCluster, small_cluster
from tests.integration.replication.test_peer_to_peer import cut, heal
from tests.support.polling import eventually

SCHEMA = """
create table tickets (id int primary key, n bigint generated always as identity, v text, amount numeric default 0);
create table notes (id int primary key, ticket int references tickets on delete cascade, v text);
"""
TICKETS = "select id, n, v, amount::text from tickets order by id"


def shorter(table: str, key: Row, kept: Row, came: Row, kept_site: str, came_site: str) -> Row:
    """A resolver that takes one of the rows as it is."""
    return min(kept, came, key=lambda row: (len(row["v"]), row["v"]))


PEERS = 'policy = "peer-to-peer"'
RESOLVERS = {name: f'{PEERS}\nresolver = "{name}"' for name in ("last-writer", "per-column", f"{__name__}:shorter")}


async def same_everywhere(cluster: SmallCluster, shop: ReplicaSet, sql: str) -> list[tuple[Any, ...]]:
    """The rows, once every replica has applied everything; nothing may be quarantined."""
    await shop.wait_in_sync()
    found: dict[str, list[tuple[Any, ...]]] = {}

    async def same() -> bool:
        found.update(await rows_everywhere(shop, sql))
        return len({repr(rows) for rows in found.values()}) == 1

    await eventually(same, what=f"equal rows: {found}")
    for replica in cluster.databases:
        assert [dict(row) for row in await cluster.sql(replica, "select * from tops.set_aside")] == []
    return next(iter(found.values()))


@pytest.mark.parametrize("keys", RESOLVERS.values(), ids=["last-writer", "per-column", "function"])
async def test_an_identity_beside_the_key_is_the_same_at_every_site(
    server: EmbeddedPostgres, folder: Path, keys: str
) -> None:
    async with (
        small_cluster(server, folder, keys, schema=SCHEMA) as cluster,
        cluster.connect(prefer="r1") as shop,
    ):
        await shop.write([Insert("tickets", {"id": 1, "n": 77, "v": "given"})])
        await shop.write([Insert("tickets", {"id": 2, "v": "drawn"})])
        await shop.write([Upsert("tickets", {"id": 3}, {"v": "drawn by an upsert"})])
        done = await shop.execute("insert into tickets (id, v) values (4, 'executed') returning n")
        for row in (1, 2, 3, 4):
            await shop.write([Update("tickets", {"id": row}, {"v": f"row {row}"})])
        await shop.write([Upsert("tickets", {"id": 1}, {"v": "again", "n": 77})])
        await shop.write([Update("tickets", {"id": 1}, add={"amount": 5})])
        await shop.execute("update tickets set v = v || pg_backend_pid() * 0 where id = 2")

        rows = await same_everywhere(cluster, shop, TICKETS)

        assert rows == [(1, 77, "again", "5"), (2, 1, "row 20", "0"), (3, 2, "row 3", "0"), (4, 3, "row 4", "0")]
        assert done.returned[0][0]["n"] == 3


@pytest.mark.parametrize("keys", RESOLVERS.values(), ids=["last-writer", "per-column", "function"])
async def test_sites_that_draw_different_identities_for_one_row_end_with_one(
    server: EmbeddedPostgres, folder: Path, keys: str
) -> None:
    """No update can give the column a value: the row is inserted anew, and what refers to it stays."""
    async with (
        small_cluster(server, folder, keys, schema=SCHEMA) as cluster,
        cluster.connect(prefer="r1") as one,
        cluster.connect(prefer="r2") as two,
    ):
        for site in cluster.agents:
            cut(cluster, site)
        drawn = []
        for number, (shop, v) in enumerate([(one, "longer"), (two, "short")]):
            await shop.write([Insert("tickets", {"id": 1, "v": v + "!"})])
            await shop.write([Insert("notes", {"id": number, "ticket": 1})])
            await shop.write([Update("tickets", {"id": 1}, {"v": v})])
            drawn += await shop.fetch("select n from tickets")
        for site in cluster.agents:
            heal(cluster, site)

        ((_, n, v, _),) = await same_everywhere(cluster, one, TICKETS)

        assert v == "short"
        assert [row["n"] for row in drawn] == [1, n]
        assert await same_everywhere(cluster, one, "select id, ticket from notes order by id") == [(0, 1), (1, 1)]


@pytest.mark.parametrize("action", ["cascade", "no action"])
@pytest.mark.parametrize("keys", [PEERS, 'policy = "write-all"'])
async def test_an_identity_that_a_statement_draws_anew_is_replicated(
    server: EmbeddedPostgres, folder: Path, keys: str, action: str
) -> None:
    async with (
        small_cluster(server, folder, keys, schema=SCHEMA.replace("cascade", action)) as cluster,
        cluster.connect(prefer="r1") as shop,
    ):
        await shop.write([Insert("tickets", {"id": 1, "n": 77, "v": "a"})])
        await shop.write([Insert("notes", {"id": 1, "ticket": 1})])

        await shop.execute("update tickets set n = default where id = 1")

        assert await same_everywhere(cluster, shop, TICKETS) == [(1, 1, "a", "0")]
        assert await same_everywhere(cluster, shop, "select id, ticket from notes") == [(1, 1)]
        with pytest.raises(WriteRejected, match="DEFAULT") as rejected:
            await shop.write([Update("tickets", {"id": 1}, {"n": 5})])
        assert rejected.value.sqlstate == "428C9"


KEYS = """
create table drawn (id bigint generated always as identity primary key, v text);
create table numbered (id bigserial primary key, v text);
create table named (id uuid default gen_random_uuid() primary key, v text);
create table plain (id int primary key, v text);
"""


@pytest.mark.parametrize("table", ["drawn", "numbered", "named"])
async def test_a_row_that_leaves_its_key_to_the_database_has_the_same_key_everywhere(
    server: EmbeddedPostgres, folder: Path, table: str
) -> None:
    async with (
        small_cluster(server, folder, PEERS, schema=KEYS) as cluster,
        cluster.connect(prefer="r1") as one,
        cluster.connect(prefer="r2") as two,
    ):
        for shop in (one, two):
            for _ in range(2):  # the second is known to need an execution
                done = await shop.write([Insert(table, {"v": "x"})])
                assert done.rows == (1,)

        rows = await same_everywhere(cluster, one, f"select id, v from {table} order by id")
        assert len({key for key, _ in rows}) == 4


async def test_a_row_that_lacks_a_key_that_nobody_makes_is_rejected(server: EmbeddedPostgres, folder: Path) -> None:
    async with small_cluster(server, folder, PEERS, schema=KEYS) as cluster, cluster.connect(prefer="r1") as shop:
        with pytest.raises(WriteRejected, match="id") as rejected:
            await shop.write([Insert("plain", {"v": "x"})])

        assert rejected.value.sqlstate == "23502"


SUMS = """
create domain amount as numeric;
create domain fine_amount as amount check (value >= 0);
create table sums (id int primary key, i interval, d date, m money, f float8, n int, x fine_amount);
"""


async def test_only_sums_that_do_not_depend_on_the_order_are_added_to(server: EmbeddedPostgres, folder: Path) -> None:
    async with small_cluster(server, folder, PEERS, schema=SUMS) as cluster, cluster.connect(prefer="r1") as shop:
        row = {"id": 1, "i": "1 day", "d": "2026-01-01", "m": 1, "f": 1.0, "n": 1, "x": 1}
        await shop.write([Insert("sums", row)])
        for column, amount in {"i": "1 hour", "d": 1, "m": 1, "f": 1.0}.items():
            with pytest.raises(WriteRejected, match=f"column '{column}' of 'sums' .* write the new value instead"):
                await shop.write([Update("sums", {"id": 1}, add={column: amount})])

        await shop.write([Update("sums", {"id": 1}, add={"n": 2, "x": "0.5"})])

        assert await same_everywhere(cluster, shop, "select i::text, n, x::text from sums") == [("1 day", 3, "1.5")]
