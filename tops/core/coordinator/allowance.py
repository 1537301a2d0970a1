"""How often each identity may do what leaves a trace in memory: so many times at once, then so many a second."""

from tops.protocol.messages import Sender


class Allowance:
    """What each identity has left. There are as many entries as identities."""

    def __init__(self, at_once: int, per_second: float) -> None:
        self._at_once, self._per_second = at_once, per_second
        self._left: dict[str, tuple[float, float]] = {}  # by identity: how much was left, and when

    def take(self, sender: Sender, now: float) -> bool:
        """Use one up; False if none is left."""
        left, at = self._left.get(sender.accountable, (float(self._at_once), now))
        left = min(float(self._at_once), left + max(0.0, now - at) * self._per_second)
        self._left[sender.accountable] = max(left - 1, 0.0), now
        return left >= 1
