"""Measures publishing once, with the code in the working directory, and prints one JSON object.

    python -P bench/revision_publish.py durable 20000

`bench.revisions` runs this file in checkouts of two revisions. It runs as a file, not as a module, because an older
revision does not have it; `bench` and `tops` come from the working directory. It uses only what `bench.overlay`
offers in both revisions.
"""

import json
import sys

import psutil
import uvloop

from bench.overlay import OurBroker, our_broker, our_delivery, our_durable_delivery
from bench.peers.nats import Delivery

IN_FLIGHT = 256


async def _deliver(broker: OurBroker, kind: str, events: int) -> Delivery:
    if kind == "durable":
        return await our_durable_delivery(broker, events, IN_FLIGHT)
    return await our_delivery(broker, events)


async def _measure(kind: str, events: int) -> None:
    async with our_broker() as broker:
        process = psutil.Process(broker.process.pid)
        await _deliver(broker, kind, events // 10)  # warm-up
        before = process.cpu_times()
        delivery = await _deliver(broker, kind, events)
        after = process.cpu_times()
    spent_s = after.user + after.system - before.user - before.system
    print(json.dumps({"per_s": delivery.received_per_s, "broker_us": 1e6 * spent_s / events}))


if __name__ == "__main__":
    uvloop.run(_measure(sys.argv[1], int(sys.argv[2])))
