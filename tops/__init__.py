"""TOPS: content-based publish/subscribe whose publications can be grouped into transactions.

Knows no database, no SQL and no replica set. An application holds a `Site`; a `Broker` is a process of the overlay.
`tops.model` has the vocabulary, `tops.protocol` the messages, `tops.core` the machines without I/O, `tops.runtime`
their drivers; `tops.sim` runs the same machines on virtual time. `docs/architecture.md` follows one write file by file.
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
