"""Limits for each peer: frame sizes, rates, connections that are not authenticated.

Plain data and arithmetic; the time is an argument, in seconds of any monotonic clock.
"""

import ipaddress
from collections import Counter, OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from tops.model.errors import ConfigError, LimitExceeded, ProtocolError


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """The most bytes of one frame; few before authentication, when any program can make this node hold them."""

    before_authentication: int = 8 * 1024
    after_authentication: int = 8 * 1024 * 1024

    def check(self, size: int, *, authenticated: bool) -> None:
        """Call with the announced length, before the bytes are read or inflated."""
        most = self.after_authentication if authenticated else self.before_authentication
        if not 0 < size <= most:
            raise ProtocolError(f"a frame of {size} bytes was rejected: the limit here is 1 to {most}")


class TokenBucket:
    """`rate` per second on average, `burst` at once."""

    __slots__ = ("_at", "_tokens", "burst", "rate")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        if rate <= 0 or burst <= 0:
            raise ConfigError(f"a rate limit needs a rate and a burst above zero, not {rate} and {burst}")
        self.rate, self.burst = rate, burst
        self._tokens, self._at = float(burst), now

    def take(self, amount: float, now: float) -> bool:
        """Take `amount`, completely or not at all."""
        self._refill(now)
        if amount > self._tokens:
            return False
        self._tokens -= amount
        return True

    def wait_s(self, amount: float, now: float) -> float:
        """How long until `take` succeeds; infinite for more than the burst."""
        self._refill(now)
        if amount > self.burst:
            return float("inf")
        return max(0.0, (amount - self._tokens) / self.rate)

    def _refill(self, now: float) -> None:
        # A clock that steps back adds nothing and removes nothing.
        if now > self._at:
            self._tokens = min(self.burst, self._tokens + (now - self._at) * self.rate)
            self._at = now


class KeyedBuckets:
    """A bucket per key, for at most `keys_max` keys at once.

    The least recently used key is evicted. A peer with many keys gains only a fresh burst by that, like any new key;
    memory stays bounded.
    """

    def __init__(self, rate: float, burst: float, keys_max: int = 10_000) -> None:
        if keys_max < 1:
            raise ConfigError("a table of rate limits needs at least one key")
        self.rate, self.burst, self.keys_max = rate, burst, keys_max
        self._buckets: OrderedDict[Hashable, TokenBucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, key: Hashable, amount: float, now: float) -> bool:
        return self._bucket(key, now).take(amount, now)

    def wait_s(self, key: Hashable, amount: float, now: float) -> float:
        """How long until `take` succeeds; nothing is taken."""
        bucket = self._buckets.get(key)
        return 0.0 if bucket is None else bucket.wait_s(amount, now)

    def check(self, key: Hashable, amount: float, now: float) -> None:
        """`take`, or an error with the time to wait."""
        bucket = self._bucket(key, now)
        if not bucket.take(amount, now):
            wait_s = bucket.wait_s(amount, now)
            raise LimitExceeded(f"{key}: over the limit of {self.rate:g} per second; wait {wait_s:.2f} s", wait_s)

    def _bucket(self, key: Hashable, now: float) -> TokenBucket:
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = TokenBucket(self.rate, self.burst, now)
            if len(self._buckets) > self.keys_max:
                self._buckets.popitem(last=False)
        else:
            self._buckets.move_to_end(key)
        return bucket


@dataclass(frozen=True, slots=True)
class Ticket:
    """One connection's slot among those that have not authenticated yet."""

    number: int
    network: str
    since: float
    deadline: float
    displaced: int | None = None  # the number of the connection that had this slot; the caller closes it


class ConnectionBudget:
    """How many connections may wait for authentication, per address and in total, and for how long; and how many an
    identity may have.

    Call `admit` before anything is read, and `release` with the ticket when the connection has authenticated or is
    closed. `overdue` returns those that took too long, for the caller to close. Call `identify` when it has
    authenticated, and `leave` when it is closed.

    Silent connections can't lock others out. If an address has no slot left, its longest waiting connection is
    displaced once it has had `sure_s`: an honest one needs much less. If no slot is left at all, a connection of the
    address with the most slots is displaced for one of an address that has fewer.
    """

    def __init__(
        self,
        *,
        per_address: int = 16,
        total: int = 256,
        per_second: float = 20.0,
        wait_s: float = 10.0,
        sure_s: float = 1.0,
        per_identity: int = 1_000,
    ) -> None:
        if min(per_address, total, per_second, wait_s, sure_s, per_identity) <= 0:
            raise ConfigError("every limit on connections must be above zero")
        self.per_address, self.total, self.wait_s, self.sure_s = per_address, total, wait_s, sure_s
        self.per_identity = per_identity
        self._arrivals = KeyedBuckets(per_second, max(per_second, per_address))
        self._waiting: dict[int, Ticket] = {}
        self._by_network: dict[str, dict[int, Ticket]] = {}  # the longest waiting first
        self._by_identity: Counter[str] = Counter()
        self._next = 1

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def admit(self, address: str, now: float) -> Ticket:
        network = network_of(address)
        self._arrivals.check(network, 1, now)
        displaced = self._displaced(network, now)
        if displaced is not None:
            self.release(displaced)
        number = self._next
        self._next += 1
        ticket = Ticket(number, network, now, now + self.wait_s, displaced.number if displaced is not None else None)
        self._waiting[number] = self._by_network.setdefault(network, {})[number] = ticket
        return ticket

    def _displaced(self, network: str, now: float) -> Ticket | None:
        """The connection to displace for a new one from this network; None if a slot is free. LimitExceeded if no
        connection may be displaced."""
        own = self._by_network.get(network, {})
        if len(own) >= self.per_address:
            oldest = next(iter(own.values()))
            if now - oldest.since < self.sure_s:
                raise LimitExceeded(f"{network}: {self.per_address} connections wait for authentication", self.sure_s)
            return oldest
        if len(self._waiting) < self.total:
            return None
        most = max(self._by_network.values(), key=len)
        if len(most) <= len(own) + 1:
            raise LimitExceeded(f"{self.total} connections wait for authentication; try again", self.wait_s)
        return next(iter(most.values()))

    def release(self, ticket: Ticket) -> None:
        """Free the slot; a repeated call does nothing, so every end of a connection may call it."""
        if self._waiting.pop(ticket.number, None) is None:
            return
        left = self._by_network[ticket.network]
        del left[ticket.number]
        if not left:
            del self._by_network[ticket.network]

    def overdue(self, now: float) -> list[Ticket]:
        return [ticket for ticket in self._waiting.values() if ticket.deadline <= now]

    def identify(self, identity: str) -> None:
        """Count an authenticated connection of this identity; LimitExceeded if it has too many."""
        if self._by_identity[identity] >= self.per_identity:
            raise LimitExceeded(
                f"{identity} has {self.per_identity} connections here, which is the quota: close some, or raise "
                "`sessions_max` of the broker"
            )
        self._by_identity[identity] += 1

    def leave(self, identity: str) -> None:
        """A connection of this identity is closed."""
        self._by_identity[identity] -= 1
        if not self._by_identity[identity]:
            del self._by_identity[identity]


def network_of(address: str) -> str:
    """What counts as one address: IPv6 addresses count by /64, since one household has 2^64 of them."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((parsed, 64), strict=False))
