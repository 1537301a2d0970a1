"""Which right a site needs for each message that it sends: the first of the three tables of rights.

The table is complete: a site can't send a message that has no entry, nor one whose entry says that only brokers send
it. A right is checked under the event type that the message itself names. Rights do not have to ensure that a message
concerns only its own sender: brokers stamp the sender.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from tops.model.event_types import SetPart, set_part
from tops.protocol.messages import (
    AbortTx,
    AdvertisementHandled,
    AppliedIndexReported,
    BeginPublic,
    BeginTx,
    CensusOpened,
    CensusReplied,
    ChainPassed,
    ChainTaken,
    ChangeSubscription,
    CommitTx,
    ConfirmEvent,
    ConfirmRoute,
    CutMade,
    DecisionRelayed,
    Definitions,
    Dissemination,
    EndLog,
    Envelope,
    EpochDecided,
    EpochFinished,
    EpochVoted,
    Event,
    EventConfirmed,
    EventsPublished,
    EventsRejected,
    FinishNoted,
    FollowLog,
    FollowRejected,
    GetAppliedIndex,
    GetEpochOutcome,
    GetLogState,
    GetMembership,
    GetOutcome,
    HistoryDiffers,
    HistoryRejected,
    IndexesSkipped,
    LocalCommitOrdered,
    LogDelivered,
    LogEnded,
    LogRecovered,
    LogStateReported,
    MembershipReported,
    OrderedPublished,
    PartialCut,
    ParticipantAborted,
    ParticipantLost,
    PrepareEpoch,
    Published,
    PublisherDone,
    PublisherLost,
    PublishInTx,
    PublishInTxHandled,
    QueryPeers,
    RecoverLog,
    RouteAdded,
    RouteConfirmed,
    RouteRemoved,
    RoutesReset,
    RunOneShot,
    RunOneShots,
    ScopeChosen,
    StageStarted,
    StandingAccepted,
    StandingRegistered,
    StandingWithdrawn,
    SubscriptionChanged,
    SubscriptionsAnnounced,
    TxAbandoned,
    TxBegan,
    TxOpened,
    TxOutcome,
    TxOutcomes,
    TxPublished,
    TxSpec,
    TypeAdvertised,
    VotesMissing,
)
from tops.protocol.set_types import BATCH, MARKS, ORIGIN
from tops.security import DEFAULT_ROLES, Verb

Right = tuple[tuple[Verb, ...], str]  # one of these verbs, on this event type


class Need(NamedTuple):
    """What a message needs; `words` is the text for the documentation."""

    words: str
    rights: Callable[[Any], Iterable[Right]]


REQUESTING = (Verb.READ, Verb.WRITE, Verb.OPERATE)


def publishing(event_type: str) -> Right:
    """The right to publish single events of a type, and to advertise it for that."""
    match set_part(event_type):
        case SetPart.LOG:
            return ((Verb.ORIGINATE,), event_type)
        case SetPart.REQUESTS:
            return (REQUESTING, event_type)
        case SetPart.RESPONSES:
            return ((Verb.RESPOND,), event_type)
    return ((Verb.PUBLISH,), event_type)


def receiving(event_type: str) -> Right:
    """The right to receive events of a type."""
    match set_part(event_type):
        case SetPart.REQUESTS:
            return ((Verb.RESPOND,), event_type)
        case SetPart.RESPONSES:
            return (REQUESTING, event_type)
    return ((Verb.SUBSCRIBE,), event_type)


def advertising(event_type: str) -> Right:
    """The right to advertise a type: for the types of requests and responses, the right to send them."""
    if set_part(event_type) is SetPart.LOG:
        return (REQUESTING, event_type)  # its definition is fixed, and running or publishing something needs more
    if set_part(event_type) in (SetPart.REQUESTS, SetPart.RESPONSES):
        return publishing(event_type)
    return ((Verb.ADVERTISE,), event_type)


def extending(definitions: Definitions) -> Iterable[Right]:
    """The rights to declare a child of these types, whose subscribers receive the child's events from then on."""
    return [((Verb.ADVERTISE, Verb.PUBLISH), ancestor.name) for ancestor in definitions[:-1]]


def _on(verb: Verb, event_type: str) -> Right:
    return ((verb,), event_type)


def _subscribing(m: SubscriptionChanged) -> Iterable[Right]:
    if m.filter is None:
        return ()  # the subscription ends
    name = m.definitions[-1].name
    return (receiving(name), _on(Verb.FOLLOW, name)) if m.durable else (receiving(name),)


def _following(m: FollowLog) -> Iterable[Right]:
    name = m.definitions[-1].name
    return (receiving(name),) if m.ephemeral else (receiving(name), _on(Verb.FOLLOW, name))


def _recovering(m: RecoverLog) -> Iterable[Right]:
    return (_on(Verb.ADMINISTER, m.event_type),)


def _ending_log(m: EndLog) -> Iterable[Right]:
    return (_on(Verb.OPERATE if m.operator else Verb.FOLLOW, m.event_type),)


def _voting(m: EpochVoted | EpochFinished | GetEpochOutcome | QueryPeers | DecisionRelayed) -> Iterable[Right]:
    return (_on(Verb.PARTICIPATE, m.epoch.event_type),)


def _taking_part(
    m: StandingRegistered
    | StandingWithdrawn
    | CensusReplied
    | ParticipantAborted
    | AppliedIndexReported
    | HistoryDiffers,
) -> Iterable[Right]:
    return (_on(Verb.PARTICIPATE, m.event_type),)


def _running(spec: TxSpec, events: Iterable[Event]) -> Iterable[Right]:
    """On a set's log writes need `write`; captured rows, and events that are no writes, come only from replicas.
    A transaction that is not bound by the set's plans needs `operate`, whatever it contains."""
    name = spec.event_type
    if set_part(name) is not SetPart.LOG:
        return (_on(Verb.BEGIN, name), *(_on(Verb.PUBLISH, other) for other in {event.type for event in events}))
    operated = (_on(Verb.OPERATE, name),) if spec.operator else ()
    marked = [event for event in events if event.type != name or not MARKS.isdisjoint(event.body)]
    if [event for event in marked if event.type != name or BATCH in event.body or ORIGIN in event.body]:
        return (_on(Verb.ORIGINATE, name), *operated)
    if operated:
        return operated
    if marked:
        return (((Verb.OPERATE, Verb.ORIGINATE), name),)
    return (_on(Verb.WRITE, name),)


def _one_shots(m: RunOneShots) -> Iterable[Right]:
    return _running(m.spec, [event for one in m.transactions for event in one.events])


def _begins(m: BeginTx | BeginPublic | CensusOpened) -> Iterable[Right]:
    name = m.spec.event_type
    return (((Verb.ORIGINATE,), name) if set_part(name) is SetPart.LOG else _on(Verb.BEGIN, name),)


def _advertises(m: TypeAdvertised) -> Iterable[Right]:
    name = m.definitions[-1].name
    rights = [advertising(name), *extending(m.definitions)]
    return rights if m.plans is None and m.members is None else [*rights, _on(Verb.ORIGINATE, name)]


def _nothing(m: object) -> Iterable[Right]:
    return ()


_PUBLISHES = "publish; on a set's log originate, requests read, write or operate, responses respond"
_RECEIVES = "subscribe; requests respond, responses read, write or operate"
_OWN = "none: only for the sender's own transactions, or those in which it has published"
_VOTES = Need("participate", _voting)
_TAKES_PART = Need("participate", _taking_part)
_BEGINS = Need("begin; on a set's log originate", _begins)
_RUNS = (
    "begin, and publish for each event; on a set's log write, outside of its plans operate, captured rows originate, "
    "barriers, repairs and housekeeping operate or originate"
)
_SUBSCRIBES = Need("subscribe", lambda m: (receiving(m.event_type),))

LINK_RIGHTS: Mapping[type, Need | None] = {
    # messages that contain other messages: checked by their content
    Envelope: Need("as its body", _nothing),
    Dissemination: Need("as its publication", _nothing),
    # publications
    Published: Need(_PUBLISHES, lambda m: (publishing(m.event.type),)),
    EventsPublished: Need(_PUBLISHES, lambda m: (publishing(m.event_type),)),
    CensusOpened: _BEGINS,
    TxPublished: Need("publish", lambda m: (_on(Verb.PUBLISH, m.event.type),)),
    TxBegan: None,
    LocalCommitOrdered: None,
    TxAbandoned: None,
    OrderedPublished: None,
    IndexesSkipped: None,
    # subscriptions
    SubscriptionChanged: Need(f"{_RECEIVES}; durable also follow", _subscribing),
    ScopeChosen: Need("none: only the site's own scope in a transaction that was announced to it", _nothing),
    ConfirmRoute: Need("none: only for the site's own subscription", _nothing),
    RouteAdded: None,
    RouteRemoved: None,
    RoutesReset: None,
    RouteConfirmed: None,
    # ordering domains
    ChangeSubscription: Need("subscribe, on each type that is added", lambda m: [receiving(name) for name in m.types]),
    ConfirmEvent: Need("publish", lambda m: (_on(Verb.PUBLISH, m.event_type),)),
    CutMade: None,
    ChainPassed: None,
    ChainTaken: None,
    PartialCut: None,
    StageStarted: None,
    SubscriptionsAnnounced: None,
    # event types and logs
    TypeAdvertised: Need(
        "advertise, and advertise or publish on each ancestor; a set's log read, write or operate, its requests and "
        "responses as publishing them; with plans or members originate",
        _advertises,
    ),
    AdvertisementHandled: None,
    EventConfirmed: None,
    EventsRejected: None,
    FollowLog: Need("subscribe and follow; ephemeral only subscribe", _following),
    LogDelivered: None,
    FollowRejected: None,
    GetLogState: _SUBSCRIBES,
    LogStateReported: None,
    EndLog: Need("follow for the site's own, operate for others", _ending_log),
    LogEnded: None,
    GetAppliedIndex: None,
    AppliedIndexReported: _TAKES_PART,
    HistoryDiffers: _TAKES_PART,
    HistoryRejected: None,
    RecoverLog: Need("administer", _recovering),
    LogRecovered: None,
    # a publisher's transactions
    BeginTx: _BEGINS,
    BeginPublic: _BEGINS,
    RunOneShot: Need(_RUNS, lambda m: _running(m.spec, m.events)),
    RunOneShots: Need(_RUNS, _one_shots),
    PublishInTx: Need("publish", lambda m: (_on(Verb.PUBLISH, m.event.type),)),
    PublisherDone: Need(_OWN, _nothing),
    CommitTx: Need(_OWN, _nothing),
    AbortTx: Need(f"{_OWN}; operate for others", lambda m: (_on(Verb.OPERATE, m.event_type),) if m.operator else ()),
    GetOutcome: Need("begin for the site's own and for public ones, resolve for others", _nothing),
    TxOpened: None,
    PublishInTxHandled: None,
    VotesMissing: None,
    TxOutcome: None,
    TxOutcomes: None,
    PublisherLost: None,
    # participants
    CensusReplied: _TAKES_PART,
    StandingRegistered: _TAKES_PART,
    StandingWithdrawn: _TAKES_PART,
    ParticipantAborted: _TAKES_PART,
    GetMembership: _SUBSCRIBES,
    EpochVoted: _VOTES,
    EpochFinished: _VOTES,
    GetEpochOutcome: _VOTES,
    QueryPeers: _VOTES,
    DecisionRelayed: _VOTES,
    ParticipantLost: None,
    StandingAccepted: None,
    MembershipReported: None,
    PrepareEpoch: None,
    EpochDecided: None,
    FinishNoted: None,
}


def links_table() -> str:
    """The table of the documentation."""
    sent = [(kind.__name__, need.words) for kind, need in LINK_RIGHTS.items() if need is not None]
    lines = ["| message | right that a site needs |", "|---|---|", *(f"| `{name}` | {words} |" for name, words in sent)]
    brokers = ", ".join(f"`{kind.__name__}`" for kind, need in LINK_RIGHTS.items() if need is None)
    return "\n".join([*lines, "", f"Only brokers send {brokers}.", ""])


def roles_table() -> str:
    """The table of the verbs of the default roles."""
    verbs = list(Verb)
    lines = [f"| role | on | {' | '.join(verb.value for verb in verbs)} |", "|---|---|" + "---|" * len(verbs)]
    for role in DEFAULT_ROLES.values():
        granted = {rule.verb for rule in role.allow}
        marks = " | ".join("yes" if verb in granted else "" for verb in verbs)
        lines.append(f"| `{role.name}` | `{role.allow[0].pattern.text}` | {marks} |")
    return "\n".join([*lines, ""])
