"""Random messages of every kind: well-typed fields that name oneself, others and what was seen on the wire, and garbled
ones. Everything follows from one seed, apart from what the cluster answers."""

import types
import typing
from collections.abc import Iterable
from enum import Enum
from random import Random
from typing import Any, get_args

import msgspec

from adapters.changes import Change, Delete, Insert, Member, Statement, Update, encode_member
from replication.model.events import batch_body, write_body
from tops.core.link.session import Frame
from tops.model.errors import TopsError
from tops.model.event_types import EventType
from tops.model.filters import Filter
from tops.model.ids import NodeId, TxId
from tops.model.log_points import LogPoint
from tops.protocol.messages import (
    Address,
    AddressedMessage,
    DecisionRelayed,
    Dissemination,
    Envelope,
    EpochId,
    Event,
    LinkMessage,
    Message,
    Publication,
    TxSpec,
)
from tops.protocol.set_types import BATCH, CONTROL, ORIGIN, requests_filter, responses_filter, set_definition
from tops.runtime.edge.rights import LINK_RIGHTS
from tops.runtime.links.wire import encode_frame

CARRIERS = (Envelope, Dissemination)
KINDS = tuple(kind for kind in LINK_RIGHTS if kind not in CARRIERS)
OF_SITES = tuple(kind for kind in KINDS if LINK_RIGHTS[kind] is not None)
OF_BROKERS = tuple(kind for kind in KINDS if LINK_RIGHTS[kind] is None)  # each ends the connection
PUBLICATIONS, LETTERS = frozenset(get_args(Publication)), frozenset(get_args(AddressedMessage))
SETS = ("shop", "stock", "gamma")
LOGS = tuple(f"rs.{name}" for name in SETS)
NUMBERS = (0, 1, 2, 3, -1, 7, 100, 2**31, 2**53 - 1, 2**63 - 1, -(2**63))
SECONDS = (0.0, 0.001, 1.0, 5.0, -1.0, 1e9, float("inf"))
TEXTS = ("", "x", "now", "oldest", "shop/r1", "ä\u200b\U0001f600", "*", "rs.**", "'; drop table accounts", "n" * 300)
TYPES = ("rs.shop.request0", "rs.shop.response0", "rs.stock.request0", "rs.shop.x", "orders", "orders.child")
SEEN_MAX = 200
NESTING_MAX = 4


class Seen:
    """What the wire has told: ids, addresses and numbers that are real."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.epochs: list[EpochId] = []
        self.addresses: list[Address] = []
        self.transactions: list[str] = []
        self.numbers: list[int] = []
        self.texts: list[str] = []

    def note(self, found: object, nesting: int = 0) -> None:
        """Everything of use in a message, wherever it stands."""
        if isinstance(found, EpochId):
            self._keep(self.epochs, found)
        elif isinstance(found, Address):
            self._keep(self.addresses, found)
        elif isinstance(found, bool | bytes | float):
            return
        elif isinstance(found, int):
            self._keep(self.numbers, found)
        elif isinstance(found, str):
            self._keep(self.transactions if found.count(".") >= 2 and ":" in found else self.texts, found)
        if nesting > NESTING_MAX:
            return
        parts: Iterable[object] = ()
        if isinstance(found, msgspec.Struct):
            parts = [getattr(found, name) for name in found.__struct_fields__]
        elif isinstance(found, dict):
            parts = [*found.keys(), *found.values()]
        elif isinstance(found, tuple | list | frozenset):
            parts = list(found)[:10]
        for part in parts:
            self.note(part, nesting + 1)

    def _keep(self, kept: list[Any], found: object) -> None:
        if len(kept) < SEEN_MAX:
            kept.append(found)
        else:
            kept[self._random.randrange(SEEN_MAX)] = found


class RandomMessages:
    """Messages of one attacker."""

    def __init__(self, seed: str, node: str, brokers: tuple[str, ...], others: tuple[str, ...]) -> None:
        self.random = Random(seed)
        self.node, self.incarnation = node, 1
        self.brokers, self.others = brokers, others
        self.seen = Seen(self.random)
        self._of_sites: list[type] = []
        self._of_brokers: list[type] = []

    def of_a_site(self) -> LinkMessage:
        return self.message(self._next(self._of_sites, OF_SITES))

    def of_a_broker(self) -> LinkMessage:
        return self.message(self._next(self._of_brokers, OF_BROKERS))

    def _next(self, left: list[type], kinds: tuple[type, ...]) -> type:
        """Each kind equally often."""
        if not left:
            left += kinds
            self.random.shuffle(left)
        return left.pop()

    def message(self, kind: type) -> LinkMessage:
        """One of this kind, in what carries it. What contradicts itself is made anew: it can't even be encoded."""
        while True:
            try:
                return self._carried(kind)
            except (ValueError, TypeError, TopsError):
                continue

    def _carried(self, kind: type) -> LinkMessage:
        body = self._struct(kind, 0)
        broker = NodeId(self.random.choice(self.brokers))
        if kind in PUBLICATIONS:
            return Dissemination(
                rendezvous=broker,
                upward=self.random.random() < 0.9,
                early=self.random.random() < 0.2,
                publication=body,
                lineage=self.random.choice([(), (body.event_type,), ("rs.shop",)]),
            )
        if kind in LETTERS:
            to = Address(broker)
            # Of what sites send only this goes to another site; others end the connection, and what is behind them.
            if self.seen.addresses and self.random.random() < (0.5 if kind is DecisionRelayed else 0.002):
                to = self.random.choice(self.seen.addresses)
            return Envelope(to=to, body=body)
        return typing.cast(LinkMessage, body)

    def garbled(self, number: int, taken: int) -> bytes:
        """A frame with bytes changed, left out or put in, or with a part of a message replaced by something else."""
        encoded = bytearray(encode_frame(Frame(number, taken, (self.of_a_site(),))))
        match self.random.randrange(4):
            case 0:
                for _ in range(self.random.randrange(1, 6)):
                    encoded[self.random.randrange(len(encoded))] = self.random.randrange(256)
            case 1:
                del encoded[self.random.randrange(len(encoded)) :]
            case 2:
                at = self.random.randrange(1, len(encoded))
                encoded[at:at] = self.random.randbytes(self.random.randrange(1, 20))
            case 3:
                return bytes(encoded[:1]) + msgspec.msgpack.encode(
                    self._altered(msgspec.msgpack.decode(bytes(encoded[1:]), strict=False))
                )
        return bytes(encoded)

    def _altered(self, part: Any) -> Any:
        if isinstance(part, list) and part and self.random.random() < 0.9:
            at = self.random.randrange(len(part))
            return [*part[:at], self._altered(part[at]), *part[at + 1 :]]
        return self.random.choice([None, True, 0, -1, 2**64 - 1, 1.5, "", "x", b"\xff", [], [[[]]], {}, {"a": None}])

    # ------------------------------------------------------------------------------------------------------ values

    def _struct(self, kind: type, nesting: int) -> Any:
        hints = typing.get_type_hints(kind)
        given = {}
        for field in msgspec.structs.fields(kind):
            if field.required or self.random.random() < 0.5:
                given[field.name] = self._value(hints[field.name], field.name, nesting + 1)
        return kind(**given)

    def _value(self, hint: Any, field: str, nesting: int) -> Any:
        made: dict[Any, Any] = {
            TxId: self._transaction,
            NodeId: lambda: NodeId(self._name()),
            str: lambda: self._text(field),
            int: self._number,
            float: lambda: self.random.choice(SECONDS),
            bool: lambda: self.random.random() < 0.5,
            bytes: lambda: self.random.randbytes(self.random.choice([0, 1, 16, 32])),
            Address: self._address,
            EventType: lambda: self._definition(),
            EpochId: self._epoch,
            Event: self._event,
            Filter: self._filter,
            TxSpec: lambda: self._spec(nesting),
            msgspec.Raw: lambda: msgspec.Raw(msgspec.msgpack.encode(self._event().body)),
            LogPoint: lambda: LogPoint(self._text(""), self._number(), self.random.choice(["", "e" * 32, "x"])),
            Any: lambda: self.random.choice([None, 1, "x", b"x", 1.0, [1], {"a": 1}]),
        }
        if hint in made:
            return made[hint]()
        return self._composed(hint, field, nesting)

    def _composed(self, hint: Any, field: str, nesting: int) -> Any:
        if isinstance(hint, typing.NewType):
            return self._value(hint.__supertype__, field, nesting)
        origin, parts = typing.get_origin(hint), get_args(hint)
        if origin in (typing.Union, types.UnionType):
            return self._value(self.random.choice(parts), field, nesting)
        if hint is type(None):
            return None
        if origin is tuple and len(parts) == 2 and parts[1] is not ...:
            return tuple(self._value(part, field, nesting) for part in parts)
        many = self.random.choice([0, 1, 1, 1, 2, 3]) if nesting < NESTING_MAX else 0
        if field == "definitions":
            many = max(many, 1)
        if origin is tuple:
            return tuple(self._value(parts[0], field, nesting + 1) for _ in range(many))
        if origin is frozenset:
            return frozenset(self._value(parts[0], field, nesting + 1) for _ in range(many))
        if origin is dict:
            return {
                self._value(parts[0], field, nesting + 1): self._value(parts[1], field, nesting + 1)
                for _ in range(many)
            }
        if isinstance(hint, type) and issubclass(hint, Enum):
            return self.random.choice(list(hint))
        return self._struct(hint, nesting)

    def _name(self) -> str:
        return self.random.choice([self.node, *self.others, *self.brokers, *self.seen.texts[:3]])

    def _text(self, field: str) -> str:
        if field == "event_type":
            return self._type_name()
        if field in ("voter", "name", "site", "replicas"):
            return self.random.choice([self._name(), *TEXTS[:3]])
        return self.random.choice([*TEXTS, *self.random.sample(self.seen.texts, min(3, len(self.seen.texts)))])

    def _number(self) -> int:
        if self.seen.numbers and self.random.random() < 0.4:
            near = self.random.choice(self.seen.numbers) + self.random.choice([0, 0, 1, -1])
            return max(-(2**63), min(near, 2**63 - 1))
        return self.random.choice([*NUMBERS, self.incarnation])

    def _transaction(self) -> TxId:
        which = self.random.random()
        if which < 0.4:
            return TxId(f"{self.node}.{self.incarnation}.{self.random.randrange(1, 2000)}")
        if which < 0.8 and self.seen.transactions:
            return TxId(self.random.choice(self.seen.transactions))
        return TxId(f"{self._name()}.{self._number()}.{self._number()}")

    def _address(self) -> Address:
        if self.seen.addresses and self.random.random() < 0.5:
            return self.random.choice(self.seen.addresses)
        return Address(NodeId(self._name()), self.random.choice(["", "h", "0" * 32]), self._number())

    def _epoch(self) -> EpochId:
        if self.seen.epochs and self.random.random() < 0.7:
            known = self.random.choice(self.seen.epochs)
            ahead = self.random.choice([0, 0, 1, 2, 5, 1000])
            return msgspec.structs.replace(known, number=min(known.number + ahead, 2**63 - 1))
        broker = NodeId(self.random.choice(self.brokers))
        return EpochId(self._type_name(), self._number(), self.random.choice([1, 2]), broker, self._number())

    def _type_name(self) -> str:
        return self.random.choice([*LOGS, *LOGS, *TYPES, f"t{self.random.randrange(50)}", *TEXTS[:3]])

    def _definition(self) -> EventType:
        name = self._type_name()
        if name.startswith("rs.") and self.random.random() < 0.9:
            return set_definition(name)
        parent = self.random.choice([None, None, "orders", "rs.shop"])
        return EventType(
            name,
            {"n": int, "s": str},
            durable=self.random.random() < 0.5,
            parent=parent,
            discloses_sender=self.random.random() < 0.3,
        )

    def _filter(self) -> Filter:
        node = NodeId(self.random.choice([self.node, self._name()]))
        addressed = requests_filter(node), responses_filter(node)
        return self.random.choice([Filter(), Filter(), Filter.nothing(), Filter.where("n", ">", 1), *addressed])

    def _event(self) -> Event:
        name = self._type_name()
        if not name.startswith("rs."):
            return Event(name, self.random.choice([{"n": 1, "s": "x"}, {"n": 2**62, "s": ""}, {}, {"n": "x"}]))
        if name.count(".") == 2:
            garbled = self.random.choice([b"", b"\x90", self.random.randbytes(20)])
            return Event(name, {"to": self.random.choice([*self.others, "*"]), "body": garbled})
        body: dict[str, Any] = write_body(self._member())
        match self.random.randrange(6):
            case 0:
                body = batch_body([self.random.choice([b"", b"\xc1", encode_member(self._member())])])
            case 1:
                body[self.random.choice([ORIGIN, CONTROL, BATCH])] = self.random.choice(["shop/r1", b"", b"\xc1", 1])
            case 2:
                body[self.random.choice(["at", "write", "reads"])] = self.random.choice(
                    [None, 1, b"\xc1", "x", -(2**63)]
                )
            case 3:
                del body[self.random.choice(list(body))]
        return Event(name, body)

    def _member(self) -> Member:
        """A write to rows that no client of the test uses."""
        id_ = self.random.randrange(900_000, 900_050)
        changes: tuple[Change, ...] = self.random.choice(
            [
                (),
                (Insert("accounts", {"id": id_, "owner": "x", "balance": 1}),),
                (Update("accounts", {"id": id_}, {"owner": "y"}),),
                (Delete("accounts", {"id": id_}),),
                (Insert("accounts", {"id": id_, "balance": -5}),),
                (Insert("no_such_table", {"id": 1}),),
                (Insert("tops.applied", {"id": 1}),),
                (Statement("update accounts set owner = 'z' where id = $1", (id_,)),),
                (Statement("select pg_read_file('x')"),),
                (Statement("nonsense"),),
            ]
        )
        return Member(TxId(""), changes, self.random.choice(["", "", "k1", "tops-x", "tx:a.1.1"]))

    def _spec(self, nesting: int) -> TxSpec:
        spec: TxSpec = self._struct(TxSpec, nesting)
        return spec


def encoded_kinds(message: Message) -> type:
    """The kind that a message is counted by."""
    if isinstance(message, Envelope):
        return type(message.body)
    return type(message.publication) if isinstance(message, Dissemination) else type(message)
