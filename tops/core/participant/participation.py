"""The subscriber's side of a site: its subscriptions, and its part in other sites' transactions.

A subscription's participant works in one of three ways: by callbacks (one `SubTxExecutor` per transaction), as a batch
(an `EpochExecutor`: a replica), or, on a durable type, as a reader of the log (`LogReader`).
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from tops.core.commit.decision_sender import CheckProof
from tops.core.commit.eviction import trim
from tops.core.participant.calls import Calls
from tops.core.participant.prepared_epochs import PreparedEpochs
from tops.core.participant.sub_transactions import SubTransactions
from tops.core.participant.sub_tx_executor import SubTxExecutor
from tops.core.participant.subscriptions import SiteOptions, Subscription, Subscriptions, Wish
from tops.core.participant.voters import Voters
from tops.model.event_types import EventTypes
from tops.model.filters import Filter
from tops.model.ids import NodeId, Pseudonym, TxId, standing_pseudonym
from tops.model.transactions import Scope, granted_scope
from tops.protocol.effects import Deliver, DeliverAll, Effect, SendOnLink
from tops.protocol.messages import (
    CensusOpened,
    Dissemination,
    EventsPublished,
    LocalCommitOrdered,
    MembershipReported,
    Origin,
    Published,
    ScopeChosen,
    TxAbandoned,
    TxBegan,
    TxPublished,
    decode_body,
)

__all__ = ["Participation", "SiteOptions", "Subscription", "Wish"]

EVERYTHING = Filter.everything()
NONE, DISTRIBUTED = Scope.NONE, Scope.DISTRIBUTED  # read with every message


class Participation:
    """All subscriptions of one site."""

    def __init__(
        self,
        site: NodeId,
        types: EventTypes,
        calls: Calls,
        brokers: Sequence[NodeId],
        rendezvous: Callable[[str], NodeId],
        entropy: Callable[[int], bytes],
        options: SiteOptions,
        check_proof: CheckProof | None = None,
    ) -> None:
        self.entropy = entropy
        self.voters = Voters()
        self.sub_transactions = SubTransactions(calls, options, self.voters)
        self.subscribed = Subscriptions(
            site, types, calls, brokers, rendezvous, entropy, options, self.voters, self.sub_transactions.open_logged
        )
        self.prepared_epochs = PreparedEpochs(
            self.subscribed, self.sub_transactions, self.voters, brokers, options.doubt_s, check_proof
        )
        self.subscriptions = self.subscribed.all
        self.executors, self.ended = self.sub_transactions.executors, self.sub_transactions.ended
        self.epochs = self.prepared_epochs.epochs
        self.latest: OrderedDict[tuple[str, str], tuple[int, int]] = OrderedDict()  # per publisher: incarnation, number
        # Publications from the tree. The message carries the lineage of its type, which this site may not know.
        self.publications: dict[type, Callable[[Any, Dissemination, NodeId], list[Effect]]] = {
            TxPublished: self._event,
            Published: self._deliver,
            EventsPublished: self._deliver_all,
            CensusOpened: self._census,
            TxBegan: self._began,
            LocalCommitOrdered: self._commit_ordered,
            TxAbandoned: self._abandoned,
        }

    # --------------------------------------------------------------------------------------------- subscriptions

    def subscribe(self, number: int, wish: Wish, request: int, link: NodeId | None) -> list[Effect]:
        """Add a subscription; the request completes at once, or when the standing registration is accepted."""
        return self.subscribed.subscribe(number, wish, request, link)

    def unsubscribe(self, number: int, link: NodeId | None) -> list[Effect]:
        """End a subscription. Its sub-transactions abort, except prepared ones, which wait for their decisions."""
        subscription = self.subscribed.remove(number)
        if subscription is None:
            return []
        effects: list[Effect] = []
        for executors in list(self.executors.values()):
            if number in executors:
                effects += executors[number].give_up("the subscription ended")
        return effects + self.subscribed.announce_end(subscription, link)

    def link_up(self, link: NodeId) -> list[Effect]:
        """Announce everything again to a broker that has no state of this site."""
        effects: list[Effect] = []
        for subscription in self.subscriptions.values():
            effects += self.subscribed.announce(subscription, link)
        for executors in self.executors.values():
            for executor in executors.values():
                effects += executor.on_quiet()
        return effects

    # ---------------------------------------------------------------------------------------------- publications

    def _event(self, published: TxPublished, message: Dissemination, link: NodeId) -> list[Effect]:
        tx, sequence, event = published.tx, published.sequence, published.event
        for replica in self.subscribed.replicas:
            if tx in replica.collected:
                replica.collect(tx, sequence, event)
        own = self.voters.own  # these have processed it when this site published it
        effects: list[Effect] = []
        for executor in self.sub_transactions.of(tx):
            if executor.subscription not in own:
                effects += executor.on_event(sequence, event)
        return effects

    def _began(self, began: TxBegan, message: Dissemination, link: NodeId) -> list[Effect]:
        return [effect for e in self.sub_transactions.of(began.tx) for effect in e.on_began(began.members)]

    def _commit_ordered(self, ordered: LocalCommitOrdered, message: Dissemination, link: NodeId) -> list[Effect]:
        last = ordered.last_sequence
        return [effect for e in self.sub_transactions.of(ordered.tx) for effect in e.on_local_commit(last)]

    def _abandoned(self, abandoned: TxAbandoned, message: Dissemination, link: NodeId) -> list[Effect]:
        for replica in self.subscribed.replicas:
            replica.forget(abandoned.tx)
        executors = self.sub_transactions.of(abandoned.tx)
        if abandoned.distributed_only:
            executors = [e for e in executors if e.scope is DISTRIBUTED]
        return [effect for e in executors for effect in e.abandon(abandoned.rejection)]

    def _is_repeated(self, origin: Origin) -> bool:
        """Whether the event has arrived before: after a move to another broker the slower path may deliver it again."""
        latest = self.latest.get((origin.family, origin.publisher), (0, 0))
        if (origin.incarnation, origin.number) <= latest:
            return True
        self.latest[origin.family, origin.publisher] = (origin.incarnation, origin.number)
        trim(self.latest)
        return False

    def _deliver(self, published: Published, message: Dissemination, link: NodeId) -> list[Effect]:
        if self._is_repeated(published.origin):
            return []
        event, lineage, sender = published.event, message.lineage, message.sender
        return [
            Deliver(s.number, event, None, sender)
            for s in self.subscriptions.values()
            if s.wish.durable is None and s.matches(lineage, event.body)
        ]

    def _deliver_all(self, published: EventsPublished, message: Dissemination, link: NodeId) -> list[Effect]:
        lineage = message.lineage
        takers = [s for s in self.subscriptions.values() if s.wish.durable is None and s.type_name in lineage]
        if not takers or self._is_repeated(published.origin):
            return []
        bodies = tuple(body for each in published.bodies if (body := decode_body(each)) is not None)
        effects: list[Effect] = []
        for s in takers:
            wanted = bodies
            if s.wish.filter != EVERYTHING:
                wanted = tuple(body for body in bodies if s.wish.filter.matches(body))
            if wanted:
                effects.append(DeliverAll(s.number, published.event_type, wanted, message.sender))
        return effects

    def _census(self, census: CensusOpened, message: Dissemination, link: NodeId) -> list[Effect]:
        tx, spec = census.tx, census.spec
        known = self.executors.get(tx, ())
        candidates: list[SubTxExecutor] = []
        effects: list[Effect] = []
        for s in self.subscriptions.values():
            if s.number in known or not s.matches(message.lineage, spec.attributes):
                continue
            if (tx, s.number) in self.ended:
                continue  # it has arrived again on a slower path
            if s.replica is not None:
                if spec.census is not None:
                    s.replica.expect(tx)  # its events are collected here and executed at prepare
            elif s.wish.scope is DISTRIBUTED:
                effects += self._standing_participant(s, census)
            elif s.wish.durable is None:  # a durable subscription gets it from the log
                candidates.append(self.sub_transactions.open(s, tx, spec, Pseudonym(self.entropy(16).hex())))
        return effects + self._request_scopes(census, candidates, link) if candidates else effects

    def _standing_participant(self, s: Subscription, census: CensusOpened) -> list[Effect]:
        granted = granted_scope(DISTRIBUTED, census.spec.limit, census.spec.tx_type)
        if census.spec.census is None or granted is NONE:
            return []  # the prepare of a one-shot carries its events
        executor = self.sub_transactions.open(
            s, census.tx, census.spec, standing_pseudonym(s.secret, census.tx), s.voter
        )
        return executor.take(granted)

    def _request_scopes(self, census: CensusOpened, candidates: list[SubTxExecutor], link: NodeId) -> list[Effect]:
        """Let every subscription choose its scope; when all have chosen, report to the broker what the site takes."""
        waiting = len(candidates)
        effects: list[Effect] = []

        def chosen(executor: SubTxExecutor) -> list[Effect]:
            nonlocal waiting
            waiting -= 1
            replies = executor.reply() if executor.scope is DISTRIBUTED else []
            if waiting or (replies and len(candidates) == 1):
                return replies  # it is the only one: the reply alone informs the broker
            scopes = [e.scope for e in candidates]
            others = max((x for x in scopes if x is not DISTRIBUTED), default=NONE)
            choice = ScopeChosen(tx=census.tx, scope=others, distributed=DISTRIBUTED in scopes)
            return [*replies, SendOnLink(link, choice)]

        for executor in candidates:
            scope = self.subscriptions[executor.subscription].wish.scope
            if scope is None:
                effects += executor.request_scope(census.initiator, chosen)
            else:
                effects += executor.take(granted_scope(scope, census.spec.limit, census.spec.tx_type))
                waiting -= 1
        return effects

    # ------------------------------------------------------------------------------------------------- doubt, time

    def on_membership(self, reported: MembershipReported) -> list[Effect]:
        named = [e for e in self.sub_transactions.of(reported.tx) if e.voter == reported.voter]
        return [effect for e in named for effect in e.on_membership(reported)]

    def on_timer(self, key: tuple[str, ...]) -> list[Effect]:
        match key:
            case ("renew", number):
                return self.subscribed.renew(int(number))
            case ("quiet", tx, subscription):
                executor = self.sub_transactions.get(TxId(tx), int(subscription))
                return executor.on_quiet() if executor is not None else []
            case ("doubt", voter, incarnation, number, attempt):
                return self.prepared_epochs.on_doubt(voter, int(incarnation), int(number), int(attempt))
        return []
