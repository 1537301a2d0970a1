"""The transactions of an epoch coordinator that wait or are in flight, and their bytes per identity, for quotas."""

from collections import Counter
from collections.abc import Iterable

from tops.core.commit.ballot import ReadyTx
from tops.model.ids import TxId


class HeldTransactions:
    """The ids of the transactions, and their bytes by the identity that is accountable for them."""

    def __init__(self) -> None:
        self._sizes: dict[TxId, tuple[str, int]] = {}
        self._bytes: Counter[str] = Counter()

    def __contains__(self, tx: TxId) -> bool:
        return tx in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def bytes_of(self, who: str) -> int:
        return self._bytes[who]

    def add(self, ready: ReadyTx) -> None:
        self.discard(ready.tx)
        self._sizes[ready.tx] = ready.who, ready.size
        self._bytes[ready.who] += ready.size

    def discard(self, tx: TxId) -> None:
        who, size = self._sizes.pop(tx, ("", 0))
        self._bytes[who] -= size
        if not self._bytes[who]:
            del self._bytes[who]

    def discard_all(self, transactions: Iterable[TxId]) -> None:
        for tx in transactions:
            self.discard(tx)
