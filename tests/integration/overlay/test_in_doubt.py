"""A transaction that a real PostgreSQL has promised and nobody has decided: found, shown, and ended by an operator."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress

import asyncpg
import pytest

from adapters.embedded.servers import EmbeddedPostgres
from tests.integration.overlay.cluster import Cluster, Recorder, event_type
from tests.support.command_line import tops
from tests.support.polling import eventually
from tops import EventType, Outcome, Site, TxType
from tops.client.transactions import Transaction
from tops.model.errors import UncheckedTransaction
from tops.model.ids import TxId
from tops.protocol.messages import CensusPolicy, TxOutcome, TxSpec


class Table(Recorder):
    """Inserts the events of a transaction into a table of a PostgreSQL, as a prepared transaction."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        super().__init__()
        self.connection = connection

    async def on_prepare(self, tx: TxId) -> None:
        await self.connection.execute("begin")
        for number in self.events[tx]:
            await self.connection.execute("insert into orders values ($1)", number)
        await self.connection.execute(f"prepare transaction '{tx}'")

    async def on_commit(self, tx: TxId) -> None:
        await self.connection.execute(f"commit prepared '{tx}'")
        await super().on_commit(tx)

    async def on_abort(self, tx: TxId, reason: str) -> None:
        await self.connection.execute(f"rollback prepared '{tx}'")
        await super().on_abort(tx, reason)

    async def prepared_in_database(self) -> list[str]:
        return [row["gid"] for row in await self.connection.fetch("select gid from pg_prepared_xacts")]


class Silent(Recorder):
    """Does not answer when it is asked for its promise, until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = asyncio.Event()

    async def on_prepare(self, tx: TxId) -> None:
        await self.go_on.wait()


@pytest.fixture
async def table() -> AsyncIterator[Table]:
    async with EmbeddedPostgres() as server:
        connection = await asyncpg.connect(server.dsn)
        await connection.execute("create table orders (id int primary key)")
        try:
            yield Table(connection)
        finally:
            await connection.close()


async def in_doubt(publisher: Site, orders: EventType) -> Transaction:
    """A transaction with one promise of two; its publisher has gone to do something else."""
    spec = TxSpec(
        orders.name,
        TxType.DISTRIBUTED,
        census=CensusPolicy(timeout_s=20.0, replies=2),
        vote_timeout_s=0.5,
        decide_within_s=250.0,  # the operator's commands may take long on a machine under load
    )
    tx = await publisher.begin(spec)
    await tx.publish(orders, {"id": 7})
    with pytest.raises(UncheckedTransaction):
        await tx.commit()
    return tx


async def decided(tx: Transaction) -> TxOutcome:
    """Its outcome, however long the votes take that are still missing."""
    while True:
        with suppress(UncheckedTransaction):
            return await tx.wait()


async def test_an_operator_ends_what_a_database_has_promised_and_nobody_decides(broker: Cluster, table: Table) -> None:
    orders, silent, url = event_type(), Silent(), broker.url("b1")
    async with broker.site("publisher") as publisher, broker.site("one") as one, broker.site("two") as two:
        await publisher.advertise(orders)
        await one.subscribe(orders, participant=table)
        await two.subscribe(orders, participant=silent)
        tx = await in_doubt(publisher, orders)
        await eventually(lambda: _listed(url, tx))
        assert await table.prepared_in_database() == [tx.id]
        resolve = ("tx", "resolve", tx.id, "--event-type", orders.name, "--url", url, "--wait", "1")

        code, out, error = await tops(*resolve)
        assert (code, out.startswith(f"{tx.id}: unknown (committing; votes missing from ")) == (1, True), error
        assert await table.prepared_in_database() == [tx.id]
        code, out, error = await tops(*resolve, "--force")

        assert (code, out.strip()) == (1, f"{tx.id}: aborted (ended by an operator, by force)"), error
        assert "aborted by force" in error
        await eventually(lambda: tx.id in table.aborted)
        assert await table.prepared_in_database() == []
        assert await table.connection.fetch("select * from orders") == []
        assert (await tx.abort()).outcome is Outcome.ABORTED
        _, out, _ = await tops("tx", "list", "--in-doubt", "--url", url, "--format", "json")
        assert json.loads(out) == []
        silent.go_on.set()


async def test_a_decision_that_was_taken_stands_whatever_is_forced(broker: Cluster, table: Table) -> None:
    orders, silent, url = event_type(), Silent(), broker.url("b1")
    async with broker.site("publisher") as publisher, broker.site("one") as one, broker.site("two") as two:
        await publisher.advertise(orders)
        await one.subscribe(orders, participant=table)
        await two.subscribe(orders, participant=silent)
        tx = await in_doubt(publisher, orders)
        silent.go_on.set()
        assert (await decided(tx)).outcome is Outcome.COMMITTED
        await eventually(lambda: tx.id in table.committed)

        code, out, _ = await tops("tx", "resolve", tx.id, "--event-type", orders.name, "--url", url, "--force")

        assert (code, out.strip()) == (0, f"{tx.id}: committed")
        assert [row["id"] for row in await table.connection.fetch("select * from orders")] == [7]


async def test_a_promise_survives_its_silent_coordinator_and_resolve_says_whom_to_start(
    broker: Cluster, table: Table
) -> None:
    orders, silent, url = event_type(), Silent(), broker.url("b1")
    async with broker.site("publisher") as publisher, broker.site("one") as one, broker.site("two") as two:
        await publisher.advertise(orders)
        await one.subscribe(orders, participant=table)
        await two.subscribe(orders, participant=silent)
        tx = await in_doubt(publisher, orders)
        await eventually(lambda: _listed(url, tx))  # the database has promised
        await broker.kill("b1")

        code, _, error = await tops("tx", "resolve", tx.id, "--event-type", orders.name, "--url", url, "--force")

        assert (code, "no broker responds" in error) == (3, True), error
        assert await table.prepared_in_database() == [tx.id]
        silent.go_on.set()
        await broker.start("b1")  # it has no record of a decision, so there was none
        await eventually(lambda: tx.id in table.aborted)
        assert await table.prepared_in_database() == []


async def _listed(url: str, tx: Transaction) -> bool:
    code, out, error = await tops("tx", "list", "--in-doubt", "--url", url, "--format", "json")
    assert code == 0, error
    return [t["tx"] for t in json.loads(out)] == [tx.id]
