"""A bank: transfers that are at two of three replicas when they are acknowledged, and never seen half done.

python -m examples.bank
"""

import asyncio
import random
from collections.abc import Sequence

from examples.local_cluster import local_cluster
from replication import ReplicaSet, connect
from replication.rpc.rejections import WriteRejected

SCHEMA = "create table accounts (id int primary key, balance bigint not null check (balance >= 0));"


async def transfer(bank: ReplicaSet, accounts: Sequence[int], amount: int) -> bool:
    source, target = accounts
    try:
        async with bank.transaction() as tx:
            await tx.update("accounts", key={"id": source}, add={"balance": -amount})
            await tx.update("accounts", key={"id": target}, add={"balance": amount})
    except WriteRejected as rejected:  # the account would be overdrawn: nothing has happened anywhere
        return rejected.why != "constraint"
    return True


async def main() -> int:
    async with (
        local_cluster("bank", 'policy = "quorum"\nwrite_quorum = 2', SCHEMA) as cluster,
        connect(cluster.urls(), "bank") as bank,
    ):
        async with bank.transaction() as tx:
            for account in range(10):
                await tx.insert("accounts", {"id": account, "balance": 100})
        done = await asyncio.gather(
            *(transfer(bank, random.sample(range(10), 2), random.randint(1, 60)) for _ in range(100))
        )
        total = await bank.fetchval("select sum(balance) from accounts", consistency="quorum")
        print(f"{sum(done)} transfers committed, {len(done) - sum(done)} refused; the total is {total}")
        return int(total)


if __name__ == "__main__":
    assert asyncio.run(main()) == 1000
