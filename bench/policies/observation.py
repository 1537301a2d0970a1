"""What a broker tells about itself: its figures for Prometheus, as far as a benchmark wants them."""

from dataclasses import dataclass

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

_MESSAGES = ("tops_received_messages_total", "tops_sent_messages_total")
_BYTES = ("tops_received_bytes_total", "tops_sent_bytes_total")
_FSYNCS = ("tops_journal_fsyncs_total",)


@dataclass(frozen=True, slots=True)
class BrokerFigures:
    """Sums since the broker's start."""

    messages: int
    bytes: int
    fsyncs: int


async def broker_figures(url: str) -> BrokerFigures:
    """Ask the broker at a link's address."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{url.rstrip('/').replace('ws', 'http', 1)}/metrics") as answer,
    ):
        return figures_in(await answer.text())


def figures_in(text: str) -> BrokerFigures:
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.labels
    }

    def total(names: tuple[str, ...]) -> int:
        return int(sum(found[name] for name in names))

    return BrokerFigures(total(_MESSAGES), total(_BYTES), total(_FSYNCS))
