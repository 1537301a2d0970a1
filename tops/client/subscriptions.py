"""The participants of a site: subscriptions, and resources of the site's own."""

from collections.abc import AsyncIterator, Sequence

from tops.client.collector import Collector
from tops.client.logs import end_log
from tops.model.ids import TxId
from tops.model.log_points import LogPoint
from tops.model.transactions import Scope
from tops.protocol.effects import Memo, PreparedWork
from tops.runtime.participant_driver import ParticipantDriver
from tops.runtime.participants import BatchParticipant, Participant, Received
from tops.runtime.site_node import SiteNode


class Subscription:
    """One subscription; without a participant of its own, iterate over it."""

    def __init__(self, node: SiteNode, number: int, participant: Participant) -> None:
        self._node, self.number, self.participant = node, number, participant

    def __aiter__(self) -> AsyncIterator[Received]:
        if not isinstance(self.participant, Collector):
            raise TypeError("this subscription has a participant, which receives its events")
        return self.participant

    async def unsubscribe(self, *, forget: bool = False, timeout_s: float = 5.0) -> None:
        """End the subscription; its part in open transactions is aborted. Its broker keeps a durable name.

        With `forget` the durable name ends as well: the broker retains nothing of the log for it, and it is free for a
        new subscription. NotReachable if the broker does not respond; then it is ended here, and possibly there.
        """
        node = self._node
        known = node.core.participation.subscriptions.get(self.number)
        node.act(node.core.unsubscribe(self.number))
        driver = node.drivers.pop(self.number, None)
        if driver is not None:
            driver.close()
        if forget and known is not None and known.wish.durable is not None:
            await end_log(node, known.type_name, known.wish.durable, timeout_s)

    def abort(self, tx: str, reason: str) -> None:
        """Abort this participant's part of a transaction, at any moment before it is prepared."""
        self._node.act(self._node.core.participant_abort(self.number, TxId(tx), reason))


class Enlisted:
    """Resources of a site that can take part in transactions that it begins."""

    def __init__(self, node: SiteNode, number: int, participant: Participant) -> None:
        self._node, self.number, self.participant = node, number, participant

    def dismiss(self) -> None:
        """End their part in transactions; work that is prepared waits for its decision."""
        self._node.act(self._node.core.dismiss(self.number))


def standing_scope(taker: Participant, scope: Scope | None, replica: LogPoint | None) -> Scope | None:
    if replica is not None:
        return taker.scope
    if scope is not None or isinstance(taker, Collector):
        return taker.scope if scope is None else scope
    return None


async def remembered(
    taker: Participant, driver: ParticipantDriver
) -> tuple[LogPoint | None, Sequence[PreparedWork], Sequence[Memo]]:
    """The point that a replica has applied, undecided prepared work, and memos of commits that may not be noted."""
    if isinstance(taker, BatchParticipant):
        memos = await taker.prepared_work()
        return await taker.point(), [PreparedWork(memo, memo.transactions) for memo in memos], ()
    prepared_work, kept = driver.prepared_work()
    return None, prepared_work, kept
