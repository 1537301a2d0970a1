"""The outcomes of transactions that ended, and the addresses that wait for them.

Commits are remembered, aborts are presumed. The response for an unknown id is "aborted", and only after a rejection of
that id is on disk, so that a transaction that arrives later can't commit. For an id whose commit may have been
truncated the response is "unknown".
"""

import re
from collections import OrderedDict
from collections.abc import Iterable

from tops.model.ids import TxId
from tops.model.rejections import Rejection, RejectionCode
from tops.model.sizes import bundles, encoded_bytes
from tops.model.transactions import Outcome
from tops.protocol.effects import Effect, Persist, SendTo
from tops.protocol.messages import Address, TxOutcome, TxOutcomes
from tops.protocol.records import TxRejected

_MAKE = re.compile(r"(.*)\.([0-9]{1,19})\.([0-9]{1,19})", re.DOTALL)

COMMITTED = Outcome.COMMITTED  # read with every transaction


class Outcomes:
    """The outcomes of the transactions of one coordinator."""

    def __init__(self, keep_max: int = 100_000) -> None:
        self.keep_max = keep_max
        self.committed: OrderedDict[TxId, TxOutcome] = OrderedDict()
        self.aborted: OrderedDict[TxId, Rejection | None] = OrderedDict()  # why, retained for requests that come soon
        self.rejected: OrderedDict[TxId, None] = OrderedDict()
        # Origin -> its latest incarnation with a truncated commit, and the counter of the latest such commit.
        self.truncated: dict[str, tuple[int, int]] = {}
        # The same for aborts. They are presumed, but their transactions must not run when they arrive again.
        self.passed: dict[str, tuple[int, int]] = {}
        self.requesters: dict[TxId, list[Address]] = {}

    def is_rejected(self, tx: TxId) -> bool:
        """Whether a transaction that arrives now is too late: it was rejected or has ended, or may have ended."""
        if self.remembers(tx):
            return True
        made = _split(tx)
        return made is None or _is_among(self.truncated, made) or _is_among(self.passed, made)

    def remembers(self, tx: TxId) -> bool:
        return tx in self.rejected or tx in self.committed or tx in self.aborted

    def remember(self, outcome: TxOutcome) -> None:
        """Record a commit, also during recovery."""
        self.committed[outcome.tx] = outcome
        if len(self.committed) > self.keep_max:
            self.forget(self.committed.popitem(last=False)[0])

    def forget(self, tx: TxId) -> None:
        """Record that commits of that incarnation up to that transaction, and of incarnations before it, may be unknown
        from now on.

        One entry per origin, however often it is restarted: few requests come for transactions of an earlier
        incarnation.
        """
        _add(self.truncated, tx)

    def incarnations(self, decided: Iterable[TxId]) -> dict[str, int]:
        """The newest commit of each incarnation in the journal: up to there commits become unknown when the journal's
        records are truncated. `decided` are the transactions whose committing sets have not finished."""
        incarnations = {f"{origin}.{incarnation}": counter for origin, (incarnation, counter) in self.truncated.items()}
        for tx in (*self.committed, *decided):
            made = _split(tx)
            if made is not None:
                name = f"{made[0]}.{made[1]}"
                incarnations[name] = max(incarnations.get(name, 0), made[2])
        return incarnations

    def reject(self, tx: TxId) -> None:
        self.rejected[tx] = None
        if len(self.rejected) > self.keep_max:
            self.forget(self.rejected.popitem(last=False)[0])

    def settle(self, outcome: TxOutcome, publisher: Address | None) -> list[Effect]:
        """A transaction ended: send the outcome to its publisher and to all requesters."""
        if outcome.outcome is COMMITTED:
            self.remember(outcome)
        else:
            self.aborted[outcome.tx] = outcome.rejection
            if len(self.aborted) > self.keep_max:
                _add(self.passed, self.aborted.popitem(last=False)[0])
        return [SendTo(address, outcome) for address in self._recipients(outcome.tx, publisher)]

    def settle_commits(self, settled: Iterable[tuple[TxOutcome, Address]]) -> list[Effect]:
        """Committed transactions are finished: send their outcomes, those for one address together."""
        messages: dict[Address, list[TxOutcome]] = {}
        for outcome, publisher in settled:
            for address in self._recipients(outcome.tx, publisher):
                messages.setdefault(address, []).append(outcome)
        return [
            SendTo(address, bundle[0] if len(bundle) == 1 else TxOutcomes(outcomes=tuple(bundle)))
            for address, outcomes in messages.items()
            for bundle in bundles(outcomes, encoded_bytes)
        ]

    def _recipients(self, tx: TxId, publisher: Address | None) -> Iterable[Address]:
        """The addresses that the outcome goes to: the publisher, and all requesters."""
        requesters = self.requesters.pop(tx, None) if self.requesters else None
        if requesters is None:
            return () if publisher is None else (publisher,)
        return dict.fromkeys([publisher, *requesters] if publisher is not None else requesters)

    def query(self, tx: TxId, requester: Address, alive: bool, *, presume: bool = True) -> list[Effect]:
        """The response to a request for an outcome. `alive`: the transaction is in progress, and the response is sent
        when it ends. `presume`: an unknown transaction was aborted, since the journal has lost no record."""
        if tx in self.aborted:
            return [SendTo(requester, TxOutcome(tx=tx, outcome=Outcome.ABORTED, rejection=self.aborted[tx]))]
        if alive:  # also when it is decided, until its committing set has finished
            requesters = self.requesters.setdefault(tx, [])
            if requester not in requesters:
                requesters.append(requester)
            return []
        known = self.committed.get(tx)
        if known is not None:
            return [SendTo(requester, known)]
        made = _split(tx)
        if tx not in self.rejected and (made is None or _is_among(self.truncated, made)):
            return [SendTo(requester, _no_record(tx, Outcome.UNKNOWN, "it ended too long ago to be remembered"))]
        outcome, text = Outcome.ABORTED, "the coordinator has no record of it"
        if not presume:
            outcome, text = Outcome.UNKNOWN, "the coordinator has no record of it, and lost some"
        response = SendTo(requester, _no_record(tx, outcome, text))
        if tx in self.rejected:
            return [response]
        self.reject(tx)
        # Persist first: after a crash the transaction could still arrive, and must not commit after this response.
        return [Persist(TxRejected(tx=tx)), response]


def _no_record(tx: TxId, outcome: Outcome, text: str) -> TxOutcome:
    return TxOutcome(tx=tx, outcome=outcome, rejection=Rejection(RejectionCode.NO_RECORD, text))


def _is_among(latest: dict[str, tuple[int, int]], made: tuple[str, int, int]) -> bool:
    """Whether `latest` has a transaction of the same origin that is as new or newer."""
    known = latest.get(made[0])
    return known is not None and made[1:] <= known


def _add(latest: dict[str, tuple[int, int]], tx: TxId) -> None:
    made = _split(tx)
    if made is not None:
        origin, incarnation, counter = made
        latest[origin] = max(latest.get(origin, (0, 0)), (incarnation, counter))


def _split(tx: TxId) -> tuple[str, int, int] | None:
    """Origin, incarnation and counter; None for an id of another form, whose age is unknown."""
    made = _MAKE.fullmatch(tx)
    return None if made is None else (made[1], int(made[2]), int(made[3]))
