"""TOPS: content-based publish/subscribe whose publications can be grouped into transactions.

One transaction, file by file:

1. `site` - an application begins it and publishes its events; `runtime.site_node` carries them to a broker.
2. `core.broker` - brokers pass letters and publications on, by hop, along `core.routing`'s trees.
3. `core.event_coordinator` - numbers the events, at the initiator's site or at the rendezvous.
4. `core.tx_coordinator` - at the rendezvous: who takes part (`core.census`), and whether that is enough
   (`constraints`). Ready transactions are voted on and decided in `core.epochs`; the decision is on disk
   (`runtime.journal`) before anyone hears it.
5. `core.sub_tx_executor` - at each subscriber: events, promise, outcome, through the callbacks of `participants`.

The machines in `core` do no I/O: `runtime` carries out what they ask for, and `sim` does so on virtual time.
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
    from tops.client.routing import RoutingTransaction, TreeSubscription
    from tops.client.site import Site
    from tops.client.subscriptions import Subscription
    from tops.client.transactions import Transaction
    from tops.core.routing_tx.plan import StaticPlan
    from tops.server.broker import Broker

__getattr__ = deferred(
    __name__,
    {
        "Broker": "tops.server.broker",
        "RoutingTransaction": "tops.client.routing",
        "StaticPlan": "tops.core.routing_tx.plan",
        "TreeSubscription": "tops.client.routing",
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
    "RoutingTransaction",
    "Scope",
    "ScopeLimit",
    "Site",
    "StaticPlan",
    "Subscription",
    "TopsError",
    "Transaction",
    "TreeSubscription",
    "TxState",
    "TxType",
    "constraints",
]
