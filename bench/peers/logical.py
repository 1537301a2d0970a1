"""PostgreSQL's logical replication: one publisher, two subscribers that apply row changes after the commit."""

import time

from adapters import EmbeddedPostgres
from bench.peers.postgres import SCHEMA, PostgresSystem, execute, fetch_text, load_accounts, until
from bench.workloads import Dataset

SUBSCRIBERS = ("subscriber1", "subscriber2")
# One row per transaction, made inside the server as fast as it can; the publisher's disk is not what is measured.
BACKLOG = """
do $$ begin
  for number in 1..{transactions} loop
    insert into entries values ({first_id} + number, repeat('x', 100));
    commit;
  end loop;
end $$
"""


class LogicalReplication(PostgresSystem):
    name = "logical"
    description = "PostgreSQL logical replication, 1 publisher and 2 subscribers"
    promise = "on disk at the publisher; the subscribers follow"

    async def start(self) -> None:
        servers = await EmbeddedPostgres.start_many(1 + len(SUBSCRIBERS), settings=self.settings)
        self.servers.update(zip(("publisher", *SUBSCRIBERS), servers, strict=True))

    async def load(self, dataset: Dataset) -> None:
        publisher = self.writer
        await load_accounts(publisher.dsn, dataset)
        await execute(publisher.dsn, "create publication bench for all tables")
        for name in SUBSCRIBERS:
            source = f"host=127.0.0.1 port={publisher.port} user=postgres password={publisher.password} dbname=postgres"
            await execute(
                self.servers[name].dsn, SCHEMA, f"create subscription {name} connection '{source}' publication bench"
            )
        for name in SUBSCRIBERS:
            await until(self.servers[name].dsn, "select bool_and(srsubstate = 'r') from pg_subscription_rel")
        await self.settle()

    async def settle(self) -> None:
        """Applied and on disk at both: their slots have confirmed the publisher's present end of log."""
        target = await fetch_text(self.writer.dsn, "select pg_current_wal_lsn()::text")
        confirmed = "select bool_and(confirmed_flush_lsn >= $1::text::pg_lsn) from pg_replication_slots"
        await until(self.writer.dsn, confirmed, target)

    async def drain_rate(self, transactions: int, first_id: int) -> float:
        """Transactions per second at which both subscribers work off a backlog, their start included.

        Inserts `transactions` rows into `entries` from `first_id` on, for which the caller's ledger must account.
        """
        for name in SUBSCRIBERS:
            await execute(self.servers[name].dsn, f"alter subscription {name} disable")
        await execute(
            self.writer.dsn,
            "set synchronous_commit = off",
            BACKLOG.format(transactions=transactions, first_id=first_id - 1),
        )
        began = time.perf_counter()
        for name in SUBSCRIBERS:
            await execute(self.servers[name].dsn, f"alter subscription {name} enable")
        await self.settle()
        return transactions / (time.perf_counter() - began)
