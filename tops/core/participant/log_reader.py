"""A durable subscription whose application works by callbacks: it gets the log entry by entry.

An entry that is a transaction becomes a local transaction of this subscriber, with its own commit or abort. Entries are
processed one after the other; the acknowledged position is the last one that the application has finished, so a crash
repeats an entry and loses none.
"""

from collections import deque
from collections.abc import Callable

from tops.core.participant.calls import Calls
from tops.core.participant.sub_tx_executor import SubTxExecutor
from tops.model.filters import Filter
from tops.model.ids import NodeId
from tops.model.transactions import Scope
from tops.protocol.effects import Effect, SendTo, TakeEvent
from tops.protocol.messages import Address, Definitions, FollowLog, LogDelivered, LogEntry, LoggedTx

OpenLocal = Callable[[LoggedTx, Callable[[], list[Effect]]], SubTxExecutor]


class LogReader:
    """Reads one durable subscription's log."""

    def __init__(
        self,
        subscription: int,
        name: str,
        definitions: Definitions,
        interest: Filter,
        coordinator: NodeId,
        calls: Calls,
        open_local: OpenLocal,
        *,
        position: int | None,
        start: str,
        credit: int,
    ) -> None:
        self.subscription, self.name, self.definitions, self.interest = subscription, name, definitions, interest
        self.coordinator, self.position, self.start, self.credit = coordinator, position, start, credit
        self._calls, self._open_local = calls, open_local
        self._todo: deque[LogEntry | int] = deque()  # entries, and positions that are reached after them
        self._queued_upto: int | None = None
        self._taking: int | None = None  # the number of the entry that the application is processing
        self._acknowledged = position
        self._stopped = False

    def want(self) -> list[Effect]:
        """Request the entries that follow; this also acknowledges the position."""
        self._acknowledged = self.position
        wanted = FollowLog(
            name=self.name,
            definitions=self.definitions,
            filter=self.interest,
            position=self.position,
            start=self.start,
            credit=self.credit,
            voter=None,
        )
        return [SendTo(Address(self.coordinator), wanted)]

    def restart(self) -> list[Effect]:
        """The link is new: deliveries that were under way may be lost."""
        self._todo.clear()
        self._queued_upto = self.position if self._taking is None else self._taking
        return self.want()

    def stop(self) -> None:
        """The subscription ended: the application gets no further entry."""
        self._stopped = True

    def on_delivered(self, delivered: LogDelivered) -> list[Effect]:
        """Queue new entries in order; entries of a repeated delivery are skipped, a delivery after a gap is ignored."""
        expected = delivered.acknowledged if self._queued_upto is None else self._queued_upto
        expected = max(expected, self.position or 0)
        if delivered.after > expected or delivered.upto <= expected:
            return []
        self._todo.extend(e for e in delivered.entries if e.number > expected)
        self._todo.append(delivered.upto)
        self._queued_upto = delivered.upto
        return self._go_on()

    def _go_on(self) -> list[Effect]:
        if self._stopped:
            return []
        effects: list[Effect] = []
        while self._todo and self._taking is None:
            item = self._todo.popleft()
            if isinstance(item, int):
                self.position = item
            else:
                effects += self._take(item)
        behind = (self.position or 0) - (self._acknowledged or 0)
        if self._taking is None and (behind * 2 >= self.credit or (behind and not self._todo)):
            effects += self.want()
        return effects

    def _take(self, entry: LogEntry) -> list[Effect]:
        self._taking = entry.number
        if entry.event is not None:
            call = self._calls.open(lambda _: self._taken(entry.number))
            return [TakeEvent(self.subscription, call, entry.number, entry.event)]
        return self._take_transactions(entry.number, deque(entry.transactions))

    def _take_transactions(self, number: int, transactions: deque[LoggedTx]) -> list[Effect]:
        if not transactions:
            return self._taken(number)
        logged = transactions.popleft()
        executor = self._open_local(logged, lambda: self._take_transactions(number, transactions))
        executor.log_number = number

        def chosen(e: SubTxExecutor) -> list[Effect]:
            if e.scope not in (Scope.LOCAL, Scope.NON_TRANSACTIONAL):
                return []  # the application takes no part: the sub-transaction has ended
            effects: list[Effect] = []
            for sequence, event in enumerate(logged.events, start=1):
                effects += e.on_event(sequence, event)
            return effects + e.on_local_commit(len(logged.events))

        return executor.request_scope(Address(self.coordinator), chosen)

    def _taken(self, number: int) -> list[Effect]:
        self._taking = None
        self.position = number
        return self._go_on()
