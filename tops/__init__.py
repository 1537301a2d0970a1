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

from tops import constraints
from tops.deferred import deferred
from tops.errors import TopsError
from tops.event_types import EventType
from tops.filters import Filter
from tops.participants import BatchParticipant, Participant, Received, Resource
from tops.transactions import Access, LocalOutcome, Outcome, Scope, ScopeLimit, TxState, TxType

if TYPE_CHECKING:
    from tops.runtime.broker import Broker
    from tops.site import Site
    from tops.site_subscriptions import Subscription
    from tops.site_transactions import Transaction

__getattr__ = deferred(
    __name__,
    {
        "Broker": "tops.runtime.broker",
        "Site": "tops.site",
        "Subscription": "tops.site_subscriptions",
        "Transaction": "tops.site_transactions",
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
