"""Processes of the overlay benchmark: `python -m bench.overlay_site ROLE URL TYPE NUMBER [NAME]`.

`subscriber` and `log-subscriber` say `ready` once they would receive the next event, then, when they have NUMBER of
them, the time of the machine's monotonic clock. `crowd` connects NUMBER idle sites and says `ready`. All end with their
standard input.
"""

import asyncio
import os
import sys
import threading
import time
from contextlib import AsyncExitStack

import uvloop

from tops import EventType, Filter, Participant, Received, Scope, Site
from tops.core.participant.participation import SiteOptions

CLUSTER = "bench"
PAYLOAD = {"payload": bytes}
ITEM = {"id": int, "price": int, "kind": str}


class Counter(Participant):
    """Counts, and tells when the last event was there."""

    def __init__(self, expected: int) -> None:
        super().__init__()
        self.expected, self.received = expected, 0
        self.complete = asyncio.Event()

    def on_notify(self, event: Received) -> None:
        self.received += 1
        if self.received == self.expected:
            self.complete.set()


async def subscriber(url: str, event_type: EventType, events: int, name: str) -> None:
    counter = Counter(events)
    async with Site.connect(url, name=name, cluster=CLUSTER) as site:
        await site.subscribe(event_type, participant=counter, scope=Scope.NON_TRANSACTIONAL)
        print("ready", flush=True)
        await counter.complete.wait()
        print(time.monotonic(), flush=True)
        await asyncio.Event().wait()


async def crowd(url: str, number: int, name: str) -> None:
    """Idle sites, five subscriptions with filters each."""
    item = EventType("items", ITEM)
    quiet = SiteOptions(renew_s=60.0)
    async with AsyncExitStack() as stack:
        for i in range(number):
            site = await stack.enter_async_context(
                Site.connect(url, name=f"{name}-{i}", cluster=CLUSTER, options=quiet, heartbeat_s=60.0, timeout_s=60.0)
            )
            for j in range(5):
                low = (i * 5 + j) * 7 % 100_000
                where = Filter.where("price", "range", (low, low + 10)).where("kind", "=", f"k{i % 50}")
                await site.subscribe(item, where, participant=Counter(0), scope=Scope.NON_TRANSACTIONAL)
        print("ready", flush=True)
        await asyncio.Event().wait()


async def main(role: str, url: str, type_name: str, number: int, name: str) -> None:
    if role == "crowd":
        await crowd(url, number, name)
    else:
        durable = role == "log-subscriber"
        await subscriber(url, EventType(type_name, PAYLOAD, durable=durable), number, name)


def end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=end_with_input, daemon=True).start()
    uvloop.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5]))
