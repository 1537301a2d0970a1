"""How long transactions take at their coordinator and how they end, for operators; decides nothing.

Measured from the arrival of the request that leaves the decision to the coordinator (a one-shot transaction, the
commit of another one) to the message with the outcome. Only types with a log are measured: their names are bounded.
"""

from collections.abc import Mapping
from typing import Final

from tops.core.log.event_log import EventLog
from tops.model.ids import TxId
from tops.protocol.messages import CommitTx, RunOneShot, RunOneShots, TxOutcome, TxOutcomes
from tops.runtime.histogram import Histogram

OPEN_MAX: Final = 100_000  # requests without an outcome; beyond that the oldest is dropped
REQUESTS: Final = frozenset((RunOneShot, RunOneShots, CommitTx))
OUTCOMES: Final = frozenset((TxOutcome, TxOutcomes))


class TxMeter:
    """Latency and ends of the transactions on a broker's logs, by family."""

    def __init__(self, logs_of: Mapping[str, EventLog]) -> None:
        self._logs_of = logs_of
        self._open: dict[TxId, tuple[str, float]] = {}  # family, time of the request; the oldest first
        self.latency: dict[str, Histogram] = {}
        self.ended: dict[tuple[str, str, str], int] = {}  # family, outcome, code of the rejection

    def request(self, message: object, now: float) -> None:
        """A request of type `REQUESTS` has arrived; one that is repeated counts from its first arrival."""
        match message:
            case RunOneShots(spec=spec, transactions=transactions):
                event_type, ids = spec.event_type, [one.tx for one in transactions]
            case RunOneShot(tx=tx, spec=spec):
                event_type, ids = spec.event_type, [tx]
            case CommitTx(tx=tx, event_type=event_type):
                ids = [tx]
            case _:
                return
        log = self._logs_of.get(event_type)
        if log is None:
            return
        begun = (log.event_type, now)
        for tx in ids:
            self._open.setdefault(tx, begun)
        while len(self._open) > OPEN_MAX:
            del self._open[next(iter(self._open))]

    def outcome(self, message: object, now: float) -> None:
        """An outcome of type `OUTCOMES` is sent. Not counted: one that was not requested here, or a repetition."""
        match message:
            case TxOutcomes(outcomes=outcomes):
                for one in outcomes:
                    self._end(one, now)
            case TxOutcome():
                self._end(message, now)

    def _end(self, ended: TxOutcome, now: float) -> None:
        begun = self._open.pop(ended.tx, None)
        if begun is None:
            return
        family, since = begun
        histogram = self.latency.get(family)
        if histogram is None:
            histogram = self.latency[family] = Histogram()
        histogram.observe(now - since)
        code = ended.rejection.code.value if ended.rejection is not None else ""
        key = (family, ended.outcome.value, code)
        self.ended[key] = self.ended.get(key, 0) + 1
