"""What neighbours say to each other over a link: letters and publications on their way, and who wants which events."""

from tops.model.filters import Filter
from tops.model.ids import NodeId, TxId
from tops.model.transactions import Scope
from tops.protocol.messages.logs import (
    AskLog,
    AskReached,
    EndLog,
    EventConfirmed,
    EventsRefused,
    HistoryDiffers,
    HistoryRejected,
    LogDelivered,
    LogEnded,
    LogRecovered,
    LogRefused,
    LogTold,
    LogWanted,
    ReachedTold,
    RecoverLog,
    RouteAsked,
    RouteStands,
    TypeAdvertised,
    TypeAnswered,
)
from tops.protocol.messages.participants import (
    AskEpoch,
    AskMembership,
    CensusReplied,
    EpochDecided,
    EpochFinished,
    EpochVoted,
    FinishNoted,
    MembershipAnswered,
    ParticipantAborted,
    ParticipantLost,
    PeerKnows,
    PeersAsked,
    PrepareEpoch,
    StandingAccepted,
    StandingAnswered,
    StandingWithdrawn,
)
from tops.protocol.messages.publications import Publication
from tops.protocol.messages.publishers import (
    AbortTx,
    AskOutcome,
    BeginPublic,
    BeginTx,
    CommitTx,
    PublisherDone,
    PublisherLost,
    PublishInTx,
    PublishInTxAnswered,
    RunOneShot,
    RunOneShots,
    TxOpened,
    TxOutcome,
    TxOutcomes,
    VotesMissing,
)
from tops.protocol.messages.routing_tx import (
    AskRoutingTx,
    BeginRoutingTx,
    BrokerJoins,
    DomainOpened,
    EndRoutingTx,
    EventStep,
    Flip,
    PlanStarted,
    PrepareRoutingTx,
    RouteChanged,
    RouteEnded,
    RouteStep,
    RoutingTxBegan,
    RoutingTxDecided,
    RoutingTxEnded,
    RoutingTxVoted,
    StepDone,
    StepProcessed,
    TreeDelivered,
    TreePublished,
)
from tops.protocol.messages.values import Address, Definitions, Message, Sender

Letter = (
    EventConfirmed
    | EventsRefused
    | BeginTx
    | RunOneShot
    | BeginPublic
    | TxOpened
    | PublishInTx
    | PublishInTxAnswered
    | PublisherDone
    | CommitTx
    | AbortTx
    | VotesMissing
    | TxOutcome
    | AskOutcome
    | PublisherLost
    | ParticipantLost
    | CensusReplied
    | StandingAnswered
    | StandingAccepted
    | StandingWithdrawn
    | ParticipantAborted
    | PrepareEpoch
    | EpochVoted
    | EpochDecided
    | EpochFinished
    | FinishNoted
    | AskEpoch
    | AskMembership
    | AskLog
    | LogTold
    | MembershipAnswered
    | PeersAsked
    | PeerKnows
    | RouteAsked
    | RouteStands
    | LogWanted
    | LogDelivered
    | LogRefused
    | EndLog
    | LogEnded
    | TypeAdvertised
    | TypeAnswered
    | RunOneShots
    | TxOutcomes
    | AskReached
    | ReachedTold
    | HistoryDiffers
    | HistoryRejected
    | RecoverLog
    | LogRecovered
    | BeginRoutingTx
    | RoutingTxBegan
    | EndRoutingTx
    | AskRoutingTx
    | RoutingTxEnded
    | BrokerJoins
)


NOWHERE = Address(NodeId(""))  # a site does not know where it is; its broker does


class Envelope(Message, frozen=True):
    """Point to point, over as many hops as it takes. The sender's broker fills in who the sender is and where it is
    reached; a site learns only the latter."""

    to: Address
    body: Letter
    reply_to: Address = NOWHERE
    sender: Sender | None = None


class Dissemination(Message, frozen=True):
    """Up to the rendezvous of the event type's family, then down the reverse paths of the subscriptions.

    `early`: brokers on the way up already pass it to their own subtree (single-publisher, non-durable types without
    ancestors).
    `lineage`: the event type and its ancestors; who knows a parent only finds its children by it. On the way down it
    is the rendezvous's word; what a publisher says of it is compared, never followed.
    `sender`: the publisher as its broker stamped it; on the way down only for types that disclose it.
    """

    rendezvous: NodeId
    upward: bool
    early: bool
    publication: Publication
    lineage: tuple[str, ...] = ()
    reply_to: Address = NOWHERE
    sender: Sender | None = None


class RouteAdded(Message, frozen=True):
    """Somebody behind this link wants events of that type that match the filter."""

    definitions: Definitions
    filter: Filter


class RouteRemoved(Message, frozen=True):
    event_type: str
    filter: Filter


class RoutesReset(Message, frozen=True):
    """The link's interest, replacing what was known; sent when two nodes meet. What is too long for it follows route
    by route."""

    routes: tuple[RouteAdded, ...]


class SubscriptionChanged(Message, frozen=True):
    """A site's subscription, as its own broker keeps it; `filter` None ends it."""

    subscription: int
    definitions: Definitions
    filter: Filter | None
    scope: Scope | None  # a standing answer to every census, or None: ask each time
    durable: bool


class ScopeChosen(Message, frozen=True):
    """What a site takes of a transaction, told to its own broker, which withholds the rest."""

    tx: TxId
    scope: Scope  # the highest one below distributed
    distributed: bool


TreeMessage = (
    RouteChanged
    | RouteEnded
    | TreePublished
    | TreeDelivered
    | RouteStep
    | EventStep
    | StepDone
    | StepProcessed
    | PlanStarted
    | PrepareRoutingTx
    | RoutingTxVoted
    | RoutingTxDecided
    | Flip
    | DomainOpened
)
LinkMessage = (
    Envelope | Dissemination | RouteAdded | RouteRemoved | RoutesReset | SubscriptionChanged | ScopeChosen | TreeMessage
)
