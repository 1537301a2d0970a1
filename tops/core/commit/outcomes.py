"""What a coordinator remembers of transactions that ended, and whom it still has to tell.

Commits are remembered, aborts are presumed. A question about an id that was never heard of is answered "aborted" only
after a refusal of that id is on disk, so that a late arrival can't apply; one that may have been forgotten is answered
"unknown".
"""

import re
from collections import OrderedDict
from collections.abc import Iterable

from tops.model.ids import TxId
from tops.model.rejections import Rejection, RejectionCode
from tops.model.sizes import bundles, encoded_bytes
from tops.model.transactions import Outcome
from tops.protocol.effects import Effect, Persist, Post
from tops.protocol.messages import Address, TxOutcome, TxOutcomes
from tops.protocol.records import TxRefused

_MAKE = re.compile(r"(.*)\.([0-9]{1,19})\.([0-9]{1,19})", re.DOTALL)

COMMITTED = Outcome.COMMITTED  # looked at with every transaction


class Outcomes:
    """The ends of the transactions of one coordinator."""

    def __init__(self, keep_max: int = 100_000) -> None:
        self.keep_max = keep_max
        self.committed: OrderedDict[TxId, TxOutcome] = OrderedDict()
        self.aborted: OrderedDict[TxId, Rejection | None] = OrderedDict()  # why, kept for those who ask soon
        self.refused: OrderedDict[TxId, None] = OrderedDict()
        self.forgotten: dict[str, tuple[int, int]] = {}  # origin -> its latest life with a forgotten commit, the latest
        self.passed: dict[str, tuple[int, int]] = {}  # the same for aborts: they are presumed, but must not come again
        self.askers: dict[TxId, list[Address]] = {}

    def is_refused(self, tx: TxId) -> bool:
        """Whether a transaction that arrives now comes too late: refused, ended already, or perhaps so."""
        if self.remembers(tx):
            return True
        made = _split(tx)
        return made is None or _is_among(self.forgotten, made) or _is_among(self.passed, made)

    def remembers(self, tx: TxId) -> bool:
        return tx in self.refused or tx in self.committed or tx in self.aborted

    def remember(self, outcome: TxOutcome) -> None:
        """A commit, also from recovery."""
        self.committed[outcome.tx] = outcome
        if len(self.committed) > self.keep_max:
            self.forget(self.committed.popitem(last=False)[0])

    def forget(self, tx: TxId) -> None:
        """Commits of that life up to that transaction, and of lives before it, may not be remembered any more.

        One entry per origin, however often it is restarted: an earlier life is not going to ask for much.
        """
        _add(self.forgotten, tx)

    def lives(self, decided: Iterable[TxId]) -> dict[str, int]:
        """Whose commits are remembered by the journal: what is forgotten if its records are dropped. `decided` are
        those whose committing sets have not finished."""
        lives = {f"{origin}.{life}": counter for origin, (life, counter) in self.forgotten.items()}
        for tx in (*self.committed, *decided):
            made = _split(tx)
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
        if outcome.outcome is COMMITTED:
            self.remember(outcome)
        else:
            self.aborted[outcome.tx] = outcome.rejection
            if len(self.aborted) > self.keep_max:
                _add(self.passed, self.aborted.popitem(last=False)[0])
        return [Post(address, outcome) for address in self._told(outcome.tx, publisher)]

    def settle_commits(self, settled: Iterable[tuple[TxOutcome, Address]]) -> list[Effect]:
        """Transactions that are remembered as committed are finished: everybody hears at once what is for them."""
        letters: dict[Address, list[TxOutcome]] = {}
        for outcome, publisher in settled:
            for address in self._told(outcome.tx, publisher):
                letters.setdefault(address, []).append(outcome)
        return [
            Post(address, told[0] if len(told) == 1 else TxOutcomes(outcomes=tuple(told)))
            for address, outcomes in letters.items()
            for told in bundles(outcomes, encoded_bytes)
        ]

    def _told(self, tx: TxId, publisher: Address | None) -> Iterable[Address]:
        """Who is to hear of the end: its publisher, and whoever asked meanwhile."""
        askers = self.askers.pop(tx, None) if self.askers else None
        if askers is None:
            return () if publisher is None else (publisher,)
        return dict.fromkeys([publisher, *askers] if publisher is not None else askers)

    def ask(self, tx: TxId, asker: Address, alive: bool, *, presume: bool = True) -> list[Effect]:
        """Somebody wants to know. `alive`: the coordinator is still at it, and the answer comes when it ends.
        `presume`: what is not remembered was aborted, for no record was lost."""
        if tx in self.aborted:
            return [Post(asker, TxOutcome(tx=tx, outcome=Outcome.ABORTED, rejection=self.aborted[tx]))]
        if alive:  # also one that is decided, until its committing set has finished
            askers = self.askers.setdefault(tx, [])
            if asker not in askers:
                askers.append(asker)
            return []
        known = self.committed.get(tx)
        if known is not None:
            return [Post(asker, known)]
        made = _split(tx)
        if tx not in self.refused and (made is None or _is_among(self.forgotten, made)):
            return [Post(asker, _no_record(tx, Outcome.UNKNOWN, "it ended too long ago to be remembered"))]
        outcome, text = Outcome.ABORTED, "the coordinator has no record of it"
        if not presume:
            outcome, text = Outcome.UNKNOWN, "the coordinator has no record of it, and lost some"
        answer = Post(asker, _no_record(tx, outcome, text))
        if tx in self.refused:
            return [answer]
        self.refuse(tx)
        return [Persist(TxRefused(tx=tx)), answer]


def _no_record(tx: TxId, outcome: Outcome, text: str) -> TxOutcome:
    return TxOutcome(tx=tx, outcome=outcome, rejection=Rejection(RejectionCode.NO_RECORD, text))


def _is_among(latest: dict[str, tuple[int, int]], made: tuple[str, int, int]) -> bool:
    """Whether one of its origin that is as new or newer is in `latest`."""
    known = latest.get(made[0])
    return known is not None and made[1:] <= known


def _add(latest: dict[str, tuple[int, int]], tx: TxId) -> None:
    made = _split(tx)
    if made is not None:
        origin, life, counter = made
        latest[origin] = max(latest.get(origin, (0, 0)), (life, counter))


def _split(tx: TxId) -> tuple[str, int, int] | None:
    """Origin, life and counter; None for an id of another make: nobody can tell how old it is."""
    made = _MAKE.fullmatch(tx)
    return None if made is None else (made[1], int(made[2]), int(made[3]))
