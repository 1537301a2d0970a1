"""A promise ends with its own decision and with nothing else."""

from tests.core.driven_site import BROKER, DrivenSite
from tops.core.epochs import member_digest
from tops.core.participation import Wish
from tops.effects import AbortTxCall, CommitTxCall
from tops.event_types import EventType
from tops.filters import Filter
from tops.ids import TxId, hashed
from tops.messages import EpochDecided, EpochId, EpochMember, EpochVoted, Event, PrepareEpoch
from tops.transactions import Scope

OTHER = EventType("other", {"mark": str})
WISH = Wish((OTHER,), Filter.everything(), scope=Scope.DISTRIBUTED)


def prepare(voter: str, incarnation: int, tx: TxId) -> PrepareEpoch:
    epoch = EpochId("other", 1, 1, BROKER, incarnation)
    members = (EpochMember(tx, 1, (Event("other", {"mark": "m"}),)),)
    return PrepareEpoch(epoch=epoch, digest=member_digest([tx]), voter=voter, members=members)


def test_a_new_life_of_the_coordinator_that_counts_from_one_again_does_not_end_a_promise_of_the_old_one() -> None:
    site = DrivenSite()
    voter = site.subscribe(1, WISH)
    first, second = prepare(voter, 1, TxId("p.1.1")), prepare(voter, 2, TxId("p.1.2"))

    site.hear(first)
    site.hear(second)

    assert [v.epoch for v in site.posted(EpochVoted)] == [first.epoch, second.epoch]
    assert not site.made(AbortTxCall)
    committing = frozenset([hashed(voter)])
    site.hear(EpochDecided(epoch=first.epoch, digest=first.digest, voter=voter, committing=committing))
    assert [c.tx for c in site.made(CommitTxCall)] == [TxId("p.1.1")]
