"""An agent of the dispatching scenario in a process of its own, to be killed: `dispatch_agent URL NAME [hang]`.

It says on its standard output what happens to it, and with `hang` it stops in the middle of a transaction.
"""

import asyncio
import sys
from typing import Any

from examples.dispatch import ASSIGN, Agent
from tops import Filter, Received, Site


class Reporting(Agent):
    """Says what it is assigned and what it gets."""

    def __init__(self, *, hang: bool) -> None:
        super().__init__()
        self.hang = hang

    async def on_tcm(self, tx: Any, event: Received) -> None:
        await super().on_tcm(tx, event)
        print("assigned", event.body["instance"], flush=True)
        if self.hang:
            await asyncio.sleep(600)

    def on_notify(self, event: Received) -> None:
        print("got", event.body, flush=True)


async def main(url: str, name: str, hang: bool) -> None:
    agent = Reporting(hang=hang)
    async with Site.connect(url, name=name, cluster="test", heartbeat_s=1.0) as site:
        await site.subscribe_tree(ASSIGN, Filter.where("agent", "=", name), participant=agent)
        await site.flush()
        print("ready", flush=True)
        await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], "hang" in sys.argv))
