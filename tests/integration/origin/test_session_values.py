"""What a statement can't have of the session that executes it: values of other clients, and places of rows."""

from pathlib import Path

import pytest

from adapters import EmbeddedPostgres
from adapters.postgres.proof.verdict import NotProved, Reason
from replication.rpc.rejections import WriteRejected
from tests.integration.origin.policies import POLICIES
from tests.integration.replication.inprocess import small_cluster
from tops.model.errors import TopsError

SCHEMA = """
create table orders (id serial primary key, note text);
create table log (id int primary key, note text);
"""


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_session_value_is_never_another_clients(server: EmbeddedPostgres, folder: Path, policy: str) -> None:
    async with small_cluster(server, folder, POLICIES[policy], schema=SCHEMA) as cluster:
        async with cluster.connect(prefer="r1") as one:
            for _ in range(10):
                await one.execute("insert into orders (note) values (clock_timestamp()::text)")
        async with cluster.connect(prefer="r1") as other:
            for call in ("currval('orders_id_seq')", "lastval()"):
                with pytest.raises(WriteRejected, match="not yet defined in this session"):
                    await other.execute(f"insert into log values ({call}, clock_timestamp()::text)")


@pytest.mark.parametrize("policy", ["quorum", "primary-site"])
@pytest.mark.parametrize("columns", ["ctid", "xmin", "tableoid", "id, ctid", "array[ctid]"])
async def test_the_place_of_a_row_is_not_returned(
    server: EmbeddedPostgres, folder: Path, policy: str, columns: str
) -> None:
    async with (
        small_cluster(server, folder, POLICIES[policy], schema=SCHEMA) as cluster,
        cluster.connect(prefer="r1") as shop,
    ):
        with pytest.raises(TopsError, match=r"(ctid|xmin|tableoid) tells where one database keeps a row"):
            await shop.execute(f"insert into log values (1, clock_timestamp()::text) returning {columns}")
        with pytest.raises(WriteRejected, match='column "nosuch" does not exist'):
            await shop.execute("insert into log values (1, clock_timestamp()::text) returning nosuch")
        done = await shop.execute(
            "insert into log values (1, clock_timestamp()::text) returning log.tableoid::regclass::text as part"
        )
        assert done.returned == (({"part": "log"},),)


def test_a_rule_is_rejected_with_what_to_do() -> None:
    assert "with a trigger or in the application" in NotProved(Reason.RULE, "ruled has rules").sentence


@pytest.mark.parametrize("policy", POLICIES)
async def test_within_one_transaction_a_session_value_is_that_of_the_transaction(
    server: EmbeddedPostgres, folder: Path, policy: str
) -> None:
    async with (
        small_cluster(server, folder, POLICIES[policy], schema=SCHEMA) as cluster,
        cluster.connect(prefer="r1") as shop,
    ):
        done = await shop.execute(
            "with n as (select nextval('orders_id_seq') as id) "
            "insert into log select id, currval('orders_id_seq')::text from n returning id, note"
        )
        ((row,),) = done.returned
        assert str(row["id"]) == row["note"]
