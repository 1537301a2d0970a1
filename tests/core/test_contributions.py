"""Publishing in public transactions, somebody else's and the site's own."""

import pytest

from tests.core.driven_site import DrivenSite
from tops.model.errors import CensusUnfulfilled, TransactionAborted, TransactionClosed
from tops.model.event_types import EventType
from tops.model.ids import TxId
from tops.model.transactions import Access, Outcome, TxState, TxType
from tops.protocol.effects import CompleteRequest
from tops.protocol.messages import AddressedMessage, Event, PublishInTxHandled, TxOpened, TxOutcome, TxSpec

PLAIN = EventType("plain", {"mark": str})
PUBLIC = TxSpec("plain", TxType.DISTRIBUTED, access=Access.PUBLIC)
TX = TxId("b.1.1")


def test_an_event_is_answered_although_its_publisher_has_said_meanwhile_that_it_is_done() -> None:
    site = DrivenSite()
    site.take(site.core.advertise(1, (PLAIN,)))
    site.core.contribute(TX, PUBLIC)
    site.take(site.core.tx_publish(2, TX, Event("plain", {"mark": "m"})))

    site.take(site.core.done(TX))
    site.deliver(PublishInTxHandled(tx=TX, request=2, sequence=1, state=TxState.ACTIVE))

    assert [a.value for a in site.made(CompleteRequest) if a.request == 2] == [1]


@pytest.mark.parametrize(
    ("received", "begin", "publish"),
    [
        (
            (
                TxOpened(tx=TX, state=TxState.ACTIVE),
                PublishInTxHandled(tx=TX, request=3, sequence=1, state=TxState.ACTIVE),
            ),
            TX,
            1,
        ),
        ((TxOutcome(tx=TX, outcome=Outcome.ABORTED),), TransactionAborted, TransactionClosed),
        ((TxOpened(tx=TX, state=TxState.CENSUS_UNFULFILLED),), CensusUnfulfilled, TransactionClosed),
    ],
    ids=["opened", "ended", "unfulfilled"],
)
def test_an_event_of_a_participant_is_answered_although_its_site_hears_only_then_that_it_began_the_transaction(
    received: tuple[AddressedMessage, ...], begin: object, publish: object
) -> None:
    site = DrivenSite()
    site.take(site.core.advertise(1, (PLAIN,)))
    site.take(site.core.begin(2, PUBLIC))
    site.core.contribute(TX, PUBLIC)
    site.take(site.core.tx_publish(3, TX, Event("plain", {"mark": "m"})))

    for message in (TxOpened(tx=TX, state=TxState.CENSUS, request=2), *received):
        site.deliver(message)

    answers = {a.request: a.value if a.error is None else type(a.error) for a in site.made(CompleteRequest)}
    assert answers == {2: begin, 3: publish}
    assert not site.core.own.waits()
