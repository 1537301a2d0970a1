"""What remains of a subscription that has ended: its promises, and nothing else."""

from tests.core.driven_site import BROKER, DrivenSite
from tops.core.commit.epochs import member_digest
from tops.core.participant.participation import Wish
from tops.model.event_types import EventType
from tops.model.filters import Filter
from tops.model.ids import TxId, hashed
from tops.model.log_points import BEGINNING
from tops.model.transactions import Scope
from tops.protocol.effects import FinishBatch, TakeEvent
from tops.protocol.messages import EpochDecided, EpochId, EpochMember, Event, LogDelivered, LogEntry, PrepareEpoch

SET = EventType("set", {"mark": str}, durable=True)
EVENT = Event("set", {"mark": "m"})


def test_a_replica_keeps_its_promise_after_its_subscription_has_ended() -> None:
    site = DrivenSite()
    voter = site.subscribe(1, Wish((SET,), Filter.everything(), Scope.DISTRIBUTED, durable="r", replica=BEGINNING))
    tx = TxId("p.1.1")
    epoch, digest = EpochId("set", 1, 1, BROKER, 1), member_digest([tx])
    site.deliver(PrepareEpoch(epoch=epoch, digest=digest, voter=voter, members=(EpochMember(tx, 1, (EVENT,)),)))

    site.take(site.core.unsubscribe(1))
    site.deliver(EpochDecided(epoch=epoch, digest=digest, voter=voter, committing=frozenset([hashed(voter)])))

    assert [(c.memo.epoch, c.committed) for c in site.made(FinishBatch)] == [(epoch, True)]


def test_a_reader_takes_nothing_more_after_its_subscription_has_ended() -> None:
    site = DrivenSite()
    site.answering = False
    site.take(site.core.subscribe(1, 1, Wish((SET,), Filter.everything(), durable="r", position=0)))
    entries = tuple(LogEntry(number=n, event=EVENT) for n in (1, 2))
    site.deliver(
        LogDelivered(name="r", event_type="set", acknowledged=0, after=0, upto=2, entries=entries, incarnation=1)
    )

    site.take(site.core.unsubscribe(1))
    site.answer(site.made(TakeEvent)[0])

    assert [c.number for c in site.made(TakeEvent)] == [1]
