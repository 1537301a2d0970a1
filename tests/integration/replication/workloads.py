"""Writers that keep an honest record of what they were told, and readers of what they saw."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from replication import ReplicaSet
from replication.client.reads import Consistency, TooFewReaders
from replication.rpc.rejections import WriteRejected
from tests.integration.replication.observations import QUERY, Observations, Seen, transfer_id
from tests.support.polling import eventually
from tops.model.errors import NotReachable, OutcomeUnknown, TopsError

ACCOUNTS = 10
START = 1_000_000
TIMEOUT_S = 2.0  # until an answer counts as lost


class Connects(Protocol):
    """A running cluster, of whatever kind."""

    def connect(self, *, prefer: str | None = None, timeout_s: float = ...) -> Any: ...


@dataclass
class Record:
    """`unknown` counts answers that were lost; every one of them was asked about until it was known."""

    seen: Observations = field(default_factory=lambda: Observations(ACCOUNTS * START))
    rejected: dict[str, str] = field(default_factory=dict)
    unknown: int = 0
    noticed: int = 0  # writes that ended, or whose answer was lost
    other: list[str] = field(default_factory=list)

    @property
    def acknowledged(self) -> set[str]:
        return set(self.seen.told)

    def acknowledge(self, ident: str) -> None:
        self.seen.told[ident] = time.monotonic()

    def reject(self, ident: str, reason: str) -> None:
        self.rejected[ident] = reason
        self.seen.rejected.add(ident)

    async def grows(self, count: Callable[["Record"], int], by: int, what: str, timeout_s: float = 60.0) -> None:
        """Wait until a figure of this record has grown."""
        start = count(self)

        async def grown() -> bool:
            return count(self) >= start + by

        await eventually(grown, timeout_s, what)


async def fill(shop: ReplicaSet) -> None:
    async with shop.transaction() as tx:
        for number in range(ACCOUNTS):
            await tx.insert("accounts", {"id": number, "balance": START})
    await shop.wait_in_sync()


async def transfer(shop: ReplicaSet, writer: int, step: int, amount: int = 1) -> None:
    source, target = step % ACCOUNTS, (step * 7 + 3) % ACCOUNTS
    async with shop.transaction() as tx:
        ident = transfer_id(writer, step)
        await tx.insert("transfers", {"id": ident, "source": source, "target": target, "amount": amount})
        await tx.update("accounts", key={"id": source}, add={"balance": -amount})
        await tx.update("accounts", key={"id": target}, add={"balance": amount})
        await tx.upsert("lists", key={"key": writer}, values={"items": str(step)})


async def write_until(cluster: Connects, site: str, writer: int, stop: asyncio.Event, record: Record) -> None:
    """Transfers from one site, one after the other, until told to stop; connects again when it has to."""
    step = 0
    while not stop.is_set():
        with contextlib.suppress(NotReachable):
            async with cluster.connect(prefer=site, timeout_s=TIMEOUT_S) as shop:
                while not stop.is_set():
                    step += 1
                    await _one(cluster, shop, site, writer, step, record)


async def _one(cluster: Connects, shop: ReplicaSet, site: str, writer: int, step: int, record: Record) -> None:
    ident = transfer_id(writer, step)
    record.seen.begun[ident] = time.monotonic()
    try:
        await transfer(shop, writer, step)
    except OutcomeUnknown as unknown:
        record.unknown += 1
        record.noticed += 1
        if await outcome(cluster, site, unknown.tx) == "committed":
            record.acknowledge(ident)
        else:
            record.reject(ident, "aborted")
    except WriteRejected as rejected:
        record.reject(ident, str(rejected))
    except NotReachable:
        record.reject(ident, "not reachable")
        raise
    except TopsError as error:
        record.other.append(f"{ident}: {type(error).__name__}: {error}")
    else:
        record.acknowledge(ident)
    finally:
        record.noticed += 1


async def outcome(cluster: Connects, site: str, tx: str, timeout_s: float = 90.0) -> str:
    """What became of a write, asked until somebody knows."""
    async with asyncio.timeout(timeout_s):
        while True:
            with contextlib.suppress(NotReachable, OutcomeUnknown):
                async with cluster.connect(prefer=site, timeout_s=TIMEOUT_S) as shop:
                    return str(await shop.outcome(tx))


async def read_until(cluster: Connects, consistency: Consistency, stop: asyncio.Event, record: Record) -> None:
    """Reads of everything; one that can't be answered says so, and is no observation."""
    while not stop.is_set():
        with contextlib.suppress(NotReachable):
            async with cluster.connect(timeout_s=TIMEOUT_S) as shop:
                while not stop.is_set():
                    began = time.monotonic()
                    try:
                        done = await shop.read(QUERY, consistency=consistency, wait_s=2.0)
                    except (NotReachable, TooFewReaders):
                        continue
                    except TopsError as error:
                        record.other.append(f"{consistency} read: {type(error).__name__}: {error}")
                        continue
                    row = done.rows[0]
                    registers = dict(pair.split("=") for pair in row["registers"] or ())
                    record.seen.seen.append(
                        Seen(
                            consistency,
                            began,
                            time.monotonic(),
                            row["total"],
                            frozenset(row["transfers"] or ()),
                            {writer: int(step) for writer, step in registers.items()},
                            done.replica,
                        )
                    )
