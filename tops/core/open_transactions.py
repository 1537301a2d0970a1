"""What a rendezvous coordinates at the moment: who it is, and which transactions are open at it."""

from collections.abc import Callable, Mapping

import msgspec

from tops.constraints import Predicate
from tops.core.epoch import EpochOptions
from tops.core.event_coordinator import EventCoordinator
from tops.core.local_relay import LocalRelay
from tops.core.tx_coordinator import TxCoordinator
from tops.ids import NodeId, TxId
from tops.messages import Address
from tops.transactions import Access


class RendezvousOptions(msgspec.Struct, frozen=True):
    epochs: EpochOptions = EpochOptions()
    tail_wait_s: float = 10.0  # how long silent replicas are waited for after a start
    lease_s: float = 5.0  # a standing answer that is not renewed for so long is withdrawn
    keep_outcomes: int = 100_000
    log_tail: int = 4096


class RendezvousNode(msgspec.Struct):
    """Which life of which broker coordinates, and how."""

    me: NodeId
    incarnation: int
    predicates: Mapping[str, Predicate]
    options: RendezvousOptions
    entropy: Callable[[int], bytes]


class OpenTransactions:
    """The transactions that have begun at this rendezvous and not ended."""

    def __init__(self) -> None:
        self.coordinators: dict[TxId, TxCoordinator] = {}
        self.relays: dict[TxId, LocalRelay] = {}
        self.publishers: dict[TxId, tuple[NodeId, int]] = {}  # whose death ends a private transaction

    def __contains__(self, tx: TxId) -> bool:
        return tx in self.coordinators or tx in self.relays

    def owner(self, tx: TxId) -> TxCoordinator | LocalRelay | None:
        return self.coordinators.get(tx) or self.relays.get(tx)

    def may_speak(self, owner: TxCoordinator | LocalRelay, sender: Address) -> bool:
        """Whether this site's word counts in a transaction: everybody's in a public one, else its initiator's alone.

        Brokers vouch for a sender's name and life; where it is connected may have changed.
        """
        initiator = owner.initiator
        own = sender.handle == initiator.handle and sender.incarnation == initiator.incarnation
        return own or owner.spec.access is Access.PUBLIC

    def published_by(self, tx: TxId, numbering: EventCoordinator | None, life: tuple[NodeId, int]) -> bool:
        """Whether the death of this life of a site ends the transaction."""
        return self.publishers.get(tx) == life or (numbering is not None and life in numbering.publishing)
