"""Writes as SQL statements in a write-all set: shipped to every replica, or executed once and replicated as rows.

Both sides insert into the same table, whose column `token` has a random default. One gives the value, so that its
statement is proved deterministic and shipped; the other leaves it to the default, so that it is executed once.
"""

import asyncio
from uuid import uuid4

import asyncpg

from adapters.changes import Change, Statement
from bench.policies.catalog import case_named
from bench.policies.client import TopsClient
from bench.policies.system import ProcessCluster
from bench.systems import Client
from bench.workloads import Add, Append, Dataset, Transfer

_TOKEN = "alter table entries add column token uuid not null default gen_random_uuid()"


class Texts:
    """One side's statements; `gives_token`: with the value of every column."""

    def __init__(self, insert: str, add: str, *, gives_token: bool) -> None:
        self._insert, self._add, self._gives_token = insert, add, gives_token

    def changes_of(self, operation: Add | Transfer | Append) -> list[Change]:
        match operation:
            case Append(id, payload):
                token = (uuid4(),) if self._gives_token else ()
                return [Statement(self._insert, (id, payload, *token))]
            case Add(key, amount):
                return [Statement(self._add, (amount, key))]
        raise ValueError(f"{operation} is in no workload of this system")


SHIPPED = Texts(
    "insert into entries (id, payload, token) values ($1, $2, $3)",
    "update accounts set bal = bal + $1 where id = $2",
    gives_token=True,
)
EXECUTED = Texts(
    "insert into entries (id, payload) values ($1, $2)",
    "update accounts set bal = bal + $1 where id = $2 and random() < 2",
    gives_token=False,
)


class StatementClient(TopsClient):
    """Hands over each operation as one statement."""

    def __init__(self, client: TopsClient, texts: Texts) -> None:
        super().__init__(client.replica_set)
        self._texts = texts

    def changes_of(self, operation: Add | Transfer | Append) -> list[Change]:
        return self._texts.changes_of(operation)


class StatementCluster(ProcessCluster):
    def __init__(self, name: str, texts: Texts) -> None:
        super().__init__(case_named("write_all"), name=name)
        self._texts = texts

    async def load_rows(self, dataset: Dataset) -> None:
        await super().load_rows(dataset)
        await asyncio.gather(*(_run(server.dsn, _TOKEN) for server in self.servers.values()))

    async def client(self) -> Client:
        shared = await super().client()
        assert isinstance(shared, TopsClient)
        return StatementClient(shared, self._texts)


async def _run(dsn: str, sql: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(sql)
    finally:
        await connection.close()
