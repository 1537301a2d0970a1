"""Tree routing: how its entries are named, and the kinds of transactions over them."""

from enum import Enum
from typing import Final, NewType

from tops.model.ids import NodeId

RouteKey = NewType("RouteKey", str)  # SITE.INCARNATION#NUMBER

RENDEZVOUS: Final = "rendezvous"
TREE: Final = "tree"
ROUTINGS: Final = (RENDEZVOUS, TREE)


class RouteKind(Enum):
    """What an entry of a routing table is."""

    ADVERTISEMENT = "advertisement"  # of the subscription routing table: where publications come from
    SUBSCRIPTION = "subscription"  # of the publication routing table: where publications go to


class TxKind(Enum):
    """The kind of a routing transaction: what is known beforehand, and what others see before it commits."""

    STATIC = "static"  # all operations are known beforehand; routing changes are visible at once
    DYNAMIC = "dynamic"  # operations become known one after the other; routing changes are visible at once
    ISOLATED = "isolated"  # dynamic and serializable: nothing is visible before the commit


def client_id(site: NodeId, incarnation: int) -> str:
    """What one incarnation of a site is called in the keys of its entries."""
    return f"{site}.{incarnation}"


def route_key(client: str, number: int) -> RouteKey:
    """The key of a client's advertisement or subscription; it is never used again."""
    return RouteKey(f"{client}#{number}")


def client_of(key: RouteKey) -> str:
    """The incarnation of a site that an entry belongs to."""
    return key.rpartition("#")[0]


def number_of(key: RouteKey) -> int:
    """The number that the client gave to its advertisement or subscription."""
    return int(key.rpartition("#")[2])
