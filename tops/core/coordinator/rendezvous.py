"""What a broker does for the event types whose rendezvous it is: number events, keep logs, coordinate, keep outcomes.

It composes the parts that do so: `KnownTypes` (epochs and logs per family), `LogService` (ordinary events),
`LocalTransactions`, `DistributedTransactions` and `PublicTransactions`, `RegistrationHandler` and `Outcomes`. It
handles messages, and publications on their way through; it knows nothing of links.
"""

from collections.abc import Callable, Mapping
from typing import Any

from tops.core.commit.ballot import ReadyTx
from tops.core.commit.decision_sender import Sign
from tops.core.commit.outcomes import Outcomes
from tops.core.coordinator.distributed_transactions import DistributedTransactions, membership
from tops.core.coordinator.known_types import KnownTypes, not_taken
from tops.core.coordinator.local_relay import LocalRelay
from tops.core.coordinator.local_transactions import LocalTransactions
from tops.core.coordinator.log_opening import LogOpenings
from tops.core.coordinator.log_recovery import LogRecovery
from tops.core.coordinator.log_service import LogService
from tops.core.coordinator.open_transactions import OpenTransactions, RendezvousNode, RendezvousOptions
from tops.core.coordinator.public_transactions import PublicTransactions
from tops.core.coordinator.rate_limit import RateLimit
from tops.core.coordinator.registration_handler import RegistrationHandler
from tops.core.coordinator.tx_coordinator import TxCoordinator
from tops.core.log.event_log import Feed
from tops.core.ordering.broker import OrderingBroker
from tops.model.constraints import Predicate
from tops.model.event_types import set_of_log
from tops.model.filters import Filter
from tops.model.ids import NodeId, TxId, voter_key
from tops.model.rejections import Rejection, RejectionCode
from tops.model.transactions import Outcome, TxState, TxType
from tops.protocol.effects import Effect, Reject, SendTo
from tops.protocol.messages import (
    AbortTx,
    Address,
    AppliedIndexReported,
    BeginPublic,
    BeginTx,
    CensusOpened,
    CensusReplied,
    CommitTx,
    ConfirmRoute,
    EndLog,
    EpochFinished,
    EpochVoted,
    EventsPublished,
    FollowLog,
    GetEpochOutcome,
    GetLogState,
    GetMembership,
    GetOutcome,
    HistoryDiffers,
    LogEntry,
    MembershipReported,
    OneShot,
    ParticipantAborted,
    ParticipantLost,
    Publication,
    Published,
    PublisherDone,
    PublisherLost,
    PublishInTx,
    RecoverLog,
    RouteConfirmed,
    RunOneShot,
    RunOneShots,
    Sender,
    StandingRegistered,
    StandingWithdrawn,
    TxOutcome,
    TxPublished,
    TypeAdvertised,
)
from tops.protocol.records import (
    AnyRecord,
    EpochCommitted,
    FinishesNoted,
    HistoryBegun,
    InSyncChanged,
    LogAppended,
    LogCut,
    LogDecided,
    LogStale,
    MembersDeclared,
    OutcomesTruncated,
    PlansDeclared,
    PublishersRetained,
    ReplicasUnconfirmed,
    Started,
    SubscriptionAdvanced,
    TxRejected,
    TypeDefined,
)

__all__ = ["BROKER_ROLE", "Rendezvous", "RendezvousOptions"]

BROKER_ROLE = "broker"
# The rate limit of one identity for requests about transactions that are not known here.
UNKNOWN_TX_REQUESTS_AT_ONCE, UNKNOWN_TX_REQUESTS_PER_S = 10_000, 1.0

COMMITTING = TxState.COMMITTING  # read with every commit


class Rendezvous:
    """The coordinator's side of all event types whose rendezvous is this broker."""

    def __init__(
        self,
        me: NodeId,
        incarnation: int,
        predicates: Mapping[str, Predicate],
        options: RendezvousOptions,
        entropy: Callable[[int], bytes],
        sign: Sign | None = None,
    ) -> None:
        node = self.node = RendezvousNode(me, incarnation, predicates, options, entropy, sign)
        outcomes = self.outcomes = Outcomes(options.keep_outcomes)
        known = self.known = KnownTypes(node, outcomes, self._settled)
        self.types, self.families = known.types, known.families
        self.epochs, self.logs, self.logs_of = known.epochs, known.logs, known.logs_of
        transactions = self.open = OpenTransactions(options.quotas, known.unlisted)
        self.coordinators, self.relays = transactions.coordinators, transactions.relays
        self.publishers = transactions.publishers
        self.openings = LogOpenings(node, known)
        self.log_service = LogService(known, self.openings, options.quotas)
        recovery = LogRecovery(node, known, outcomes)
        self.local = LocalTransactions(node, known, transactions, outcomes)
        self.distributed = DistributedTransactions(node, known, transactions, outcomes)
        self.public = PublicTransactions(node, known, transactions, outcomes, self.local, self.distributed)
        self._requests = RateLimit(UNKNOWN_TX_REQUESTS_AT_ONCE, UNKNOWN_TX_REQUESTS_PER_S)
        self.standing = RegistrationHandler(node, known, self.openings, self._lose)
        self.handlers: dict[type, Callable[[Any, Sender, Address, float], list[Effect]]] = {
            TypeAdvertised: known.on_advertised,
            BeginTx: self.distributed.on_begin,
            BeginPublic: self.public.on_begin,
            RunOneShot: self._run_one_shot,
            RunOneShots: self._run_one_shots,
            CensusReplied: self.distributed.on_replied,
            StandingRegistered: self.standing.on_registered,
            StandingWithdrawn: self.standing.on_withdrawn,
            PublishInTx: self._publish_in_tx,
            PublisherDone: self.public.on_done,
            CommitTx: self._commit,
            AbortTx: self._abort,
            ParticipantAborted: self.distributed.on_participant_aborted,
            ParticipantLost: self._on_participant_lost,
            PublisherLost: self._on_publisher_lost,
            EpochVoted: self._voted,
            EpochFinished: self._finished,
            GetEpochOutcome: self._get_epoch_outcome,
            GetMembership: self._get_membership,
            GetOutcome: self._get_outcome,
            FollowLog: self.log_service.on_follow,
            GetLogState: self.log_service.on_get_log_state,
            EndLog: self.log_service.on_end,
            AppliedIndexReported: self.openings.on_applied_index,
            HistoryDiffers: self.openings.on_differs,
            RecoverLog: recovery.on_recover,
            ConfirmRoute: self._confirm_route,
        }

    def order_with(self, ordering: OrderingBroker) -> None:
        """Events of types in ordering domains go to their topic managers."""
        self.log_service.ordering = self.known.ordering = ordering
        self.handlers.update(ordering.handlers)

    def on_message(self, message: object, sender: Sender, at: Address, now: float) -> list[Effect]:
        """A message that is addressed to this broker as a rendezvous. `sender` is the stamp of the sender's broker;
        responses go to the address `at`."""
        handler = self.handlers.get(type(message))
        return handler(message, sender, at, now) if handler is not None else []

    def on_publication(self, publication: Publication, sender: Sender, at: Address, now: float) -> list[Effect]:
        """A publication that a site sent up the tree; the effects contain what goes down again."""
        if type(publication) is TxPublished:
            if (misfit := self.known.misfit(publication.event, sender, f"tx {publication.tx}")) is not None:
                return [misfit]  # the sequence now has a gap, so the transaction can't commit
            owner = self.open.owner(publication.tx)
            if owner is None or not self.open.is_initiator(owner, sender):
                return []
            return self.public.on_event(owner, publication)
        if type(publication) is Published:
            return self.log_service.on_published(publication, sender, at)
        if type(publication) is EventsPublished:
            return self.log_service.on_published_together(publication, sender, at)
        if type(publication) is CensusOpened:
            return self.local.on_announced(publication, sender, at)
        return []

    # --------------------------------------------------------------------------------------------------- commitment

    def _run_one_shot(self, m: RunOneShot, sender: Sender, at: Address, now: float) -> list[Effect]:
        one = RunOneShots(spec=m.spec, transactions=(OneShot(m.tx, m.events),))
        return self._run_one_shots(one, sender, at, now)

    def _run_one_shots(self, m: RunOneShots, sender: Sender, at: Address, now: float) -> list[Effect]:
        if (rejection := self.known.against_plan(m.spec, sender)) is not None:
            return self._unplanned(m, rejection, sender, at)
        if not set_of_log(m.spec.event_type) and (misfit := self._misfit(m, sender)) is not None:
            return [misfit, *(SendTo(at, _aborted(one.tx, not_taken(misfit))) for one in m.transactions)]
        if m.spec.tx_type is TxType.LOCAL:
            return self.local.on_one_shots(m, sender, at)
        return self.distributed.on_one_shots(m, sender, at)

    def _misfit(self, m: RunOneShots, sender: Sender) -> Reject | None:
        """The rejection of the whole message if one of its events does not fit its type. The client library checks
        events before it sends them, so the message does not come from it."""
        events = ((one.tx, event) for one in m.transactions for event in one.events)
        found = (self.known.misfit(event, sender, f"tx {tx}") for tx, event in events)
        return next((misfit for misfit in found if misfit is not None), None)

    def _publish_in_tx(self, m: PublishInTx, sender: Sender, at: Address, now: float) -> list[Effect]:
        misfit = self.known.misfit(m.event, sender, f"tx {m.tx}")
        return self.public.on_publish(m, sender, at, now) if misfit is None else [misfit]

    def _unplanned(self, m: RunOneShots, rejection: Rejection, sender: Sender, at: Address) -> list[Effect]:
        aborted = [_aborted(one.tx, rejection) for one in m.transactions]
        text = f"{sender.node} ran a transaction: {rejection.text}"
        rejected = Reject(sender, "run", m.spec.event_type, text, code=rejection.code.value)
        return [rejected, *(SendTo(at, outcome) for outcome in aborted)]

    def _commit(self, m: CommitTx, sender: Sender, at: Address, now: float) -> list[Effect]:
        owner = self.open.owner(m.tx)
        if owner is None:
            return self._ended(m, at)
        if not self.open.may_end(owner, sender):
            return [_foreign(m.tx, "commit", owner, sender)]
        if isinstance(owner, LocalRelay):
            return self.local.commit(owner, m.last_sequence)
        if m.incarnation and m.incarnation != owner.incarnation:
            # After a restart the begin message arrived again, but the publisher may have received an abort before.
            restarted = Rejection(RejectionCode.RESTARTED, "its coordinator was restarted")
            return self.distributed.abort(owner, restarted, at)
        if owner.state is COMMITTING:
            return self.known.epochs_of(owner.spec).wait_again(m.tx)
        return self.distributed.commit(owner, m.last_sequence)

    def _settled(self, ready: ReadyTx, committed: bool) -> list[Effect]:
        """An epoch decided one of its members."""
        return self.distributed.settled(ready, committed)

    def _voted(self, m: EpochVoted, sender: Sender, at: Address, now: float) -> list[Effect]:
        epochs = self.epochs.get(m.epoch.event_type)
        return epochs.on_voted(m, sender) if epochs is not None else []

    def _finished(self, m: EpochFinished, sender: Sender, at: Address, now: float) -> list[Effect]:
        epochs = self.epochs.get(m.epoch.event_type)
        return epochs.on_finished(m, sender, at) if epochs is not None else []

    # ------------------------------------------------------------------------------------------- aborts and losses

    def _abort(self, m: AbortTx, sender: Sender, at: Address, now: float) -> list[Effect]:
        owner = self.open.owner(m.tx)
        if owner is None:
            return self._ended(m, at)
        # The edge checked the operator's right under the type that the message names: it must be the transaction's.
        operated = m.operator and m.event_type == owner.spec.event_type
        if not operated and not self.open.may_end(owner, sender):
            return [_foreign(m.tx, "abort", owner, sender)]
        rejection = Rejection(RejectionCode.ABORTED, m.reason)
        if isinstance(owner, LocalRelay):
            return self.local.end(owner, Outcome.ABORTED, rejection)
        return self.distributed.abort(owner, rejection, at)

    def _on_participant_lost(self, m: ParticipantLost, sender: Sender, at: Address, now: float) -> list[Effect]:
        """A broker may report only its own sites. A site that has moved since has another address and is not meant."""
        if m.address.broker != sender.identity:
            reason = f"{sender.node} reports the loss of a site of {m.address.broker}, and is not that broker"
            return [Reject(sender, "participate", "", reason)]
        members = [m for c in self.coordinators.values() for m in c.members.values()]
        for epochs in self.epochs.values():
            members += [voter for epoch in epochs.in_flight.values() for voter in epoch.voters.values()]
        keys = {member.key: None for member in members if member.address == m.address}
        standing = [s for epochs in self.epochs.values() for s in epochs.standing.registrations.values()]
        keys |= {s.key: None for s in standing if s.address == m.address}
        return self._lose(tuple(keys), "the participant is unreachable")

    def _lose(self, keys: tuple[str, ...], reason: str) -> list[Effect]:
        effects = self.distributed.on_lost(keys, reason)
        for epochs in self.epochs.values():
            for key in keys:
                epochs.standing.withdraw(key)
            effects += epochs.drop(keys, reason)
        return effects

    def _on_publisher_lost(self, m: PublisherLost, sender: Sender, at: Address, now: float) -> list[Effect]:
        """Abort the undecided transactions of a lost publisher, behind its last accepted event."""
        if sender.role != BROKER_ROLE:
            return [Reject(sender, "publish", "", f"{sender.node} reports the loss of {m.site}, and is no broker")]
        incarnation = (m.site, m.incarnation)
        rejection = Rejection(RejectionCode.PUBLISHER_LOST, "a publisher is unreachable, or moved to another broker")
        return self.local.on_publisher_lost(incarnation, rejection) + self.distributed.on_publisher_lost(
            incarnation, rejection
        )

    # ---------------------------------------------------------------------------------------------------- requests

    def _get_epoch_outcome(self, m: GetEpochOutcome, sender: Sender, at: Address, now: float) -> list[Effect]:
        epochs = self.epochs.get(m.epoch.event_type)
        if epochs is None or m.epoch.coordinator != self.node.me:
            return []
        return epochs.on_outcome_requested(m.epoch, m.digest, voter_key(sender.identity, m.voter), at)

    def _get_membership(self, m: GetMembership, sender: Sender, at: Address, now: float) -> list[Effect]:
        if m.tx in self.relays:
            return [membership(m.tx, m.voter, TxState.ACTIVE, at)]
        coordinator, key = self.coordinators.get(m.tx), voter_key(sender.identity, m.voter)
        if coordinator is not None and coordinator.spec.event_type != m.event_type:
            return []  # the right to know the members was checked for another type
        epochs = self.known.epochs_if_known(m.event_type)
        if coordinator is None and epochs is not None and epochs.holds(m.tx):
            return []  # the outcome of a one-shot is still to come
        if coordinator is not None and coordinator.detached and key not in coordinator.joined:
            return []  # a local subscriber: it waits for the publisher's commit or abort
        if coordinator is None or coordinator.failed is not None:
            return [membership(m.tx, m.voter, TxState.ABORTED, at)]
        if key in coordinator.members:
            coordinator.members[key].address = at  # it may have moved to another broker
        if coordinator.state is TxState.CENSUS:
            return []
        response = MembershipReported(
            tx=m.tx, voter=m.voter, state=coordinator.state, members=coordinator.census.hashed_members()
        )
        return [SendTo(at, response)]

    def _get_outcome(self, m: GetOutcome, sender: Sender, at: Address, now: float) -> list[Effect]:
        if not self._is_known_tx(m, sender) and not self._requests.take(sender, now):
            reason = f"{sender.accountable} has requested the outcomes of too many unknown transactions: wait"
            return [Reject(sender, "begin", m.event_type, reason, f"tx {m.tx}", code="quota")]
        return self._ended(m, at)

    def _is_known_tx(self, m: GetOutcome, sender: Sender) -> bool:
        """Whether the response needs no new entry here, or the transaction is of the requesting session itself.

        An unknown id is rejected for good, which takes an entry in memory, and an identity can make up any number of
        sessions and ids."""
        if m.tx.startswith(f"{sender.node}.") or self.outcomes.remembers(m.tx):
            return True
        return self.distributed.holds(m.tx, m.event_type)

    def _ended(self, m: GetOutcome | CommitTx | AbortTx, at: Address) -> list[Effect]:
        """The outcome of a transaction that is not coordinated here any more, or never was."""
        alive = self.distributed.holds(m.tx, m.event_type)
        remembered = m.tx_type is TxType.DISTRIBUTED or m.event_type in self.logs_of
        if not alive and not remembered and not self.outcomes.is_rejected(m.tx):
            text = "the broker was restarted and keeps no record of local transactions"
            rejection = Rejection(RejectionCode.NO_RECORD, text)
            return [SendTo(at, TxOutcome(tx=m.tx, outcome=Outcome.UNKNOWN, rejection=rejection))]
        log = self.logs_of.get(m.event_type)
        if log is not None and log.opening is not None and not alive and not self.outcomes.is_rejected(m.tx):
            return []  # a replica may have committed it; the requester repeats the request until that is known
        return self.outcomes.query(m.tx, at, alive, presume=log is None or not log.missing)

    def _confirm_route(self, m: ConfirmRoute, sender: Sender, at: Address, now: float) -> list[Effect]:
        return [SendTo(at, RouteConfirmed(subscription=m.subscription))]

    # ------------------------------------------------------------------------------------------------ time, recovery

    def on_timer(self, key: tuple[str, ...], now: float) -> list[Effect]:
        match key:
            case ("census", tx):
                return self.distributed.on_census_over(TxId(tx))
            case ("deadline", tx):
                return self._deadline(TxId(tx))
            case ("epoch", event_type, number):
                return self.epochs[event_type].on_timer(int(number))
            case ("notes", event_type):
                return self.epochs[event_type].write_notes()
            case ("tail", event_type):
                return self.openings.on_timer(event_type)
            case ("lease", event_type):
                return self.standing.on_lease(event_type, now)
        return []

    def _deadline(self, tx: TxId) -> list[Effect]:
        rejection = Rejection(RejectionCode.TIMED_OUT, "it was not decided in time")
        relay = self.relays.get(tx)
        if relay is not None:
            return self.local.end(relay, Outcome.ABORTED, rejection)
        coordinator = self.coordinators.get(tx)
        if coordinator is None:
            return []
        coordinator.detached = False
        return self.distributed.abort(coordinator, rejection, None)

    def log_read(self, event_type: str, feed: str, entries: tuple[LogEntry, ...]) -> list[Effect]:
        """The result of a `ReadLog`."""
        return self.log_service.on_read(event_type, feed, entries)

    def recover(self, record: AnyRecord) -> None:
        """Replay one record of the journal, in order."""
        match record:
            case Started(incarnation=incarnation):
                self.node.incarnation = max(self.node.incarnation, incarnation)
            case TypeDefined():
                self.known.recover(record)
            case PlansDeclared(event_type=name, plans=plans):
                self.known.plans[name] = plans
            case MembersDeclared(event_type=name, members=members):
                self.known.members[name] = members
            case LogAppended(event_type=name) | InSyncChanged(event_type=name):
                self.epochs[name].recover(record)
            case EpochCommitted(epoch=epoch):
                self.epochs[epoch.event_type].recover(record)
            case LogStale() | HistoryBegun() | ReplicasUnconfirmed():
                self.openings.recover(record)
            case FinishesNoted(event_type=name):
                self.epochs[name].recover(record)
            case TxRejected(tx=tx):
                self.outcomes.reject(tx)
            case OutcomesTruncated(incarnations=incarnations):
                for origin, counter in incarnations.items():
                    self.outcomes.forget(TxId(f"{origin}.{counter}"))
            case LogDecided(event_type=name, upto=upto):
                self.logs[name].last_number = max(self.logs[name].last_number, upto)
            case LogCut(event_type=name, point=point):
                self.logs[name].chain.begin(point)
            case PublishersRetained(event_type=name, published=published):
                self.logs[name].published.update(published)
            case SubscriptionAdvanced():
                self._recover_subscription(record)

    def _recover_subscription(self, record: SubscriptionAdvanced) -> None:
        log, key, position = self.logs[record.event_type], record.name, record.position
        known = log.feeds.get(key)
        if record.dropped:
            log.drop(key, position)
        elif position >= 0:
            # Nothing is sent to this address, and the filter matches nothing, until the subscriber follows again.
            here, nothing = Address(self.node.me), Filter.nothing()
            feed = Feed(key, "", log.event_type, here, nothing, position, position, 0, replica=record.replica)
            log.feeds[key] = feed
        else:
            log.end(key)
            self.openings.ended(log, known.replica if known is not None and known.replica else key)

    def recovered(self) -> list[Effect]:
        """The journal is read: request from the replicas whether it is the newest one."""
        return self.openings.recovered()


def _aborted(tx: TxId, rejection: Rejection) -> TxOutcome:
    return TxOutcome(tx=tx, outcome=Outcome.ABORTED, rejection=rejection)


def _foreign(tx: TxId, verb: str, owner: TxCoordinator | LocalRelay, sender: Sender) -> Effect:
    reason = f"{sender.node} neither began {tx} nor published in it"
    return Reject(sender, verb, owner.spec.event_type, reason, f"tx {tx}")
