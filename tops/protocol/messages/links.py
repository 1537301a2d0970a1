"""Messages between neighbours over a link: addressed messages and publications under way, and interest in events."""

from tops.model.filters import Filter
from tops.model.ids import NodeId, TxId
from tops.model.transactions import Scope
from tops.protocol.messages.logs import (
    AdvertisementHandled,
    AppliedIndexReported,
    ConfirmRoute,
    EndLog,
    EventConfirmed,
    EventsRejected,
    FollowLog,
    FollowRejected,
    GetAppliedIndex,
    GetLogState,
    HistoryDiffers,
    HistoryRejected,
    LogDelivered,
    LogEnded,
    LogRecovered,
    LogStateReported,
    RecoverLog,
    RouteConfirmed,
    TypeAdvertised,
)
from tops.protocol.messages.ordering import (
    ChainPassed,
    ChainTaken,
    ChangeSubscription,
    ConfirmEvent,
    CutMade,
    PartialCut,
    StageStarted,
    SubscriptionsAnnounced,
)
from tops.protocol.messages.participants import (
    CensusReplied,
    DecisionRelayed,
    EpochDecided,
    EpochFinished,
    EpochVoted,
    FinishNoted,
    GetEpochOutcome,
    GetMembership,
    MembershipReported,
    ParticipantAborted,
    ParticipantLost,
    PrepareEpoch,
    QueryPeers,
    StandingAccepted,
    StandingRegistered,
    StandingWithdrawn,
)
from tops.protocol.messages.publications import Publication
from tops.protocol.messages.publishers import (
    AbortTx,
    BeginPublic,
    BeginTx,
    CommitTx,
    GetOutcome,
    PublisherDone,
    PublisherLost,
    PublishInTx,
    PublishInTxHandled,
    RunOneShot,
    RunOneShots,
    TxOpened,
    TxOutcome,
    TxOutcomes,
    VotesMissing,
)
from tops.protocol.messages.values import Address, Definitions, Message, Sender

AddressedMessage = (
    EventConfirmed
    | EventsRejected
    | BeginTx
    | RunOneShot
    | BeginPublic
    | TxOpened
    | PublishInTx
    | PublishInTxHandled
    | PublisherDone
    | CommitTx
    | AbortTx
    | VotesMissing
    | TxOutcome
    | GetOutcome
    | PublisherLost
    | ParticipantLost
    | CensusReplied
    | StandingRegistered
    | StandingAccepted
    | StandingWithdrawn
    | ParticipantAborted
    | PrepareEpoch
    | EpochVoted
    | EpochDecided
    | EpochFinished
    | FinishNoted
    | GetEpochOutcome
    | GetMembership
    | GetLogState
    | LogStateReported
    | MembershipReported
    | QueryPeers
    | DecisionRelayed
    | ConfirmRoute
    | RouteConfirmed
    | FollowLog
    | LogDelivered
    | FollowRejected
    | EndLog
    | LogEnded
    | TypeAdvertised
    | AdvertisementHandled
    | RunOneShots
    | TxOutcomes
    | GetAppliedIndex
    | AppliedIndexReported
    | HistoryDiffers
    | HistoryRejected
    | RecoverLog
    | LogRecovered
    | ChainPassed
    | ChainTaken
    | StageStarted
    | SubscriptionsAnnounced
    | ChangeSubscription
    | CutMade
    | PartialCut
    | ConfirmEvent
)


NOWHERE = Address(NodeId(""))  # a site does not know its address; its broker fills it in


class Envelope(Message, frozen=True):
    """Point to point, over any number of hops. The sender's broker fills in `sender` and `reply_to`; sites receive only
    the latter."""

    to: Address
    body: AddressedMessage
    reply_to: Address = NOWHERE
    sender: Sender | None = None


class Dissemination(Message, frozen=True):
    """Up to the rendezvous of the event type's family, then down the reverse paths of the subscriptions.

    `early`: brokers on the way up disseminate it to their own subtrees at once (single-publisher, non-durable types
    without ancestors).
    `lineage`: the event type and its ancestors, for subscribers that know only an ancestor. On the way down it comes
    from the rendezvous; what a publisher claims is compared with that and never used.
    `sender`: the publisher as stamped by its broker; on the way down only for types that disclose it.
    """

    rendezvous: NodeId
    upward: bool
    early: bool
    publication: Publication
    lineage: tuple[str, ...] = ()
    reply_to: Address = NOWHERE
    sender: Sender | None = None


class RouteAdded(Message, frozen=True):
    """A subscriber behind this link wants events of that type that match the filter."""

    definitions: Definitions
    filter: Filter


class RouteRemoved(Message, frozen=True):
    event_type: str
    filter: Filter


class RoutesReset(Message, frozen=True):
    """The complete interest of a link, which replaces the known one; sent on a new link. What does not fit follows
    route by route."""

    routes: tuple[RouteAdded, ...]


class SubscriptionChanged(Message, frozen=True):
    """A site's subscription, as its own broker keeps it; `filter` None ends it."""

    subscription: int
    definitions: Definitions
    filter: Filter | None
    scope: Scope | None  # a standing registration for every census, or None: the site chooses each time
    durable: bool


class ScopeChosen(Message, frozen=True):
    """The scope that a site has chosen in a transaction, for its own broker, which withholds the rest."""

    tx: TxId
    scope: Scope  # the highest one below distributed
    distributed: bool


LinkMessage = Envelope | Dissemination | RouteAdded | RouteRemoved | RoutesReset | SubscriptionChanged | ScopeChosen
