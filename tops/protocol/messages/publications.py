"""Publications: what travels down the multicast tree of an event type to its subscribers."""

from typing import Any, final

import msgspec

from tops.model.ids import NodeId, TxId
from tops.model.rejections import Rejection
from tops.protocol.messages.ordering import IndexesSkipped, OrderedPublished
from tops.protocol.messages.values import Address, Event, Message, Origin, TxSpec


@final
class Published(Message, frozen=True):
    """An ordinary event. For a durable type the rendezvous confirms it when it is on disk."""

    event: Event
    origin: Origin

    @property
    def event_type(self) -> str:
        return self.event.type


@final
class EventsPublished(Message, frozen=True):
    """Ordinary events of one type, published together: the same as several `Published`.

    Bodies stay encoded until they must be matched: most brokers on the way need not decode them. `origin` is that of
    the last event, also where a filter has removed some on the way.
    """

    event_type: str
    bodies: tuple[msgspec.Raw, ...]
    origin: Origin


@final
class CensusOpened(Message, frozen=True):
    """A transaction is announced; subscribers reply with a scope."""

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
    """The census has closed; only participants whose hashed pseudonym is listed are distributed participants."""

    tx: TxId
    event_type: str
    members: frozenset[str]


@final
class TxPublished(Message, frozen=True):
    """The `sequence`-th event of a transaction, under the transaction's type, whatever its own type is."""

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
    """A publisher aborted or is lost, or the census failed: subscribers that have not voted drop the transaction.

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
    """The body of an event, or None if the bytes are not one."""
    try:
        return _bodies.decode(encoded)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def type_of(publication: Publication) -> str:
    """The event type that a publication travels under."""
    return publication.event_type
