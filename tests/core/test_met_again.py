"""A site that moved to another broker meets again, on a slower path, what it has taken before."""

from tests.core.driven_site import BROKER, DrivenSite
from tops.core.participant.participation import Wish
from tops.model.event_types import EventType
from tops.model.filters import Filter
from tops.model.ids import TxId
from tops.model.transactions import Scope, TxType
from tops.protocol.effects import Call, CommitTxCall, JoinTx
from tops.protocol.messages import (
    Address,
    CensusOpened,
    Dissemination,
    Event,
    LocalCommitOrdered,
    Publication,
    TxPublished,
    TxSpec,
)

PLAIN = EventType("plain", {"n": int})
TX = TxId("p.1.1")


class MixedSite(DrivenSite):
    """Its first subscription never chooses, the others take everything locally."""

    def answer(self, call: Call) -> None:
        if isinstance(call, JoinTx) and call.subscription == 1:
            return
        super().answer(call)

    def disseminate(self, publication: Publication) -> None:
        self.receive(
            Dissemination(
                rendezvous=BROKER,
                upward=False,
                early=False,
                publication=publication,
                lineage=("plain",),
            )
        )


def test_one_subscription_does_not_take_again_what_it_ended_while_another_is_still_at_it() -> None:
    site = MixedSite()
    site.take(site.core.subscribe(1, 1, Wish((PLAIN,), Filter.everything())))
    site.take(site.core.subscribe(2, 2, Wish((PLAIN,), Filter.everything(), Scope.LOCAL)))
    told = (
        CensusOpened(
            tx=TX,
            spec=TxSpec("plain", TxType.LOCAL, attributes={"n": 1}),
            coordinator=BROKER,
            incarnation=1,
            initiator=Address(BROKER, "p", 1),
        ),
        TxPublished(tx=TX, event_type="plain", sequence=1, event=Event("plain", {"n": 1})),
        LocalCommitOrdered(tx=TX, event_type="plain", last_sequence=1),
    )

    for publication in told * 2:
        site.disseminate(publication)

    assert [call.subscription for call in site.made(CommitTxCall)] == [2]
