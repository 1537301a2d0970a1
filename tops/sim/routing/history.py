"""What a run's clients did and saw."""

from typing import Any

import msgspec

from tops.model.filters import Filter
from tops.model.ids import NodeId, TxId
from tops.model.routing import RouteKey, RouteKind, TxKind


class Operation(msgspec.Struct):
    """One operation of a transaction, in the order in which they were acknowledged."""

    site: NodeId
    kind: RouteKind | None  # None: a publication
    added: bool = True
    key: RouteKey = RouteKey("")
    event_type: str = ""
    filter: Filter = Filter()
    body: dict[str, Any] = {}


class Delivery(msgspec.Struct):
    """An event that reached an application."""

    site: NodeId
    incarnation: int
    key: RouteKey
    mark: str
    tx: TxId | None
    at: float


class Transaction(msgspec.Struct):
    """One transaction from the outside."""

    tx: TxId
    kind: TxKind
    initiator: NodeId
    operations: list[Operation] = []
    updates: list[str] = []  # marks of updates that exactly one agent must get
    outcomes: dict[str, bool] = {}  # what each site was told


class Update(msgspec.Struct):
    """A regular update of an item."""

    mark: str
    group: int
    item: int
    at: float


class RoutingHistory:
    """Everything that was observed in one run."""

    def __init__(self) -> None:
        self.transactions: dict[TxId, Transaction] = {}
        self.deliveries: list[Delivery] = []
        self.updates: list[Update] = []
        self.initial: dict[RouteKey, tuple[NodeId, str, Filter]] = {}  # subscriptions before the first transaction
        self.crashed: set[NodeId] = set()  # sites
        self.late: list[str] = []  # transactions that were open past their time-out
        self.quiet_since = 0.0
