"""What a coordinator remembers of transactions that ended, and whom it still has to tell.

Commits are remembered, aborts are presumed. A question about an id that was never heard of is answered "aborted" only
after a refusal of that id is on disk, so that a late arrival can't apply; one that may have been forgotten is answered
"unknown".
"""

from collections import OrderedDict

from tops.effects import Effect, Persist, Post
from tops.ids import TxId
from tops.messages import Address, TxOutcome
from tops.records import TxRefused
from tops.transactions import Outcome


class Outcomes:
    """The ends of the transactions of one coordinator."""

    def __init__(self, keep_max: int = 100_000) -> None:
        self.keep_max = keep_max
        self.committed: OrderedDict[TxId, TxOutcome] = OrderedDict()
        self.aborted: OrderedDict[TxId, str] = OrderedDict()  # reasons, kept for those who ask soon
        self.refused: OrderedDict[TxId, None] = OrderedDict()
        self.forgotten: dict[str, tuple[int, int]] = {}  # origin -> its latest life with a forgotten commit, the latest
        self.askers: dict[TxId, list[Address]] = {}

    def is_refused(self, tx: TxId) -> bool:
        """Whether a transaction that arrives now comes too late: refused, ended already, or perhaps so."""
        if tx in self.refused or tx in self.committed or tx in self.aborted:
            return True
        return self._may_be_forgotten(tx)

    def _may_be_forgotten(self, tx: TxId) -> bool:
        made = _split(tx)
        if made is None:
            return True  # not an id that TOPS made: nobody can tell how old it is
        origin, life, counter = made
        return (life, counter) <= self.forgotten.get(origin, (0, 0))

    def remember(self, outcome: TxOutcome) -> None:
        """A commit, also from recovery."""
        self.committed[outcome.tx] = outcome
        if len(self.committed) > self.keep_max:
            self.forget(self.committed.popitem(last=False)[0])

    def forget(self, tx: TxId) -> None:
        """Commits of that life up to that transaction, and of lives before it, may not be remembered any more.

        One entry per origin, however often it is restarted: an earlier life is not going to ask for much.
        """
        made = _split(tx)
        if made is not None:
            origin, life, counter = made
            self.forgotten[origin] = max(self.forgotten.get(origin, (0, 0)), (life, counter))

    def logged_lives(self) -> dict[str, int]:
        """Whose commits are remembered by a log alone: what is forgotten if its entries are dropped."""
        lives = {f"{origin}.{life}": counter for origin, (life, counter) in self.forgotten.items()}
        for tx, outcome in self.committed.items():
            made = _split(tx) if outcome.log_number is not None else None
            if made is not None:
                name = f"{made[0]}.{made[1]}"
                lives[name] = max(lives.get(name, 0), made[2])
        return lives

    def refuse(self, tx: TxId) -> None:
        self.refused[tx] = None
        if len(self.refused) > self.keep_max:
            self.forget(self.refused.popitem(last=False)[0])

    def settle(self, outcome: TxOutcome, publisher: Address | None) -> list[Effect]:
        """A transaction ended: tell its publisher and whoever asked meanwhile."""
        if outcome.outcome is Outcome.COMMITTED:
            self.remember(outcome)
        else:
            self.aborted[outcome.tx] = outcome.reason
            if len(self.aborted) > self.keep_max:
                self.aborted.popitem(last=False)
        askers = self.askers.pop(outcome.tx, None)
        if askers is None:
            return [] if publisher is None else [Post(publisher, outcome)]
        told = dict.fromkeys([publisher, *askers] if publisher is not None else askers)
        return [Post(address, outcome) for address in told]

    def ask(self, tx: TxId, asker: Address, alive: bool) -> list[Effect]:
        """Somebody wants to know. `alive`: the coordinator is still at it, and the answer comes when it ends."""
        if tx in self.aborted:
            return [Post(asker, TxOutcome(tx=tx, outcome=Outcome.ABORTED, reason=self.aborted[tx]))]
        if alive:  # also one that is decided, until its committing set has finished
            askers = self.askers.setdefault(tx, [])
            if asker not in askers:
                askers.append(asker)
            return []
        known = self.committed.get(tx)
        if known is not None:
            return [Post(asker, known)]
        if tx not in self.refused and self._may_be_forgotten(tx):
            reason = "it ended too long ago to be remembered"
            return [Post(asker, TxOutcome(tx=tx, outcome=Outcome.UNKNOWN, reason=reason))]
        answer = Post(asker, TxOutcome(tx=tx, outcome=Outcome.ABORTED, reason="the coordinator has no record of it"))
        if tx in self.refused:
            return [answer]
        self.refuse(tx)
        return [Persist(TxRefused(tx=tx)), answer]


def _split(tx: TxId) -> tuple[str, int, int] | None:
    """Origin, life and counter; None for an id of another make, which may hold anything."""
    words = tx.rsplit(".", 2)
    if len(words) != 3 or not (_is_number(words[1]) and _is_number(words[2])):
        return None
    return words[0], int(words[1]), int(words[2])


def _is_number(word: str) -> bool:
    return len(word) < 20 and word.isascii() and word.isdigit()
