"""What travels down the multicast tree of an event type to whoever subscribed."""

from typing import Any, final

import msgspec

from tops.model.ids import NodeId, TxId
from tops.model.rejections import Rejection
from tops.protocol.messages.ordering import IndexesSkipped, OrderedPublished
from tops.protocol.messages.values import Address, Event, Message, Origin, TxSpec


@final
class Published(Message, frozen=True):
    """An ordinary event. `confirm` asks the rendezvous to say when a durable type's event is on disk."""

    event: Event
    origin: Origin

    @property
    def event_type(self) -> str:
        return self.event.type


@final
class EventsPublished(Message, frozen=True):
    """Ordinary events of one type, published together; they are what `Published` is for one.

    Bodies stay encoded until somebody has to look into them: most brokers on the way need not. `origin` is the last
    one's, also where a filter has left some out on the way.
    """

    event_type: str
    bodies: tuple[msgspec.Raw, ...]
    origin: Origin


@final
class CensusOpened(Message, frozen=True):
    """A transaction is announced; subscribers answer with a scope."""

    tx: TxId
    spec: TxSpec
    coordinator: NodeId
    incarnation: int
    initiator: Address

    @property
    def event_type(self) -> str:
        return self.spec.event_type


@final
class TxBegan(Message, frozen=True):
    """The census closed; only those whose hashed pseudonym is listed act as distributed participants."""

    tx: TxId
    event_type: str
    members: frozenset[str]


@final
class TxPublished(Message, frozen=True):
    """The `sequence`-th event of a transaction, under the transaction's type whatever its own."""

    tx: TxId
    event_type: str
    sequence: int
    event: Event


@final
class LocalCommitOrdered(Message, frozen=True):
    """Local subscribers commit if they have all events up to `last_sequence`."""

    tx: TxId
    event_type: str
    last_sequence: int


@final
class TxAbandoned(Message, frozen=True):
    """A publisher aborted, died, or the census failed: whoever has not voted yet forgets the transaction.

    `distributed_only`: the distributed part failed by itself; local subscribers are unaffected.
    """

    tx: TxId
    event_type: str
    rejection: Rejection
    distributed_only: bool = False


TxPublication = CensusOpened | TxBegan | TxPublished | LocalCommitOrdered | TxAbandoned  # of one transaction
Publication = Published | EventsPublished | OrderedPublished | IndexesSkipped | TxPublication


_bodies: msgspec.msgpack.Decoder[dict[str, Any]] = msgspec.msgpack.Decoder(dict[str, Any])
encode_body = msgspec.msgpack.Encoder().encode


def decode_body(encoded: msgspec.Raw) -> dict[str, Any] | None:
    """The body of an event, or None if the bytes are not one: whoever sent them is ignored, not obeyed."""
    try:
        return _bodies.decode(encoded)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def type_of(publication: Publication) -> str:
    """The event type that a publication travels under."""
    return publication.event_type
