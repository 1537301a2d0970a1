"""Publishing in somebody else's public transaction."""

from tests.core.driven_site import DrivenSite
from tops.effects import Answer
from tops.event_types import EventType
from tops.ids import TxId
from tops.messages import Event, PublishInTxAnswered, TxSpec
from tops.transactions import Access, TxState, TxType

PLAIN = EventType("plain", {"mark": str})


def test_an_event_is_answered_although_its_publisher_has_said_meanwhile_that_it_is_done() -> None:
    site, tx = DrivenSite(), TxId("b.1.1")
    site.take(site.core.advertise(1, (PLAIN,)))
    site.core.contribute(tx, TxSpec("plain", TxType.DISTRIBUTED, access=Access.PUBLIC))
    site.take(site.core.tx_publish(2, tx, Event("plain", {"mark": "m"})))

    site.take(site.core.done(tx))
    site.hear(PublishInTxAnswered(tx=tx, request=2, sequence=1, state=TxState.ACTIVE))

    assert [a.value for a in site.made(Answer) if a.request == 2] == [1]
