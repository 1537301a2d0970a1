"""A publisher or a participant in a process of its own, driven by lines on standard input.

    python -m tests.integration.overlay.actor_process ROLE NAME DATA TYPES URL...

It says what happens as JSON lines. `run` makes a publisher run a transaction; `log N` makes it publish a durable event;
`status` asks what is promised and committed.
"""

import asyncio
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import uvloop

from tops import EventType, Participant, Received, Scope, Site, TopsError, TxType
from tops.core.participant.participation import SiteOptions
from tops.model import constraints
from tops.model.ids import TxId
from tops.protocol.messages import CensusPolicy, TxSpec

OPTIONS = SiteOptions(renew_s=0.3, quiet_s=1.0, doubt_s=0.3, retry_s=0.3, give_up_s=20.0)
EVENTS = 3


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


class Ledger(Participant):
    """Keeps what it committed in a file of its own, each transaction once."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.events: dict[TxId, list[int]] = {}

    def on_join(self, tx: TxId, spec: TxSpec) -> Scope:
        return Scope.DISTRIBUTED

    async def on_notify_tx(self, event: Received) -> None:
        assert event.tx is not None
        self.events.setdefault(event.tx, []).append(event.body["id"])

    async def on_commit(self, tx: TxId) -> None:
        if tx not in self.committed():
            with self.path.open("a") as file:
                file.write(json.dumps({"tx": tx, "events": self.events.get(tx)}) + "\n")
                file.flush()
                os.fsync(file.fileno())
        self.events.pop(tx, None)
        say(step="committed", tx=tx)

    async def on_abort(self, tx: TxId, reason: str) -> None:
        self.events.pop(tx, None)
        say(step="aborted", tx=tx, reason=reason)

    async def on_recover(self, tx: TxId, events: Any) -> None:
        self.events[tx] = [event.body["id"] for event in events]

    def committed(self) -> dict[str, list[int]]:
        if not self.path.exists():
            return {}
        lines = self.path.read_text().splitlines()
        return {line["tx"]: line["events"] for line in map(json.loads, lines)}


async def participate(site: Site, commands: "asyncio.Queue[list[str]]", types: list[EventType], data: Path) -> None:
    ledger = Ledger(data / "committed.jsonl")
    await site.subscribe(types[0], participant=ledger)
    say(step="ready")
    while True:
        await commands.get()
        assert site._journal is not None
        say(step="status", open=len(site._journal.prepared), committed=ledger.committed())


async def publish(site: Site, commands: "asyncio.Queue[list[str]]", types: list[EventType]) -> None:
    for each in types:
        await site.advertise(each)
    say(step="ready")
    running: set[asyncio.Task[None]] = set()
    while True:
        command = await commands.get()
        work = transact(site, types[0]) if command[0] == "run" else log(site, types[1], int(command[1]))
        task = asyncio.ensure_future(work)
        running.add(task)
        task.add_done_callback(running.discard)


async def transact(site: Site, orders: EventType) -> None:
    tx = ""
    try:
        async with site.transaction(
            orders,
            TxType.DISTRIBUTED,
            constraints=[constraints.MinParticipants(2)],
            census=CensusPolicy(timeout_s=10.0, replies=2),
            vote_timeout_s=10.0,
            decide_within_s=20.0,
        ) as transaction:
            tx = transaction.id
            say(step="began", tx=tx)
            for i in range(EVENTS):
                await transaction.publish(orders, {"id": i})
                await site.flush()  # a frame of its own, so that a blow can fall between two events
        say(step="outcome", tx=tx, outcome="committed")
    except TopsError as error:
        say(step="outcome", tx=tx, outcome=type(error).__name__, reason=str(error))


async def log(site: Site, durable: EventType, number: int) -> None:
    await site.publish(durable, {"id": number})
    say(step="logged", id=number)


async def main(role: str, name: str, data: Path, names: str, urls: list[str]) -> None:
    loop = asyncio.get_running_loop()
    commands: asyncio.Queue[list[str]] = asyncio.Queue()

    def listen() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(commands.put_nowait, line.split())
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    ordinary, durable = names.split(",")
    types = [EventType(ordinary, {"id": int}), EventType(durable, {"id": int}, durable=True)]
    data.mkdir(parents=True, exist_ok=True)
    journal = data / "journal" if role == "participant" else None
    async with Site.connect(
        urls, name=name, cluster="test", data=journal, options=OPTIONS, heartbeat_s=1.0, timeout_s=60.0
    ) as site:
        if role == "participant":
            await participate(site, commands, types, data)
        else:
            await publish(site, commands, types)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4], sys.argv[5:]))
