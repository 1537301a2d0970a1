"""Messages of ordering domains: between topic managers, from and to the ordering modules of sites.

Topics are named by their position in the domain's list of types; lists only grow at their end.
"""

from typing import final

from tops.protocol.messages.values import Address, Event, Message, Origin, Sender, Wire


class Waiting(Wire, frozen=True):
    """An event that has its index and waits for the rest of its timestamp."""

    event: Event
    origin: Origin
    sender: Sender
    reply_to: Address


class PartialTimestamp(Message, frozen=True):
    """The timestamp of an event on its way up; the managers from the event's stage down have written their entries."""

    topic: int
    index: int
    group: tuple[int, ...]  # the topics of higher stages whose entries are missing
    entries: dict[int, int]


class PartialCut(Message, frozen=True):
    """A change of a subscription on its way up. Each manager among `members` stores the new subscription and writes
    how many events it has numbered. A subscriber's broker sends it to the lowest of them as a message of its own."""

    domain: str
    subscriber: Address
    incarnation: int  # of the subscriber's broker
    version: int
    topics: tuple[int, ...]  # the whole subscription from here on
    members: tuple[int, ...]  # the managers that it concerns: of the topics before and after the change
    entries: dict[int, int]
    name: str = ""  # of the durable subscription, for the response


class TimestampCompleted(Message, frozen=True):
    """A complete timestamp on its way back to the manager of the event's topic."""

    topic: int
    index: int
    entries: dict[int, int]


class StageOpening(Message, frozen=True):
    """For a higher stage that has lost its memory: how many events the managers up to here have numbered."""

    clocks: dict[int, int]


ChainItem = PartialTimestamp | PartialCut | TimestampCompleted | StageOpening


@final
class ChainPassed(Message, frozen=True):
    """From the managers of one broker to those of another: items with their places in an order without gaps.

    `after`: the place before the first item. `acknowledged`: the sender knows that everything up to there was taken.
    """

    domain: str
    types: int  # how many types the sender has in the domain's list
    acknowledged: int
    after: int
    items: tuple[tuple[int, ChainItem], ...]


@final
class ChainTaken(Message, frozen=True):
    """Everything up to this place is taken, and on disk as far as it is durable."""

    domain: str
    upto: int


@final
class StageStarted(Message, frozen=True):
    """A broker has started. Its managers request the state that they have lost, and the sites of its earlier
    incarnation have ended. Repeated until the response `SubscriptionsAnnounced` arrives."""

    domain: str
    incarnation: int


class KnownSubscription(Wire, frozen=True):
    """The latest change of one subscriber, as its broker has passed it on."""

    subscriber: Address
    incarnation: int  # of that broker
    version: int
    topics: tuple[int, ...]


@final
class SubscriptionsAnnounced(Message, frozen=True):
    """The subscriptions of the sites at one broker, for topic managers that have lost them."""

    domain: str
    incarnation: int  # of the requesting broker
    subscriptions: tuple[KnownSubscription, ...]
    last: bool = True  # of the messages that it takes


@final
class ChangeSubscription(Message, frozen=True):
    """A site's request: from here on its ordering module receives events of these types, as the domain lists them,
    in order.

    `former`: the types that an earlier version named and that this one may not name any more."""

    domain: str
    version: int
    types: tuple[str, ...]
    former: tuple[str, ...] = ()
    name: str = ""  # of the durable subscription; one site may have several


@final
class CutMade(Message, frozen=True):
    """The response: what each manager had numbered when the change passed it. Events behind that point are ordered
    with the changed subscription."""

    domain: str
    version: int
    entries: dict[int, int]
    name: str = ""


@final
class ConfirmEvent(Message, frozen=True):
    """A publisher's request whether an event that is not durable still waits for its timestamp. The response
    `EventConfirmed` says that it does not."""

    event_type: str
    origin: Origin


@final
class OrderedPublished(Message, frozen=True):
    """An event of an ordering domain with its index and timestamp, on its way to the subscribers."""

    domain: str
    topic: int
    index: int
    entries: dict[int, int]
    event: Event
    origin: Origin
    sender: Sender | None = None  # known where it is numbered; subscribers learn it where the type discloses it

    @property
    def event_type(self) -> str:
        return self.event.type


@final
class IndexesSkipped(Message, frozen=True):
    """The events behind `after` up to `upto` are not for whoever receives this.

    `after` None: everything up to `upto` that was going to be sent has been sent; what did not arrive is lost."""

    domain: str
    topic: int
    event_type: str
    after: int | None
    upto: int
