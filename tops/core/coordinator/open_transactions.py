"""What a rendezvous coordinates at the moment: its own identity and options, and the transactions that are open."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from tops.core.commit.decision_sender import Sign
from tops.core.commit.epoch import EpochOptions
from tops.core.coordinator.event_coordinator import EventCoordinator
from tops.core.coordinator.local_relay import LocalRelay
from tops.core.coordinator.tx_coordinator import TxCoordinator
from tops.model.constraints import Predicate
from tops.model.ids import NodeId, TxId
from tops.model.rejections import Rejection, RejectionCode
from tops.model.transactions import Access
from tops.protocol.effects import Reject
from tops.protocol.messages import Sender, TxSpec


class Quotas(msgspec.Struct, frozen=True):
    """How much one identity may have here, all its sessions together."""

    subscriptions: int = 10_000
    filter_bytes: int = 4 * 2**20  # of all its subscriptions at a broker, and of all followers of a log
    types: int = 10_000
    type_bytes: int = 16 * 2**20  # of their definitions
    followers: int = 1_000
    transactions: int = 50_000
    transaction_bytes: int = 256 * 2**20  # of the events of its open transactions, where they are kept
    waiting_bytes: int = 128 * 2**20  # of its transactions that wait to be prepared, in one family
    participants: int = 1_000


class RendezvousOptions(msgspec.Struct, frozen=True):
    epochs: EpochOptions = EpochOptions()
    tail_wait_s: float = 10.0  # how long a start waits for silent replicas
    lease_s: float = 5.0  # a standing registration that is not renewed for so long is withdrawn
    keep_outcomes: int = 100_000
    log_tail: int = 4096
    quotas: Quotas = Quotas()


class RendezvousNode(msgspec.Struct):
    """The broker and the incarnation that coordinate, with their options."""

    me: NodeId
    incarnation: int
    predicates: Mapping[str, Predicate]
    options: RendezvousOptions
    entropy: Callable[[int], bytes]
    sign: Sign | None = None  # signs decisions; None in a cluster without keys


Owner = TypeVar("Owner", bound=TxCoordinator | LocalRelay)


class Begun(dict[TxId, Owner]):
    """Open transactions of one kind, counted and measured by the identity that began them."""

    def __init__(self, counts: Counter[str], all_bytes: Counter[str]) -> None:
        super().__init__()
        self._counts, self._bytes = counts, all_bytes
        self._sizes: dict[TxId, int] = {}  # in bytes, of those that keep their events

    def __setitem__(self, tx: TxId, owner: Owner) -> None:
        super().__setitem__(tx, owner)
        self._counts[owner.begun_by.accountable] += 1

    def note_size(self, owner: Owner) -> None:
        """Update the byte counts after an event was added to the transaction."""
        added = owner.size - self._sizes.get(owner.tx, 0)
        self._sizes[owner.tx] = owner.size
        self._bytes[owner.begun_by.accountable] += added

    def __delitem__(self, tx: TxId) -> None:
        owner = self[tx]
        super().__delitem__(tx)
        self._bytes[owner.begun_by.accountable] -= self._sizes.pop(tx, 0)
        if not self._bytes[owner.begun_by.accountable]:
            del self._bytes[owner.begun_by.accountable]
        self._counts[owner.begun_by.accountable] -= 1
        if not self._counts[owner.begun_by.accountable]:
            del self._counts[owner.begun_by.accountable]


class OpenTransactions:
    """The transactions that have begun at this rendezvous and not ended."""

    def __init__(self, quotas: Quotas, unlisted: Callable[[str, Sender], str | None]) -> None:
        """`unlisted`: see `KnownTypes.unlisted`."""
        self._quota, self._bytes_max, self._unlisted = quotas.transactions, quotas.transaction_bytes, unlisted
        self._counts: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self.coordinators: Begun[TxCoordinator] = Begun(self._counts, self._bytes)
        self.relays: Begun[LocalRelay] = Begun(self._counts, self._bytes)
        self.publishers: dict[TxId, tuple[NodeId, int]] = {}  # whose loss aborts a private transaction

    def rejection(self, tx: str, spec: TxSpec, sender: Sender) -> Reject | None:
        """Why this sender can't begin one more, or None."""
        if (problem := self._unlisted(spec.event_type, sender)) is not None:
            return Reject(sender, "originate", spec.event_type, problem, f"tx {tx}", code="not-listed")
        if self._counts[sender.accountable] < self._quota:
            return None
        reason = f"{sender.accountable} has {self._quota} transactions open, which is the quota: end some first"
        return Reject(sender, "begin", spec.event_type, reason, f"tx {tx}", code="quota")

    def record_growth(self, owner: TxCoordinator | LocalRelay) -> Rejection | None:
        """Count an event that was added to a transaction; the rejection if its identity exceeds the quota of bytes."""
        if not owner.keep_events:
            return None
        if isinstance(owner, LocalRelay):
            self.relays.note_size(owner)
        else:
            self.coordinators.note_size(owner)
        who = owner.begun_by.accountable
        if self._bytes[who] <= self._bytes_max:
            return None
        text = f"the open transactions of {who} exceed the quota of {self._bytes_max} bytes: end some first"
        return Rejection(RejectionCode.NOT_TAKEN, text)

    def __contains__(self, tx: TxId) -> bool:
        return tx in self.coordinators or tx in self.relays

    def owner(self, tx: TxId) -> TxCoordinator | LocalRelay | None:
        return self.coordinators.get(tx) or self.relays.get(tx)

    def is_initiator(self, owner: TxCoordinator | LocalRelay, sender: Sender) -> bool:
        """Whether this incarnation of this site began the transaction; it may be connected to another broker now."""
        begun_by = owner.begun_by
        return sender is begun_by or (sender.node, sender.incarnation) == (begun_by.node, begun_by.incarnation)

    def may_publish(self, owner: TxCoordinator | LocalRelay, sender: Sender) -> bool:
        """Every site that knows the id may publish in a public transaction, only the initiator in a private one."""
        return owner.spec.access is Access.PUBLIC or self.is_initiator(owner, sender)

    def may_end(self, owner: TxCoordinator | LocalRelay, sender: Sender) -> bool:
        """The initiator may end it, and in a public transaction every site that has published in it."""
        contributed = owner.numbering is not None and sender.node in owner.numbering.contributors
        return contributed or self.is_initiator(owner, sender)

    def published_by(self, tx: TxId, numbering: EventCoordinator | None, incarnation: tuple[NodeId, int]) -> bool:
        """Whether the loss of this incarnation of a site aborts the transaction."""
        return self.publishers.get(tx) == incarnation or (numbering is not None and incarnation in numbering.publishing)
