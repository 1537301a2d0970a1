"""The event coordinator: which events belong to a transaction, and in which order.

It runs at the initiator's site for private transactions and at the rendezvous broker for public ones. Nothing else
assigns sequence numbers.
"""

import msgspec

from tops.model.errors import TransactionClosed
from tops.model.ids import NodeId, TxId
from tops.model.transactions import TxState
from tops.protocol.messages import Event, TxPublished

CENSUS, ACTIVE = TxState.CENSUS, TxState.ACTIVE  # read with every event


class EventCoordinator(msgspec.Struct, eq=False):
    """Admits events to one transaction and numbers them 1, 2, 3, …"""

    tx: TxId
    event_type: str
    last_sequence: int = 0
    state: TxState = CENSUS
    publishing: set[tuple[NodeId, int]] = set()  # public publishers that have not sent `PublisherDone`
    contributors: set[NodeId] = set()  # sites that have published in a public transaction
    admitted: dict[tuple[NodeId, int, int], int] = {}  # (publisher, its incarnation, its request) -> sequence number

    def open(self) -> None:
        """The census has succeeded: events are accepted from here on."""
        if self.state is CENSUS:
            self.state = ACTIVE

    def admit(self, event: Event, publisher: tuple[NodeId, int] | None = None, request: int = 0) -> TxPublished:
        """Return the numbered event; raise `TransactionClosed` unless the transaction is active.

        For a remote publisher the caller looks up `admitted` first: a repeated request must not be numbered twice.
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
        """Accept no more events: commit was requested, or the transaction ended."""
        self.state = state
