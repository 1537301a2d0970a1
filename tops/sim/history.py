"""What a run's applications asked for, were told and saw; together with the databases it is all that checkers use."""

import msgspec

from tops.model.ids import NodeId, TxId
from tops.model.rejections import Rejection
from tops.model.transactions import Scope
from tops.protocol.messages import Event, TxSpec


class TxHistory(msgspec.Struct):
    """One transaction from the outside."""

    tx: TxId
    spec: TxSpec
    publisher: NodeId
    marks: list[str]  # its events in sequence order, as far as the publishers know
    outcome: str = "unknown"  # what a publisher was told in the end: committed, aborted or unknown
    aborted_by_publisher: bool = False


class History:
    """Everything that was observed in one run."""

    def __init__(self) -> None:
        self.transactions: dict[TxId, TxHistory] = {}
        # What each subscription chose and was shown, in each life of its site: one that has crashed chooses anew.
        self.scopes: dict[tuple[TxId, NodeId, int, int], Scope] = {}
        self.seen: dict[tuple[NodeId, int, int], list[tuple[TxId | None, str]]] = {}
        self.confirmed: dict[str, list[tuple[int, str]]] = {}  # durable type -> (log number, mark) that were confirmed
        self.prepared_work: dict[TxId, set[tuple[NodeId, int]]] = {}  # who voted YES at some time
        self.outcomes: dict[TxId, set[str]] = {}  # every outcome that anybody was told
        self.voters: dict[str, NodeId | None] = {}  # what sites voted under; None: own resources, which nobody counts
        self.local_aborts: list[tuple[TxId, NodeId, Rejection]] = []  # what local subscribers had to undo, and why
        self.events: dict[str, Event] = {}  # by mark, everything that was ever published
        self.broken: list[str] = []
        self.machine_faults: list[str] = []  # of these: a machine raised, or applied what does not continue its state

    def record_outcome(self, tx: TxId, outcome: str) -> None:
        self.outcomes.setdefault(tx, set()).add(outcome)
        known = self.transactions.get(tx)
        if known is not None:
            known.outcome = outcome
