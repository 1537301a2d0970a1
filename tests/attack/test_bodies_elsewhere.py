"""Events that do not fit their type's definition, sent to a broker that is not the type's rendezvous."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from adapters.embedded.free_ports import free_port
from tests.attack.test_event_checks import raw
from tests.integration.overlay.secured import CLUSTER, issue
from tests.support.brokers import denied
from tests.support.hostile import Hostile
from tests.support.polling import eventually
from tops import Broker, EventType, Site
from tops.model.ids import NodeId, TxId
from tops.model.transactions import LocalOutcome, Outcome, ScopeLimit, TxType
from tops.protocol.messages import (
    Address,
    Dissemination,
    Envelope,
    Event,
    EventsPublished,
    EventsRejected,
    OneShot,
    Origin,
    Published,
    PublishInTx,
    RunOneShot,
    RunOneShots,
    TxOutcome,
    TxPublished,
    TxSpec,
)
from tops.runtime.config import parse_config
from tops.security import Authority, Kind, utc_now

LOG = EventType("orders", {"n": int}, durable=True)
MISFITS: list[dict[str, Any]] = [{"n": 1, "m": 2}, {"n": "one"}, {"n": [1]}, {}]
SPEC = TxSpec(LOG.name, TxType.LOCAL, limit=ScopeLimit.LOCAL, local_outcome=LocalOutcome.INDEPENDENT, census=None)


class Two:
    """Two brokers with keys: the one where `orders` meets, and the other one."""

    def __init__(self, brokers: list[Broker], authority: Authority) -> None:
        meets = brokers[0].node.core.topology.rendezvous(LOG.name)
        self.meets = next(b for b in brokers if b.name == meets)
        self.other = next(b for b in brokers if b.name != meets)
        self.authority = authority

    @property
    def logged(self) -> int:
        return self.meets.node.core.rendezvous.logs[LOG.name].last_number


@asynccontextmanager
async def two_brokers(folder: Path) -> AsyncIterator[Two]:
    authority = Authority.init(folder / "keys", CLUSTER, utc_now(), 30)
    lines = [f'[cluster]\nname = "{CLUSTER}"']
    for name in ("b1", "b2"):
        keys = issue(authority, name, kind=Kind.BROKER)
        lines.append(f'[[broker]]\nname = "{name}"\nlisten = "127.0.0.1:{free_port()}"\ndata = "{name}"')
        lines.append(f'keys = "{keys}"')
    config = parse_config("\n".join(lines), folder / "tops.toml")
    async with Broker.run(config, "b1") as one, Broker.run(config, "b2") as two:
        await eventually(lambda: "b2" in one.node.links and "b1" in two.node.links)
        yield Two([one, two], authority)


@pytest.mark.parametrize("body", MISFITS, ids=["unknown", "kind", "list", "missing"])
async def test_what_does_not_fit_is_neither_logged_nor_passed_on(tmp_path: Path, body: dict[str, Any]) -> None:
    async with (
        two_brokers(tmp_path) as two,
        Site.connect(two.meets.url, keys=issue(two.authority, "honest", "admin")) as honest,
        Hostile.connect(two.other.url, issue(two.authority, "mallory", "admin"), two.meets.name) as mallory,
    ):
        await honest.advertise(LOG)
        subscription = await honest.subscribe(LOG)
        meets, event = NodeId(two.meets.name), Event(LOG.name, body)
        one, several = (TxId(f"{mallory.node}.{mallory.incarnation}.{number}") for number in (1, 2))
        for publication in (
            Published(event=event, origin=Origin(LOG.name, 1)),
            EventsPublished(event_type=LOG.name, bodies=(raw({"n": 1}), raw(body)), origin=Origin(LOG.name, 2)),
            TxPublished(tx=one, event_type=LOG.name, sequence=1, event=event),
        ):
            message = Dissemination(rendezvous=meets, upward=True, early=False, publication=publication)
            await mallory.send(message)
        for content in (
            RunOneShot(tx=one, spec=SPEC, events=(event,)),
            RunOneShots(spec=SPEC, transactions=(OneShot(several, (event,)),)),
            PublishInTx(tx=one, request=1, event=event),
        ):
            await mallory.send(Envelope(to=Address(meets), body=content))

        await eventually(lambda: two.meets.node.counters["rejected"] == 6)
        assert two.logged == 0
        received_of = [m.body for m in mallory.received if isinstance(m, Envelope)]
        assert len([h for h in received_of if isinstance(h, EventsRejected)]) == 2
        aborted = {h.tx for h in received_of if isinstance(h, TxOutcome) and h.outcome is Outcome.ABORTED}
        assert aborted == {one, several}
        assert {record["who"] for record in denied(two.meets)} == {"mallory"}

        assert await honest.publish(LOG, {"n": 7}) == 1
        assert (await anext(aiter(subscription))).body == {"n": 7}
