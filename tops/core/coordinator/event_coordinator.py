"""The event coordinator: which events belong to a transaction, and in which order.

It sits at the initiator's site for private transactions and at the rendezvous broker for public ones. It is the only
place where sequence numbers are made.
"""

import msgspec

from tops.model.errors import TransactionClosed
from tops.model.ids import NodeId, TxId
from tops.model.transactions import TxState
from tops.protocol.messages import Event, TxPublished

CENSUS, ACTIVE = TxState.CENSUS, TxState.ACTIVE  # looked at with every event


class EventCoordinator(msgspec.Struct, eq=False):
    """Admits events to one transaction and numbers them 1, 2, 3, …"""

    tx: TxId
    event_type: str
    last_sequence: int = 0
    state: TxState = CENSUS
    publishing: set[tuple[NodeId, int]] = set()  # public publishers that have not said they are done
    contributors: set[NodeId] = set()  # whoever has published in a public transaction
    admitted: dict[tuple[NodeId, int, int], int] = {}  # (publisher, its life, its request) -> sequence number

    def open(self) -> None:
        """The census went well: events are accepted from here on."""
        if self.state is CENSUS:
            self.state = ACTIVE

    def admit(self, event: Event, publisher: tuple[NodeId, int] | None = None, request: int = 0) -> TxPublished:
        """The numbered event; refused with `TransactionClosed` unless the transaction is active.

        Whoever publishes from elsewhere looks first whether its request is among the `admitted`.
        """
        if self.state is not ACTIVE:
            raise TransactionClosed(self.tx, self.state.value)
        self.last_sequence += 1
        if publisher is not None:
            self.publishing.add(publisher)
            self.contributors.add(publisher[0])
            self.admitted[*publisher, request] = self.last_sequence
        return TxPublished(tx=self.tx, event_type=self.event_type, sequence=self.last_sequence, event=event)

    def close(self, state: TxState) -> None:
        """No more events: a commit was asked for, or the transaction ended."""
        self.state = state
