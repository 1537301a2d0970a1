"""A rate limit per identity, for requests that leave an entry in memory: a burst, then a number per second."""

from tops.protocol.messages import Sender


class RateLimit:
    """A token bucket for each identity. It holds as many entries as there are identities."""

    def __init__(self, at_once: int, per_second: float) -> None:
        self._at_once, self._per_second = at_once, per_second
        self._left: dict[str, tuple[float, float]] = {}  # by identity: the tokens left, and the time of that count

    def take(self, sender: Sender, now: float) -> bool:
        """Take one token of the sender's identity; False if none is left."""
        left, at = self._left.get(sender.accountable, (float(self._at_once), now))
        left = min(float(self._at_once), left + max(0.0, now - at) * self._per_second)
        self._left[sender.accountable] = max(left - 1, 0.0), now
        return left >= 1
