"""Publishes what a replica has committed by itself: in commit order, in batches, until the log has it.

One batch at a time, as one event that is a local transaction of its own. After a crash or an unknown
outcome a batch is published again; its transactions are recognised everywhere by their idempotency keys.

What is published stays in the outbox until this replica itself has it back from the log: until then the log may lose
it, with a journal that is restored from a backup. If the log goes on in a new history, it is published again.
"""

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

from adapters.changes import tx_of
from adapters.resource import OutboxEntry, Resource
from replication.model.events import batch_body
from replication.policies import TxPlan
from tops.client.site import Site
from tops.model.errors import EventTooLarge, TopsError
from tops.model.event_types import EventType
from tops.protocol.set_types import BATCH

FETCH_MAX = 100  # entries of the outbox
BATCH_MAX = 1_000  # transactions
BATCH_BYTES_MAX = 2 * 2**20
# What is committed meanwhile travels in the same batch; under load it is worth waiting as long as more comes.
LINGER_S, LINGER_BUSY_S, LINGER_MAX_S = 0.01, 0.03, 0.1
BUSY = 8  # transactions of the batch before
POLL_S = 1.0
AGAIN_S = 0.2
REMEMBERED_MAX = 10_000

log = logging.getLogger("tops.replication")


class Stuck(NamedTuple):
    """A record of the outbox that is longer than a message, so that it can't be published: an earlier version has
    committed it."""

    entry: OutboxEntry
    size: int

    @property
    def text(self) -> str:
        txs = ", ".join(member.tx for member in self.entry.members)
        return f"transaction {txs} is committed here and can't be published: it takes {self.size} bytes"


class OutboxPublisher:
    """The publishing half of a local-first replica."""

    def __init__(
        self, site: Site, event_type: EventType, resource: Resource, plan: TxPlan, *, awaited: bool = True
    ) -> None:
        self._site, self._event_type, self._resource, self._plan = site, event_type, resource, plan
        self._awaited = awaited  # by writers, who ask for the numbers of their transactions
        self.own: set[bytes] | None = None  # where batches are noted that are published: they come back from the log
        # The history of the log and the index in it that this replica has reached; without it nothing is waited for.
        self.reached: Callable[[], tuple[str, int]] | None = None
        self._history = ""
        self._sent = 0  # the last id of the outbox that is published
        self._unmarked: deque[tuple[int, int]] = deque()  # published: index in the log, id in the outbox
        self._work = asyncio.Event()
        self._waiting: dict[str, list[asyncio.Future[int]]] = {}
        self._published: OrderedDict[str, int] = OrderedDict()
        self.unpublished = 0
        self._committed = 0  # in all, as far as we were told
        self._last = 0  # how many there were when we looked last
        self._more = False  # there were more than a batch holds
        self._since = 0.0  # since when something waits to be published
        self.problem = ""
        self.stuck: Stuck | None = None  # nothing behind this is published
        self.resumed = asyncio.Event()
        self.resumed.set()

    def wake(self, committed: int) -> None:
        """So many transactions were committed."""
        if not self.unpublished:
            self._since = time.monotonic()
        self.unpublished += committed
        self._committed += committed
        self._work.set()

    @property
    def unpublished_s(self) -> float:
        """For how long something has been waiting to be published."""
        return time.monotonic() - self._since if self.unpublished else 0.0

    def unstick(self) -> None:
        """What could not be published is taken out of the outbox."""
        self.stuck = None
        self._work.set()

    async def logged(self, tx: str, timeout_s: float) -> int:
        """The number under which a committed transaction was logged; TimeoutError if it takes longer."""
        known = self._published.get(tx)
        if known is not None:
            return known
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tx, []).append(future)
        async with asyncio.timeout(timeout_s):
            return await future

    async def run(self) -> None:
        while True:
            self._work.clear()
            try:
                await self._publish_all()
                if self.problem:
                    log.info("publishing goes on", extra={"former_problem": self.problem})
                    self.problem = ""
            except TopsError as error:
                self.problem = str(error)
                log.warning("publishing is tried again", extra={"reason": self.problem})
                await asyncio.sleep(AGAIN_S)
                continue
            try:
                async with asyncio.timeout(POLL_S):
                    await self._work.wait()
            except TimeoutError:
                continue

    async def _publish_all(self) -> None:
        while True:
            await self.resumed.wait()
            if not (self._more or self._waiting):
                await self._linger()
            await self._mark()
            before = self._committed
            if self.stuck is not None:
                self._count(await self._resource.count_unpublished(self._sent), before)
                return
            found = await self._resource.unpublished(FETCH_MAX, self._sent)
            self._last = waiting = sum(len(entry.encoded) for entry in found)
            if len(found) == FETCH_MAX:
                waiting = await self._resource.count_unpublished(self._sent)
            self._count(waiting, before)
            entries = _cut(found)
            self._more = len(entries) < len(found) or len(found) == FETCH_MAX
            if not entries:
                return
            members = [encoded for entry in entries for encoded in entry.encoded]
            body = batch_body(members)
            if self.own is not None:
                self.own.add(body[BATCH])
            try:
                outcome = await self._site.execute(
                    self._event_type,
                    self._plan.tx_type,
                    events=[body],
                    limit=self._plan.limit,
                )
            except EventTooLarge as error:  # a batch of more than one entry is far from that
                self.stuck = Stuck(entries[0], error.size)
                log.error("publishing stopped", extra={"reason": self.stuck.text})
                return
            self._sent = entries[-1].id
            self._unmarked.append((outcome.log_number or 0, self._sent))
            if self._awaited:
                for encoded in members:
                    self._tell(tx_of(encoded), outcome.log_number or 0)

    def _count(self, waiting: int, before: int) -> None:
        """What was committed since we asked may not be among those that wait: it counts until we look again."""
        was, self.unpublished = self.unpublished, waiting + self._committed - before
        if not was:
            self._since = time.monotonic()

    async def _mark(self) -> None:
        """What has come back from the log is safe: every replica follows from there."""
        history, reached = self.reached() if self.reached is not None else (self._history, None)
        if self._history and history != self._history:
            self._unmarked.clear()
            self._sent, self.stuck = 0, None
        self._history = history
        done = 0
        while self._unmarked and (reached is None or self._unmarked[0][0] <= reached):
            done = self._unmarked.popleft()[1]
        if done:
            await self._resource.mark_published(done)

    async def _linger(self) -> None:
        """Nobody waits for the log: a batch costs every replica a transaction, whatever its size."""
        clock = asyncio.get_running_loop().time
        seen, ends = -1, clock() + LINGER_MAX_S
        pause_s = LINGER_BUSY_S if self._last >= BUSY else LINGER_S
        while self.unpublished > seen and clock() < ends and not self._waiting:
            seen = self.unpublished
            await asyncio.sleep(pause_s)

    def _tell(self, tx: str, number: int) -> None:
        self._published[tx] = number
        if len(self._published) > REMEMBERED_MAX:
            self._published.popitem(last=False)
        for future in self._waiting.pop(tx, ()):
            if not future.done():
                future.set_result(number)


def _cut(entries: list[OutboxEntry]) -> list[OutboxEntry]:
    """As many as fit into one message, one at least."""
    size = count = 0
    for row_key, entry in enumerate(entries):
        size += sum(map(len, entry.encoded))
        count += len(entry.encoded)
        if (size > BATCH_BYTES_MAX or count > BATCH_MAX) and row_key:
            return entries[:row_key]
    return entries
