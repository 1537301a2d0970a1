"""The version of a row in a peer-to-peer set, and the order of versions: the highest one wins, on every replica.

A row's history has generations: a delete ends one, an insert after it begins the next. Within a generation a delete
beats every update, so that a late update does not bring a deleted row back. Beyond that the set's resolver decides.
Since it is one total order and the highest version is kept, replicas end equal whatever order they learn versions in.
"""

import json
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import msgspec

from adapters.changes import Row, Value

Rank = tuple[Any, ...]


class Version(msgspec.Struct, frozen=True):
    """Who changed a row last, when, and how often it was changed before. `adds` sums every increment ever made."""

    generation: int = 0
    deleted: bool = False
    edits: int = 0
    clock: int = 0
    site: str = ""
    adds: dict[str, str] = {}
    columns: dict[str, tuple[int, int, str]] = {}  # per-column sets only: generation, clock, site

    @property
    def identity(self) -> tuple[int, bool, int, str]:
        return self.generation, self.deleted, self.clock, self.site

    @property
    def live(self) -> bool:
        return self.generation > 0 and not self.deleted

    def added(self, add: Row) -> "Version":
        sums = {**self.adds}
        for column, amount in add.items():
            sums[column] = str(Decimal(sums.get(column, "0")) + Decimal(str(amount)))
        return msgspec.structs.replace(self, adds=sums)


class Base(msgspec.Struct, frozen=True):
    """A row as the log alone has it: its version, and its columns beside the key (None: there is no row)."""

    version: Version
    image: Row | None

    @property
    def text(self) -> str:
        return to_json({"version": msgspec.structs.asdict(self.version), "image": self.image})

    @classmethod
    def of(cls, text: str) -> "Base":
        found = from_json(text)
        return cls(Version(**found["version"]), found["image"])


class Ranking:
    """The total order of versions under one resolver."""

    def __init__(self, resolver: str, priority: Sequence[str]) -> None:
        self.resolver = resolver
        self._priority = {site: -row_key for row_key, site in enumerate(priority)}

    @property
    def per_column(self) -> bool:
        return self.resolver == "per-column"

    def rank(self, v: Version) -> Rank:
        match self.resolver:
            case "first-writer":
                return v.generation, v.deleted, v.edits, -v.clock, v.site
            case "site-priority":
                return v.generation, v.deleted, v.edits, self._priority.get(v.site, 0), v.clock, v.site
        return v.generation, v.deleted, v.clock, v.site


def base_of(image: Row, adds: dict[str, str]) -> Row:
    """An image without the increments that its site knew of."""
    return {name: shifted(value, adds.get(name), -1) for name, value in image.items()}


def on_top(base: Row, adds: dict[str, str]) -> Row:
    """A base with the increments that we know of."""
    return {name: shifted(value, adds.get(name), 1) for name, value in base.items()}


def shifted(value: Value, amount: str | None, sign: int) -> Value:
    if amount is None or value is None:
        return value
    total = Decimal(str(value)) + sign * Decimal(amount)
    return int(total) if total == total.to_integral_value() and "." not in str(value) else str(total)


_encode = json.JSONEncoder(default=str, sort_keys=True).encode


def to_json(value: Any) -> str:
    return _encode(value)


def from_json(text: str) -> Any:
    return json.loads(text)
