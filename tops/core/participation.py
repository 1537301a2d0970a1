"""The subscriber's side of a site: its subscriptions, and its part in other sites' transactions.

A subscription's participant works in one of three ways: by callbacks (one `SubTxExecutor` per transaction), as a batch
(an `EpochExecutor`: a replica), or, on a durable type, as a reader of the log (`LogReader`).
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tops.constraints import needs_identity
from tops.core.callback_epoch import CallbackEpoch
from tops.core.calls import Calls
from tops.core.epoch_executor import EpochExecutor
from tops.core.event_log import is_start
from tops.core.log_reader import LogReader
from tops.core.sub_tx_executor import SubTxExecutor
from tops.effects import Alarm, Answer, Deliver, DeliverAll, Effect, Memo, Post, Promise, Send, SetTimer
from tops.errors import InvalidEventType, TopsError
from tops.event_types import EventTypes
from tops.filters import Filter
from tops.ids import NodeId, Pseudonym, TxId, standing_pseudonym
from tops.messages import (
    Address,
    CensusOpened,
    Definitions,
    EpochDecided,
    EpochId,
    Event,
    EventsPublished,
    FinishNoted,
    LocalCommitOrdered,
    LogDelivered,
    LoggedTx,
    LogRefused,
    LogWanted,
    MembershipAnswered,
    Origin,
    PeerKnows,
    PeersAsked,
    PrepareEpoch,
    Publication,
    Published,
    ScopeChosen,
    StandingAccepted,
    StandingAnswered,
    StandingWithdrawn,
    SubscriptionChanged,
    TxAbandoned,
    TxBegan,
    TxPublished,
    TxSpec,
    decode_body,
)
from tops.transactions import Scope, TxType, granted_scope

REMEMBERED_MAX = 10_000
EVERYTHING = Filter.everything()
EpochKey = tuple[str, int, int, int]  # what is voted under; the coordinator's incarnation, the number, the attempt


class SiteOptions(msgspec.Struct, frozen=True):
    """Times of a site: how long silence is borne, how often answers are renewed and questions repeated."""

    renew_s: float = 1.0
    quiet_s: float = 10.0
    doubt_s: float = 1.0
    retry_s: float = 1.0
    give_up_s: float = 30.0
    delivery_attempts: int = 1
    log_credit: int = 1024


class Wish(msgspec.Struct, frozen=True):
    """What an application subscribes to.

    `scope` None: the participant is asked at every census; else it is a standing answer. `replica` is the position of
    a batch participant, which needs a durable type, a name and the standing answer `DISTRIBUTED`, or `LOCAL` if it
    only follows the log.
    """

    definitions: Definitions
    filter: Filter
    scope: Scope | None = None
    durable: str | None = None
    start: str = "now"
    replica: int | None = None
    position: int | None = None
    compensatable: bool = False


class Subscription(msgspec.Struct):
    """One subscription of this site."""

    number: int
    wish: Wish
    coordinator: NodeId
    voter: str = ""  # what a standing answer votes under, while one link lives
    secret: bytes = b""
    request: int | None = None  # answered when the standing answer counts
    replica: EpochExecutor | None = None
    reader: LogReader | None = None

    @property
    def type_name(self) -> str:
        return self.wish.definitions[-1].name

    @property
    def family(self) -> str:
        return self.wish.definitions[0].name

    def matches(self, lineage: Sequence[str], attributes: dict[str, object]) -> bool:
        return self.type_name in lineage and self.wish.filter.matches(attributes)


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
    ) -> None:
        self.site, self.types, self.calls, self.brokers = site, types, calls, brokers
        self.rendezvous, self.entropy, self.options = rendezvous, entropy, options
        self.subscriptions: dict[int, Subscription] = {}
        self.leaving: dict[int, Subscription] = {}  # ended, with a promise of a replica that waits for its decision
        self.executors: dict[TxId, dict[int, SubTxExecutor]] = {}
        self.epochs: dict[EpochKey, CallbackEpoch] = {}
        self.newest: dict[tuple[str, int, int], CallbackEpoch] = {}  # the attempt that counts, per number
        self.voters: dict[str, int] = {}  # what we vote under -> subscription
        self.promised: dict[str, int] = {}  # what we vote under -> epochs that are open
        self.latest: OrderedDict[tuple[str, NodeId], tuple[int, int]] = OrderedDict()  # per publisher: life, number
        self.ended: OrderedDict[TxId, None] = OrderedDict()
        self.decisions: OrderedDict[EpochId, tuple[str, frozenset[str]]] = OrderedDict()

    # --------------------------------------------------------------------------------------------- subscriptions

    def subscribe(self, number: int, wish: Wish, request: int, link: NodeId | None) -> list[Effect]:
        """A new subscription; answered at once, or when its standing answer counts."""
        try:
            whole = self.types.define_all(wish.definitions)
            wish.filter.check_against(whole)
            _check_wish(wish, whole.durable)
        except TopsError as refusal:
            return [Answer(request, error=refusal)]
        coordinator = self.rendezvous(wish.definitions[0].name)
        subscription = Subscription(number, wish, coordinator)
        self.subscriptions[number] = subscription
        if wish.replica is not None:
            subscription.replica = EpochExecutor(
                number,
                wish.replica,
                self.calls,
                self.brokers,
                self.options.doubt_s,
                lambda caught_up: self._progressed(subscription, caught_up),
            )
        elif wish.durable is not None:
            subscription.reader = LogReader(
                number,
                wish.durable,
                wish.definitions,
                wish.filter,
                coordinator,
                self.calls,
                lambda logged, ended: self._open_logged(subscription, logged, ended),
                position=wish.position,
                start=wish.start,
                credit=self.options.log_credit,
            )
        if wish.scope is Scope.DISTRIBUTED:
            subscription.request = request
            return self._announce(subscription, link)
        return [*self._announce(subscription, link), Answer(request, number)]

    def unsubscribe(self, number: int, link: NodeId | None) -> list[Effect]:
        """End a subscription; whoever takes part in a transaction through it gives up, and keeps what it promised."""
        subscription = self.subscriptions.pop(number, None)
        if subscription is None:
            return []
        self.leaving = {n: s for n, s in self.leaving.items() if s.replica is not None and s.replica.leave()}
        if subscription.replica is not None and subscription.replica.leave():
            self.leaving[number] = subscription
        if subscription.reader is not None:
            subscription.reader.stop()
        effects: list[Effect] = []
        for executors in list(self.executors.values()):
            if number in executors:
                effects += executors[number].give_up("the subscription ended")
        wish = subscription.wish
        if subscription.voter:
            withdrawn = StandingWithdrawn(voter=subscription.voter, event_type=subscription.type_name)
            effects.append(Post(Address(subscription.coordinator), withdrawn))
        if link is not None:
            ended = SubscriptionChanged(
                subscription=number, definitions=wish.definitions, filter=None, scope=None, durable=False
            )
            effects.append(Send(link, ended))
        return effects

    def link_up(self, link: NodeId) -> list[Effect]:
        """A broker that knows nothing of us: tell it everything again."""
        effects: list[Effect] = []
        for subscription in self.subscriptions.values():
            effects += self._announce(subscription, link)
        for executors in self.executors.values():
            for executor in executors.values():
                effects += executor.on_quiet()
        return effects

    def _announce(self, s: Subscription, link: NodeId | None) -> list[Effect]:
        if link is None:
            return []
        changed = SubscriptionChanged(
            subscription=s.number,
            definitions=s.wish.definitions,
            filter=s.wish.filter,
            scope=s.wish.scope,
            durable=s.wish.durable is not None,
        )
        effects: list[Effect] = [Send(link, changed)]
        if s.wish.scope is Scope.DISTRIBUTED:
            # A standing answer is good for one link: what was said under the old key no longer binds anyone.
            s.voter, s.secret = self.entropy(12).hex(), self.entropy(32)
            self.voters[s.voter] = s.number
        if s.reader is not None:
            effects += s.reader.restart()
        return effects + self.renew(s.number)

    def renew(self, number: int) -> list[Effect]:
        """Standing answers and the wish for the log live as long as they are renewed."""
        s = self.subscriptions.get(number)
        if s is None or (s.wish.scope is not Scope.DISTRIBUTED and s.wish.durable is None):
            return []
        effects: list[Effect] = []
        if s.wish.scope is Scope.DISTRIBUTED and not (s.replica is not None and s.replica.doubts):
            effects.append(self._standing(s))
        if s.replica is not None:
            effects.append(self._log_wanted(s, s.replica))
        elif s.reader is not None:
            effects += s.reader.want()
        return [*effects, SetTimer(("renew", str(number)), self.options.renew_s)]

    def _standing(self, s: Subscription) -> Effect:
        answered = StandingAnswered(
            voter=s.voter,
            event_type=s.type_name,
            filter=s.wish.filter,
            scope=Scope.DISTRIBUTED,
            secret=s.secret,
            identity=self.site,
            position=s.replica.position if s.replica is not None else None,
            subscription=s.number,
        )
        return Post(Address(s.coordinator), answered)

    def _log_wanted(self, s: Subscription, replica: EpochExecutor) -> Effect:
        wanted = LogWanted(
            name=s.wish.durable or self.site,
            definitions=s.wish.definitions,
            filter=s.wish.filter,
            position=replica.position,
            start=s.wish.start,
            credit=self.options.log_credit,
            voter=s.voter or None,
        )
        return Post(Address(s.coordinator), wanted)

    def _progressed(self, s: Subscription, caught_up: bool) -> list[Effect]:
        if s.replica is None:
            return []
        wanted = self._log_wanted(s, s.replica)
        votes = s.wish.scope is Scope.DISTRIBUTED
        return [wanted, self._standing(s)] if caught_up and votes else [wanted]

    def on_accepted(self, accepted: StandingAccepted) -> list[Effect]:
        s = self.subscriptions.get(self.voters.get(accepted.voter, -1))
        if s is None or s.request is None:
            return []
        request, s.request = s.request, None
        return [Answer(request, s.number)]

    # ---------------------------------------------------------------------------------------------- publications

    def on_publication(self, publication: Publication, lineage: Sequence[str], link: NodeId) -> list[Effect]:
        """What came down the tree; `lineage` is its type's, which this site need not know."""
        if isinstance(publication, TxPublished):
            return self._event(publication)
        if isinstance(publication, Published):
            return self._deliver(publication.event, publication.origin, lineage)
        if isinstance(publication, EventsPublished):
            return self._deliver_all(publication, lineage)
        if isinstance(publication, CensusOpened):
            return self._census(publication, lineage, link)
        if isinstance(publication, TxBegan):
            members = publication.members
            return self._each(publication.tx, lambda e: e.on_began(members))
        if isinstance(publication, LocalCommitOrdered):
            last_sequence = publication.last_sequence
            return self._each(publication.tx, lambda e: e.on_local_commit(last_sequence))
        return self._abandoned(publication)

    def _event(self, published: TxPublished) -> list[Effect]:
        tx, sequence, event = published.tx, published.sequence, published.event
        for s in self.replicas:
            s.collect(tx, sequence, event)
        return self._each(tx, lambda e: e.on_event(sequence, event))

    def _abandoned(self, abandoned: TxAbandoned) -> list[Effect]:
        for replica in self.replicas:
            replica.forget(abandoned.tx)
        only, reason = abandoned.distributed_only, abandoned.reason
        return self._each(
            abandoned.tx, lambda e: [] if only and e.scope is not Scope.DISTRIBUTED else e.abandon(reason)
        )

    @property
    def replicas(self) -> list[EpochExecutor]:
        return [s.replica for s in self.subscriptions.values() if s.replica is not None]

    def _each(self, tx: TxId, do: Callable[[SubTxExecutor], list[Effect]]) -> list[Effect]:
        executors = self.executors.get(tx)
        if executors is None:
            return []
        if len(executors) == 1:
            return do(next(iter(executors.values())))
        return [effect for e in list(executors.values()) for effect in do(e)]

    def _is_repeated(self, origin: Origin) -> bool:
        """A site that has moved can meet an event again that travels more slowly on its new path."""
        latest = self.latest.get((origin.family, origin.site), (0, 0))
        if (origin.incarnation, origin.number) <= latest:
            return True
        self.latest[origin.family, origin.site] = (origin.incarnation, origin.number)
        _trim(self.latest)
        return False

    def _deliver(self, event: Event, origin: Origin, lineage: Sequence[str]) -> list[Effect]:
        if self._is_repeated(origin):
            return []
        return [
            Deliver(s.number, event)
            for s in self.subscriptions.values()
            if s.wish.durable is None and s.matches(lineage, event.body)
        ]

    def _deliver_all(self, published: EventsPublished, lineage: Sequence[str]) -> list[Effect]:
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
                effects.append(DeliverAll(s.number, published.event_type, wanted))
        return effects

    def _census(self, census: CensusOpened, lineage: Sequence[str], link: NodeId) -> list[Effect]:
        if census.tx in self.ended:
            return []  # met again on a slower path
        asked: list[SubTxExecutor] = []
        effects: list[Effect] = []
        for s in self.subscriptions.values():
            known = s.number in self.executors.get(census.tx, {})
            if known or not s.matches(lineage, census.spec.attributes):
                continue
            if s.replica is not None and census.spec.census is not None:
                s.replica.expect(census.tx)
            if s.replica is not None or (s.wish.durable is not None and s.wish.scope is not Scope.DISTRIBUTED):
                continue  # it is prepared as a batch, or taken from the log
            if s.wish.scope is Scope.DISTRIBUTED:
                effects += self._standing_participant(s, census)
            else:
                executor = self._executor(s, census.tx, census.spec, Pseudonym(self.entropy(16).hex()))
                asked.append(executor)
        return effects + self._ask(census, asked, link)

    def _standing_participant(self, s: Subscription, census: CensusOpened) -> list[Effect]:
        if census.spec.census is None or granted_scope(Scope.DISTRIBUTED, census.spec.limit, census.spec.tx_type) is (
            Scope.NONE
        ):
            return []  # a one-shot reaches it with its prepare
        executor = self._executor(s, census.tx, census.spec, standing_pseudonym(s.secret, census.tx), s.voter)
        return executor.take(granted_scope(Scope.DISTRIBUTED, census.spec.limit, census.spec.tx_type))

    def _ask(self, census: CensusOpened, asked: list[SubTxExecutor], link: NodeId) -> list[Effect]:
        """Let every subscription choose; when all have, the broker learns what the site takes as a whole."""
        waiting = {e.subscription for e in asked}
        effects: list[Effect] = []

        def chosen(executor: SubTxExecutor) -> list[Effect]:
            waiting.discard(executor.subscription)
            replies = executor.reply() if executor.scope is Scope.DISTRIBUTED else []
            if waiting:
                return replies
            scopes = [e.scope for e in asked]
            if scopes == [Scope.DISTRIBUTED]:
                return replies  # the broker sees it in the reply
            others = max((x for x in scopes if x is not Scope.DISTRIBUTED), default=Scope.NONE)
            choice = ScopeChosen(tx=census.tx, scope=others, distributed=Scope.DISTRIBUTED in scopes)
            return [*replies, Send(link, choice)]

        for executor in asked:
            scope = self.subscriptions[executor.subscription].wish.scope
            if scope is None:
                effects += executor.ask(census.initiator, chosen)
            else:
                effects += executor.take(granted_scope(scope, census.spec.limit, census.spec.tx_type))
                waiting.discard(executor.subscription)
        return effects

    def _executor(
        self, s: Subscription, tx: TxId, spec: TxSpec, pseudonym: Pseudonym, voter: str | None = None
    ) -> SubTxExecutor:
        executor = SubTxExecutor(
            tx,
            s.number,
            spec,
            s.coordinator,
            self.calls,
            voter=voter or pseudonym,
            pseudonym=pseudonym,
            identity=self.site if needs_identity(spec.constraints) else None,
            quiet_s=self.options.quiet_s,
            delivery_attempts=self.options.delivery_attempts,
            ended=self._ended,
        )
        self.executors.setdefault(tx, {})[s.number] = executor
        self.voters[executor.voter] = s.number
        return executor

    def _ended(self, executor: SubTxExecutor) -> list[Effect]:
        executors = self.executors.get(executor.tx, {})
        if executors.get(executor.subscription) is executor:
            del executors[executor.subscription]
            if not executors:
                del self.executors[executor.tx]
                self.ended[executor.tx] = None
                _trim(self.ended)
        if executor.voter == executor.pseudonym and executor.voter not in self.promised:
            self.voters.pop(executor.voter, None)
        return []

    def _open_logged(self, s: Subscription, logged: LoggedTx, ended: Callable[[], list[Effect]]) -> SubTxExecutor:
        spec = TxSpec(logged.event_type, logged.tx_type, limit=logged.limit, attributes=logged.attributes)
        return SubTxExecutor(
            logged.tx,
            s.number,
            spec,
            s.coordinator,
            self.calls,
            voter="",
            pseudonym=Pseudonym(""),
            identity=None,
            quiet_s=self.options.give_up_s,
            delivery_attempts=self.options.delivery_attempts,
            ended=lambda _: ended(),
        )

    # --------------------------------------------------------------------------------------------------- commitment

    def on_prepare(self, prepare: PrepareEpoch) -> list[Effect]:
        s = self.subscriptions.get(self.voters.get(prepare.voter, -1))
        if s is None:
            return []  # not said under any name of ours: the coordinator stops waiting for it
        if prepare.epoch in self.decisions:
            return []  # late: this attempt has been decided
        if s.replica is not None:
            return s.replica.on_prepare(prepare)
        key = _key(prepare.voter, prepare.epoch)
        newest = self.newest.get(key[:3])
        if newest is not None and newest.memo.epoch.attempt >= prepare.epoch.attempt:
            return []
        effects: list[Effect] = []
        for attempt in range(1, prepare.epoch.attempt):
            known = self.epochs.get((*key[:3], attempt))
            if known is not None:
                effects += known.superseded({m.tx for m in prepare.members})
        memo = Memo(prepare.epoch, prepare.digest, prepare.voter, tuple(m.tx for m in prepare.members))
        executors: dict[TxId, SubTxExecutor] = {}
        for member in prepare.members:
            executor = self.executors.get(member.tx, {}).get(s.number)
            if (executor is None or executor.undoing) and member.events is not None:
                executor, begun = self._one_shot(s, prepare.epoch, member.tx, member.events, executor)
                effects += begun
            if executor is not None:
                executors[member.tx] = executor
        epoch = CallbackEpoch(s.number, memo, executors, self.brokers, self.options.doubt_s, self._epoch_ended)
        self._open_epoch(epoch)
        return effects + epoch.prepare(prepare.members)

    def _one_shot(
        self, s: Subscription, epoch: EpochId, tx: TxId, events: tuple[Event, ...], former: SubTxExecutor | None
    ) -> tuple[SubTxExecutor, list[Effect]]:
        spec = TxSpec(epoch.event_type, TxType.DISTRIBUTED, census=None)
        executor = self._executor(s, tx, spec, standing_pseudonym(s.secret, tx), s.voter)
        executor.begin()
        if former is not None:
            executor.follow(former)
        effects: list[Effect] = []
        for sequence, event in enumerate(events, start=1):
            effects += executor.on_event(sequence, event)
        return executor, effects

    def _open_epoch(self, epoch: CallbackEpoch) -> None:
        key = _key(epoch.memo.voter, epoch.memo.epoch)
        self.epochs[key] = self.newest[key[:3]] = epoch
        self.promised[epoch.memo.voter] = self.promised.get(epoch.memo.voter, 0) + 1

    def _epoch_ended(self, epoch: CallbackEpoch) -> None:
        key = _key(epoch.memo.voter, epoch.memo.epoch)
        del self.epochs[key]
        if self.newest.get(key[:3]) is epoch:
            del self.newest[key[:3]]
        voter = epoch.memo.voter
        self.promised[voter] -= 1
        if not self.promised[voter]:
            del self.promised[voter]
            s = self.subscriptions.get(self.voters.get(voter, -1))
            if s is None or s.voter != voter:  # a name for one transaction, or for a link that is gone
                self.voters.pop(voter, None)

    def on_decided(self, decided: EpochDecided) -> list[Effect]:
        self._remember(decided.epoch, decided.digest, decided.committing)
        return self._learn(decided.voter, decided.epoch, decided.digest, decided.committing)

    def _remember(self, epoch: EpochId, digest: str, committing: frozenset[str]) -> None:
        self.decisions[epoch] = (digest, committing)
        _trim(self.decisions)

    def _learn(self, voter: str, epoch: EpochId, digest: str, committing: frozenset[str]) -> list[Effect]:
        known = self.epochs.get(_key(voter, epoch))
        if known is not None and known.memo.epoch == epoch and known.memo.digest == digest:
            return known.on_decided(committing)
        replica = self._replica(voter)
        return replica.learn(epoch, digest, committing) if replica is not None else []

    def _replica(self, voter: str) -> EpochExecutor | None:
        """Who promised under this name, also one whose subscription has ended."""
        number = self.voters.get(voter, -1)
        left, here = self.leaving.get(number), self.subscriptions.get(number)
        if left is not None and left.replica is not None and left.replica.promised_as(voter):
            return left.replica
        return here.replica if here is not None else None

    def on_membership(self, answered: MembershipAnswered) -> list[Effect]:
        return self._each(answered.tx, lambda e: e.on_membership(answered) if e.voter == answered.voter else [])

    def on_peers_asked(self, asked: PeersAsked, asker: Address) -> list[Effect]:
        known = self.decisions.get(asked.epoch)
        if known is None or known[0] != asked.digest:
            return []
        return [Post(asker, PeerKnows(epoch=asked.epoch, digest=asked.digest, committing=known[1]))]

    def on_peer_knows(self, knows: PeerKnows) -> list[Effect]:
        effects: list[Effect] = []
        for epoch in [e for e in self.epochs.values() if e.memo.epoch == knows.epoch]:
            effects += self._learn(epoch.memo.voter, knows.epoch, knows.digest, knows.committing)
        for s in [*self.leaving.values(), *self.subscriptions.values()]:
            if s.replica is not None:
                effects += s.replica.learn(knows.epoch, knows.digest, knows.committing)
        return effects

    # ------------------------------------------------------------------------------------------------------ the log

    def on_log(self, delivered: LogDelivered) -> list[Effect]:
        for s in self.subscriptions.values():
            if s.wish.durable == delivered.name and s.family == delivered.event_type:
                if s.replica is not None:
                    return s.replica.on_log(delivered)
                if s.reader is not None:
                    return s.reader.on_delivered(delivered)
        return []

    def on_log_refused(self, refused: LogRefused) -> list[Effect]:
        text = f"durable subscription {refused.name} needs entries before {refused.oldest}, which are no longer kept"
        return [Alarm("log-gone", text)]

    # ------------------------------------------------------------------------------------------------ time, recovery

    def on_timer(self, key: tuple[str, ...]) -> list[Effect]:
        match key:
            case ("renew", number):
                return self.renew(int(number))
            case ("quiet", tx, subscription):
                executor = self.executors.get(TxId(tx), {}).get(int(subscription))
                return executor.on_quiet() if executor is not None else []
            case ("doubt", voter, incarnation, number, attempt):
                epoch = self.epochs.get((voter, int(incarnation), int(number), int(attempt)))
                if epoch is not None:
                    return epoch.on_timer()
                replica = self._replica(voter)
                return replica.on_doubt() if replica is not None else []
        return []

    def on_noted(self, noted: FinishNoted) -> list[Effect]:
        epoch = self.epochs.get(_key(noted.voter, noted.epoch))
        return epoch.on_noted() if epoch is not None and epoch.memo.epoch == noted.epoch else []

    def recover(self, number: int, promises: Sequence[Promise], kept: Sequence[Memo] = ()) -> list[Effect]:
        """Promises that a participant found again after a crash: open ones, and ones that are `kept` but not noted."""
        s = self.subscriptions[number]
        found = [*promises, *(Promise(memo, ()) for memo in kept)]
        for promise in found:
            self.voters[promise.memo.voter] = number
        if s.replica is not None:
            return s.replica.recover([p.memo for p in promises])
        effects: list[Effect] = []
        for promise in sorted(found, key=lambda p: p.memo.epoch.attempt):
            memo = promise.memo
            executors: dict[TxId, SubTxExecutor] = {}
            for tx in promise.transactions:
                spec = TxSpec(memo.epoch.event_type, TxType.DISTRIBUTED)
                executor = SubTxExecutor.recovered(tx, number, spec, memo, self.calls, self._ended)
                self.executors.setdefault(tx, {})[number] = executor
                executors[tx] = executor
            epoch = CallbackEpoch.recovered(
                number, memo, executors, self.brokers, self.options.doubt_s, self._epoch_ended
            )
            self._open_epoch(epoch)
            effects += epoch.on_timer()
        return effects


def _key(voter: str, epoch: EpochId) -> EpochKey:
    return (voter, epoch.incarnation, epoch.number, epoch.attempt)


def _trim(memory: "OrderedDict[Any, Any]") -> None:
    if len(memory) > REMEMBERED_MAX:
        memory.popitem(last=False)


def _check_wish(wish: Wish, durable_type: bool) -> None:
    name = wish.definitions[-1].name
    if wish.durable is not None and not durable_type:
        raise InvalidEventType(f"a durable subscription needs a durable event type, and {name!r} is not")
    if not is_start(wish.start):
        raise InvalidEventType(
            f"a subscription to {name!r} starts 'now', at the 'oldest' or at a number: {wish.start!r}"
        )
    if wish.replica is not None and (wish.durable is None or wish.scope not in (Scope.DISTRIBUTED, Scope.LOCAL)):
        raise InvalidEventType("a replica needs a durable name and the standing answer 'distributed' or 'local'")
