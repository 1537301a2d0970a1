"""Routing transactions at one site: those that it begins, and those of others that it takes part in.

Operations are issued one after the other: an acknowledgement of one means that every broker has processed it and what
it triggered. A tcm that arrives opens a *turn* of its own: its operations come one after the other as well, and the tcm
is acknowledged after them, also while the same site waits for a tcm of its own.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from tops.core.participant.calls import Calls
from tops.core.routing_tx.site_routes import SiteRoutes
from tops.model.errors import NoReceiver, TopsError, TransactionAborted, TransactionClosed, TransactionConflict
from tops.model.ids import NodeId, TxId
from tops.model.rejections import Rejection, RejectionCode
from tops.model.routing import RouteKind, TxKind, number_of
from tops.protocol.effects import (
    CancelTimer,
    CompleteRequest,
    Deliver,
    Effect,
    PlannedSubscription,
    SendTo,
    SetTimer,
    TakeTcm,
    TxEnded,
)
from tops.protocol.messages import (
    NOT_PLANNED,
    Address,
    AskRoutingTx,
    BeginRoutingTx,
    EndRoutingTx,
    Event,
    EventStep,
    PlannedKind,
    PlannedStep,
    PlanStarted,
    PrepareRoutingTx,
    RouteStep,
    RoutingTxBegan,
    RoutingTxDecided,
    RoutingTxEnded,
    RoutingTxVoted,
    Step,
    StepDone,
    TreeMessage,
)

TIMER: Final = "routing"
ASK_AGAIN_S: Final = 1.0
HOLD_AFTER: Final = 3  # conflicts in a row
OWN_TURN: Final = ""
PLANNED_FIRST: Final = 2**40  # numbers of routes that a plan makes; those of the application are below
LEFT: Final = Rejection(RejectionCode.PUBLISHER_LOST, "the site lost its broker during the transaction")
NO_PLANS: Final = Rejection(RejectionCode.PARTICIPANT_FAILED, "the site takes part in no plans")


class Issued(msgspec.Struct):
    """An operation that waits for its acknowledgement, or for its turn."""

    request: int
    message: RouteStep | EventStep


class Turn(msgspec.Struct):
    """Operations that are issued one after the other: the initiator's, or what a tcm triggered."""

    queue: deque[Issued] = msgspec.field(default_factory=deque)
    under_way: Issued | None = None
    calls: int = 0  # participants that are at the tcm


class Participation(msgspec.Struct):
    """One transaction at this site."""

    tx: TxId
    kind: TxKind
    own: bool = False
    base: int = 0
    hold: bool = False
    turns: dict[str, Turn] = {}
    events: list[EventStep] = []  # for the application, once it has committed
    rejection: Rejection | None = None  # why this site votes to abort
    voted: bool = False
    beginning: int | None = None  # the request that waits until operations may be issued
    ending: int | None = None  # the request that waits for the outcome
    end_asked: bool = False

    @property
    def in_doubt(self) -> bool:
        """Whether only the coordinator knows how it ends."""
        return self.voted or self.end_asked


class SiteTransactions:
    """The routing transactions of one site."""

    def __init__(
        self, name: NodeId, coordinator: NodeId, routes: SiteRoutes, calls: Calls, send: Callable[[TreeMessage], Effect]
    ) -> None:
        self.name, self.routes, self._calls, self._send = name, routes, calls, send
        self.coordinator = Address(coordinator)
        self.open: dict[TxId, Participation] = {}
        self.accepts_plans = False
        self._count = 0
        self._operations = 0
        self._planned = PLANNED_FIRST

    # ------------------------------------------------------------------------------------------------ the initiator

    def begin(self, request: int, kind: TxKind, timeout_s: float, attempt: int = 0) -> list[Effect]:
        """Begin a dynamic transaction; answered with its id when operations may be issued."""
        if not self.routes.registered:
            return [CompleteRequest(request, error=TransactionConflict("", LEFT))]
        one = self._new(kind)
        one.hold = attempt >= HOLD_AFTER
        one.turns[OWN_TURN] = Turn()
        effects: list[Effect] = [
            SendTo(self.coordinator, BeginRoutingTx(tx=one.tx, kind=kind, timeout_s=timeout_s, attempt=attempt)),
            SetTimer((TIMER, one.tx), timeout_s),
        ]
        if kind is TxKind.ISOLATED:
            one.beginning = request  # it learns which commit it begins behind
            return effects
        return [*effects, CompleteRequest(request, one.tx)]

    def execute(self, request: int, steps: tuple[PlannedStep, ...], timeout_s: float) -> list[Effect]:
        """Run a static plan; answered with its id when it has committed."""
        if not self.routes.registered:
            return [CompleteRequest(request, error=TransactionConflict("", LEFT))]
        one = self._new(TxKind.STATIC)
        one.ending, one.end_asked = request, True
        begin = BeginRoutingTx(tx=one.tx, kind=one.kind, timeout_s=timeout_s, steps=steps)
        return [SendTo(self.coordinator, begin), SetTimer((TIMER, one.tx), timeout_s)]

    def _new(self, kind: TxKind) -> Participation:
        self._count += 1
        tx = TxId(f"{self.routes.client}.r{self._count}")
        one = self.open[tx] = Participation(tx, kind, own=True)
        return one

    def on_began(self, began: RoutingTxBegan) -> list[Effect]:
        """Operations may be issued."""
        one = self.open.get(began.tx)
        if one is None or one.beginning is None:
            return []
        one.base, request, one.beginning = began.base, one.beginning, None
        return [CompleteRequest(request, one.tx)]

    def end(self, request: int, tx: TxId, rejection: Rejection | None = None) -> list[Effect]:
        """Commit, or abort with a reason; answered with the outcome."""
        one = self.open.get(tx)
        if one is None or one.end_asked or not one.own:
            return [CompleteRequest(request, error=TransactionClosed(tx, "ended"))]
        rejection = rejection or one.rejection
        one.ending, one.end_asked = request, True
        return [SendTo(self.coordinator, EndRoutingTx(tx=tx, commit=rejection is None, rejection=rejection))]

    # ---------------------------------------------------------------------------------------------------- operations

    def change_route(self, request: int, tx: TxId, turn: str, number: int, *, added: bool) -> list[Effect]:
        """adv, unadv, sub or unsub; the route of an addition is among the site's own already. Answered when every
        broker that it concerns has processed it."""
        one, own = self.open.get(tx), self.routes.own.get(number)
        if one is None or own is None:
            return [CompleteRequest(request, error=TransactionClosed(tx, "ended"))]
        if not added:
            if (problem := self.routes.problem_with_removal(number, tx)) is not None:
                return [CompleteRequest(request, error=problem)]
            own.removed_by = tx
        route = self.routes.route(own)
        return self._issue(request, one, turn, RouteStep(step=self._step(one), route=route, added=added))

    def publish(self, request: int, tx: TxId, turn: str, event: Event, *, tcm: bool) -> list[Effect]:
        """pub or tcm; answered when it has reached all brokers, and of a tcm when its receivers are done."""
        one = self.open.get(tx)
        if one is None:
            return [CompleteRequest(request, error=TransactionClosed(tx, "ended"))]
        if (problem := self.routes.problem_with_publication(event, tx)) is not None:
            return [CompleteRequest(request, error=problem)]
        return self._issue(request, one, turn, EventStep(step=self._step(one), event=event, tcm=tcm))

    def _step(self, one: Participation, planned: int = NOT_PLANNED) -> Step:
        self._operations += 1
        op = f"{self.routes.client}/{self._operations}"
        return Step(one.tx, one.kind, op, base=one.base, planned=planned, hold=one.hold)

    def _issue(self, request: int, one: Participation, name: str, message: RouteStep | EventStep) -> list[Effect]:
        turn = one.turns.get(name)
        if turn is None or one.end_asked:
            return [CompleteRequest(request, error=TransactionClosed(one.tx, "ending"))]
        if one.rejection is not None:
            return [CompleteRequest(request, error=error_of(one.tx, one.rejection))]
        turn.queue.append(Issued(request, message))
        return self._next(turn)

    def _next(self, turn: Turn) -> list[Effect]:
        if turn.under_way is not None or not turn.queue:
            return []
        turn.under_way = turn.queue.popleft()
        return [self._send(turn.under_way.message)]

    def on_done(self, done: StepDone) -> list[Effect]:
        """An operation of this site is processed everywhere, with all that it triggered."""
        one = self.open.get(done.tx)
        found = next(
            ((n, t) for n, t in one.turns.items() if t.under_way and t.under_way.message.step.op == done.op), None
        ) if one is not None else None  # fmt: skip
        if one is None or found is None or found[1].under_way is None:
            return []
        name, turn = found
        issued, turn.under_way = found[1].under_way, None
        message = issued.message
        rejection = done.rejection
        if rejection is None and isinstance(message, EventStep) and message.tcm and not done.reached:
            text = f"the tcm of type {message.event.type!r} reached no client"
            rejection = Rejection(RejectionCode.NO_RECEIVER, text)
        if rejection is None:
            return [CompleteRequest(issued.request, done.reached), *self._next(turn), *self._finish_tcm(one, name)]
        one.rejection = one.rejection or rejection
        failed = [issued, *turn.queue]
        turn.queue.clear()
        answers: list[Effect] = [CompleteRequest(each.request, error=error_of(one.tx, rejection)) for each in failed]
        return answers + self._finish_tcm(one, name)

    # --------------------------------------------------------------------------------------------------- participants

    def on_event(self, message: EventStep) -> list[Effect]:
        """A publication of a transaction, which waits for the commit, or a tcm, which is acted on now."""
        step = message.step
        one = self.open.get(step.tx)
        if one is None:
            one = self.open[step.tx] = Participation(step.tx, step.kind)
        one.base, one.hold = max(one.base, step.base), one.hold or step.hold
        if step.planned != NOT_PLANNED:
            one.events.append(message)
            return []
        if not message.tcm:
            one.events.append(message)
            return [self._send(StepDone(tx=step.tx, op=step.op, reached=1))]
        one.turns[step.op] = Turn(calls=len(message.subscriptions))
        effects: list[Effect] = []
        for number in message.subscriptions:
            call = self._calls.open(lambda reason: self._tcm_returned(step.tx, step.op, reason))
            effects.append(TakeTcm(number, call, step.tx, step.op, message.event))
        return effects

    def _tcm_returned(self, tx: TxId, op: str, reason: object) -> list[Effect]:
        one = self.open.get(tx)
        turn = one.turns.get(op) if one is not None else None
        if one is None or turn is None:
            return []
        turn.calls -= 1
        if reason is not None:
            one.rejection = one.rejection or Rejection(RejectionCode.PARTICIPANT_FAILED, str(reason))
        return self._finish_tcm(one, op)

    def _finish_tcm(self, one: Participation, op: str) -> list[Effect]:
        """A tcm is done when its receivers are, and every operation that they issued."""
        turn = one.turns[op]
        if op == OWN_TURN or turn.calls or turn.under_way is not None or turn.queue:
            return []
        del one.turns[op]
        return [self._send(StepDone(tx=one.tx, op=op, reached=1, rejection=one.rejection))]

    def on_plan(self, started: PlanStarted) -> list[Effect]:
        """A static transaction in which this site issues operations: all at once, brokers keep their order."""
        one = self.open.get(started.tx)
        if one is None:
            one = self.open[started.tx] = Participation(started.tx, TxKind.STATIC)
        if not self.routes.registered or not (self.accepts_plans or one.own):
            rejection = NO_PLANS if self.routes.registered else LEFT
            return [self._send(StepDone(tx=one.tx, op="", rejection=rejection))]
        effects: list[Effect] = []
        for place, planned in enumerate(started.steps):
            if planned.issuer == self.name and one.rejection is None:
                effects += self._issue_planned(one, place, planned)
        if one.rejection is not None:
            effects.append(self._send(StepDone(tx=one.tx, op="", rejection=one.rejection)))
        return effects

    def _issue_planned(self, one: Participation, place: int, planned: PlannedStep) -> list[Effect]:
        step, kind = self._step(one, place), planned.kind
        if kind in (PlannedKind.PUBLISH, PlannedKind.TCM):
            event = Event(planned.event_type, planned.body)
            if (problem := self.routes.problem_with_publication(event, one.tx)) is not None:
                one.rejection = Rejection(RejectionCode.INVALID, str(problem))
                return []
            return [self._send(EventStep(step=step, event=event, tcm=kind is PlannedKind.TCM))]
        if kind in (PlannedKind.UNADVERTISE, PlannedKind.UNSUBSCRIBE):
            number = number_of(planned.key) if planned.key.startswith(f"{self.routes.client}#") else -1
            if (problem := self.routes.problem_with_removal(number, one.tx)) is not None:
                one.rejection = Rejection(RejectionCode.INVALID, str(problem))
                return []
            own = self.routes.own[number]
            own.removed_by = one.tx
            return [self._send(RouteStep(step=step, route=self.routes.route(own), added=False))]
        self._planned += 1
        route_kind = RouteKind.ADVERTISEMENT if kind is PlannedKind.ADVERTISE else RouteKind.SUBSCRIPTION
        own = self.routes.add(self._planned, route_kind, planned.event_type, planned.filter, one.tx)
        issued: list[Effect] = [self._send(RouteStep(step=step, route=self.routes.route(own), added=True))]
        if route_kind is RouteKind.SUBSCRIPTION:
            issued.insert(0, PlannedSubscription(own.number, one.tx, own.event_type, own.filter))
        return issued

    def on_prepare(self, prepare: PrepareRoutingTx) -> list[Effect]:
        """Vote. From here on only the coordinator ends the transaction."""
        one = self.open.get(prepare.tx)
        rejection = LEFT if one is None else one.rejection
        if one is not None:
            one.voted = rejection is None
        return [self._send(RoutingTxVoted(tx=prepare.tx, epoch=prepare.epoch, rejection=rejection))]

    # -------------------------------------------------------------------------------------------------------- outcome

    def on_decided(self, decided: RoutingTxDecided | RoutingTxEnded) -> list[Effect]:
        """The coordinator has decided; what was published is delivered now, in order."""
        one = self.open.pop(decided.tx, None)
        if one is None:
            return []
        if not decided.committed:
            return self._aborted(one, decided.rejection or one.rejection or LEFT)
        self.routes.committed(one.tx, versions=one.kind is TxKind.ISOLATED)
        if one.kind is TxKind.STATIC:
            one.events.sort(key=lambda message: message.step.planned)
        effects: list[Effect] = [
            Deliver(number, message.event, one.tx) for message in one.events for number in message.subscriptions
        ]
        return [*effects, TxEnded(one.tx, True, ""), *self._answers(one, None)]

    def _aborted(self, one: Participation, rejection: Rejection) -> list[Effect]:
        self.routes.aborted(one.tx)
        return [TxEnded(one.tx, False, str(rejection)), *self._answers(one, rejection)]

    def _answers(self, one: Participation, rejection: Rejection | None) -> list[Effect]:
        """Nobody waits for a transaction that has ended."""
        error = None if rejection is None else error_of(one.tx, rejection)
        waiting = [issued.request for turn in one.turns.values() for issued in turn.queue]
        waiting += [turn.under_way.request for turn in one.turns.values() if turn.under_way is not None]
        closed = error or TransactionClosed(one.tx, "committed")
        answers: list[Effect] = [CompleteRequest(request, error=closed) for request in waiting]
        if one.beginning is not None:
            answers.append(CompleteRequest(one.beginning, error=closed))
        if one.ending is not None:
            answers.append(CompleteRequest(one.ending, one.tx, error))
        return [CancelTimer((TIMER, one.tx)), *answers] if one.own else answers

    # ---------------------------------------------------------------------------------------------------- link, time

    def doubts(self) -> list[Participation]:
        """Transactions whose outcome is to be asked for."""
        return [one for one in self.open.values() if one.in_doubt]

    def reconnected(self) -> list[Effect]:
        """The site is at a broker that knows nothing of it: it has left every transaction that it had not voted for."""
        effects: list[Effect] = []
        for one in [one for one in self.open.values() if not one.in_doubt]:
            del self.open[one.tx]
            if one.own:
                effects.append(SendTo(self.coordinator, EndRoutingTx(tx=one.tx, commit=False, rejection=LEFT)))
            effects += self._aborted(one, LEFT)
        return effects + self.ask()

    def ask(self) -> list[Effect]:
        """Ask for the outcomes that are in doubt."""
        return [SendTo(self.coordinator, AskRoutingTx(tx=one.tx)) for one in self.doubts()]

    def on_timer(self, tx: TxId) -> list[Effect]:
        """A transaction of this site has had its time."""
        one = self.open.get(tx)
        if one is None:
            return []
        again = SetTimer((TIMER, tx), ASK_AGAIN_S)
        if one.end_asked:
            return [SendTo(self.coordinator, AskRoutingTx(tx=tx)), again]
        one.end_asked = True
        one.rejection = one.rejection or Rejection(RejectionCode.TIMED_OUT, "it was not ended in time")
        return [SendTo(self.coordinator, EndRoutingTx(tx=tx, commit=False, rejection=one.rejection)), again]


def error_of(tx: TxId, rejection: Rejection) -> TopsError:
    """What the application gets for a rejection."""
    match rejection.code:
        case RejectionCode.NO_RECEIVER:
            return NoReceiver(tx, rejection)
        case RejectionCode.CONFLICT | RejectionCode.RESTARTED:
            return TransactionConflict(tx, rejection)
    return TransactionAborted(tx, rejection)
