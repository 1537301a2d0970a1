"""Resources that a publisher enlists in its own transactions: participants of this site that need no subscription.

They process every event that the site publishes in the transaction, and vote under a new name in each transaction. The
transaction commits only if they commit; no constraint counts them.
"""

from collections.abc import Callable, Sequence

from tops.core.participant.prepared_epochs import PreparedEpochs
from tops.core.participant.sub_transactions import SubTransactions
from tops.core.participant.voters import Voters
from tops.model.ids import NodeId, Pseudonym, TxId
from tops.model.rejections import Rejection
from tops.model.transactions import Scope
from tops.protocol.effects import Effect, Memo, PreparedWork
from tops.protocol.messages import Event, TxSpec


class OwnResources:
    """The participants that one site has enlisted, each by the number under which it is called."""

    def __init__(
        self,
        sub_transactions: SubTransactions,
        prepared_work: PreparedEpochs,
        voters: Voters,
        entropy: Callable[[int], bytes],
    ) -> None:
        self._sub_transactions, self._prepared_epochs, self._voters = sub_transactions, prepared_work, voters
        self._entropy = entropy

    def enlist(
        self, number: int, prepared_work: Sequence[PreparedWork], kept: Sequence[Memo], *, compensatable: bool
    ) -> list[Effect]:
        """Add one; work that an earlier incarnation of the site prepared through it is resolved first."""
        self._voters.own.add(number)
        if compensatable:
            self._voters.serial.add(number)
        return self._prepared_epochs.recover(number, prepared_work, kept)

    def dismiss(self, number: int) -> list[Effect]:
        """End its part in transactions; work that is prepared waits for its decision."""
        self._voters.own.discard(number)
        effects: list[Effect] = []
        for executors in list(self._sub_transactions.executors.values()):
            if number in executors:
                effects += executors[number].give_up("the publisher's resources were dismissed")
        return effects

    def knows(self, number: int) -> bool:
        return number in self._voters.own

    def new_name(self) -> Pseudonym:
        """A new name to vote under in one transaction."""
        return Pseudonym(self._entropy(16).hex())

    def begin(self, number: int, tx: TxId, spec: TxSpec, coordinator: NodeId, name: Pseudonym) -> list[Effect]:
        """The transaction is open: it accepts events."""
        executor = self._sub_transactions.open_at(number, coordinator, tx, spec, name)
        effects = executor.take(Scope.DISTRIBUTED)
        executor.begin()
        return effects

    def on_event(self, number: int, tx: TxId, sequence: int, event: Event) -> list[Effect]:
        executor = self._sub_transactions.get(tx, number)
        return executor.on_event(sequence, event) if executor is not None else []

    def abandon(self, number: int, tx: TxId, rejection: Rejection) -> list[Effect]:
        """The transaction aborted: undo it unless it is prepared; then only the decision ends it."""
        executor = self._sub_transactions.get(tx, number)
        return executor.abandon(rejection) if executor is not None else []
