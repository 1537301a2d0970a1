"""A transaction, for an application that publishes in it."""

from tops.client.outgoing import Body, TypeOrName, event_of, name_of
from tops.model.ids import TxId
from tops.model.transactions import Outcome
from tops.protocol.messages import TxOutcome, TxSpec
from tops.runtime.site_node import SiteNode


class Transaction:
    """One transaction at a site that publishes in it."""

    def __init__(self, node: SiteNode, tx: TxId, spec: TxSpec) -> None:
        self._node, self.id, self.spec = node, tx, spec
        self.outcome: TxOutcome | None = None

    async def publish(self, event_type: TypeOrName, body: Body) -> int:
        """Publish an event in the transaction; returns its sequence number. TransactionClosed once it is committing or
        has ended."""
        await self._node.wait_writable()
        event = event_of(name_of(event_type), body)
        sequence: int = await self._node.request(
            lambda request: self._node.core.tx_publish(request, self.id, event), f"tx {self.id}"
        )
        return sequence

    async def commit(self) -> TxOutcome:
        """Request commit and wait for the outcome.

        Raises TransactionAborted, OutcomeUnknown, or UncheckedTransaction: then `wait` again, or `abort`.
        """
        self.outcome = await self._node.request(
            lambda request: self._node.core.commit(request, self.id), f"tx {self.id}"
        )
        return self.outcome

    async def wait(self) -> TxOutcome:
        """Wait once more after UncheckedTransaction."""
        return await self.commit()

    async def abort(self, reason: str = "aborted by its publisher") -> TxOutcome:
        """Abort; returns the outcome, which is a commit if that was decided before."""
        self.outcome = await self._node.request(
            lambda request: self._node.core.abort(request, self.id, reason), f"tx {self.id}"
        )
        return self.outcome

    def done(self) -> None:
        """A contributor to a public transaction publishes no more: its loss no longer aborts the transaction."""
        self._node.act(self._node.core.done(self.id))

    @property
    def committed(self) -> bool:
        return self.outcome is not None and self.outcome.outcome is Outcome.COMMITTED
