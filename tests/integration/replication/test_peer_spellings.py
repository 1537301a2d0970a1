"""A row of a peer-to-peer set has one version, however its table and its key are written: replicas end equal."""

import asyncio
import random
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest

from adapters import EmbeddedPostgres
from adapters.changes import Change, Delete, Insert, Member, Row, Statement, Update, Upsert, encode_member
from adapters.resource import MemberVote, OutboxEntry
from replication import ReplicaSet
from replication.conflicts.tables import key_text, rows_of
from replication.operations.doctor import examine
from replication.rpc.rejections import WriteRejected
from tests.integration.replication.inprocess import SmallCluster, small_cluster
from tests.integration.replication.test_peer_to_peer import cut, heal
from tests.support.polling import eventually

SITES = ("r1", "r2")
IDENT = "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"
# By type, the spellings of some keys.
SPELLINGS: dict[str, list[list[Any]]] = {
    "int": [[4, "4", " 4", "+4", "0x4", "004", "4 "], [-6, "-6", " -6", "-06"]],
    "bigint": [[2**40, str(2**40), f" {2**40}", "0x10000000000"]],
    "numeric": [[1, "1.0", "1.00", "1e0", Decimal("1.000"), "+1"], ["0", "-0", "0.00", 0]],
    "numeric(8,2)": [["1.5", "1.50", Decimal("1.500")], [7, "7.00"]],
    "float8": [[0.0, "-0", "0", "0e5"], ["0.5", 0.5, "5e-1"]],
    "uuid": [[IDENT, IDENT.upper(), IDENT.replace("-", ""), f"{{{IDENT}}}", UUID(IDENT)]],
    "date": [["2026-01-02", "20260102", "2026-1-2"]],
    "timestamptz": [["2026-01-01 12:00:00+00", "2026-01-01T13:00:00+01:00", "2026-01-01 12:00:00.000+00"]],
    "timestamp": [["2026-01-01 12:00:00", "2026-01-01T12:00:00", "20260101 120000"]],
    "interval": [["1 day", "24:00:00", "P1D"], ["1 mon", "30 days", "720:00:00"], ["-1 days", "1 day -48:00:00"]],
    "text": [["a"], ["A"], ["a "]],
    "varchar(3)": [["abc"], ["ab "], ["ab"]],
    "char(5)": [["ab", "ab   ", "ab "]],
    "bytea": [[b"\x01\xff", "\\x01ff", "\\x01FF", "\\001\\377"]],
    "bool": [[True, "true", "t", "yes", "1", "on"], [False, "false", "off"]],
    "mood": [["good"], ["bad"]],
    "near": [[1, "1.0", "1.00"]],
    "inet": [["10.0.0.1", "10.0.0.1/32"]],
}
TABLES = {f"t{place}": kind for place, kind in enumerate(SPELLINGS)}
PAIRS = {"id": SPELLINGS["int"][0], "day": SPELLINGS["date"][0], "amount": SPELLINGS["numeric"][0]}
BESIDE = "v text not null, n int not null default 0"
SCHEMA = f"""
create type mood as enum ('good', 'bad'); create domain nearest as numeric; create domain near as nearest;
{" ".join(f"create table {name} (id {kind} primary key, {BESIDE});" for name, kind in TABLES.items())}
create table pairs (id int, day date, amount numeric, {BESIDE}, primary key (amount, id, day));
drop schema if exists other cascade; create schema other; create table other."a.b" (id int primary key, {BESIDE});
"""


def first_text(table: str, key: Row, kept: Row, came: Row, kept_site: str, came_site: str) -> Row:
    """A resolver of the user's own: the set folds its log."""
    return {**came, "v": min(kept["v"], came["v"])}


Keys = dict[str, list[Row]]  # by table, all spellings of one row


def rows() -> list[Keys]:
    """Every row that is written, with all the ways to write its key."""
    found: list[Keys] = []
    for name, kind in TABLES.items():
        found += [{name: [{"id": value} for value in spellings]} for spellings in SPELLINGS[kind]]
    pick = random.Random(1)
    found.append({"pairs": [{column: pick.choice(PAIRS[column]) for column in PAIRS} for _ in range(10)]})
    found.append({'other."a.b"': [{"id": value} for value in SPELLINGS["int"][0]]})
    return found


def change(pick: random.Random, row: Keys, value: str) -> Change:
    """Any change of the row, its table and key spelled in any way."""
    ((table, spellings),) = row.items()
    key = pick.choice(spellings)
    table = pick.choice(
        ['"other"."a.b"', table] if table.startswith("other") else [table, f"public.{table}", f'"{table}"']
    )
    match pick.randrange(8):
        case 0:
            return Delete(table, key)
        case 1 | 2:
            return Update(table, key, add={"n": 1})
        case 3:
            return Upsert(table, key, {"v": value})
    return Update(table, key, {"v": value})


async def put(shop: ReplicaSet, written: Change) -> None:
    await shop.write([written])


async def state(cluster: SmallCluster, site: str) -> dict[str, list[tuple[Any, ...]]]:
    names = [*TABLES, "pairs", 'other."a.b"']
    found = {name: await cluster.sql(site, f"select t::text from {name} t order by 1") for name in names}
    found["clocks"] = await cluster.sql(
        site, "select table_name, key, generation, deleted, clock, site, waiting from tops.row_clocks order by 1, 2"
    )
    found["sums"] = await cluster.sql(site, "select * from tops.row_sums where amount <> 0 order by 1, 2, 3")
    return {name: [tuple(record) for record in records] for name, records in found.items()}


def versions_by_table(clocks: list[tuple[Any, ...]]) -> Counter[str]:
    return Counter(clock[0] for clock in clocks)


@pytest.mark.parametrize("resolver", ["last-writer", "first-writer", "per-column", f"{__name__}:first_text"])
async def test_sites_that_spell_one_row_differently_end_equal(
    server: EmbeddedPostgres, folder: Path, resolver: str
) -> None:
    pick = random.Random(resolver)
    keys = f'policy = "peer-to-peer"\nresolver = "{resolver}"'
    async with (
        small_cluster(server, folder, keys, replicas=2, schema=SCHEMA) as cluster,
        cluster.connect(prefer="r1") as one,
        cluster.connect(prefer="r2") as other,
    ):
        shops = dict(zip(SITES, (one, other), strict=True))
        for round_number in range(4):
            for site in SITES:
                cut(cluster, site)
            for row in rows():
                for site, shop in shops.items():
                    if round_number == 0:  # both sites insert the row
                        ((table, spellings),) = row.items()
                        await put(shop, Insert(table, {**pick.choice(spellings), "v": f"{site}-0", "n": 0}))
                        continue
                    for step in range(2):
                        await put(shop, change(pick, row, f"{site}-{round_number}-{step}"))
            for site in SITES:
                heal(cluster, site)
            await one.wait_in_sync()
            await other.wait_in_sync()
            here, there = [await state(cluster, site) for site in SITES]

            assert here == there, f"round {round_number}"
            expected = Counter(next(iter(row)) for row in rows())
            assert versions_by_table(here["clocks"]) == expected


ROUNDED = """
create table amounts (id numeric(8,2) primary key, v text not null);
create table codes (id varchar(3) primary key, v text not null);
create table moments (id timestamptz(0) primary key, v text not null);
"""


async def test_a_key_that_its_column_rounds_is_the_row_that_is_stored(server: EmbeddedPostgres, folder: Path) -> None:
    inserts = {
        "amounts": ("1.005", "1.01"),
        "codes": ("abc  ", "abc"),
        "moments": ("2026-01-01 00:00:00.6Z", "2026-01-01 00:00:01Z"),
    }
    async with (
        small_cluster(server, folder, 'policy = "peer-to-peer"', replicas=2, schema=ROUNDED) as cluster,
        cluster.connect(prefer="r1") as one,
        cluster.connect(prefer="r2") as other,
    ):
        for site in SITES:
            cut(cluster, site)
        for table, (given, stored) in inserts.items():
            await put(one, Insert(table, {"id": given, "v": "one"}))
            await put(other, Insert(table, {"id": stored, "v": "other"}))
            missed = await one.write([Update(table, {"id": given}, {"v": "nobody"})])
            assert sum(missed.rows) == 0  # as in PostgreSQL, where no row has such a key
        with pytest.raises(WriteRejected, match="too long"):
            await put(one, Insert("codes", {"id": "abcd", "v": "one"}))
        for site in SITES:
            heal(cluster, site)
        await one.wait_in_sync()

        for table in inserts:
            found = [await cluster.sql(site, f"select v from {table}") for site in SITES]
            assert [[row["v"] for row in rows] for rows in found] == [["other"]] * 2
        versions = "select table_name, key, site from tops.row_clocks order by 1"
        clocks = [await cluster.sql(site, versions) for site in SITES]
        assert clocks[0] == clocks[1]
        assert len(clocks[0]) == len(inserts)


def misnamed(published: Member, key: str) -> Member:
    """The same member as an agent of another version, or a hostile one, may write it: its rows by other names."""
    changes: list[Change] = []
    for step in rows_of(published.changes):
        assert isinstance(step.change, Update)
        row = msgspec.structs.replace(step.change, table="public.t0", key={"id": key})
        if step.clock is None:
            changes.append(msgspec.structs.replace(row, sum_key=key))
        else:
            place = {"table_name": "public.t0", "key": key_text({"id": key})}
            changes += [row, msgspec.structs.replace(step.clock, key=place)]
    return msgspec.structs.replace(published, changes=tuple(changes))


async def test_what_another_site_calls_a_row_is_not_believed(server: EmbeddedPostgres, folder: Path) -> None:
    async with (
        small_cluster(server, folder, 'policy = "peer-to-peer"', schema=SCHEMA) as cluster,
        cluster.connect(prefer="r1") as one,
        cluster.connect(prefer="r2") as other,
    ):
        await put(one, Insert("t0", {"id": 4, "v": "", "n": 0}))
        await one.wait_in_sync()
        writes, spellings = cluster.agents["r1"].writes, iter([" 4", "0x4", "+4", "04", "4 ", "+04"])
        assert writes is not None
        write_all = writes._resource.write_all_local

        async def write_misnamed(members: list[Member]) -> list[MemberVote]:
            return await write_all([misnamed(member, next(spellings)) for member in members])

        writes._resource.write_all_local = write_misnamed  # type: ignore[method-assign, assignment]
        for step in range(3):
            await put(one, Update("t0", {"id": 4}, {"v": f"r1 {step}"}))
            await put(one, Update("t0", {"id": 4}, add={"n": 1}))
            await put(other, Update("t0", {"id": 4}, {"v": f"r2 {step}"}))
        await one.wait_in_sync()
        await other.wait_in_sync()

        second, third = [await state(cluster, site) for site in ("r2", "r3")]
        assert second == third
        assert [clock[:2] for clock in second["clocks"]] == [("t0", '{"id": "4"}')]
        assert [tuple(row) for row in second["sums"]] == [("t0", '{"id": "4"}', "n", 3)]


@pytest.mark.parametrize("resolver", ["last-writer", f"{__name__}:first_text"])
async def test_a_member_whose_key_is_no_value_of_its_type_is_left_out_alike_everywhere(
    server: EmbeddedPostgres, folder: Path, resolver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = f'policy = "peer-to-peer"\nresolver = "{resolver}"'
    async with (
        small_cluster(server, folder, keys, schema=SCHEMA) as cluster,
        cluster.connect(prefer="r1") as one,
        cluster.connect(prefer="r2") as other,
    ):
        await put(one, Insert("t0", {"id": 4, "v": "", "n": 0}))
        await one.wait_in_sync()
        resource = cluster.agents["r1"].resource
        unpublished = resource.unpublished

        async def hostile(limit: int, after: int = 0) -> list[OutboxEntry]:
            entries = await unpublished(limit, after)
            return [OutboxEntry(e.id, [encode_member(misnamed(m, "no number")) for m in e.members]) for e in entries]

        monkeypatch.setattr(resource, "unpublished", hostile)
        await one.write([Update("t0", {"id": 4}, {"v": "hostile"})])

        async def left_out() -> bool:
            status = [await cluster.agents[site].status() for site in ("r2", "r3")]
            return [told["quarantined"] + told["conflicts"] for told in status] == [1, 1]

        await eventually(left_out, 10.0, what="that the transaction was left out")
        resource.unpublished = unpublished  # type: ignore[method-assign]
        await put(other, Update("t0", {"id": 4}, {"v": "later"}))

        async def applied() -> bool:
            found = [await cluster.sql(site, "select v from t0") for site in ("r2", "r3")]
            return [[row["v"] for row in rows] for rows in found] == [["later"]] * 2

        await eventually(applied, what="what came later")


async def test_statements_and_changes_of_one_row_meet(server: EmbeddedPostgres, folder: Path) -> None:
    async with (
        small_cluster(server, folder, 'policy = "peer-to-peer"', replicas=2, schema=SCHEMA) as cluster,
        cluster.connect(prefer="r1") as one,
        cluster.connect(prefer="r2") as other,
    ):
        for site in SITES:
            cut(cluster, site)
        await one.write([Statement("insert into public.t2 values (2.50, 'statement')")])
        await one.write([Statement("update t2 set id = 2.500 where id = 2.5")])
        await put(other, Insert("t2", {"id": "25e-1", "v": "change", "n": 0}))
        for site in SITES:
            heal(cluster, site)
        await one.wait_in_sync()
        await other.wait_in_sync()

        here, there = [await state(cluster, site) for site in SITES]
        assert here == there
        assert [clock[:2] for clock in here["clocks"]] == [("t2", '{"id": "2.5"}')]


UNFIT = """
create collation nobody_cares (provider = libc, locale = 'C');
update pg_collation set collisdeterministic = false where collname = 'nobody_cares';
create type pair as (a numeric, b text); create domain short as varchar(3);
create table documents (id jsonb primary key, v text);
create table lists_of_amounts (id numeric[] primary key, v text);
create table names (id text collate nobody_cares primary key, v text);
create table couples (id pair primary key, v text);
create table shorts (id short primary key, v text);
create table fine (id int primary key, v text);
"""


async def test_keys_of_which_no_text_stands_for_all_are_rejected(server: EmbeddedPostgres, folder: Path) -> None:
    tables = {"documents": "{}", "lists_of_amounts": "{1.0}", "names": "Ann", "couples": "(1.0,x)", "shorts": "a"}
    async with (
        small_cluster(server, folder, 'policy = "peer-to-peer"', replicas=2, schema=UNFIT) as cluster,
        cluster.connect(prefer="r1") as shop,
    ):
        for table, key in tables.items():
            with pytest.raises(WriteRejected, match="different texts of it are equal"):
                await put(shop, Insert(table, {"id": key, "v": ""}))
        await put(shop, Insert("fine", {"id": 1, "v": ""}))

        findings = await examine(cluster.cluster, cluster.cluster.replica_set("shop"))
        told = [found for found in findings if found.level == "error" and "texts of it are equal" in found.text]
        assert len(told) == len(SITES) * len(tables)


async def test_a_key_that_no_row_can_have_is_its_writers_problem_alone(server: EmbeddedPostgres, folder: Path) -> None:
    async with (
        small_cluster(server, folder, 'policy = "peer-to-peer"', replicas=2, schema=SCHEMA) as cluster,
        cluster.connect(prefer="r1") as shop,
    ):
        keys: list[Any] = ["seven", 2**40, *range(10), "1.5"]
        ended = await asyncio.gather(
            *(put(shop, Insert("t0", {"id": key, "v": "", "n": 0})) for key in keys),
            *(put(shop, Insert("t10", {"id": key, "v": "", "n": 0})) for key in ("a\0b", "fine")),
            return_exceptions=True,
        )

        assert [type(end).__name__ for end in ended] == [
            *["WriteRejected"] * 2, *["NoneType"] * 10, "WriteRejected", "WriteRejected", "NoneType"
        ]  # fmt: skip


def carried_out(written: Change, row: tuple[str, int] | None) -> tuple[str, int] | None:
    """What a change makes of the columns beside the key."""
    match written:
        case Delete():
            return None
        case Upsert(values=values):
            return values["v"], row[1] if row is not None else 0
        case Update(values=values, add=add) if row is not None:
            return values.get("v", row[0]), row[1] + add.get("n", 0)
    return row


@pytest.mark.parametrize("policy", ["write-all", "serializable"])
async def test_changes_of_one_row_by_several_spellings_are_done_in_order(
    server: EmbeddedPostgres, folder: Path, policy: str
) -> None:
    """Under other policies, where changes of one shape share a statement."""
    pick, every = random.Random(policy), rows()
    async with (
        small_cluster(server, folder, f'policy = "{policy}"', replicas=2, schema=SCHEMA) as cluster,
        cluster.connect() as shop,
    ):
        expected: list[tuple[str, int] | None] = [None] * len(every)
        for step in range(6):
            changes: list[Change] = []
            for _ in range(150):
                place = pick.randrange(len(every))
                written = change(pick, every[place], f"{place}-{step}-{len(changes)}")
                expected[place] = carried_out(written, expected[place])
                changes.append(written)
            await shop.write(changes)
        await shop.wait_in_sync()

        for site in SITES:
            found: list[tuple[str, int]] = []
            for table in [*TABLES, "pairs", 'other."a.b"']:
                found += [tuple(row) for row in await cluster.sql(site, f"select v, n from {table}")]
            assert sorted(found) == sorted(row for row in expected if row is not None)
