"""Global ids of prepared transactions: cluster, replica set, coordinator, its life, number, attempt and note."""

import functools
from urllib.parse import quote, unquote

from adapters.resource import Attempt
from tops.model.errors import ConfigError
from tops.model.ids import NodeId

_PREFIX = "tops1"
_LIMIT = 199  # PostgreSQL's, in bytes


@functools.lru_cache(maxsize=64)  # asked for at prepare and again at the decision
def global_id(cluster: str, replica_set: str, attempt: Attempt) -> str:
    """Free of quotes by construction: PREPARE TRANSACTION takes a literal only."""
    names = _quoted(cluster, replica_set, attempt.coordinator)
    gid = f"{names}:{attempt.incarnation}:{attempt.number}:{attempt.attempt}:{quote(attempt.note, safe='')}"
    if len(gid) > _LIMIT:
        raise ConfigError(
            f"the names of cluster {cluster!r}, replica set {replica_set!r} and broker {attempt.coordinator!r} "
            f"are too long together for a transaction id of PostgreSQL ({len(gid)} of {_LIMIT} bytes): shorten one"
        )
    return gid


@functools.lru_cache(maxsize=64)
def _quoted(*names: str) -> str:
    return ":".join([_PREFIX, *(quote(name, safe="") for name in names)])


def parse(gid: str, cluster: str, replica_set: str) -> Attempt | None:
    """The attempt behind an id; None if it is not ours, or of another cluster or replica set."""
    parts = gid.split(":")
    if len(parts) != 8 or parts[0] != _PREFIX or [unquote(part) for part in parts[1:3]] != [cluster, replica_set]:
        return None
    if not all(part.isdigit() for part in parts[4:7]):
        return None
    incarnation, number, attempt = map(int, parts[4:7])
    coordinator, note = NodeId(unquote(parts[3])), unquote(parts[7])
    return Attempt(number=number, incarnation=incarnation, attempt=attempt, coordinator=coordinator, note=note)
