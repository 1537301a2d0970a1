"""Three sites that write the same rows, cut off from each other and with clocks that differ, end with the same rows."""

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from adapters import EmbeddedPostgres
from adapters.changes import Change, Delete, Insert, Member, Row, Update
from replication import ReplicaSet
from replication.conflicts.clock import wall_ms
from replication.conflicts.tables import rows_of, version_in
from replication.replica.apply.participant import entry_of
from tests.integration.replication.clusters import rows_everywhere
from tests.integration.replication.inprocess import SmallCluster, small_cluster
from tests.support.polling import eventually
from tops.model.errors import NotReachable, OutcomeUnknown
from tops.model.log_points import Digests, LogPoint
from tops.protocol.messages import LogEntry

HOT, DOOMED, COUNTER, WRITERS = range(8), range(20, 28), 50, 12
SKEW_MS = {"r1": 0, "r2": 5_000, "r3": -5_000}
RESOLVERS = ["last-writer", "first-writer", "per-column", "site-priority", f"{__name__}:shorter_or_first"]
Identity = tuple[int, bool, int, str]


def shorter_or_first(table: str, key: Row, kept: Row, came: Row, kept_site: str, came_site: str) -> Row:
    """A resolver that is neither symmetric nor associative: it depends on the order in which it meets versions."""
    return {**came, "owner": min(kept["owner"], came["owner"], key=len)}


def keys_for(resolver: str) -> str:
    priority = '\nsite_priority = ["r2", "r1", "r3"]' if resolver == "site-priority" else ""
    return f'policy = "peer-to-peer"\nresolver = "{resolver}"{priority}'


def cut(cluster: SmallCluster, site: str) -> None:
    """Nothing comes in from the log and nothing goes out to it; local writes go on."""
    agent = cluster.agents[site]
    assert agent.writes is not None
    agent.participant.stop("cut off")
    agent.writes.publisher.resumed.clear()


def heal(cluster: SmallCluster, site: str) -> None:
    agent = cluster.agents[site]
    assert agent.writes is not None
    agent.participant.resume()
    agent.writes.publisher.resumed.set()


def _skewed_ms(ahead_ms: int) -> int:
    return wall_ms() + ahead_ms


def skew(cluster: SmallCluster) -> None:
    for site, ahead_ms in SKEW_MS.items():
        writes = cluster.agents[site].writes
        assert writes is not None
        writes.clock._wall = partial(_skewed_ms, ahead_ms)


async def begin(shop: ReplicaSet) -> None:
    rows = [*HOT, *DOOMED, COUNTER, *(100 + place for place in range(WRITERS))]
    await shop.write([Insert("accounts", {"id": row, "owner": "", "balance": 1_000_000}) for row in rows])
    await shop.wait_in_sync()


class Told:
    """What the writers were told, and how many writes were answered."""

    def __init__(self) -> None:
        self.own: dict[int, str] = {}
        self.added: Counter[int] = Counter()
        self.deleted: set[int] = set()
        self.answered = 0


async def write_much(cluster: SmallCluster, site: str, place: int, count: int, told: Told) -> None:
    """Updates of rows that everyone updates and adds to, of a row of one's own; deletes of what others update."""
    pick = random.Random(place)
    async with cluster.connect(prefer=site) as shop:
        for step in range(count):
            value, choice = f"{site}-{place}-{step}.", pick.random()
            if choice < 0.6:
                await put(shop, Update("accounts", {"id": pick.choice(HOT)}, {"owner": value}))
            elif choice < 0.75:
                if await put(shop, Update("accounts", {"id": 100 + place}, {"owner": value})):
                    told.own[place] = value
            elif choice < 0.9:
                row = pick.choice([COUNTER, *HOT])
                done = await put(shop, Update("accounts", {"id": row}, add={"balance": 1}))
                told.added[row] += done
            elif choice < 0.95:
                new = {"values": {"owner": value}} if pick.random() < 0.5 else {"add": {"balance": 1}}
                await put(shop, Update("accounts", {"id": pick.choice(DOOMED)}, **new))
            else:
                row = DOOMED[(step + place) % len(DOOMED)]
                if await put(shop, Delete("accounts", {"id": row})):
                    told.deleted.add(row)
            told.answered += 1


async def put(shop: ReplicaSet, change: Change) -> bool:
    """Write, and ask what became of it if the answer is lost."""
    try:
        await shop.write([change])
    except OutcomeUnknown as unknown:
        while True:
            with contextlib.suppress(OutcomeUnknown, NotReachable):
                return await shop.outcome(unknown.tx) == "committed"
    return True


class Published:
    """Every version of every row as the log has it: what it set, and which version its writer had seen."""

    def __init__(self, cluster: SmallCluster) -> None:
        self.set: dict[tuple[str, Identity], str] = {}  # row and version -> the owner that it set
        self.seen: set[tuple[str, Identity]] = set()  # versions that somebody built upon
        participant = cluster.agents["r1"].participant
        apply = participant.apply_entries

        async def noted(entries: tuple[LogEntry, ...], upto: int, history: str, digests: Digests) -> LogPoint:
            for logged in entries:
                for member in entry_of(logged.number, logged).members:
                    self._note(member)
            return await apply(entries, upto, history, digests)

        participant.apply_entries = noted  # type: ignore[method-assign]

    def _note(self, member: Member) -> None:
        for _, change, clock in rows_of(member.changes):
            if clock is None:
                continue
            told, row = json.loads(clock.values["change"]), str(clock.key["key"])
            self.seen.add((row, tuple(json.loads(clock.values["previous"]))))
            if told["kind"] in ("insert", "update") and isinstance(change, Insert | Update):
                self.set[row, version_in(clock).identity] = str(change.values.get("owner", ""))

    def nobody_built_upon(self) -> dict[tuple[str, Identity], str]:
        return {version: owner for version, owner in self.set.items() if version not in self.seen}


async def converge(server: EmbeddedPostgres, folder: Path, resolver: str, count: int) -> None:
    async with small_cluster(server, folder, keys_for(resolver)) as cluster, cluster.connect(prefer="r1") as shop:
        sites, told = list(cluster.databases), Told()
        published = Published(cluster)
        await begin(shop)
        skew(cluster)
        async with asyncio.TaskGroup() as writers:
            tasks = [
                writers.create_task(write_much(cluster, sites[place % 3], place, count // WRITERS, told))
                for place in range(WRITERS)
            ]
            await partitions(cluster, told, tasks)
        await shop.wait_in_sync(120.0)

        found = await rows_everywhere(shop, "select id, owner, balance from accounts order by id")
        assert found["r1"] == found["r2"] == found["r3"]
        rows = {row[0]: row for row in found["r1"]}
        for place in range(WRITERS):
            assert rows[100 + place][1] == told.own.get(place, ""), "an update that never conflicted is lost"
        for row in (COUNTER, *HOT):
            assert rows[row][2] == 1_000_000 + told.added[row], "an increment is lost or doubled"
        assert rows.keys() & told.deleted == set(), "a deleted row came back"
        await check_discarded(cluster, published)


async def partitions(cluster: SmallCluster, told: Told, writers: Sequence[asyncio.Task[None]]) -> None:
    """One site after the other is cut off while some writes are answered."""
    pick = random.Random(1)
    while not all(writer.done() for writer in writers):
        lonely = pick.choice(list(cluster.databases))
        for switch in (cut, heal):
            switch(cluster, lonely)
            until = told.answered + pick.randint(5, 40)

            async def enough(until: int = until) -> bool:
                return told.answered >= until or all(writer.done() for writer in writers)

            await eventually(enough, 300.0, "writes while a site is cut off")


async def check_discarded(cluster: SmallCluster, published: Published) -> None:
    """A version that nobody built upon is the one that is kept, or it is in the conflict log of every replica."""
    kept: set[tuple[str, Identity]] = set()
    for row in await cluster.sql("r1", "select key, generation, deleted, clock, site from tops.row_clocks"):
        kept.add((row["key"], (row["generation"], row["deleted"], row["clock"], row["site"])))
    lost = {version: owner for version, owner in published.nobody_built_upon().items() if version not in kept}
    assert lost, "nothing was discarded: this was no test"
    for site in cluster.databases:
        logged: dict[str, str] = {}
        for line in await cluster.sql(site, "select key, discarded from tops.conflicts where discarded is not null"):
            logged[line["key"]] = logged.get(line["key"], "") + line["discarded"]
        missing = [owner for (key, _), owner in lost.items() if owner not in logged.get(key, "")]
        assert missing == [], f"versions were discarded at {site} that its conflict log does not show"


@pytest.mark.parametrize("resolver", RESOLVERS)
async def test_sites_converge_under_conflicts_partitions_and_skewed_clocks(
    server: EmbeddedPostgres, folder: Path, resolver: str
) -> None:
    await converge(server, folder, resolver, 240)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("resolver", RESOLVERS)
async def test_sites_converge_after_ten_thousand_changes(server: EmbeddedPostgres, folder: Path, resolver: str) -> None:
    await converge(server, folder, resolver, 10_000)


async def test_every_discarded_version_is_in_the_conflict_log_with_the_winner(
    server: EmbeddedPostgres, folder: Path
) -> None:
    async with small_cluster(server, folder, keys_for("last-writer")) as cluster, cluster.connect() as shop:
        await begin(shop)
        skew(cluster)
        for site in cluster.databases:
            cut(cluster, site)
        for site in cluster.databases:
            async with cluster.connect(prefer=site) as there:
                await there.write([Update("accounts", {"id": 1}, {"owner": f"by {site}"})])
        for site in cluster.databases:
            heal(cluster, site)
        await shop.wait_in_sync()

        found = await rows_everywhere(shop, "select owner from accounts where id = 1")
        assert {rows[0][0] for rows in found.values()} == {"by r2"}, "the site whose clock is ahead wins"
        lines = [line for lines in (await shop.conflicts()).values() for line in lines]
        discarded = {json.loads(line["discarded"])["owner"] for line in lines}
        assert discarded >= {"by r1", "by r3"}
        assert {line["kind"] for line in lines} == {"update_origin_differs"}
        assert all(json.loads(line["kept"])["owner"] for line in lines)
        statuses = (await shop.status())["replicas"]
        assert any("clock" in status["warning"] for status in statuses), "nobody warned of the clocks"


async def test_a_row_deleted_at_one_site_and_updated_at_another_stays_deleted(
    server: EmbeddedPostgres, folder: Path
) -> None:
    async with small_cluster(server, folder, keys_for("last-writer")) as cluster, cluster.connect(prefer="r1") as shop:
        await begin(shop)
        for site in cluster.databases:
            cut(cluster, site)
        await shop.write([Delete("accounts", {"id": 2})])
        async with cluster.connect(prefer="r2") as there:
            await there.write([Update("accounts", {"id": 2}, {"owner": "later"})])
        async with cluster.connect(prefer="r3") as there:
            await there.write([Update("accounts", {"id": 2}, add={"balance": 7})])
        for site in cluster.databases:
            heal(cluster, site)
        await shop.wait_in_sync()

        found = await rows_everywhere(shop, "select owner from accounts where id = 2")
        assert found == {"r1": [], "r2": [], "r3": []}
        lines = [line for lines in (await shop.conflicts()).values() for line in lines]
        assert {line["kind"] for line in lines} <= {"update_deleted", "delete_origin_differs"}
        assert {"add": {"balance": "7"}} in [json.loads(line["discarded"]) for line in lines]

        await shop.write([Insert("accounts", {"id": 2, "owner": "again", "balance": 1})])
        await shop.wait_in_sync()
        again = await rows_everywhere(shop, "select owner from accounts where id = 2")
        assert again == {"r1": [("again",)], "r2": [("again",)], "r3": [("again",)]}


async def test_a_violated_constraint_sets_the_transaction_aside_and_marks_the_set_divergent(
    server: EmbeddedPostgres, folder: Path
) -> None:
    schema = "create table accounts (id int primary key, owner text not null default '', unique (owner))"
    async with (
        small_cluster(server, folder, keys_for("last-writer"), schema=schema) as cluster,
        cluster.connect(prefer="r1") as shop,
    ):
        for site in cluster.databases:
            cut(cluster, site)
        await shop.write([Insert("accounts", {"id": 1, "owner": "same"})])
        async with cluster.connect(prefer="r2") as there:
            await there.write([Insert("accounts", {"id": 2, "owner": "same"})])
        for site in cluster.databases:
            heal(cluster, site)

        async def quarantined() -> bool:
            status = {r["replica"]: r for r in (await shop.status())["replicas"]}
            return bool(status["r1"]["divergent"]) and status["r1"]["quarantined"] == 1

        await eventually(quarantined, what="r1 quarantines it")
        assert not any(r["in_sync"] for r in (await shop.status())["replicas"] if r["divergent"])
        await cluster.sql("r1", "alter table accounts drop constraint accounts_owner_key")
        assert "1 of 1" in await shop.order("r1", "retry")
        assert len(await cluster.sql("r1", "select * from accounts")) == 2


@pytest.mark.parametrize("resolver", ["last-writer", f"{__name__}:shorter_or_first"])
async def test_a_request_repeated_at_another_site_counts_once_and_all_sites_end_equal(
    server: EmbeddedPostgres, folder: Path, resolver: str
) -> None:
    async with (
        small_cluster(server, folder, keys_for(resolver)) as cluster,
        cluster.connect(prefer="r1") as first,
        cluster.connect(prefer="r2") as second,
    ):
        await begin(first)
        for site in cluster.databases:
            cut(cluster, site)
        await second.write([Update("accounts", {"id": 1}, {"owner": "elsewhere"})])
        request = [
            Update("accounts", {"id": 1}, {"balance": 7}),
            Update("accounts", {"id": COUNTER}, add={"balance": 5}),
        ]
        await first.write(request, idempotency_key="k")
        await second.write(request, idempotency_key="k")
        for site in cluster.databases:
            heal(cluster, site)
        await first.wait_in_sync()

        found = await rows_everywhere(first, "select id, owner, balance from accounts where id in (1, 50) order by id")
        assert found["r1"] == found["r2"] == found["r3"]
        assert found["r1"][1][2] == 1_000_005, "an increment counted twice"


@pytest.mark.parametrize(
    "resolver", ["last-writer", pytest.param(f"{__name__}:shorter_or_first", marks=pytest.mark.long)]
)
async def test_records_of_deleted_rows_and_conflicts_go_with_age_but_not_before_every_replica_has_them(
    server: EmbeddedPostgres, folder: Path, resolver: str
) -> None:
    keys = f"{keys_for(resolver)}\nkeep_tombstones_s = 0.1\nkeep_conflicts_s = 0.1"
    async with small_cluster(server, folder, keys) as cluster, cluster.connect(prefer="r1") as shop:
        await begin(shop)
        await cluster.stop("r3")
        await shop.write([Delete("accounts", {"id": 1})])
        async with cluster.connect(prefer="r2") as there:
            cut(cluster, "r2")
            await shop.write([Update("accounts", {"id": 2}, {"owner": "here"})])
            await there.write([Update("accounts", {"id": 2}, {"owner": "there"})])
            heal(cluster, "r2")

        async def left(site: str) -> tuple[int, int]:
            (row,) = await cluster.sql(
                site,
                "select (select count(*) from tops.row_clocks where deleted) as deleted, "
                "(select count(*) from tops.conflicts) as conflicts",
            )
            return row["deleted"], row["conflicts"]

        async def met() -> bool:
            return await left("r1") == (1, 1)

        await eventually(met, what="the conflict at r1")
        pruning = cluster.agents["r1"].pruning
        assert pruning is not None
        rounds = pruning.rounds

        async def tried() -> bool:
            return pruning.rounds > rounds

        await eventually(tried, 90.0, what="a round of pruning while r3 is away")
        assert await left("r1") == (1, 1), "forgotten before r3 has it"

        await cluster.start("r3")

        async def gone() -> bool:
            return [await left(site) for site in cluster.databases] == [(0, 0)] * 3

        await eventually(gone, 90.0, what="everything old being forgotten")
        await shop.write([Insert("accounts", {"id": 1, "owner": "again", "balance": 1})])
        await shop.wait_in_sync()
        again = await rows_everywhere(shop, "select owner from accounts where id = 1")
        assert again == {"r1": [("again",)], "r2": [("again",)], "r3": [("again",)]}
