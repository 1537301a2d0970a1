"""An application of the stack: transfers between accounts, and at the end a comparison of all replicas.

`run` writes until SIGTERM or SIGINT, and prints one JSON object per second with what became of the writes so far.
`compare` prints, for each replica, how many transfers it has and the sum of all balances. `owner` prints which broker
decides about the set: writes stop while that one is down.
"""

import argparse
import asyncio
import json
import random
import secrets
import signal
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from replication import ReplicaSet
from replication.client.replica_set import connect_by_file
from replication.model.config import Cluster
from replication.model.events import log_type
from replication.rpc.rejections import WriteRejected
from tops.model.errors import NotReachable, OutcomeUnknown, TopsError

SET = "shop"
ACCOUNTS, BALANCE = 20, 1_000
WRITERS = 4
PAUSE_S = 0.05  # after a write that was rejected
REPORT_S = 1.0
IN_SYNC_S = 120.0


@dataclass
class Tally:
    """What became of the writes."""

    acknowledged: int = 0
    rejected: int = 0
    unknown: int = 0


def connected(cluster: Cluster, keys: Path) -> AbstractAsyncContextManager[ReplicaSet]:
    return connect_by_file(cluster, SET, keys=keys, timeout_s=30.0)


async def open_accounts(shop: ReplicaSet) -> None:
    """The accounts, where there are none yet."""
    if await shop.fetchval("select count(*) from accounts", consistency="quorum"):
        return
    async with shop.transaction() as tx:
        for account in range(ACCOUNTS):
            await tx.insert("accounts", {"id": account, "balance": BALANCE})


async def transfer(shop: ReplicaSet, pick: random.Random) -> None:
    source, target = pick.sample(range(ACCOUNTS), 2)
    async with shop.transaction() as tx:
        await tx.insert("transfers", {"id": secrets.token_hex(8), "source": source, "target": target, "amount": 1})
        await tx.update("accounts", key={"id": source}, add={"balance": -1})
        await tx.update("accounts", key={"id": target}, add={"balance": 1})


async def write(shop: ReplicaSet, tally: Tally, pick: random.Random) -> None:
    while True:
        try:
            await transfer(shop, pick)
        except OutcomeUnknown:
            tally.unknown += 1
        except (WriteRejected, NotReachable):
            tally.rejected += 1
            await asyncio.sleep(PAUSE_S)
        else:
            tally.acknowledged += 1


async def run(cluster: Cluster, keys: Path) -> None:
    """Until a signal; a write that is under way then ends with its outcome known or counted as unknown."""
    stop, tally = asyncio.Event(), Tally()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with connected(cluster, keys) as shop:
        await open_accounts(shop)
        writers = [asyncio.ensure_future(write(shop, tally, random.Random(n))) for n in range(WRITERS)]
        while not stop.is_set():
            print(json.dumps(asdict(tally)), flush=True)
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), REPORT_S)
        for writer in writers:
            writer.cancel()
        ended = await asyncio.gather(*writers, return_exceptions=True)
        tally.unknown += sum(isinstance(end, asyncio.CancelledError) for end in ended)
    print(json.dumps({**asdict(tally), "ended": True}), flush=True)


async def compare(cluster: Cluster, keys: Path) -> None:
    """Prints what each replica has, once all of them are in sync."""
    async with connected(cluster, keys) as shop:
        await open_accounts(shop)
        await shop.wait_in_sync(IN_SYNC_S)
        found = {}
        for replica in cluster.replica_set(SET).names:
            query = "select (select count(*) from transfers) as transfers, (select sum(balance) from accounts) as sum"
            row = await shop.fetchrow(query, replica=replica, consistency="current")
            assert row is not None
            found[replica] = [int(row["transfers"]), int(row["sum"])]
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=["run", "compare", "owner"])
    parser.add_argument("--config", type=Path, default=Path("/etc/tops/tops.toml"))
    parser.add_argument("--keys", type=Path, default=Path("/keys/application"))
    given = parser.parse_args()
    cluster = Cluster.load(given.config)
    if given.step == "owner":
        print(cluster.config.topology().rendezvous(log_type(SET).name))
        return
    try:
        asyncio.run((run if given.step == "run" else compare)(cluster, given.keys))
    except TopsError as error:
        raise SystemExit(f"load: {error}") from None


if __name__ == "__main__":
    main()
