"""One subscriber of the NATS benchmark, as a process: `python -m bench.peers.nats_subscriber URL SUBJECT EVENTS KIND`.

Says `ready` once it would receive the next event, then, when it has EVENTS of them, the time of the machine's
monotonic clock. KIND is `core` or `jetstream`. It ends with its standard input, so that it does not outlive the
benchmark.
"""

import asyncio
import os
import sys
import threading
import time
from importlib import import_module
from typing import Any

import uvloop


async def receive(url: str, subject: str, events: int, kind: str) -> float:
    connection: Any = await import_module("nats").connect(url)
    received = 0
    complete = asyncio.Event()

    async def on_event(_: object) -> None:
        nonlocal received
        received += 1
        if received == events:
            complete.set()

    if kind == "jetstream":
        await connection.jetstream().subscribe(subject, cb=on_event, ordered_consumer=True)
    else:
        await connection.subscribe(subject, cb=on_event, pending_msgs_limit=-1, pending_bytes_limit=-1)
    await connection.flush()  # the server has seen the subscription
    print("ready", flush=True)
    await complete.wait()
    last = time.monotonic()
    await connection.close()
    return last


def end_with_input() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=end_with_input, daemon=True).start()
    _, url, subject, events, kind = sys.argv
    print(uvloop.run(receive(url, subject, int(events), kind)), flush=True)
