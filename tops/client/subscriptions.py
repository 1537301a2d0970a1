"""What takes part at a site: subscriptions, and resources of the site's own."""

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
        """End it; whoever takes part in a transaction through it gives up. A durable name is kept by its broker.

        With `forget` that ends as well: the broker keeps nothing of the log for the name, which is free for a new
        subscription. NotReachable if its broker does not answer; it is ended here, then, and may be there.
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
        """Give up a transaction by itself, at any moment before the promise."""
        self._node.act(self._node.core.participant_abort(self.number, TxId(tx), reason))


class Enlisted:
    """Resources of a site's own that can take part in transactions that it begins."""

    def __init__(self, node: SiteNode, number: int, participant: Participant) -> None:
        self._node, self.number, self.participant = node, number, participant

    def dismiss(self) -> None:
        """They take part in nothing new, and give up what they have not promised."""
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
    """What a replica has applied; open promises; promises that are kept and perhaps not noted."""
    if isinstance(taker, BatchParticipant):
        memos = await taker.prepared_work()
        return await taker.point(), [PreparedWork(memo, memo.transactions) for memo in memos], ()
    prepared_work, kept = driver.prepared_work()
    return None, prepared_work, kept
