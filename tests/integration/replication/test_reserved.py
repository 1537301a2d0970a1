"""What only agents write is out of a client's reach, under every policy: by row change, and by an agent's own SQL."""

from pathlib import Path

import pytest

from adapters import EmbeddedPostgres
from adapters.changes import (
    SETTLED,
    Change,
    Delete,
    Insert,
    Member,
    Repair,
    Statement,
    Update,
    Upsert,
    encode_member,
    own_key,
)
from replication.conflicts.own_statements import DROP_SUMS, DROP_WRITE_SETS, REPAIR_CALL
from replication.model.events import log_type
from replication.policies import policy_of
from replication.policies.base import write_spec
from replication.rpc.control import control_key
from tests.integration.replication.inprocess import SmallCluster, small_cluster
from tests.support.hostile_client import unchecked
from tops import Site
from tops.model.errors import TopsError, TransactionAborted
from tops.model.ids import TxId, counted_id

POLICIES = {
    "write-all": 'policy = "write-all"',
    "serializable": 'policy = "serializable"',
    "primary-site": 'policy = "primary-site"\nprimary = "r1"',
    "peer-to-peer": 'policy = "peer-to-peer"',
}
ATTACKS: list[Change] = [
    Upsert("tops.row_clocks", {"table_name": "accounts", "key": "{}"}, {"generation": 9}),
    Insert('"tops".conflicts', {"id": "x"}),
    Delete("tops.agent_locks", {"replica_set": "shop"}),
    Insert("tops.write_sets", {"number": 10**9, "places": "[]"}),
    Statement(DROP_WRITE_SETS, (10**9,)),
    Statement(DROP_SUMS, (["accounts"], ["1"])),
    Statement(REPAIR_CALL, ("x", ["delete from tops.position"])),
]


async def memory(small: SmallCluster, *tables: str) -> list[object]:
    """What agents remember, but for what goes on by itself."""
    tables = tables or ("agent_locks", "row_clocks", "row_sums", "write_sets", "set_aside", "start")
    return [
        await small.sql(name, f"select * from tops.{table} order by 1") for table in tables for name in small.agents
    ]


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_client_cannot_write_what_is_an_agents(
    server: EmbeddedPostgres, folder: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unchecked(monkeypatch)
    async with small_cluster(server, folder, POLICIES[policy], replicas=2) as small, small.connect() as shop:
        before = await memory(small)
        for attack in ATTACKS:
            with pytest.raises(TopsError):
                await shop.write([attack])

        assert await memory(small) == before
        await shop.write([Insert("accounts", {"id": 1, "balance": 1})])
        await shop.wait_in_sync()


@pytest.mark.parametrize("policy", ["write-all", "primary-site"])
async def test_a_text_with_nul_ends_no_agents_session(
    server: EmbeddedPostgres, folder: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unchecked(monkeypatch)
    sessions = (
        "select pid from pg_stat_activity where application_name like 'tops-agent%' and datname = current_database()"
    )
    async with small_cluster(server, folder, POLICIES[policy], replicas=2) as small, small.connect() as shop:
        before = [await small.sql(name, sessions) for name in small.agents]
        for sql in ("insert into accounts values ('\0')", "delete from accounts -- \0", "select random() -- \0"):
            with pytest.raises(TopsError, match="NUL"):
                await shop.execute(sql)
        with pytest.raises(TopsError, match="NUL"):
            await shop.execute("delete from accounts", idempotency_key="\0")

        assert [await small.sql(name, sessions) for name in small.agents] == before
        await shop.write([Insert("accounts", {"id": 1, "balance": 1})])
        await shop.wait_in_sync()


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


EVIL = Insert("accounts", {"id": 666, "balance": 666}, captured=True)
REPAIR = Repair("shop/r1", "guessed", 10**9)
# Encoded by a client that claims to be more than one: none of it counts, and no replica stops.
CLAIMS = {
    "an origin": encode_member(Member(TxId(""), (EVIL,), origin="r1")),
    "sequences": encode_member(Member(TxId(""), (), origin="r1", sequences=(("public.s", 10**9),))),
    "a repair": encode_member(
        Member(TxId(""), (Statement(REPAIR_CALL, ("x", ["select 1"])),), control_key(REPAIR), control=REPAIR)
    ),
    "a tops key": encode_member(Member(TxId(""), (Insert("accounts", {"id": 666, "balance": 1}),), "tops-mine")),
    "another's id": encode_member(
        Member(
            TxId(""),
            (Insert("accounts", {"id": 666, "balance": 1}),),
            own_key(counted_id("victim", "life", 1, "", "r1")),
        )
    ),
    "no member": b"\xc1 nothing that can be decoded",
    "no bytes at all": b"",
    "a name of three parts": encode_member(Member(TxId(""), (Insert("a.b.c", {"id": 666}),))),
    "values nested too deep": encode_member(Member(TxId(""), (Insert("accounts", {"id": nested(400)}),))),
    "other content": encode_member(Member(TxId(""), (), "another's key", content="0123456789abcdef" * 2)),
    "an endless key": encode_member(Member(TxId(""), (), "k", key_ttl_s=2**62)),
    "a row's sum": encode_member(Member(TxId(""), (Update("accounts", {"id": 1}, add={"balance": 1}, sum_key="x"),))),
    "nobody else's id": encode_member(
        Member(TxId(""), (), own_key(counted_id("victim", "life", 2, "", "r1")), content=SETTLED)
    ),
}
BODIES: dict[str, dict[str, object]] = {
    "reads that can't be decoded": {"at": 0, "write": encode_member(Member(TxId(""), ())), "reads": b"\xc1"},
    "a clock beyond all bounds": {"at": 2**62, "write": encode_member(Member(TxId(""), ())), "reads": b""},
}


@pytest.mark.parametrize(
    "policy",
    ['policy = "write-all"', 'policy = "serializable"', 'policy = "peer-to-peer"\norder = "ordered"'],
    ids=["write-all", "serializable", "ordered"],
)
async def test_what_a_client_claims_inside_its_write_does_not_count(
    server: EmbeddedPostgres, folder: Path, policy: str
) -> None:
    log = log_type("shop")
    async with small_cluster(server, folder, policy, replicas=2) as small, small.connect() as shop:
        before = await memory(small, "row_clocks", "row_sums", "set_aside", "start", "known_ids")
        spec = write_spec(log, policy_of(small.cluster.replica_set("shop")))
        async with Site.connect(small.cluster.urls(), name="mallory") as site:
            await site.advertise(log)
            bodies = {claim: {"at": 0, "write": member, "reads": b""} for claim, member in CLAIMS.items()}
            for claim, body in (bodies | BODIES).items():
                try:
                    await site.run(spec, [body])
                except TransactionAborted:
                    assert policy == 'policy = "write-all"', claim  # elsewhere it is logged first and rejected then

        await shop.write([Insert("accounts", {"id": 1, "balance": 1})])
        await shop.wait_in_sync()
        assert await memory(small, "row_clocks", "row_sums", "set_aside", "start", "known_ids") == before
        for name in small.agents:
            assert [row["id"] for row in await small.sql(name, "select id from accounts")] == [1]
