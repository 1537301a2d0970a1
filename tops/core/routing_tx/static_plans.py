"""Static transactions at one broker: which operation may be processed when.

Every operation visits every broker: as itself where it is routed, as the marker `StepProcessed` over all other links. A
broker processes an operation once it has processed, or has a marker of, each one that comes before it. Nothing has to
be predicted: an operation that is not routed here is marked here.

What an advertisement attracts is not part of the plan. It is acknowledged, therefore, and its markers leave the first
broker when everything that it attracted is done.
"""

from collections.abc import Callable

import msgspec

from tops.core.routing_tx.steps import Pending, Steps, TxStep, Work
from tops.core.routing_tx.tree_routes import ADVERTISEMENT
from tops.model.ids import NodeId, TxId
from tops.protocol.effects import Effect, SendOnLink
from tops.protocol.messages import EventStep, PlannedKind, PlannedStep, RouteStep, StepDone, StepProcessed, TxEpoch


class Progress(msgspec.Struct):
    """How far a plan has come at this broker."""

    work: Work
    epoch: TxEpoch
    steps: tuple[PlannedStep, ...]
    processed: set[int] = set()
    arrived: dict[int, tuple[NodeId, TxStep]] = {}

    def may_process(self, place: int) -> bool:
        """Whether everything that comes before an operation is processed here."""
        return self.processed.issuperset(self.steps[place].after)

    @property
    def complete(self) -> bool:
        """Whether every operation is processed here."""
        return len(self.processed) == len(self.steps)


class StaticPlans:
    """The static transactions that are open at one broker."""

    def __init__(self, steps: Steps, completed: Callable[[Work], list[Effect]]) -> None:
        """`completed` is called when every operation of a plan is processed here."""
        self._steps, self._completed = steps, completed
        self.plans: dict[TxId, Progress] = {}

    def start(self, work: Work, epoch: TxEpoch, steps: tuple[PlannedStep, ...]) -> list[Effect]:
        """A plan arrived, before any of its operations."""
        plan = self.plans[work.tx] = Progress(work, epoch, steps)
        return self._run(plan)

    def end(self, tx: TxId) -> None:
        """The transaction is decided."""
        self.plans.pop(tx, None)

    def on_step(self, link: NodeId, message: TxStep) -> list[Effect]:
        """An operation, from the site that issues it or from a neighbour."""
        plan, place = self.plans.get(message.step.tx), message.step.planned
        if plan is None or not 0 <= place < len(plan.steps) or place in plan.arrived:
            return []
        from_site = link not in self._steps.routes.neighbours
        if from_site and not _is_planned(plan.steps[place], message, link):
            return []  # the site issues something else than what it was asked to
        plan.arrived[place] = (link, message)
        return self._run(plan)

    def on_processed(self, link: NodeId, marker: StepProcessed) -> list[Effect]:
        """An operation was processed behind a link and is not routed to here."""
        plan = self.plans.get(marker.tx)
        if plan is None or marker.epoch != plan.epoch:
            return []
        return self._processed(plan, marker.planned, {link}) + self._run(plan)

    def on_done(self, work: Work, pending: Pending) -> list[Effect]:
        """An advertisement, and everything that it attracted, is done behind this broker."""
        plan, routes = self.plans.get(work.tx), self._steps.routes
        if plan is None:
            return []
        if pending.link in routes.neighbours:
            return [SendOnLink(pending.link, StepDone(tx=work.tx, op=pending.step.op, rejection=pending.rejection))]
        work.rejection = work.rejection or pending.rejection
        return self._processed(plan, pending.step.planned, set()) + self._run(plan)

    def _run(self, plan: Progress) -> list[Effect]:
        """Process whatever may be processed, in the order of the plan."""
        effects: list[Effect] = []
        waiting = True
        while waiting:
            waiting = False
            for place in sorted(plan.arrived.keys() - plan.processed):
                link, message = plan.arrived[place]
                if message.step.op not in plan.work.pending and plan.may_process(place):
                    done_before = len(plan.work.executed)
                    effects += self._process(plan, place, link, message)
                    waiting = len(plan.work.executed) > done_before or waiting
        if plan.complete and self.plans.get(plan.work.tx) is plan:
            effects += self._completed(plan.work)
        return effects

    def _process(self, plan: Progress, place: int, link: NodeId, message: TxStep) -> list[Effect]:
        if isinstance(message, RouteStep) and message.route.kind is ADVERTISEMENT:
            if any(done.message is message for done in plan.work.executed):
                return []  # acknowledged already; its marker is on its way
            return self._steps.process(plan.work, link, message)
        withdrawn = self._steps.forget_former(message)
        _, onward = self._steps.execute(plan.work, link, message)
        sendings: list[Effect] = [SendOnLink(to, routed) for to, routed in onward]
        return withdrawn + sendings + self._processed(plan, place, {link, *(to for to, _ in onward)})

    def _processed(self, plan: Progress, place: int, but: set[NodeId]) -> list[Effect]:
        """Mark an operation here and at the neighbours that it does not go to."""
        if place in plan.processed:
            return []
        plan.processed.add(place)
        marker = StepProcessed(tx=plan.work.tx, epoch=plan.epoch, planned=place)
        return [SendOnLink(link, marker) for link in self._steps.routes.neighbours if link not in but]


def _is_planned(planned: PlannedStep, message: TxStep, issuer: NodeId) -> bool:
    """Whether a site issues what the plan says, in its own name."""
    if planned.issuer != issuer:
        return False
    if isinstance(message, EventStep):
        kind = PlannedKind.TCM if message.tcm else PlannedKind.PUBLISH
        return planned.kind is kind and (message.event.type, message.event.body) == (planned.event_type, planned.body)
    adds = planned.kind in (PlannedKind.ADVERTISE, PlannedKind.SUBSCRIBE)
    advertises = planned.kind in (PlannedKind.ADVERTISE, PlannedKind.UNADVERTISE)
    route = message.route
    if message.added != adds or (route.kind is ADVERTISEMENT) != advertises:
        return False
    same = route.event_type == planned.event_type
    return same and (route.filter == planned.filter if adds else route.key == planned.key)
