"""In doubt: a promise was given and no decision has come.

The coordinator is asked, again and again; when it stays silent the other participants are asked as well. Only a
decision that somebody heard ends the doubt, never a guess.
"""

from collections.abc import Sequence

from tops.model.ids import NodeId
from tops.protocol.effects import Alarm, Effect, Memo, SendTo, SetTimer
from tops.protocol.messages import Address, GetEpochOutcome, QueryPeers

QUERIES_BEFORE_PEERS = 2
QUERIES_BEFORE_ALARM = 20


class Doubt:
    """Asks for the decision on one epoch until somebody knows it."""

    def __init__(self, memo: Memo, brokers: Sequence[NodeId], every_s: float) -> None:
        self.memo, self.brokers = memo, brokers
        self.queries_sent = 0
        epoch = memo.epoch
        self.timer = ("doubt", memo.voter, epoch.incarnation, epoch.number, epoch.attempt)
        self.wait = SetTimer(self.timer, every_s)  # gives the decision some time to arrive by itself

    def query(self) -> list[Effect]:
        """The time is up: ask, and come back."""
        memo = self.memo
        query_message = GetEpochOutcome(epoch=memo.epoch, digest=memo.digest, voter=memo.voter)
        effects: list[Effect] = [SendTo(Address(memo.epoch.coordinator), query_message)]
        if self.queries_sent >= QUERIES_BEFORE_PEERS:
            to_peers = QueryPeers(epoch=memo.epoch, digest=memo.digest, voter=memo.voter)
            effects += [SendTo(Address(broker), to_peers) for broker in self.brokers]
        if self.queries_sent == QUERIES_BEFORE_ALARM:
            effects.append(Alarm("in-doubt", f"{memo.epoch}: promised, and nobody knows the decision"))
        self.queries_sent += 1
        return [*effects, self.wait]
