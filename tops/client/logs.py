"""A site's requests to the coordinator of a durable type about its log."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from functools import partial

from tops.model.errors import NotReachable
from tops.protocol.effects import Effect
from tops.protocol.messages import LogDelivered, LogEntry, LogRecovered, LogStateReported
from tops.runtime.site_node import SiteNode

READ_MAX = 256  # entries in one response


async def get_log_state(node: SiteNode, event_type: str, timeout_s: float) -> LogStateReported:
    """How far a log is decided, and its followers."""
    core = node.core
    request = 0

    def make(number: int) -> list[Effect]:
        nonlocal request
        request = number
        return core.get_log_state(number, event_type)

    try:
        async with asyncio.timeout(timeout_s):
            reported: LogStateReported = await node.request(make)
            return reported
    except TimeoutError:
        raise _silent(node, event_type) from None
    finally:
        core.cancel_log_request(request)


async def read_log(node: SiteNode, event_type: str, first: int, last: int, timeout_s: float) -> AsyncIterator[LogEntry]:
    """The entries from one number to another, as far as they are retained."""
    core = node.core
    name, after = f"{node.name}~{secrets.token_hex(4)}", first - 1
    try:
        while after < last:
            async with asyncio.timeout(timeout_s):
                delivered: LogDelivered = await node.request(
                    partial(core.read_log, name=name, event_type=event_type, after=after, entries_max=READ_MAX),
                    f"log {name}",
                )
            for entry in delivered.entries:
                if entry.number <= last:
                    yield entry
            after = delivered.upto
    except TimeoutError:
        raise _silent(node, event_type) from None
    finally:
        node.act(core.read_log_done(name, event_type))


async def end_log(node: SiteNode, event_type: str, name: str, timeout_s: float, *, operator: bool = False) -> None:
    sent: list[int] = []

    def make(request: int) -> list[Effect]:
        sent.append(request)
        return node.core.end_log(request, event_type, name, operator=operator)

    try:
        async with asyncio.timeout(timeout_s):
            await node.request(make, f"log {name}")
    except TimeoutError:
        broker = node.core.coordinator_of(event_type)
        raise NotReachable(
            f"broker {broker!r} did not confirm within {timeout_s} s that {name!r} has ended: try again"
        ) from None
    finally:
        for request in sent:
            node.core.cancel_log_request(request)


async def recover_log(
    node: SiteNode, event_type: str, replicas: tuple[str, ...], needed: int, accept_loss: bool, timeout_s: float
) -> LogRecovered:
    """Continue a log whose journal is stale in a new history, for an operator."""
    sent: list[int] = []

    def make(request: int) -> list[Effect]:
        sent.append(request)
        return node.core.recover_log(request, event_type, replicas, needed, accept_loss)

    try:
        async with asyncio.timeout(timeout_s):
            recovered: LogRecovered = await node.request(make, f"recover {event_type}")
            return recovered
    except TimeoutError:
        raise _silent(node, event_type) from None
    finally:
        for request in sent:
            node.core.cancel_log_request(request)


def _silent(node: SiteNode, event_type: str) -> NotReachable:
    coordinator = node.core.coordinator_of(event_type)
    return NotReachable(f"broker {coordinator!r}, which has the log of {event_type!r}, does not respond")
