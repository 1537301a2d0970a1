"""What a site may send and receive: every message is checked where the site is connected, by what the message names.

Brokers believe each other, so nothing that only a broker or a coordinator says passes here. A message is either
allowed, or refused with what the site needs to end the request that it belongs to.
"""

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import msgspec

from tops.errors import PermissionDenied, ProtocolError
from tops.messages import (
    AbortTx,
    AskEpoch,
    AskLog,
    AskMembership,
    AskOutcome,
    BeginPublic,
    BeginTx,
    CensusOpened,
    CensusReplied,
    CommitTx,
    Dissemination,
    EndLog,
    Envelope,
    EpochFinished,
    EpochVoted,
    EventsPublished,
    HistoryDiffers,
    LinkMessage,
    LogDelivered,
    LogWanted,
    ParticipantAborted,
    PeerKnows,
    PeersAsked,
    Published,
    PublisherDone,
    PublishInTx,
    ReachedTold,
    RecoverLog,
    RouteAsked,
    RunOneShot,
    RunOneShots,
    ScopeChosen,
    StandingAnswered,
    StandingWithdrawn,
    SubscriptionChanged,
    TxPublished,
    TypeAdvertised,
    type_of,
)
from tops.security import EVERYTHING, Identity, Permissions, Verb

Right = tuple[Verb, str]


class Refusal(msgspec.Struct, frozen=True):
    """A message that was not acted on; `subjects` has one for each request of the site that it answers."""

    subjects: tuple[str, ...]
    error: PermissionDenied


_RIGHTS: dict[type, Callable[[Any], Iterable[Right]]] = {
    TypeAdvertised: lambda m: [(Verb.ADVERTISE, m.definitions[-1].name)],
    BeginTx: lambda m: [(Verb.BEGIN, m.spec.event_type)],
    BeginPublic: lambda m: [(Verb.BEGIN, m.spec.event_type)],
    RunOneShot: lambda m: [(Verb.BEGIN, m.spec.event_type), *((Verb.PUBLISH, e.type) for e in m.events)],
    RunOneShots: lambda m: [
        (Verb.BEGIN, m.spec.event_type),
        *((Verb.PUBLISH, name) for name in {e.type for one in m.transactions for e in one.events}),
    ],
    PublishInTx: lambda m: [(Verb.PUBLISH, m.event.type)],
    StandingAnswered: lambda m: [(Verb.SUBSCRIBE, m.event_type)],
    StandingWithdrawn: lambda m: [(Verb.SUBSCRIBE, m.event_type)],
    EpochVoted: lambda m: [(Verb.SUBSCRIBE, m.epoch.event_type)],
    EpochFinished: lambda m: [(Verb.SUBSCRIBE, m.epoch.event_type)],
    AskEpoch: lambda m: [(Verb.SUBSCRIBE, m.epoch.event_type)],
    PeersAsked: lambda m: [(Verb.SUBSCRIBE, m.epoch.event_type)],
    PeerKnows: lambda m: [(Verb.SUBSCRIBE, m.epoch.event_type)],
    AskMembership: lambda m: [(Verb.SUBSCRIBE, m.event_type)],
    AskLog: lambda m: [(Verb.SUBSCRIBE, m.event_type)],
    EndLog: lambda m: [(Verb.SUBSCRIBE, m.event_type)],
    ReachedTold: lambda m: [(Verb.SUBSCRIBE, m.event_type)],
    HistoryDiffers: lambda m: [(Verb.SUBSCRIBE, m.event_type)],
    RecoverLog: lambda m: [(Verb.ADMINISTER, m.event_type)],
    LogWanted: lambda m: [(Verb.SUBSCRIBE, m.definitions[-1].name)],
    # These name a transaction only; that its events may be published or received was checked before.
    CommitTx: lambda m: (),
    AbortTx: lambda m: (),
    PublisherDone: lambda m: (),
    CensusReplied: lambda m: (),
    ParticipantAborted: lambda m: (),
    RouteAsked: lambda m: (),
}


_OF_A_PUBLISHER = frozenset([BeginTx, RunOneShot, CommitTx, AbortTx, PublishInTx, PublisherDone])
_transaction_of = attrgetter("tx")
GRANTED_MAX = 10_000


class Guard:
    """The rights of one connected site."""

    def __init__(self, identity: Identity, permissions: Permissions, brokers: Iterable[str]) -> None:
        self.identity, self._permissions = identity, permissions
        self._origins = frozenset([identity.name, *brokers])
        self._publishable: set[str] = set()
        self._granted: set[Right] = set()  # what was checked before: the roles of one `Permissions` never change
        self._readable: dict[str, bool] = {}
        self.unreckoned = 0  # messages that are not reckoned against the site's rate yet

    def refusal(self, message: LinkMessage) -> Refusal | None:
        """Why this message from the site must not be acted on; ProtocolError if no site ever sends it."""
        try:
            if type(message) is Dissemination:
                publication = message.publication
                if type(publication) is Published:
                    # The path of every ordinary event: one look-up.
                    name = publication.event.type
                    if name not in self._publishable:
                        self._permissions.check(self.identity, Verb.PUBLISH, name)
                        if len(self._publishable) >= GRANTED_MAX:
                            self._publishable.clear()
                        self._publishable.add(name)
                    return None
                self._check_publication(message)
            elif type(message) is Envelope:
                self._check_letter(message)
            elif type(message) is SubscriptionChanged:
                if not message.definitions:
                    raise ProtocolError(f"{self.identity} subscribed to no event type")
                if message.filter is not None:
                    self._permissions.check(self.identity, Verb.SUBSCRIBE, message.definitions[-1].name)
            elif type(message) is not ScopeChosen:
                raise ProtocolError(f"{self.identity} sent a {type(message).__name__}, which only brokers send")
        except PermissionDenied as error:
            return Refusal(_subjects(message), error)
        return None

    def _check_publication(self, message: Dissemination) -> None:
        publication = message.publication
        match publication:
            case EventsPublished(event_type=event_type):
                self._permissions.check(self.identity, Verb.PUBLISH, event_type)
            case CensusOpened(spec=spec):
                self._permissions.check(self.identity, Verb.BEGIN, spec.event_type)
            case TxPublished(event=event, tx=tx):
                self._check_origin(_life_of(tx))
                self._permissions.check(self.identity, Verb.PUBLISH, event.type)
            case _:
                raise ProtocolError(f"{self.identity} sent a {type(publication).__name__}, which coordinators send")

    def _check_letter(self, envelope: Envelope) -> None:
        letter = envelope.body
        kind = type(letter)
        if type(letter) is AskOutcome:
            # Whoever may begin transactions of the type may ask what became of them, and so may whoever resolves.
            if not self._permissions.allowed(self.identity, Verb.BEGIN, letter.event_type):
                self._permissions.check(self.identity, Verb.RESOLVE, letter.event_type)
            return
        if (type(letter) is TypeAdvertised or type(letter) is LogWanted) and not letter.definitions:
            raise ProtocolError(f"{self.identity} named no event type")
        rights = _RIGHTS.get(kind)
        if rights is None or (envelope.to.handle and kind is not PeerKnows):
            raise ProtocolError(f"{self.identity} sent a {kind.__name__}, which only brokers send")
        if kind in _OF_A_PUBLISHER:
            self._check_origin(_life_of(_transaction_of(letter)))
        elif type(letter) is RunOneShots:
            for life in {_life_of(one.tx) for one in letter.transactions}:
                self._check_origin(life)
        for right in rights(letter):
            if right not in self._granted:
                self._grant(right)

    def _grant(self, right: Right) -> None:
        self._permissions.check(self.identity, *right)
        if len(self._granted) >= GRANTED_MAX:
            self._granted.clear()
        self._granted.add(right)

    def _check_origin(self, life: str) -> None:
        """A private transaction is its initiator's alone; a public one has its id from a broker. An operator may
        end any."""
        if life.rpartition(".")[0] not in self._origins:
            self._permissions.check(self.identity, Verb.RESOLVE, EVERYTHING)
            self._permissions.check(self.identity, Verb.ADMINISTER, EVERYTHING)

    def deliverable(self, message: LinkMessage) -> LinkMessage | None:
        """What of a message may go out to the site: a subscription to a parent type must not leak a child's events."""
        if type(message) is Dissemination:
            publication = message.publication
            if type(publication) is Published or type(publication) is TxPublished:
                return message if self.may_read(publication.event.type) else None
            if type(publication) is EventsPublished:
                return message if self.may_read(publication.event_type) else None
            if type(publication) is CensusOpened:
                return message if self.may_read(publication.spec.event_type) else None
        elif type(message) is Envelope and type(message.body) is LogDelivered:
            return self._log(message, message.body)
        return message

    def may_read(self, event_type: str) -> bool:
        known = self._readable.get(event_type)
        if known is None:
            known = self._permissions.allowed(self.identity, Verb.SUBSCRIBE, event_type)
            if len(self._readable) >= GRANTED_MAX:
                self._readable.clear()
            self._readable[event_type] = known
        return known

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


def _life_of(tx: str) -> str:
    return tx.rpartition(".")[0]


def _subjects(message: LinkMessage) -> tuple[str, ...]:
    if type(message) is Envelope and type(message.body) is RunOneShots:
        return tuple(f"tx {one.tx}" for one in message.body.transactions)
    return (_subject(message),)


def _subject(message: LinkMessage) -> str:
    """What the refused message was about, in words that the site finds its request by."""
    match message:
        case Dissemination(publication=Published() | EventsPublished() as published):
            return f"events {type_of(published)}"
        case Dissemination(publication=publication):
            return f"tx {getattr(publication, 'tx', '')}"
        case SubscriptionChanged(subscription=number):
            return f"subscription {number}"
        case Envelope(body=TypeAdvertised(definitions=definitions)):
            return f"type {definitions[-1].name}"
        case Envelope(body=LogWanted(name=name)):
            return f"log {name}"
        case Envelope(body=StandingAnswered(voter=voter)):
            return f"voter {voter}"
        case Envelope(body=RecoverLog(event_type=event_type)):
            return f"recover {event_type}"
        case Envelope(body=BeginPublic(request=request)):
            return f"begin {request}"
        case Envelope(body=body):
            return f"tx {getattr(body, 'tx', '')}"
    return ""
