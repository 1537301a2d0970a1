"""The subscriptions of a site: announced to its broker, and renewed at each coordinator."""

from collections.abc import Callable, Sequence

import msgspec

from tops.core.log.event_log import is_start
from tops.core.participant.calls import Calls
from tops.core.participant.epoch_executor import EpochExecutor
from tops.core.participant.log_reader import LogReader
from tops.core.participant.sub_tx_executor import SubTxExecutor
from tops.core.participant.voters import Voters
from tops.model.errors import InvalidEventType, TopsError
from tops.model.event_types import EventTypes
from tops.model.filters import Filter
from tops.model.ids import NodeId
from tops.model.log_points import BEGINNING, LogPoint
from tops.model.transactions import Scope
from tops.protocol.effects import Alarm, CompleteRequest, Effect, SendOnLink, SendTo, SetTimer
from tops.protocol.messages import (
    Address,
    Definitions,
    FollowLog,
    FollowRejected,
    HistoryRejected,
    LogDelivered,
    LoggedTx,
    StandingAccepted,
    StandingRegistered,
    StandingWithdrawn,
    SubscriptionChanged,
)


class SiteOptions(msgspec.Struct, frozen=True):
    """Times of a site: how long it tolerates silence, how often it renews registrations and repeats requests."""

    renew_s: float = 1.0
    quiet_s: float = 10.0
    doubt_s: float = 1.0
    retry_s: float = 1.0
    give_up_s: float = 30.0
    delivery_attempts: int = 1
    log_credit: int = 1024


class Wish(msgspec.Struct, frozen=True):
    """What an application subscribes to.

    `scope` None: the participant chooses at every census; else it is a standing registration. `replica` is the point
    that a batch participant has applied; it needs a durable type, a name and the standing registration `DISTRIBUTED`,
    or `LOCAL` if it only follows the log.
    """

    definitions: Definitions
    filter: Filter
    scope: Scope | None = None
    durable: str | None = None
    start: str = "now"
    replica: LogPoint | None = None
    position: int | None = None
    compensatable: bool = False


class Subscription(msgspec.Struct):
    """One subscription of this site."""

    number: int
    wish: Wish
    coordinator: NodeId
    voter: str = ""  # the name of its standing registration, valid for one link
    secret: bytes = b""
    request: int | None = None  # completed when the standing registration is accepted
    replica: EpochExecutor | None = None
    reader: LogReader | None = None
    type_name: str = ""
    family: str = ""

    def __post_init__(self) -> None:
        definitions = self.wish.definitions
        self.type_name, self.family = definitions[-1].name, definitions[0].name

    def matches(self, lineage: Sequence[str], attributes: dict[str, object]) -> bool:
        return self.type_name in lineage and self.wish.filter.matches(attributes)


OpenLogged = Callable[[Subscription, LoggedTx, Callable[[], list[Effect]]], SubTxExecutor]


class Subscriptions:
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
        voters: Voters,
        open_logged: OpenLogged,
    ) -> None:
        self.site, self.types, self.calls, self.brokers = site, types, calls, brokers
        self.rendezvous, self.entropy, self.options = rendezvous, entropy, options
        self.voters, self.open_logged = voters, open_logged
        self.all: dict[int, Subscription] = {}
        self.replicas: list[EpochExecutor] = []  # of subscriptions that have not ended
        self.leaving: dict[int, Subscription] = {}  # ended, but a prepared epoch waits for its decision

    def subscribe(self, number: int, wish: Wish, request: int, link: NodeId | None) -> list[Effect]:
        """Add a subscription; the request completes at once, or when the standing registration is accepted."""
        try:
            whole = self.types.define_all(wish.definitions)
            wish.filter.check_against(whole)
            _check_wish(wish, whole.durable)
        except TopsError as rejection:
            return [CompleteRequest(request, error=rejection)]
        coordinator = self.rendezvous(wish.definitions[0].name)
        subscription = Subscription(number, wish, coordinator)
        self.all[number] = subscription
        if wish.compensatable:
            self.voters.serial.add(number)
        if wish.replica is not None:
            subscription.replica = EpochExecutor(
                number,
                wish.durable or self.site,
                coordinator,
                wish.replica,
                self.calls,
                self.brokers,
                self.options.doubt_s,
                lambda caught_up: self._progressed(subscription, caught_up),
            )
            self.replicas.append(subscription.replica)
        elif wish.durable is not None:
            subscription.reader = LogReader(
                number,
                wish.durable,
                wish.definitions,
                wish.filter,
                coordinator,
                self.calls,
                lambda logged, ended: self.open_logged(subscription, logged, ended),
                position=wish.position,
                start=wish.start,
                credit=self.options.log_credit,
            )
        if wish.scope is Scope.DISTRIBUTED:
            subscription.request = request
            return self.announce(subscription, link)
        return [*self.announce(subscription, link), CompleteRequest(request, number)]

    def remove(self, number: int) -> Subscription | None:
        """End a subscription; a replica's prepared epoch still waits for its decision."""
        subscription = self.all.pop(number, None)
        if subscription is None:
            return None
        self.leaving = {n: s for n, s in self.leaving.items() if s.replica is not None and s.replica.leave()}
        if subscription.replica is not None:
            self.replicas.remove(subscription.replica)
            if subscription.replica.leave():
                self.leaving[number] = subscription
        if subscription.reader is not None:
            subscription.reader.stop()
        return subscription

    def announce_end(self, s: Subscription, link: NodeId | None) -> list[Effect]:
        effects: list[Effect] = []
        if s.voter:
            withdrawn = StandingWithdrawn(voter=s.voter, event_type=s.type_name)
            effects.append(SendTo(Address(s.coordinator), withdrawn))
        if link is not None:
            ended = SubscriptionChanged(
                subscription=s.number, definitions=s.wish.definitions, filter=None, scope=None, durable=False
            )
            effects.append(SendOnLink(link, ended))
        return effects

    def by_voter(self, voter: str) -> Subscription | None:
        """The subscription that votes under this name."""
        return self.all.get(self.voters.subscription(voter))

    def stop_registering(self, voter: str) -> list[int]:
        """The broker did not register this voter. Returns the request that waited for it."""
        s = self.by_voter(voter)
        if s is None or s.request is None:
            return []
        request, s.request = s.request, None
        return [request]

    def replica_of(self, voter: str) -> EpochExecutor | None:
        """The replica that votes or has prepared under this name, also one whose subscription has ended."""
        number = self.voters.subscription(voter)
        left, here = self.leaving.get(number), self.all.get(number)
        if left is not None and left.replica is not None and left.replica.prepared_as(voter):
            return left.replica
        return here.replica if here is not None else None

    def replica_named(self, name: str, family: str) -> EpochExecutor | None:
        """The replica behind a durable subscription."""
        found = [s.replica for s in self.all.values() if s.wish.durable == name and s.family == family]
        return found[0] if found else None

    def announce(self, s: Subscription, link: NodeId | None) -> list[Effect]:
        """Announce this subscription completely to a broker that has no state of it."""
        if link is None:
            return []
        changed = SubscriptionChanged(
            subscription=s.number,
            definitions=s.wish.definitions,
            filter=s.wish.filter,
            scope=s.wish.scope,
            durable=s.wish.durable is not None,
        )
        effects: list[Effect] = [SendOnLink(link, changed)]
        if s.wish.scope is Scope.DISTRIBUTED:
            # A standing registration is valid for one link: with a new name, messages that were sent under the old
            # link can't be taken for current ones.
            s.voter, s.secret = self.entropy(12).hex(), self.entropy(32)
            replica = s.replica
            self.voters.rename(s.number, s.voter, lambda name: replica is not None and replica.prepared_as(name))
        if s.reader is not None:
            effects += s.reader.restart()
        return effects + self.renew(s.number)

    def renew(self, number: int) -> list[Effect]:
        """Renew the standing registration and the request for the log, which expire at the coordinator."""
        s = self.all.get(number)
        if s is None or (s.wish.scope is not Scope.DISTRIBUTED and s.wish.durable is None):
            return []
        effects: list[Effect] = []
        if s.wish.scope is Scope.DISTRIBUTED and not (s.replica is not None and s.replica.doubts):
            effects.append(self._standing(s))
        if s.replica is not None:
            effects.append(self._follow_log(s, s.replica))
        elif s.reader is not None:
            effects += s.reader.want()
        return [*effects, SetTimer(("renew", str(number)), self.options.renew_s)]

    def _standing(self, s: Subscription) -> Effect:
        point = s.replica.point if s.replica is not None else BEGINNING
        registered = StandingRegistered(
            voter=s.voter,
            event_type=s.type_name,
            filter=s.wish.filter,
            scope=Scope.DISTRIBUTED,
            secret=s.secret,
            position=point.index if s.replica is not None else None,
            subscription=s.number,
            history=point.history,
            digest=point.digest,
        )
        return SendTo(Address(s.coordinator), registered)

    def _follow_log(self, s: Subscription, replica: EpochExecutor) -> Effect:
        follow = FollowLog(
            name=s.wish.durable or self.site,
            definitions=s.wish.definitions,
            filter=s.wish.filter,
            position=replica.position,
            start=s.wish.start,
            credit=self.options.log_credit,
            voter=s.voter or None,
            history=replica.point.history,
            digest=replica.point.digest,
        )
        return SendTo(Address(s.coordinator), follow)

    def _progressed(self, s: Subscription, caught_up: bool) -> list[Effect]:
        if s.replica is None:
            return []
        follow = self._follow_log(s, s.replica)
        votes = s.wish.scope is Scope.DISTRIBUTED
        return [follow, self._standing(s)] if caught_up and votes else [follow]

    def on_accepted(self, accepted: StandingAccepted) -> list[Effect]:
        s = self.by_voter(accepted.voter)
        if s is None or s.request is None:
            return []
        request, s.request = s.request, None
        return [CompleteRequest(request, s.number)]

    def on_log(self, delivered: LogDelivered) -> list[Effect]:
        for s in self.all.values():
            if s.wish.durable == delivered.name and s.family == delivered.event_type:
                if s.replica is not None:
                    return s.replica.on_log(delivered)
                if s.reader is not None:
                    return s.reader.on_delivered(delivered)
        return []

    def on_history_rejected(self, rejected: HistoryRejected) -> list[Effect]:
        replica = self.replica_named(rejected.name, rejected.event_type)
        return replica.on_rejected(rejected) if replica is not None else []

    def on_follow_rejected(self, rejected: FollowRejected) -> list[Effect]:
        needs = rejected.reason or f"it needs entries before {rejected.oldest}, which are no longer retained"
        text = f"durable subscription {rejected.name}: {needs}"
        return [Alarm("log-gone", text)]


def _check_wish(wish: Wish, durable_type: bool) -> None:
    name = wish.definitions[-1].name
    if wish.durable is not None and not durable_type:
        raise InvalidEventType(f"a durable subscription needs a durable event type, and {name!r} is not")
    if not is_start(wish.start):
        raise InvalidEventType(
            f"a subscription to {name!r} can't start at {wish.start!r}: give 'now', 'oldest' or a number"
        )
    if wish.replica is not None and (wish.durable is None or wish.scope not in (Scope.DISTRIBUTED, Scope.LOCAL)):
        raise InvalidEventType("a replica needs a durable name and the standing registration 'distributed' or 'local'")
