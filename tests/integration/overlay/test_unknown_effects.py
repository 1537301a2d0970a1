"""A node that can't perform an effect fails at once: to ignore one could mean that a message is never sent."""

from pathlib import Path

import pytest

from tests.support.brokers import broker_at
from tops import Site
from tops.model.errors import InvariantBroken
from tops.protocol.effects import Effect


class FutureEffect(Effect, frozen=True):
    """An effect that a later version of a machine might emit."""


async def test_a_broker_fails_on_an_effect_that_it_does_not_know(tmp_path: Path) -> None:
    async with broker_at(tmp_path) as broker:
        with pytest.raises(InvariantBroken, match="a broker can't perform the effect FutureEffect"):
            broker.node.act([FutureEffect()])


async def test_a_site_fails_on_an_effect_that_it_does_not_know(tmp_path: Path) -> None:
    async with broker_at(tmp_path) as broker, Site.connect(broker.url, name="shop", cluster="test") as site:
        with pytest.raises(InvariantBroken, match="a site can't perform the effect FutureEffect"):
            site._node.act([FutureEffect()])
