"""In doubt: work is prepared and no decision has arrived.

The participant requests the outcome from the coordinator repeatedly; when the coordinator stays silent, it queries the
other participants as well. Only a decision that a node received resolves the doubt. To guess would break atomicity:
other participants may have acted on the opposite decision.
"""

from collections.abc import Sequence

from tops.model.ids import NodeId
from tops.protocol.effects import Alarm, Effect, Memo, SendTo, SetTimer
from tops.protocol.messages import Address, GetEpochOutcome, QueryPeers

QUERIES_BEFORE_PEERS = 2
QUERIES_BEFORE_ALARM = 20


class Doubt:
    """Requests the decision on one epoch until it is found."""

    def __init__(self, memo: Memo, brokers: Sequence[NodeId], every_s: float) -> None:
        self.memo, self.brokers = memo, brokers
        self.queries_sent = 0
        epoch = memo.epoch
        self.timer = ("doubt", memo.voter, epoch.incarnation, epoch.number, epoch.attempt)
        self.wait = SetTimer(self.timer, every_s)  # the decision mostly arrives unrequested before that

    def query(self) -> list[Effect]:
        """The timer has expired: send the requests, and set the timer again."""
        memo = self.memo
        query_message = GetEpochOutcome(epoch=memo.epoch, digest=memo.digest, voter=memo.voter)
        effects: list[Effect] = [SendTo(Address(memo.epoch.coordinator), query_message)]
        if self.queries_sent >= QUERIES_BEFORE_PEERS:
            to_peers = QueryPeers(epoch=memo.epoch, digest=memo.digest, voter=memo.voter)
            effects += [SendTo(Address(broker), to_peers) for broker in self.brokers]
        if self.queries_sent == QUERIES_BEFORE_ALARM:
            effects.append(Alarm("in-doubt", f"{memo.epoch}: prepared, and no reachable node knows the decision"))
        self.queries_sent += 1
        return [*effects, self.wait]
