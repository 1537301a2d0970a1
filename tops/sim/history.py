"""What a run's applications requested and observed; checkers use this and the databases."""

import msgspec

from tops.model.ids import NodeId, TxId
from tops.model.rejections import Rejection
from tops.model.transactions import Scope
from tops.protocol.messages import Event, TxSpec


class TxHistory(msgspec.Struct):
    """One transaction as its publishers observed it."""

    tx: TxId
    spec: TxSpec
    publisher: NodeId
    marks: list[str]  # its events in sequence order, as far as the publishers know
    outcome: str = "unknown"  # the final outcome that a publisher got: committed, aborted or unknown
    aborted_by_publisher: bool = False


class History:
    """Everything that was observed in one run."""

    def __init__(self) -> None:
        self.transactions: dict[TxId, TxHistory] = {}
        # What each subscription chose and got, per incarnation of its site: after a crash it chooses again.
        self.scopes: dict[tuple[TxId, NodeId, int, int], Scope] = {}
        self.seen: dict[tuple[NodeId, int, int], list[tuple[TxId | None, str]]] = {}
        self.confirmed: dict[str, list[tuple[int, str]]] = {}  # durable type -> (log number, mark) that were confirmed
        self.prepared_work: dict[TxId, set[tuple[NodeId, int]]] = {}  # participants that voted YES at some time
        self.outcomes: dict[TxId, set[str]] = {}  # every outcome that a site got
        self.voters: dict[str, NodeId | None] = {}  # voter names; None: own resources, which no constraint counts
        self.local_aborts: list[tuple[TxId, NodeId, Rejection]] = []  # what local subscribers had to undo, and why
        self.events: dict[str, Event] = {}  # by mark, everything that was ever published
        self.broken: list[str] = []
        self.machine_faults: list[str] = []  # of these: a machine raised, or applied what does not continue its state

    def record_outcome(self, tx: TxId, outcome: str) -> None:
        self.outcomes.setdefault(tx, set()).add(outcome)
        known = self.transactions.get(tx)
        if known is not None:
            known.outcome = outcome
