"""What a site may send and receive: its broker checks every message, by the objects that the message names.

Brokers trust each other, so a message that only a broker or a coordinator sends must not pass here. A message is either
allowed, or rejected with the data that the site needs to end the request behind it. `tops.runtime.edge.rights` defines
the right that each message needs.
"""

from collections.abc import Iterable
from operator import attrgetter

import msgspec

from tops.core.log.event_log import identity_of_feed
from tops.model.errors import InvalidEvent, InvalidEventType, InvalidTransaction, PermissionDenied, ProtocolError
from tops.model.event_types import SetPart, set_part
from tops.model.ids import node_id
from tops.model.sizes import ENCODED_BYTES_MAX, SITE_MESSAGE_BYTES_MAX, TEXT_MAX, encoded_bytes
from tops.protocol.messages import (
    AbortTx,
    BeginPublic,
    CensusOpened,
    CommitTx,
    DecisionRelayed,
    Definitions,
    Dissemination,
    Envelope,
    EventsPublished,
    EventStep,
    FollowLog,
    GetOutcome,
    IndexesSkipped,
    LinkMessage,
    LogDelivered,
    LogStateReported,
    OrderedPublished,
    Published,
    PublisherDone,
    PublishInTx,
    RecoverLog,
    RouteChanged,
    RouteStep,
    RunOneShots,
    StandingRegistered,
    SubscriptionChanged,
    TreePublished,
    TxPublished,
    TypeAdvertised,
    type_of,
)
from tops.protocol.set_types import check_definitions, requests_filter, responses_filter
from tops.runtime.edge.bounds import check_bounds
from tops.runtime.edge.event_checks import EventChecks
from tops.runtime.edge.rights import LINK_RIGHTS, Right, extending, publishing, receiving
from tops.security import Identity, Permissions, Verb


class GuardRejection(msgspec.Struct, frozen=True):
    """A message that was not acted on; `subjects` has one for each request of the site that ends with it."""

    subjects: tuple[str, ...]
    error: PermissionDenied
    code: str = "denied"


_OF_A_PUBLISHER = frozenset([CommitTx, AbortTx, PublishInTx, PublisherDone])
_transaction_of = attrgetter("tx")
GRANTED_MAX = 10_000


class Guard:
    """The rights of one connected site. A session that acts for a principal has only the rights that both have."""

    def __init__(
        self,
        identity: Identity,
        permissions: Permissions,
        brokers: Iterable[str],
        instance: str = "",
        principal: Identity | None = None,
        *,
        may_represent_all: bool = False,
    ) -> None:
        """`may_represent_all`: the site needs no right to act for its principal, since names are not proved in this
        cluster."""
        self._checks = EventChecks()
        self._may_represent_all = may_represent_all
        self.identity, self.principal, self._permissions = identity, principal, permissions
        node = node_id(identity.name, instance)
        # One service has sessions for many principals, which must not end each other's transactions.
        self._origins = frozenset([identity.name if principal is None else node, *brokers])
        self._addressed = {SetPart.REQUESTS: requests_filter(node), SetPart.RESPONSES: responses_filter(node)}
        self._publishable: set[str] = set()
        self._granted: set[Right] = set()  # a cache: the roles of one `Permissions` never change
        self._readable: dict[str, bool] = {}
        self.uncounted = 0  # messages that do not count against the site's rate yet

    def rejection(self, message: LinkMessage, size: int = 0) -> GuardRejection | None:
        """Why this message, in a frame of that size, must not be acted on, or None; ProtocolError if no site may ever
        send it.

        A wrong writer's clock is replaced in the message."""
        try:
            if size > TEXT_MAX:
                check_bounds(message)
            if type(message) is Dissemination:
                publication = message.publication
                if type(publication) is Published:
                    # The path of every ordinary event: one lookup.
                    name = publication.event.type
                    if name not in self._publishable:
                        self._check(publishing(name))
                        if len(self._publishable) >= GRANTED_MAX:
                            self._publishable.clear()
                        self._publishable.add(name)
                    self._checks.event(publication.event)
                    return None
                self._check_rights(publication)
                self._checks.check(publication)
            elif type(message) is Envelope:
                self._check_envelope(message)
                self._checks.check(message.body)
            elif type(message) is SubscriptionChanged:
                self._check_subscription(message)
            else:
                self._check_rights(message)
                self._checks.check(message)
        except PermissionDenied as error:
            return GuardRejection(_subjects(message), error)
        except (InvalidEvent, InvalidEventType, InvalidTransaction) as error:
            return GuardRejection(_subjects(message), self._invalid(message, str(error)), code="invalid")
        return None

    def too_large(self, message: LinkMessage) -> GuardRejection | None:
        """Why this message must not be acted on, or None: it is too long to be forwarded inside of other messages. Its
        size is that of a new encoding, which may be longer than what arrived."""
        publication = message.publication if type(message) is Dissemination else None
        bytes_max = ENCODED_BYTES_MAX if type(publication) is EventsPublished else SITE_MESSAGE_BYTES_MAX
        size = encoded_bytes(message)
        if size <= bytes_max:
            return None
        kind = type(message.body if type(message) is Envelope else publication or message).__name__
        error = f"a {kind} of {size} bytes is over the limit of {bytes_max} for a message of a site: split it"
        return GuardRejection(_subjects(message), self._invalid(message, error), code="invalid")

    def _invalid(self, message: LinkMessage, reason: str) -> PermissionDenied:
        event_type = type_of(message.publication) if type(message) is Dissemination else ""
        return PermissionDenied(reason, who=str(self.identity), verb=Verb.PUBLISH.value, event_type=event_type)

    def _check_subscription(self, changed: SubscriptionChanged) -> None:
        if not changed.definitions:
            raise ProtocolError(f"{self.identity} subscribed to no event type")
        self._check_rights(changed)
        self._check_definitions(changed.definitions, Verb.SUBSCRIBE)
        name = changed.definitions[-1].name
        addressed = self._addressed.get(set_part(name))
        if changed.filter is not None and addressed is not None and changed.filter != addressed:
            raise PermissionDenied(
                f"{self.identity} may receive only those of {name!r} that are addressed to it: filter by `to`",
                who=str(self.identity),
                verb=Verb.SUBSCRIBE.value,
                event_type=name,
            )

    def _check_definitions(self, definitions: Definitions, verb: Verb) -> None:
        try:
            check_definitions(definitions)
        except InvalidEventType as error:
            name = definitions[-1].name
            raise PermissionDenied(str(error), who=str(self.identity), verb=verb.value, event_type=name) from None

    def _check_envelope(self, envelope: Envelope) -> None:
        message = envelope.body
        kind = type(message)
        if type(message) is TypeAdvertised or type(message) is FollowLog:
            if not message.definitions:
                raise ProtocolError(f"{self.identity} named no event type")
            self._check_definitions(message.definitions, Verb.ADVERTISE)
            if type(message) is FollowLog and message.defines and not self._may_extend(message.definitions):
                msgspec.structs.force_setattr(message, "defines", False)  # in place: it was decoded for this site alone
        if envelope.to.handle and kind is not DecisionRelayed:
            raise ProtocolError(f"{self.identity} sent a {kind.__name__} to another site, which only brokers may do")
        if type(message) is GetOutcome:
            verb = Verb.BEGIN if self._is_own(message.tx) else Verb.RESOLVE
            self._check(((verb,), message.event_type))
        elif kind in _OF_A_PUBLISHER and not (type(message) is AbortTx and message.operator):
            self._check_own(_transaction_of(message), kind)
        self._check_rights(message)

    def _may_extend(self, definitions: Definitions) -> bool:
        rights = extending(definitions)
        return all(any(self._allowed(verb, event_type) for verb in verbs) for verbs, event_type in rights)

    def _check_rights(self, message: object) -> None:
        need = LINK_RIGHTS.get(type(message))
        if need is None:
            raise ProtocolError(f"{self.identity} sent a {type(message).__name__}, which only brokers send")
        for right in need.rights(message):
            if right not in self._granted:
                self._check(right)
                if len(self._granted) >= GRANTED_MAX:
                    self._granted.clear()
                self._granted.add(right)

    def _check(self, right: Right) -> None:
        verbs, event_type = right
        if any(self._allowed(verb, event_type) for verb in verbs):
            return
        if self.principal is not None:
            if not self._may_represent_all:
                self._permissions.check(self.identity, Verb.REPRESENT, event_type)
            self._permissions.check(self.principal, verbs[0], event_type)
        self._permissions.check(self.identity, verbs[0], event_type)

    def _allowed(self, verb: Verb, event_type: str) -> bool:
        allowed = self._permissions.allowed
        if not allowed(self.identity, verb, event_type):
            return False
        if self.principal is None:
            return True
        represents = self._may_represent_all or allowed(self.identity, Verb.REPRESENT, event_type)
        return represents and allowed(self.principal, verb, event_type)

    def _is_own(self, tx: str) -> bool:
        """Whether the site's identity began the transaction, or a broker assigned its id: then it is a public one."""
        node = tx.rsplit(".", 2)[0]
        return node in self._origins or (self.principal is None and node.partition(":")[0] in self._origins)

    def _check_own(self, tx: str, kind: type) -> None:
        """Raise PermissionDenied for a private transaction of another site. For public ones the coordinator checks
        whether the site takes part."""
        if not self._is_own(tx):
            raise PermissionDenied(
                f"{self.identity} may not send a {kind.__name__} about {tx[:200]!r}, which another site began",
                who=str(self.identity),
                verb=Verb.OPERATE.value,
                event_type="",
            )

    def deliverable(self, message: LinkMessage) -> LinkMessage | None:
        """The part of a message that may be sent to the site: a subscription to a parent type must not disclose events
        of a child type without the right to receive them."""
        if type(message) is Dissemination:
            publication = message.publication
            if type(publication) is Published or type(publication) is TxPublished:
                return message if self.may_read(publication.event.type) else None
            if type(publication) is EventsPublished:
                return message if self.may_read(publication.event_type) else None
            if type(publication) is OrderedPublished and not self.may_read(publication.event.type):
                return _without_event(message, publication)
            if type(publication) is CensusOpened:
                return message if self.may_read(publication.spec.event_type) else None
        elif type(message) is Envelope and type(message.body) is LogDelivered:
            return self._log(message, message.body)
        elif type(message) is Envelope and type(message.body) is LogStateReported:
            return self._followers(message, message.body)
        return message

    @property
    def accountable(self) -> str:
        """The identity whose quotas its messages count against."""
        return (self.principal or self.identity).name

    def may_read(self, event_type: str) -> bool:
        known = self._readable.get(event_type)
        if known is None:
            verbs, _ = receiving(event_type)
            known = any(self._allowed(verb, event_type) for verb in verbs)
            if len(self._readable) >= GRANTED_MAX:
                self._readable.clear()
            self._readable[event_type] = known
        return known

    def _followers(self, envelope: Envelope, told: LogStateReported) -> Envelope:
        """Which sites follow a log is for them and for operators; its replicas everybody may know."""
        if self._allowed(Verb.OPERATE, told.event_type):
            return envelope
        shown = tuple(f for f in told.followers if "/" in f.name or identity_of_feed(f.name) == self.identity.name)
        if len(shown) == len(told.followers):
            return envelope
        return msgspec.structs.replace(envelope, body=msgspec.structs.replace(told, followers=shown))

    def _log(self, envelope: Envelope, delivered: LogDelivered) -> Envelope:
        readable = tuple(
            e
            for e in delivered.entries
            if (e.event is None or self.may_read(e.event.type))
            and all(self.may_read(event.type) for logged in e.transactions for event in logged.events)
        )
        if len(readable) == len(delivered.entries):
            return envelope
        return msgspec.structs.replace(envelope, body=msgspec.structs.replace(delivered, entries=readable))


def _subjects(message: LinkMessage) -> tuple[str, ...]:
    if type(message) is Envelope and type(message.body) is RunOneShots:
        return tuple(f"tx {one.tx[:TEXT_MAX]}" for one in message.body.transactions)
    return (_subject(message)[:TEXT_MAX],)


def _subject(message: LinkMessage) -> str:
    """The subject of a rejected message, by which the site finds its request."""
    match message:
        case Dissemination(publication=Published() | EventsPublished() as published):
            return f"events {type_of(published)}"
        case Dissemination(publication=publication):
            return f"tx {getattr(publication, 'tx', '')}"
        case SubscriptionChanged(subscription=number):
            return f"subscription {number}"
        case Envelope(body=TypeAdvertised(definitions=definitions)):
            return f"type {definitions[-1].name if definitions else ''}"
        case Envelope(body=FollowLog(name=name)):
            return f"log {name}"
        case Envelope(body=StandingRegistered(voter=voter)):
            return f"voter {voter}"
        case Envelope(body=RecoverLog(event_type=event_type)):
            return f"recover {event_type}"
        case Envelope(body=BeginPublic(request=request)):
            return f"begin {request}"
        case Envelope(body=body):
            return f"tx {getattr(body, 'tx', '')}"
        case RouteChanged(route=route):
            return f"route {route.key}"
        case TreePublished(event=event):
            return f"events {event.type}"
        case RouteStep(step=step) | EventStep(step=step):
            return f"step {step.op}"
    return ""


def _without_event(message: Dissemination, published: OrderedPublished) -> Dissemination:
    """The site may not read the event: it learns only that the index is not for it, and does not wait."""
    skipped = IndexesSkipped(
        domain=published.domain,
        topic=published.topic,
        event_type=message.lineage[-1],
        after=published.index - 1,
        upto=published.index,
    )
    return msgspec.structs.replace(message, publication=skipped, lineage=message.lineage[-1:], sender=None)
