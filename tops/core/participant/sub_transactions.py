"""The sub-transactions of a site: one executor per transaction and subscription, until it ends."""

from collections import OrderedDict
from collections.abc import Callable, Collection

from tops.core.commit.eviction import trim
from tops.core.participant.calls import Calls
from tops.core.participant.sub_tx_executor import SubTxExecutor
from tops.core.participant.subscriptions import SiteOptions, Subscription
from tops.core.participant.voters import Voters
from tops.model.ids import NodeId, Pseudonym, TxId
from tops.protocol.effects import Effect, Memo
from tops.protocol.messages import LoggedTx, TxSpec


class SubTransactions:
    """Opens executors and removes those that ended."""

    def __init__(self, calls: Calls, options: SiteOptions, voters: Voters) -> None:
        self._calls, self._options, self._voters = calls, options, voters
        self.executors: dict[TxId, dict[int, SubTxExecutor]] = {}
        self.ended: OrderedDict[tuple[TxId, int], None] = OrderedDict()  # with the subscription's number

    def get(self, tx: TxId, subscription: int) -> SubTxExecutor | None:
        return self.executors.get(tx, {}).get(subscription)

    def of(self, tx: TxId) -> Collection[SubTxExecutor]:
        """The executors of one transaction, of all subscriptions."""
        executors = self.executors.get(tx)
        return () if executors is None else list(executors.values())

    def open(
        self, s: Subscription, tx: TxId, spec: TxSpec, pseudonym: Pseudonym, voter: str | None = None
    ) -> SubTxExecutor:
        return self.open_at(s.number, s.coordinator, tx, spec, pseudonym, voter)

    def open_at(
        self, number: int, coordinator: NodeId, tx: TxId, spec: TxSpec, pseudonym: Pseudonym, voter: str | None = None
    ) -> SubTxExecutor:
        """Open one for the participant with that number, which may have no subscription."""
        executor = SubTxExecutor(
            tx,
            number,
            spec,
            coordinator,
            self._calls,
            voter=voter or pseudonym,
            pseudonym=pseudonym,
            quiet_s=self._options.quiet_s,
            delivery_attempts=self._options.delivery_attempts,
            ended=self._ended,
        )
        self.executors.setdefault(tx, {})[number] = executor
        self._voters.names[executor.voter] = number
        return executor

    def open_logged(self, s: Subscription, logged: LoggedTx, ended: Callable[[], list[Effect]]) -> SubTxExecutor:
        """Open one for a transaction from the log, which its reader processes as a local one. Only the reader holds
        it."""
        spec = TxSpec(logged.event_type, logged.tx_type, limit=logged.limit, attributes=logged.attributes)
        return SubTxExecutor(
            logged.tx,
            s.number,
            spec,
            s.coordinator,
            self._calls,
            voter="",
            pseudonym=Pseudonym(""),
            quiet_s=self._options.give_up_s,
            delivery_attempts=self._options.delivery_attempts,
            ended=lambda _: ended(),
        )

    def recover(self, tx: TxId, subscription: int, spec: TxSpec, memo: Memo) -> SubTxExecutor:
        """Restore one that was prepared before a crash."""
        executor = SubTxExecutor.recovered(tx, subscription, spec, memo, self._calls, self._ended)
        self.executors.setdefault(tx, {})[subscription] = executor
        return executor

    def _ended(self, executor: SubTxExecutor) -> list[Effect]:
        tx, subscription = executor.tx, executor.subscription
        executors = self.executors.get(tx, {})
        if executors.get(subscription) is executor:
            del executors[subscription]
            if not executors:
                del self.executors[tx]
            self.ended[tx, subscription] = None
            trim(self.ended)
        if executor.voter == executor.pseudonym:
            self._voters.drop_unless_prepared(executor.voter)
        return []
