"""A local transaction as its rendezvous broker sees it: events that pass through on their way to every subscriber.

Each subscriber coordinates its own sub-transaction. The rendezvous only makes sure that all of them receive the same
outcome: the commit order follows a complete sequence of events, and the loss of a publisher is an abort behind its last
event. On a durable type the whole transaction becomes an entry of the log, or a part of one.
"""

from tops.core.coordinator.event_coordinator import EventCoordinator
from tops.model.ids import TxId
from tops.model.rejections import Rejection, RejectionCode
from tops.model.sizes import encoded_bytes, logged_bytes
from tops.protocol.effects import Disseminate, Effect
from tops.protocol.messages import (
    Address,
    Event,
    LocalCommitOrdered,
    LoggedTx,
    Sender,
    TxAbandoned,
    TxPublished,
    TxSpec,
)


class LocalRelay:
    """One local transaction on its way through the rendezvous."""

    def __init__(
        self,
        tx: TxId,
        spec: TxSpec,
        begun_by: Sender,
        initiator: Address,
        *,
        keep_events: bool,
        numbering: EventCoordinator | None,
    ) -> None:
        self.tx, self.spec, self.begun_by, self.initiator = tx, spec, begun_by, initiator
        self.keep_events = keep_events
        self.numbering = numbering  # the event coordinator, where it runs here: public transactions
        self.events: list[Event] = []
        self.size = logged_bytes(tx, spec.event_type, spec.attributes)  # in bytes, with all its events
        self.last_sequence = 0
        self.broken: Rejection | None = None

    def on_event(self, published: TxPublished) -> None:
        if published.sequence != self.last_sequence + 1:
            text = f"event {published.sequence} arrived after event {self.last_sequence}"
            self.broken = Rejection(RejectionCode.INCOMPLETE, text)
            return
        self.last_sequence += 1
        self.size += encoded_bytes(published.event)
        if self.keep_events:
            self.events.append(published.event)

    def lacking(self, last_sequence: int | None) -> Rejection | None:
        """Why the transaction can't commit, or None."""
        if self.broken is None and last_sequence is not None and last_sequence != self.last_sequence:
            text = f"{self.last_sequence} of {last_sequence} events arrived"
            return Rejection(RejectionCode.INCOMPLETE, text)
        return self.broken

    def commit_order(self) -> Effect:
        return Disseminate(
            LocalCommitOrdered(tx=self.tx, event_type=self.spec.event_type, last_sequence=self.last_sequence)
        )

    def abandon_order(self, rejection: Rejection) -> Effect:
        return Disseminate(TxAbandoned(tx=self.tx, event_type=self.spec.event_type, rejection=rejection))

    def logged(self) -> LoggedTx:
        """The transaction as it stands in a durable type's log."""
        return LoggedTx(
            self.tx, self.spec.event_type, tuple(self.events), self.spec.attributes, self.spec.limit, self.spec.tx_type
        )
