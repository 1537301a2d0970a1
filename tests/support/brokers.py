"""One broker in this process, and what its audit log says."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from adapters.embedded.free_ports import free_port
from tops import Broker
from tops.runtime.config import parse_config


@asynccontextmanager
async def broker_at(directory: Path, *, cluster: str = "", extra: str = "") -> AsyncIterator[Broker]:
    """A broker without keys; `cluster` and `extra` are further keys of its tables."""
    text = (
        f'[cluster]\nname = "test"\n{cluster}\n[[broker]]\nname = "b1"\nlisten = "127.0.0.1:{free_port()}"\n'
        f'data = "data"\n{extra}'
    )
    async with Broker.run(parse_config(text, directory / "tops.toml"), "b1") as broker:
        yield broker


def denied(broker: Broker) -> list[dict[str, str]]:
    """What the broker has rejected, by its audit log."""
    lines = (broker.table.data / "audit.log").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "denied"]
