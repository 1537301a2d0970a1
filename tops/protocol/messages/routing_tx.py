"""Tree routing and transactions over it: what sites and brokers send along the tree, and to the coordinator.

A *step* is one operation of a transaction on its way through the tree. Messages without a transaction are regular ones.
"""

from enum import Enum
from typing import Any

from tops.model.filters import Filter
from tops.model.ids import TxId
from tops.model.rejections import Rejection
from tops.model.routing import RouteKey, RouteKind, TxKind
from tops.protocol.messages.values import Event, Message, Wire

TxEpoch = tuple[int, int]  # of the routing domain: incarnation of its coordinator, and how often it began anew since
NO_EPOCH: TxEpoch = (0, 0)
NOT_PLANNED = -1


class Route(Wire, frozen=True):
    """An advertisement or a subscription. Of two with the same key the higher generation counts: a site that moves to
    another broker registers there under the next one, and the former broker's entry can't come back behind it."""

    key: RouteKey
    kind: RouteKind
    event_type: str
    filter: Filter
    generation: int


class RouteChanged(Message, frozen=True):
    """Regular: the neighbour behind this link has the route now, or no longer has it."""

    route: Route
    added: bool


class RouteEnded(Message, frozen=True):
    """To a site: no more events come for a subscription that a transaction removed."""

    key: RouteKey


class TreePublished(Message, frozen=True):
    """A regular publication on its way. `stamp` is the last commit that its entry broker had applied: every broker
    routes it by the tables of that commit."""

    event: Event
    stamp: int = 0


class TreeDelivered(Message, frozen=True):
    """A regular publication for subscriptions of a site."""

    event: Event
    subscriptions: tuple[int, ...]


class Step(Wire, frozen=True):
    """Which operation of which transaction, and under which conditions brokers process it."""

    tx: TxId
    kind: TxKind
    op: str  # unique within the transaction
    epoch: TxEpoch = NO_EPOCH  # filled in by the first broker
    base: int = 0  # a broker processes the step once it has applied this commit
    planned: int = NOT_PLANNED  # its place in a static plan
    hold: bool = False  # hold matching regular changes of sites until the transaction has ended


class RouteStep(Message, frozen=True):
    """adv, unadv, sub and unsub of a transaction."""

    step: Step
    route: Route
    added: bool


class EventStep(Message, frozen=True):
    """pub and tcm of a transaction. `subscriptions` is for the site that receives it."""

    step: Step
    event: Event
    tcm: bool
    subscriptions: tuple[int, ...] = ()


class StepDone(Message, frozen=True):
    """The step and everything that it triggered is processed behind this link. `reached`: sites that received it."""

    tx: TxId
    op: str
    reached: int = 0
    rejection: Rejection | None = None


class StepProcessed(Message, frozen=True):
    """A step of a static plan that is not routed to this broker is processed everywhere it had to pass before."""

    tx: TxId
    epoch: TxEpoch
    planned: int


class PlannedKind(Enum):
    """The operations of a static plan."""

    ADVERTISE = "advertise"
    UNADVERTISE = "unadvertise"
    SUBSCRIBE = "subscribe"
    UNSUBSCRIBE = "unsubscribe"
    PUBLISH = "publish"
    TCM = "tcm"


class PlannedStep(Wire, frozen=True):
    """One operation of a static plan: who issues it, and which operations every broker processes before it."""

    issuer: str  # the name of a site's session
    kind: PlannedKind
    event_type: str
    body: dict[str, Any]
    after: tuple[int, ...] = ()
    filter: Filter = Filter()
    key: RouteKey = RouteKey("")  # of what is to be withdrawn


class PlanStarted(Message, frozen=True):
    """A static transaction begins: to every broker, and to the sites that issue a step of it."""

    tx: TxId
    epoch: TxEpoch
    steps: tuple[PlannedStep, ...]


class PrepareRoutingTx(Message, frozen=True):
    """To every broker, and from it to the sites that take part: vote. `number` is what an isolated transaction commits
    under; 0 for the other kinds."""

    tx: TxId
    kind: TxKind
    epoch: TxEpoch
    number: int


class RoutingTxVoted(Message, frozen=True):
    """A site's vote, or that of a broker and everything behind it."""

    tx: TxId
    epoch: TxEpoch
    rejection: Rejection | None = None  # None: prepared
    participants: tuple[str, ...] = ()
    reached: tuple[int, ...] = ()  # planned tcms that reached a site


class RoutingTxDecided(Message, frozen=True):
    """To every broker, and from it to the sites that take part."""

    tx: TxId
    committed: bool
    number: int = 0
    rejection: Rejection | None = None


class Flip(Message, frozen=True):
    """Every broker behind this link has applied the commit: it stamps nothing with an earlier one any more."""

    tx: TxId
    epoch: TxEpoch


class DomainOpened(Message, frozen=True):
    """The coordinator begins anew, after a restart of its own or of a broker: open transactions are aborted. These
    commits may not have been applied everywhere yet."""

    epoch: TxEpoch
    number: int
    committed: tuple[tuple[TxId, int], ...]
    joined: dict[str, int]  # brokers whose restart the coordinator knows of, with their incarnation


class BeginRoutingTx(Message, frozen=True):
    """`attempt` counts conflicts in a row; `steps` are those of a static transaction, which is complete with them."""

    tx: TxId
    kind: TxKind
    timeout_s: float
    attempt: int = 0
    steps: tuple[PlannedStep, ...] = ()


class RoutingTxBegan(Message, frozen=True):
    """Steps may be issued; brokers process them once they have applied the commit `base`."""

    tx: TxId
    base: int


class EndRoutingTx(Message, frozen=True):
    """Commit, or abort. An abort also comes from the broker of a participant that is lost."""

    tx: TxId
    commit: bool
    rejection: Rejection | None = None


class AskRoutingTx(Message, frozen=True):
    """A participant that voted asks for the outcome."""

    tx: TxId


class RoutingTxEnded(Message, frozen=True):
    """The outcome of a transaction, for whoever began it or asked."""

    tx: TxId
    committed: bool
    rejection: Rejection | None = None


class BrokerJoins(Message, frozen=True):
    """A broker, or one of its links in the tree, begins without memory: open transactions can't go on. `session` counts
    the links of this incarnation; a repeated message changes nothing."""

    incarnation: int
    session: int
