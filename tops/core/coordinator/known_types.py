"""The event types whose rendezvous this broker is: each family has its epochs and, if it is durable, its log."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tops.core.commit.ballot import ReadyTx
from tops.core.commit.epochs import EpochCoordinator
from tops.core.commit.outcomes import Outcomes
from tops.core.commit.standing_registrations import StandingRegistrations
from tops.core.coordinator.open_transactions import RendezvousNode
from tops.core.log.event_log import EventLog
from tops.core.ordering.broker import OrderingBroker
from tops.model.constraints import OnlyFrom
from tops.model.errors import InvalidEvent, InvalidEventType, InvalidTransaction
from tops.model.event_types import EventType, EventTypes, SetPart, set_of_log, set_part
from tops.model.rejections import Rejection, RejectionCode
from tops.model.sizes import encoded_bytes
from tops.model.transactions import LocalOutcome, ScopeLimit, TxType
from tops.protocol.effects import Effect, Persist, Reject, SendTo
from tops.protocol.messages import Address, AdvertisementHandled, Definitions, Event, Sender, TxSpec, TypeAdvertised
from tops.protocol.records import MembersDeclared, PlansDeclared, TypeDefined

NOT_LISTED = RejectionCode.NOT_LISTED.value


class KnownTypes:
    """The definitions and declarations of each type. A definition never changes."""

    def __init__(
        self, node: RendezvousNode, outcomes: Outcomes, settled: Callable[[ReadyTx, bool], list[Effect]]
    ) -> None:
        self._node, self._outcomes, self._settled = node, outcomes, settled
        self.ordering: OrderingBroker | None = None
        self.types = EventTypes()
        self._defined_by: Counter[str] = Counter()  # how many types an identity has defined since the start
        self._defined_bytes: Counter[str] = Counter()  # and how much their definitions take
        self.families: dict[str, str] = {}  # type -> its oldest ancestor
        self.epochs: dict[str, EpochCoordinator] = {}  # per family
        self.logs: dict[str, EventLog] = {}  # per durable family
        self.logs_of: dict[str, EventLog] = {}  # the same by each type's own name
        self.plans: dict[str, tuple[TxSpec, ...]] = {}  # of replica sets' logs
        self.members: dict[str, frozenset[str]] = {}  # of replica sets' logs, as declared

    def on_advertised(self, m: TypeAdvertised, sender: Sender, at: Address, now: float) -> list[Effect]:
        name = m.definitions[-1].name
        new = [d for d in m.definitions if d.name not in self.types]
        size = encoded_bytes(new) if new else 0
        if new and (reason := self._beyond_quota(sender.accountable, len(new), size)) is not None:
            rejection = Reject(sender, "advertise", name, reason, f"type {name}", code="quota")
            return [rejection, SendTo(at, AdvertisementHandled(event_type=name, rejection=reason))]
        try:
            self._check_order(m.definitions)
            effects = self._define(m.definitions)
        except InvalidEventType as error:
            return [SendTo(at, AdvertisementHandled(event_type=name, rejection=str(error)))]
        if new:
            self._defined_by[sender.accountable] += len(new)
            self._defined_bytes[sender.accountable] += size
        return [*effects, *self._declare(m, name, sender), SendTo(at, AdvertisementHandled(event_type=name))]

    def _check_order(self, definitions: Definitions) -> None:
        """Reject a type that is not durable in a durable ordering domain, and the other way round."""
        known = self.ordering.topics.get(definitions[0].name) if self.ordering is not None else None
        if known is None or known[0].domain.durable == definitions[0].durable:
            return
        domain = known[0].domain
        kinds = ("durable", "not durable") if domain.durable else ("not durable", "durable")
        raise InvalidEventType(
            f"ordering domain {domain.name!r} is {kinds[0]} and event type {definitions[0].name!r} is {kinds[1]}: "
            "all types of a domain are of one kind"
        )

    def _beyond_quota(self, identity: str, count: int, size: int) -> str | None:
        quotas = self._node.options.quotas
        if self._defined_by[identity] + count > quotas.types:
            return f"{identity} has defined {quotas.types} event types here, which is the quota"
        if self._defined_bytes[identity] + size > quotas.type_bytes:
            return (
                f"the event types that {identity} has defined here take {quotas.type_bytes} bytes, which is the quota"
            )
        return None

    def _declare(self, m: TypeAdvertised, name: str, sender: Sender) -> list[Effect]:
        """Record a declaration of a replica set's log. Members of the set and administrators may declare; the first
        declaration may come from any replica of the set, since no list of members exists before it."""
        effects: list[Effect] = []
        if m.plans is not None and m.plans != self.plans.get(name):
            effects.append(Persist(PlansDeclared(event_type=name, plans=m.plans)))
        if m.members and m.members != self.members.get(name):
            effects.append(Persist(MembersDeclared(event_type=name, members=m.members)))
        if effects and (reason := self.unlisted(name, sender)) is not None:
            return [Reject(sender, "originate", name, reason, code=NOT_LISTED)]
        if m.plans is not None:
            self.plans[name] = m.plans
        if m.members:
            self.members[name] = m.members
        return effects

    def _members_of(self, name: str) -> frozenset[str]:
        """The replicas of a set: the declared ones, else those that its plans name."""
        if name in self.members:
            return self.members[name]
        plans = self.plans.get(name, ())
        named = [only.ids for plan in plans for only in plan.constraints if isinstance(only, OnlyFrom)]
        return frozenset[str]().union(*named)

    def is_replica(self, family: str, identity: str) -> bool:
        """Whether a follower that gave its log's digest is a replica of the set whose log this is, in its list."""
        members = self._members_of(family)
        return bool(identity and set_of_log(family)) and (not members or identity in members)

    def unlisted(self, family: str, sender: Sender) -> str | None:
        """Why a replica with a certificate of the set may not use the set's log, or None: it is not in the list.

        Members would have to apply what such a replica publishes, and what it declares would bind clients. A service
        that acts for such a replica has no more rights than the replica itself."""
        replica_set, identity = sender.replica_set, sender.identity
        if not replica_set and sender.on_behalf_of is not None and "/" in sender.accountable:
            replica_set, identity = sender.accountable.partition("/")[0], sender.accountable
        if not replica_set or replica_set != set_of_log(family):
            return None
        members = self._members_of(family)
        if not members or identity in members:
            return None
        return (
            f"{identity} is not in the declared list of replicas of {replica_set!r}: "
            "a replica in that list, or an administrator, has to declare it"
        )

    def no_member(self, family: str, sender: Sender) -> str | None:
        """Why this sender is no member of the replica set whose log this is, or None; other types have no members."""
        replica_set = set_of_log(family)
        if replica_set and sender.replica_set != replica_set:
            return f"{sender.node} is no replica of {replica_set!r}"
        return self.unlisted(family, sender)

    def misfit(self, event: Event, sender: Sender, subject: str) -> Reject | None:
        """The rejection of an event that does not fit its type's definition, or None. The publisher's broker may not
        know the type, so the rendezvous checks every event."""
        return self.misfit_among(event.type, (event.body,), sender, subject)

    def misfit_among(
        self, event_type: str, bodies: Sequence[Mapping[str, Any]], sender: Sender, subject: str
    ) -> Reject | None:
        """The same for several events of one type: the rejection of the first that does not fit.

        Types of replica sets are defined by their names: the publisher's broker has checked their events."""
        whole = self.types.whole_if_known(event_type)
        if whole is None or set_part(event_type) is not SetPart.NONE:
            return None
        try:
            for body in bodies:
                whole.check(body)
        except InvalidEvent as error:
            return Reject(sender, "publish", event_type, str(error), subject, code="invalid")
        return None

    def _define(self, definitions: Definitions) -> list[Effect]:
        """Define a type and its ancestors. A definition can't be changed or removed afterwards."""
        effects: list[Effect] = []
        for definition in definitions:
            new = definition.name not in self.types
            if new and definition.durable and definition.parent is not None and definition.parent not in self.logs_of:
                raise InvalidEventType(f"durable event type {definition.name!r} needs a durable parent")
            whole = self.types.define(definition)
            if new:
                # A child of a durable family shares its parent's log and history.
                history = self._node.entropy(16).hex() if definition.durable and definition.parent is None else ""
                self._know(whole, history)
                effects.append(Persist(TypeDefined(event_type=definition, history=history)))
        return effects

    def recover(self, record: TypeDefined) -> None:
        self._know(self.types.define(record.event_type), record.history)

    def _know(self, whole: EventType, history: str) -> None:
        family = self.types.family(whole.name)
        self.families[whole.name] = family
        if family not in self.epochs:
            self._found(family, whole.durable, history)
        log = self.logs.get(family)
        if log is not None:
            self.logs_of[whole.name] = log

    def _found(self, family: str, durable: bool, history: str) -> None:
        node, log = self._node, None
        if durable:
            log = EventLog(family, node.incarnation, self.types.lineage, node.options.log_tail, history)
            self.logs[family] = log
        self.epochs[family] = EpochCoordinator(
            family,
            node.me,
            node.incarnation,
            StandingRegistrations(node.options.lease_s, self.types.lineage),
            log,
            self._outcomes,
            node.predicates,
            node.options.epochs,
            self._settled,
            node.sign,
        )

    def epochs_of(self, spec: TxSpec) -> EpochCoordinator:
        """The coordinator of the epochs in which transactions of a known type are prepared."""
        return self.epochs[self.families[spec.event_type]]

    def epochs_if_known(self, event_type: str) -> EpochCoordinator | None:
        return self.epochs.get(self.families.get(event_type, ""))

    def against_plan(self, spec: TxSpec, sender: Sender) -> Rejection | None:
        """Why the log of a replica set does not accept this transaction from this sender, or None.

        The set's plans do not bind its members: members log what they have committed or what a client has requested."""
        replica_set = set_of_log(spec.event_type)
        if not replica_set:
            return None
        if (reason := self.unlisted(spec.event_type, sender)) is not None:
            return Rejection(RejectionCode.NOT_LISTED, reason)
        if spec.operator or sender.replica_set == replica_set:
            return None
        plans = self.plans.get(spec.event_type)
        if plans is None:
            text = f"no replica has declared yet which transactions the log {spec.event_type!r} accepts"
            return Rejection(RejectionCode.PLAN_UNKNOWN, text)
        if spec not in plans:
            text = f"the policy of the log {spec.event_type!r} does not allow this kind of transaction"
            return Rejection(RejectionCode.AGAINST_PLAN, text)
        return None

    def spec_rejection(self, spec: TxSpec) -> Rejection | None:
        """Why the coordinator does not accept this transaction, or None."""
        if spec.event_type not in self.types:
            return unknown_type(spec.event_type)
        if self.ordering is not None and self.types.family(spec.event_type) in self.ordering.topics:
            text = f"{spec.event_type!r} is in an ordering domain, whose types take single events and no transactions"
            return Rejection(RejectionCode.NOT_TAKEN, text)
        if (
            spec.event_type in self.logs_of
            and spec.tx_type is TxType.DISTRIBUTED
            and spec.local_outcome is LocalOutcome.INDEPENDENT
            and spec.limit is not ScopeLimit.DISTRIBUTED
        ):
            text = "local subscribers of a durable type follow the log: use local_outcome 'follows'"
            return Rejection(RejectionCode.NOT_TAKEN, text)
        try:
            spec.check()
        except InvalidTransaction as error:
            return Rejection(RejectionCode.NOT_TAKEN, str(error))
        return None


def unknown_type(event_type: str) -> Rejection:
    """Why a transaction of a type that was never advertised is rejected."""
    text = f"the coordinator does not know event type {event_type!r}: advertise it first"
    return Rejection(RejectionCode.NOT_TAKEN, text)


def not_taken(rejected: Reject) -> Rejection:
    """The rejection that the publisher of a transaction gets when its message was not acted on."""
    return Rejection(RejectionCode.NOT_TAKEN, rejected.reason)
