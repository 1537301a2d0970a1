"""Operations of transactions at one broker: their marks in the tables, what they trigger, and their acknowledgements.

    step arrives ──► marks, what it triggers is sent ──► all of that is done ──► the step is sent on ──► all of that is
    done ──► StepDone to where the step came from

A step is sent on only after what it triggered is done, and an acknowledgement means that everything behind a link is
done. So whoever waits for it knows that every broker has processed the step before anything that follows.
"""

from collections.abc import Callable

import msgspec

from tops.core.routing_tx.conflicts import ABSENT, Executed, result_of
from tops.core.routing_tx.tables import AT_ONCE, Entry, Mark, View
from tops.core.routing_tx.tree_routes import ADVERTISEMENT, TreeRoutes
from tops.model.ids import NodeId, TxId
from tops.model.rejections import Rejection, RejectionCode
from tops.model.routing import RouteKey, TxKind
from tops.protocol.effects import Effect, SendOnLink
from tops.protocol.messages import NOT_PLANNED, EventStep, Route, RouteStep, Step, StepDone

TxStep = RouteStep | EventStep
Sending = tuple[NodeId, TxStep]


class Pending(msgspec.Struct):
    """A step that is not done: what it waits for, and what is to be sent on then."""

    step: Step
    link: NodeId
    waiting: set[tuple[NodeId, str]] = set()  # links and operations
    onward: list[Sending] = []
    reached: int = 0
    rejection: Rejection | None = None


class Work:
    """What one broker keeps of one transaction that is not decided."""

    def __init__(self, tx: TxId, kind: TxKind, hold: bool = False) -> None:
        self.tx, self.kind, self.hold = tx, kind, hold
        self.executed: list[Executed] = []
        self.routes: dict[RouteKey, Route] = {}  # of all entries with a mark of this transaction, or sent because of it
        self.sent: dict[tuple[RouteKey, NodeId], bool] = {}  # what neighbours have, or no longer have, because of it
        self.pending: dict[str, Pending] = {}
        self.sites: set[NodeId] = set()  # of this broker, that issued or received something
        self.rejection: Rejection | None = None  # why this broker votes to abort

    def has(self, entry: Entry, link: NodeId) -> bool:
        """Whether a neighbour has an entry from here, as this transaction sees it."""
        return self.sent.get((entry.route.key, link), link in entry.sent)

    def link_reset(self, link: NodeId) -> None:
        """A neighbour has lost what it had from here."""
        self.sent = {(key, to): present for (key, to), present in self.sent.items() if to != link}


class Steps:
    """Executes and acknowledges the steps of transactions on one broker's tables."""

    def __init__(self, routes: TreeRoutes, done: Callable[[Work, Pending], list[Effect]]) -> None:
        """`done` is called with each step that is done, for whoever waits for it."""
        self.routes, self._done = routes, done

    def process(self, work: Work, link: NodeId, message: TxStep) -> list[Effect]:
        """Execute a step; the link that it came from gets an acknowledgement when all of it is done."""
        step = message.step
        withdrawn = self.forget_former(message)
        triggered, onward = self.execute(work, link, message)
        pending = work.pending[step.op] = Pending(step, link, onward=onward, rejection=self._problem(work, link))
        if not triggered:
            return withdrawn + self._go_on(work, pending)
        pending.waiting = {(to, sent.step.op) for to, sent in triggered}
        return [*withdrawn, *(SendOnLink(to, sent) for to, sent in triggered)]

    def _problem(self, work: Work, link: NodeId) -> Rejection | None:
        executed = work.executed[-1]
        if executed.result == ABSENT and link not in self.routes.neighbours:
            return Rejection(RejectionCode.INVALID, "the client has no such advertisement or subscription")
        return None

    def on_done(self, work: Work, link: NodeId, done: StepDone) -> list[Effect]:
        """A neighbour or a site is done with a step, or with one that the step triggered."""
        key = (link, done.op)
        pending = next((p for p in work.pending.values() if key in p.waiting), None)
        if pending is None:
            return []
        pending.waiting.discard(key)
        pending.reached += done.reached
        pending.rejection = pending.rejection or done.rejection
        return [] if pending.waiting else self._go_on(work, pending)

    def link_lost(self, work: Work, link: NodeId, rejection: Rejection) -> list[Effect]:
        """Whoever is behind a link has left: the steps that wait for it are done, and have failed."""
        waiting = [op for p in list(work.pending.values()) for to, op in sorted(p.waiting) if to == link]
        effects: list[Effect] = []
        for op in waiting:
            effects += self.on_done(work, link, StepDone(tx=work.tx, op=op, rejection=rejection))
        return effects

    def _go_on(self, work: Work, pending: Pending) -> list[Effect]:
        """What the step triggered is done: it is sent on; when that is done as well the step is."""
        onward, pending.onward = pending.onward, []
        if onward and pending.rejection is None:
            pending.waiting = {(to, message.step.op) for to, message in onward}
            return [SendOnLink(to, message) for to, message in onward]
        del work.pending[pending.step.op]
        return self._done(work, pending)

    # ------------------------------------------------------------------------------------------------------ execution

    def forget_former(self, message: TxStep) -> list[Effect]:
        """A client that has moved may come here by a step first: what its former broker had registered is gone, whether
        the transaction commits or not."""
        if not isinstance(message, RouteStep) or not message.added:
            return []
        known = self.routes.tables.entries.get(message.route.key)
        if known is None or known.route.generation >= message.route.generation:
            return []
        return self.routes.drop(known)

    def execute(self, work: Work, link: NodeId, message: TxStep) -> tuple[list[Sending], list[Sending]]:
        """Leave the step's marks; returns the steps that it triggers, and where itself is to be sent on."""
        view = View(self.routes.number, work.tx, len(work.executed))
        result = result_of(self.routes, message, link, view)
        work.executed.append(Executed(message, link, result))
        if isinstance(message, EventStep):
            return [], self._event(work, link, message)
        known = self.routes.tables.entries.get(message.route.key)
        if message.added and self.routes.tables.is_outdated(message.route):
            work.rejection = work.rejection or Rejection(RejectionCode.CONFLICT, "a client has moved to another broker")
            return [], []
        if not message.added and (known is None or known.hop != link):
            return [], []
        # Also what another transaction removes at the moment: it may abort, and bring it back.
        entry = self._mark(work, link, message)
        if message.route.kind is not ADVERTISEMENT:
            return [], self._subscription(work, entry, message)
        triggered = [] if link not in self.routes.neighbours else self._triggered(work, link, message)
        onward: list[Sending] = [(to, message) for to in self.routes.neighbours if to != link]
        for to, _ in onward:
            work.sent[entry.route.key, to] = message.added
        return triggered, onward

    def _event(self, work: Work, link: NodeId, message: EventStep) -> list[Sending]:
        event = message.event
        view = View(self.routes.number, work.tx)
        links, sites = self.routes.destinations(event.type, event.body, view, link)
        work.sites.update(sites)
        onward: list[Sending] = [(to, message) for to in links]
        for site, numbers in sites.items():
            onward.append((site, msgspec.structs.replace(message, subscriptions=numbers)))
        return onward

    def _mark(self, work: Work, link: NodeId, message: RouteStep) -> Entry:
        route, tables = message.route, self.routes.tables
        number = None if work.kind is TxKind.ISOLATED else AT_ONCE
        work.routes[route.key] = route
        entry = tables.put(route, link, base=False) if message.added else tables.entries[route.key]
        entry.mark(work.tx, Mark(len(work.executed) - 1, message.added, number))
        return entry

    def _subscription(self, work: Work, entry: Entry, message: RouteStep) -> list[Sending]:
        """To the neighbours that advertisements came from; a removal to those that have the subscription."""
        tables, view = self.routes.tables, View(self.routes.number, work.tx)
        onward: list[Sending] = []
        for link in self.routes.neighbours:
            has = work.has(entry, link)
            if has != message.added and (has or tables.wants(entry.route, entry.hop, link, view)):
                work.sent[entry.route.key, link] = message.added
                onward.append((link, message))
        return onward

    def _triggered(self, work: Work, link: NodeId, message: RouteStep) -> list[Sending]:
        """Subscriptions that follow an advertisement to where it came from, or are withdrawn from there with it."""
        sendings: list[Sending] = []
        result = work.executed[-1].result
        for key in sorted(map(str, result)) if result != ABSENT else ():
            entry = self.routes.tables.entries[RouteKey(key)]
            work.routes[entry.route.key] = entry.route
            work.sent[entry.route.key, link] = message.added
            step = msgspec.structs.replace(message.step, op=f"{message.step.op}>{key}", planned=NOT_PLANNED)
            sendings.append((link, RouteStep(step=step, route=entry.route, added=message.added)))
        return sendings
