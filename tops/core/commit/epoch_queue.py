"""Transactions that are ready to be prepared, and which of them are prepared together.

An epoch groups transactions with the same voters, as many as one prepare and one entry of a log may hold. The
constraints of each are tested once more right before it is prepared; one that can't commit with the present voters
leaves the queue and is aborted. So does one that was put back and has lost a voter since: that voter joined with the
first prepare, and without constraints every voter that joined is needed.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping

from tops.core.commit.ballot import ReadyTx, shortfall
from tops.core.commit.census import Member
from tops.core.commit.standing_registrations import StandingRegistrations
from tops.model.constraints import Predicate, unmet
from tops.model.ids import TxId
from tops.model.rejections import Rejection
from tops.model.sizes import BUNDLE_BYTES
from tops.protocol.effects import Effect

RejectReady = Callable[[ReadyTx, Rejection], list[Effect]]


class EpochQueue:
    """Transactions that wait to be prepared, in the order in which their commit was requested."""

    def __init__(self, standing: StandingRegistrations, predicates: Mapping[str, Predicate], members_max: int) -> None:
        self.standing, self.predicates, self.members_max = standing, predicates, members_max
        self.ready: deque[ReadyTx] = deque()

    def withdraw(self, tx: TxId) -> bool:
        """Remove a transaction that is not being prepared yet; False if it is not in the queue."""
        for ready in self.ready:
            if ready.tx == tx:
                self.ready.remove(ready)
                return True
        return False

    def put_back(self, members: Iterable[ReadyTx]) -> None:
        """Put these at the front of the queue, in their order."""
        self.ready.extendleft(reversed(list(members)))

    def next_group(self, reject: RejectReady) -> tuple[list[ReadyTx], dict[str, Member], list[Effect]]:
        """The next transactions to be prepared together, their voters, and the effects of `reject` for those that can't
        be prepared."""
        effects: list[Effect] = []
        group: list[ReadyTx] = []
        voters: dict[str, Member] = {}
        met: set[object] = set()  # constraints that hold with these voters; many members share theirs
        size = 0
        while self.ready and len(group) < self.members_max:
            ready = self.ready[0]
            own_size = ready.logged_bytes()
            if group and size + own_size > BUNDLE_BYTES:
                break
            if group and _is_alike(ready, group[-1]):
                group.append(self.ready.popleft())
                size += own_size
                continue
            own = self.voters_of(ready)
            if group and (own.keys() != voters.keys() or ready.alone or group[0].alone):
                break
            self.ready.popleft()
            lacking = self._lacking(ready, own, met)
            if lacking is not None:
                effects += reject(ready, lacking)
                continue
            group.append(ready)
            size += own_size
            voters = own
        return group, voters, effects

    def voters_of(self, ready: ReadyTx) -> dict[str, Member]:
        """The voters to which a prepare would be sent now."""
        if ready.members is None:
            return self.standing.voters(ready.spec)
        return {
            key: m
            for key, m in ready.members.items()
            if not m.standing or ((s := self.standing.registrations.get(key)) is not None and self.standing.counted(s))
        }

    def _lacking(self, ready: ReadyTx, voters: dict[str, Member], met: set[object]) -> Rejection | None:
        """The test before prepare: why the transaction can't commit with these voters."""
        if ready.members is not None or ready.started_with or not voters:
            required = ready.started_with.union(ready.members or ())
            return shortfall(ready, required, voters, self.predicates)
        constraints = ready.spec.constraints
        if constraints in met:
            return None
        lacking = unmet(constraints, [m.identity for m in voters.values()], self.predicates)
        if lacking is None:
            met.add(constraints)
        return lacking


def _is_alike(ready: ReadyTx, other: ReadyTx) -> bool:
    """Whether both arrived in the same message with the same specification: then they have the same voters, and the
    constraints need no second test."""
    if ready.spec is not other.spec or ready.alone or other.alone:
        return False
    return ready.members is None and other.members is None
