"""What an application writes down as a static transaction, and the order that follows from it.

    plan = StaticPlan()
    assign = plan.tcm("dispatcher", "assign", {"agent": "agent-1"})
    plan.subscribe("agent-1", "update", wanted, after=assign)
    plan.unsubscribe("dispatcher", "update", key, after=assign)

Three rules give the order: a client's operations in the order in which they were written; an operation behind what it
is `after`; and everything that a client's tcm triggers before what the client does next.
"""

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from tops.model.errors import InvalidTransaction
from tops.model.filters import Filter
from tops.model.routing import RouteKey
from tops.protocol.messages import PlannedKind, PlannedStep

After = int | Iterable[int]


class StaticPlan:
    """The operations of a static transaction. Each method returns the operation's place, for `after`."""

    def __init__(self) -> None:
        self._steps: list[PlannedStep] = []

    def tcm(self, issuer: str, event_type: str, body: dict[str, Any], *, after: After = ()) -> int:
        """A publication that must reach a client; operations of others that are `after` it are triggered by it."""
        return self._add(PlannedStep(issuer, PlannedKind.TCM, event_type, body, _places(after)))

    def publish(self, issuer: str, event_type: str, body: dict[str, Any], *, after: After = ()) -> int:
        """A publication that is delivered when the transaction has committed."""
        return self._add(PlannedStep(issuer, PlannedKind.PUBLISH, event_type, body, _places(after)))

    def subscribe(self, issuer: str, event_type: str, where: Filter, *, after: After = ()) -> int:
        """A new subscription of a client."""
        return self._add(PlannedStep(issuer, PlannedKind.SUBSCRIBE, event_type, {}, _places(after), where))

    def unsubscribe(self, issuer: str, event_type: str, key: str, *, after: After = ()) -> int:
        """The end of a client's subscription, by its key."""
        return self._remove(issuer, PlannedKind.UNSUBSCRIBE, event_type, key, after)

    def advertise(self, issuer: str, event_type: str, where: Filter, *, after: After = ()) -> int:
        """A new advertisement of a client."""
        return self._add(PlannedStep(issuer, PlannedKind.ADVERTISE, event_type, {}, _places(after), where))

    def unadvertise(self, issuer: str, event_type: str, key: str, *, after: After = ()) -> int:
        """The end of a client's advertisement, by its key."""
        return self._remove(issuer, PlannedKind.UNADVERTISE, event_type, key, after)

    def _remove(self, issuer: str, kind: PlannedKind, event_type: str, key: str, after: After) -> int:
        return self._add(PlannedStep(issuer, kind, event_type, {}, _places(after), key=RouteKey(key)))

    def _add(self, step: PlannedStep) -> int:
        if not all(0 <= place < len(self._steps) for place in step.after):
            raise InvalidTransaction("an operation of a static plan can only be after operations that the plan has")
        self._steps.append(step)
        return len(self._steps) - 1

    def steps(self) -> tuple[PlannedStep, ...]:
        """The operations with everything that each of them comes after; InvalidTransaction if that is a circle."""
        behind = self._ancestors()
        after = [set(found) for found in behind]
        for place, step in enumerate(self._steps):
            for trigger in self._threads_before(place):
                if self._steps[trigger].kind is not PlannedKind.TCM:
                    continue
                for other, theirs in enumerate(self._steps):
                    if theirs.issuer != step.issuer and trigger in behind[other] and place not in behind[other]:
                        after[place].add(other)
        _check_order(after)
        return tuple(replace(step, after=tuple(sorted(after[i]))) for i, step in enumerate(self._steps))

    def _threads_before(self, place: int) -> list[int]:
        issuer = self._steps[place].issuer
        return [i for i in range(place) if self._steps[i].issuer == issuer]

    def _ancestors(self) -> list[set[int]]:
        """What was written to come before each operation, by its client's thread or by `after`."""
        behind: list[set[int]] = []
        for place, step in enumerate(self._steps):
            direct = {*step.after, *self._threads_before(place)}
            behind.append(direct.union(*(behind[i] for i in direct)))
        return behind


def _places(after: After) -> tuple[int, ...]:
    return (after,) if isinstance(after, int) else tuple(after)


def _check_order(after: list[set[int]]) -> None:
    ordered: set[int] = set()
    while len(ordered) < len(after):
        ready = {place for place, before in enumerate(after) if place not in ordered and before <= ordered}
        if not ready:
            raise InvalidTransaction("the operations of the static plan wait for each other in a circle")
        ordered |= ready
