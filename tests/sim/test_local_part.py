"""Local subscribers of a mixed transaction go by the publisher's word, whatever the distributed part does."""

from tests.sim.small_worlds import SmallWorld
from tops.core.participant.participation import Wish
from tops.model.filters import Filter
from tops.model.transactions import Scope, TxType
from tops.protocol.messages import CensusPolicy, Event, TxSpec
from tops.sim.workload import DEFINITIONS


def test_a_local_subscriber_that_asks_after_the_distributed_part_failed_still_commits() -> None:
    world = SmallWorld()
    publisher, local, distributed = world.site("p", "b1"), world.site("l", "b3"), world.site("d", "b3")
    wish = Wish(DEFINITIONS["plain"], Filter.everything())
    kept = world.participant(local, wish, Scope.LOCAL)
    world.participant(distributed, wish, Scope.DISTRIBUTED)
    world.begin()
    spec = TxSpec("plain", TxType.DISTRIBUTED, attributes={"key": "a"}, census=CensusPolicy(0.3))
    core = publisher.site.core
    opened = world.request(publisher, lambda request: core.begin(request, spec))
    world.go(1.0)
    (tx,) = opened
    world.request(publisher, lambda request: core.tx_publish(request, tx, Event("plain", {"mark": "m1", "key": "a"})))
    world.go(0.5)

    distributed.site.act(lambda: distributed.site.core.participant_abort(1, tx, "can't"))
    world.go(world.site_options.quiet_s * 2)
    world.request(publisher, lambda request: core.commit(request, tx))
    world.settle()

    assert [done.events for done in kept.local.values()] == [("m1",)]
