"""TOPS: content-based publish/subscribe whose publications can be grouped into transactions.

One transaction, file by file:

1. `site` - an application begins it and publishes its events; `runtime.site_node` carries them to a broker.
2. `core.broker` - brokers forward messages and publications, by hop, along the trees of `core.broker.routing`.
3. `core.coordinator.event_coordinator` - numbers the events, at the initiator's site or at the rendezvous.
4. `core.coordinator.tx_coordinator` - at the rendezvous: which participants join (`core.commit.census`), and whether
   they are enough (`model.constraints`). `core.commit.epochs` collects the votes and decides; the decision is on disk
   (`journal`) before any message reveals it.
5. `core.participant.sub_tx_executor` - at each subscriber: events, prepare, outcome, through the callbacks of
   `runtime.participants`.

The machines in `core` do no I/O: `runtime` carries out their effects, and `sim` does so on virtual time.
"""

from typing import TYPE_CHECKING

from tops.model import constraints
from tops.model.errors import TopsError
from tops.model.event_types import EventType
from tops.model.filters import Filter
from tops.model.transactions import Access, LocalOutcome, Outcome, Scope, ScopeLimit, TxState, TxType
from tops.runtime.deferred import deferred
from tops.runtime.participants import BatchParticipant, Participant, Received, Resource

if TYPE_CHECKING:
    from tops.client.site import Site
    from tops.client.subscriptions import Subscription
    from tops.client.transactions import Transaction
    from tops.server.broker import Broker

__getattr__ = deferred(
    __name__,
    {
        "Broker": "tops.server.broker",
        "Site": "tops.client.site",
        "Subscription": "tops.client.subscriptions",
        "Transaction": "tops.client.transactions",
    },
)

__all__ = [
    "Access",
    "BatchParticipant",
    "Broker",
    "EventType",
    "Filter",
    "LocalOutcome",
    "Outcome",
    "Participant",
    "Received",
    "Resource",
    "Scope",
    "ScopeLimit",
    "Site",
    "Subscription",
    "TopsError",
    "Transaction",
    "TxState",
    "TxType",
    "constraints",
]
