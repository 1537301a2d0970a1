"""Public transactions: any client that knows one publishes in it, and its events are numbered at the rendezvous."""

from collections import OrderedDict

from tops.core.commit.outcomes import Outcomes
from tops.core.coordinator.distributed_transactions import DistributedTransactions
from tops.core.coordinator.event_coordinator import EventCoordinator
from tops.core.coordinator.known_types import KnownTypes, not_taken
from tops.core.coordinator.local_relay import LocalRelay
from tops.core.coordinator.local_transactions import LocalTransactions
from tops.core.coordinator.open_transactions import OpenTransactions, RendezvousNode
from tops.core.coordinator.tx_coordinator import TxCoordinator
from tops.model.errors import TransactionClosed
from tops.model.ids import TxId, tx_id
from tops.model.rejections import over_limit
from tops.model.sizes import encoded_bytes
from tops.model.transactions import TxState, TxType
from tops.protocol.effects import Effect, SendTo
from tops.protocol.messages import (
    Address,
    BeginPublic,
    CensusOpened,
    PublisherDone,
    PublishInTx,
    PublishInTxHandled,
    Sender,
    TxOpened,
    TxPublished,
)

RANDOM_BITS = 40  # of an id, whose number has 63


class PublicTransactions:
    """Allots the ids of public transactions, local and distributed, and admits their events."""

    def __init__(
        self,
        node: RendezvousNode,
        known: KnownTypes,
        transactions: OpenTransactions,
        outcomes: Outcomes,
        local: LocalTransactions,
        distributed: DistributedTransactions,
    ) -> None:
        self._node, self._known, self._open, self._outcomes = node, known, transactions, outcomes
        self._local, self._distributed = local, distributed
        self._counter = 0
        self._requests: OrderedDict[tuple[str, int, int], TxId] = OrderedDict()

    def on_begin(self, m: BeginPublic, sender: Sender, at: Address, now: float) -> list[Effect]:
        spec_rejection = self._known.spec_rejection(m.spec)
        if spec_rejection is not None:
            return [
                SendTo(at, TxOpened(tx=TxId(""), state=TxState.ABORTED, rejection=spec_rejection, request=m.request))
            ]
        asked = (sender.node, sender.incarnation, m.request)
        if asked in self._requests:  # the answer was lost, or is on its way
            return self._again(self._requests[asked], m.request, at)
        if (rejection := self._open.rejection("", m.spec, sender)) is not None:
            aborted = TxOpened(tx=TxId(""), state=TxState.ABORTED, rejection=not_taken(rejection), request=m.request)
            return [rejection, SendTo(at, aborted)]
        tx = self._requests[asked] = self._new_id()
        if len(self._requests) > self._node.options.keep_outcomes:
            self._requests.popitem(last=False)
        numbering = EventCoordinator(tx, m.spec.event_type)
        # The initiator learns the id first; what becomes of the census follows under that id.
        learn: Effect = SendTo(at, TxOpened(tx=tx, state=TxState.CENSUS, request=m.request))
        self._open.publishers[tx] = (sender.node, sender.incarnation)
        if m.spec.tx_type is TxType.DISTRIBUTED:
            coordinator = self._distributed.coordinator(tx, m.spec, sender, at, numbering)
            return [learn, *self._distributed.open(coordinator)]
        numbering.open()
        census = CensusOpened(
            tx=tx, spec=m.spec, coordinator=self._node.me, incarnation=self._node.incarnation, initiator=at
        )
        opened = TxOpened(tx=tx, state=TxState.ACTIVE)
        return [learn, *self._local.open(census, sender, at, numbering), SendTo(at, opened)]

    def _new_id(self) -> TxId:
        """Ids grow, so that old ones can be told by their number, and can't be guessed: who knows one was told."""
        self._counter += 1
        unguessable = self._counter << RANDOM_BITS | int.from_bytes(self._node.entropy(RANDOM_BITS // 8), "big")
        return tx_id(self._node.me, self._node.incarnation, unguessable)

    def _again(self, tx: TxId, request: int, at: Address) -> list[Effect]:
        learn = SendTo(at, TxOpened(tx=tx, state=TxState.CENSUS, request=request))
        owner = self._open.owner(tx)
        if owner is None:
            return [learn, *self._outcomes.query(tx, at, alive=False)]
        active = isinstance(owner, LocalRelay) or owner.state is not TxState.CENSUS
        return [learn, *([SendTo(at, TxOpened(tx=tx, state=TxState.ACTIVE))] if active else [])]

    def on_publish(self, m: PublishInTx, sender: Sender, at: Address, now: float) -> list[Effect]:
        owner = self._open.owner(m.tx)
        numbering = owner.numbering if owner is not None and self._open.may_publish(owner, sender) else None
        if owner is None or numbering is None:
            answer = PublishInTxHandled(tx=m.tx, request=m.request, sequence=None, state=TxState.ABORTED)
            return [SendTo(at, answer)]
        publisher = (sender.node, sender.incarnation)
        known = numbering.admitted.get((*publisher, m.request))
        if known is not None:  # asked again: the answer may have been lost
            return [SendTo(at, PublishInTxHandled(tx=m.tx, request=m.request, sequence=known, state=numbering.state))]
        grown = owner.size + encoded_bytes(m.event)
        if numbering.state is TxState.ACTIVE and (rejection := over_limit(grown)) is not None:
            answer = PublishInTxHandled(
                tx=m.tx, request=m.request, sequence=None, state=numbering.state, rejection=rejection
            )
            return [SendTo(at, answer)]
        try:
            new = publisher not in numbering.publishing
            published = numbering.admit(m.event, publisher, m.request)
        except TransactionClosed:
            answer = PublishInTxHandled(tx=m.tx, request=m.request, sequence=None, state=numbering.state)
            return [SendTo(at, answer)]
        answer = PublishInTxHandled(tx=m.tx, request=m.request, sequence=published.sequence, state=numbering.state)
        if new and at != owner.initiator:
            self._outcomes.requesters.setdefault(m.tx, []).append(at)  # every publisher hears how it ends
        return [*self.on_event(owner, published), SendTo(at, answer)]

    def on_event(self, owner: TxCoordinator | LocalRelay, published: TxPublished) -> list[Effect]:
        """A numbered event of any transaction that is open here."""
        if isinstance(owner, LocalRelay):
            return self._local.on_event(owner, published)
        return self._distributed.on_event(owner, published)

    def on_done(self, m: PublisherDone, sender: Sender, at: Address, now: float) -> list[Effect]:
        owner = self._open.owner(m.tx)
        if owner is not None and owner.numbering is not None:
            owner.numbering.publishing.discard((sender.node, sender.incarnation))
        return []
