"""Writers that keep an honest record of what they were told."""

import asyncio
import contextlib
from dataclasses import dataclass, field

from replication import ReplicaSet
from replication.refusals import WriteRefused
from tests.integration.replication.clusters import RunningCluster
from tops.errors import NotReachable, OutcomeUnknown, TopsError

ACCOUNTS = 10
START = 1_000_000


@dataclass
class Record:
    acknowledged: set[str] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, tuple[str, str]] = field(default_factory=dict)  # transfer -> transaction, replica
    other: list[str] = field(default_factory=list)


async def fill(shop: ReplicaSet) -> None:
    async with shop.transaction() as tx:
        for number in range(ACCOUNTS):
            await tx.insert("accounts", {"id": number, "balance": START})
    await shop.wait_in_sync()


async def transfer(shop: ReplicaSet, ident: str, step: int, amount: int = 1) -> None:
    source, target = step % ACCOUNTS, (step * 7 + 3) % ACCOUNTS
    async with shop.transaction() as tx:
        await tx.insert("transfers", {"id": ident, "source": source, "target": target, "amount": amount})
        await tx.update("accounts", key={"id": source}, add={"balance": -amount})
        await tx.update("accounts", key={"id": target}, add={"balance": amount})


async def write_until(
    cluster: RunningCluster, site: str, stop: asyncio.Event, record: Record, writers: int = 2, pause_s: float = 0.005
) -> None:
    """Transfers from one site, by several writers, until told to stop; connects again when it has to."""

    async def writer(number: int) -> None:
        step = 0
        while not stop.is_set():
            with contextlib.suppress(NotReachable):
                async with cluster.connect(prefer=site, timeout_s=5.0) as shop:
                    while not stop.is_set():
                        step += 1
                        await one(shop, f"{site}-{number}-{step}", step)
                        await asyncio.sleep(pause_s)

    async def one(shop: ReplicaSet, ident: str, step: int) -> None:
        try:
            await transfer(shop, ident, step)
        except OutcomeUnknown as unknown:
            record.unknown[ident] = (unknown.tx, site)
        except WriteRefused as refused:
            record.refused[ident] = str(refused)
        except NotReachable:
            record.refused[ident] = "not reachable"
            raise
        except TopsError as error:
            record.other.append(f"{ident}: {type(error).__name__}: {error}")
        else:
            record.acknowledged.add(ident)

    await asyncio.gather(*(writer(number) for number in range(writers)))


async def settle_unknown(cluster: RunningCluster, record: Record) -> None:
    """Ask about every write whose answer was lost; afterwards everything is acknowledged or refused."""
    for ident, (tx, site) in list(record.unknown.items()):
        async with cluster.connect(prefer=site) as shop:
            outcome = await shop.outcome(tx)
        if outcome == "committed":
            record.acknowledged.add(ident)
        else:
            record.refused[ident] = "aborted"
    record.unknown.clear()
