"""Public transactions: any client that knows the id may publish, and the rendezvous numbers the events."""

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

RANDOM_BITS = 40  # of the 63 bits of an id's number


class PublicTransactions:
    """Assigns the ids of public transactions, local and distributed, and admits their events."""

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
        request = (sender.node, sender.incarnation, m.request)
        if request in self._requests:  # repeated: the response was lost, or is under way
            return self._again(self._requests[request], m.request, at)
        if (rejection := self._open.rejection("", m.spec, sender)) is not None:
            aborted = TxOpened(tx=TxId(""), state=TxState.ABORTED, rejection=not_taken(rejection), request=m.request)
            return [rejection, SendTo(at, aborted)]
        tx = self._requests[request] = self._new_id()
        if len(self._requests) > self._node.options.keep_outcomes:
            self._requests.popitem(last=False)
        numbering = EventCoordinator(tx, m.spec.event_type)
        # This goes first: the result of the census follows under an id that the initiator must know by then.
        opened_as: Effect = SendTo(at, TxOpened(tx=tx, state=TxState.CENSUS, request=m.request))
        self._open.publishers[tx] = (sender.node, sender.incarnation)
        if m.spec.tx_type is TxType.DISTRIBUTED:
            coordinator = self._distributed.coordinator(tx, m.spec, sender, at, numbering)
            return [opened_as, *self._distributed.open(coordinator)]
        numbering.open()
        census = CensusOpened(
            tx=tx, spec=m.spec, coordinator=self._node.me, incarnation=self._node.incarnation, initiator=at
        )
        opened = TxOpened(tx=tx, state=TxState.ACTIVE)
        return [opened_as, *self._local.open(census, sender, at, numbering), SendTo(at, opened)]

    def _new_id(self) -> TxId:
        """Ids grow, so that an old one is recognised by its number, and can't be guessed: only a site that received the
        id can publish in the transaction."""
        self._counter += 1
        unguessable = self._counter << RANDOM_BITS | int.from_bytes(self._node.entropy(RANDOM_BITS // 8), "big")
        return tx_id(self._node.me, self._node.incarnation, unguessable)

    def _again(self, tx: TxId, request: int, at: Address) -> list[Effect]:
        opened_as = SendTo(at, TxOpened(tx=tx, state=TxState.CENSUS, request=request))
        owner = self._open.owner(tx)
        if owner is None:
            return [opened_as, *self._outcomes.query(tx, at, alive=False)]
        active = isinstance(owner, LocalRelay) or owner.state is not TxState.CENSUS
        return [opened_as, *([SendTo(at, TxOpened(tx=tx, state=TxState.ACTIVE))] if active else [])]

    def on_publish(self, m: PublishInTx, sender: Sender, at: Address, now: float) -> list[Effect]:
        owner = self._open.owner(m.tx)
        numbering = owner.numbering if owner is not None and self._open.may_publish(owner, sender) else None
        if owner is None or numbering is None:
            response = PublishInTxHandled(tx=m.tx, request=m.request, sequence=None, state=TxState.ABORTED)
            return [SendTo(at, response)]
        publisher = (sender.node, sender.incarnation)
        known = numbering.admitted.get((*publisher, m.request))
        if known is not None:  # a repeated request: the response may have been lost
            return [SendTo(at, PublishInTxHandled(tx=m.tx, request=m.request, sequence=known, state=numbering.state))]
        grown = owner.size + encoded_bytes(m.event)
        if numbering.state is TxState.ACTIVE and (rejection := over_limit(grown)) is not None:
            response = PublishInTxHandled(
                tx=m.tx, request=m.request, sequence=None, state=numbering.state, rejection=rejection
            )
            return [SendTo(at, response)]
        try:
            new = publisher not in numbering.publishing
            published = numbering.admit(m.event, publisher, m.request)
        except TransactionClosed:
            response = PublishInTxHandled(tx=m.tx, request=m.request, sequence=None, state=numbering.state)
            return [SendTo(at, response)]
        response = PublishInTxHandled(tx=m.tx, request=m.request, sequence=published.sequence, state=numbering.state)
        if new and at != owner.initiator:
            self._outcomes.requesters.setdefault(m.tx, []).append(at)  # every publisher gets the outcome
        return [*self.on_event(owner, published), SendTo(at, response)]

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
