"""The names under which a site votes, and which of them it still needs."""

from collections.abc import Callable


class Voters:
    """The names of standing registrations and the pseudonyms of one site, each with its subscription."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}  # voter name -> subscription
        self.own: set[int] = set()  # participants in the site's own transactions: numbers without a subscription
        self.serial: set[int] = set()  # compensatable participants: they have one epoch in progress at a time
        self._open_epochs: dict[str, int] = {}  # voter name -> number of its open epochs

    def subscription(self, voter: str) -> int:
        """The subscription's number; -1 for an unknown name."""
        return self.names.get(voter, -1)

    def retain(self, voter: str) -> None:
        """An epoch was opened under this name."""
        self._open_epochs[voter] = self._open_epochs.get(voter, 0) + 1

    def release(self, voter: str) -> bool:
        """An epoch under this name ended; True if it was the last one."""
        left = self._open_epochs.pop(voter) - 1
        if left:
            self._open_epochs[voter] = left
        return not left

    def rename(self, number: int, voter: str, needed: Callable[[str], bool]) -> None:
        """A subscription votes under a new name; an old name is kept as long as an epoch is open under it."""
        old = [v for v, n in self.names.items() if n == number and v not in self._open_epochs and not needed(v)]
        for name in old:
            del self.names[name]
        self.names[voter] = number

    def drop_unless_prepared(self, voter: str) -> None:
        if voter not in self._open_epochs:
            self.names.pop(voter, None)
