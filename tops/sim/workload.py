"""The work of the applications of a simulated cluster: every kind of transaction, at random times."""

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import msgspec

from tops.model.constraints import (
    AnyConstraint,
    AtLeast,
    Deadline,
    MaxParticipants,
    MinParticipants,
    OnlyFrom,
    Required,
)
from tops.model.errors import OutcomeUnknown, TopsError, TransactionAborted, TransactionClosed, UncheckedTransaction
from tops.model.event_types import EventType
from tops.model.ids import TxId
from tops.model.transactions import Access, LocalOutcome, Outcome, ScopeLimit, TxType
from tops.protocol.effects import Effect
from tops.protocol.messages import CensusPolicy, Definitions, Event, GetOutcome, TxSpec
from tops.sim.history import TxHistory
from tops.sim.site_app import MakeRequest, Script, SiteApp, Sleep

if TYPE_CHECKING:
    from tops.sim.world import World

ATTRIBUTES: dict[str, type] = {"mark": str, "key": str, "bad": bool}
PLAIN = EventType("plain", ATTRIBUTES, optional=("bad",))
CHILD = EventType("plain.child", {}, parent="plain")
OTHER = EventType("other", ATTRIBUTES, optional=("bad",))
OTHER_CHILD = EventType("other.child", {}, parent="other")
LOG = EventType("log", ATTRIBUTES, durable=True, optional=("bad",))
SET = EventType("set", ATTRIBUTES, durable=True, optional=("bad",))

DEFINITIONS: dict[str, Definitions] = {
    "plain": (PLAIN,),
    "plain.child": (PLAIN, CHILD),
    "other": (OTHER,),
    "other.child": (OTHER, OTHER_CHILD),
    "log": (LOG,),
    "set": (SET,),
}
KEYS = ("a", "b", "c")
Steps = Generator[MakeRequest | Sleep, Any, Any]


class Workload:
    """Starts scripts at random sites until it is stopped."""

    def __init__(self, world: "World", pace_s: float) -> None:
        self.world, self.pace_s = world, pace_s
        self.active = True
        self._marks = 0

    def start(self) -> None:
        def go() -> None:
            if self.active:
                app = self.world.rng.choice(self.world.apps())
                app.run(self._script(app))
                self.world.clock.after(self.world.rng.expovariate(1 / self.pace_s), go)

        self.world.clock.after(0.5, go)

    def _script(self, app: SiteApp) -> Script:
        rng = self.world.rng
        kind = rng.choices(
            [self.publish, self.interactive, self.one_shot, self.one_shot_on_set, self.burst_on_set, self.curious],
            [2, 4, 2, 3, 0.5, 1],
        )[0]
        return kind(app)

    # --------------------------------------------------------------------------------------------------------- parts

    def event(self, event_type: str) -> Event:
        self._marks += 1
        body: dict[str, Any] = {"mark": f"m{self._marks}", "key": self.world.rng.choice(KEYS)}
        if event_type == "set" and self.world.rng.random() < 0.1:
            body["bad"] = True
        event = self.world.history.events[body["mark"]] = Event(event_type, body)
        return event

    def _one_of(self, app: SiteApp, *event_types: str) -> str:
        """One of these types that the site has advertised, if there is any."""
        advertised = {definitions[-1].name for definitions in app.advertises}
        return self.world.rng.choice([t for t in event_types if t in advertised] or event_types)

    def publish(self, app: SiteApp) -> Script:
        """Ordinary events, of durable types too."""
        for _ in range(self.world.rng.randint(1, 3)):
            event = self.event(self._one_of(app, "plain", "plain.child", "other", "other.child", "log", "set"))
            publish = app.gather_event if self.world.gathers else app.publish
            number = yield lambda request, event=event, publish=publish: publish(request, event)  # type: ignore[misc]
            if event.type in ("log", "set"):
                self.world.history.confirmed.setdefault(event.type, []).append((number or 0, event.body["mark"]))

    def spec(self, event_type: str, tx_type: TxType, access: Access) -> TxSpec:
        rng = self.world.rng
        durable = event_type in ("log", "set")
        limits = [ScopeLimit.NONE, ScopeLimit.LOCAL]
        if tx_type is TxType.DISTRIBUTED:
            limits.append(ScopeLimit.DISTRIBUTED)
        follows = tx_type is TxType.DISTRIBUTED and (durable or rng.random() < 0.3)
        return TxSpec(
            event_type,
            tx_type,
            access=access,
            limit=ScopeLimit.LOCAL if durable else rng.choice(limits),
            constraints=self._constraints() if tx_type is TxType.DISTRIBUTED else (),
            attributes={"mark": "", "key": rng.choice(KEYS)},
            local_outcome=LocalOutcome.FOLLOWS if follows else LocalOutcome.INDEPENDENT,
            census=rng.choice(
                [CensusPolicy(timeout_s=0.1), CensusPolicy(timeout_s=0.3, replies=2), CensusPolicy(0.5, when_met=True)]
            ),
            vote_timeout_s=1.0,
            decide_within_s=8.0,
        )

    def _constraints(self) -> tuple[AnyConstraint, ...]:
        rng, sites = self.world.rng, sorted(self.world.sites)
        some = frozenset(rng.sample(sites, min(3, len(sites))))
        return rng.choice(
            [
                (),
                (),
                (MinParticipants(1),),
                (MinParticipants(2),),
                (MinParticipants(1), MaxParticipants(2)),
                (AtLeast(1, some),),
                (AtLeast(2, some), OnlyFrom(some)),
                (Required(frozenset(sorted(some)[:1])),),
                (MinParticipants(1), Deadline(rng.choice([0.5, 3.0]))),
            ]
        )

    def interactive(self, app: SiteApp) -> Script:
        """Begin, some events, then commit or abort."""
        rng = self.world.rng
        tx_type = rng.choice([TxType.LOCAL, TxType.DISTRIBUTED, TxType.DISTRIBUTED])
        access = rng.choice([Access.PRIVATE, Access.PRIVATE, Access.PUBLIC])
        event_type = self._one_of(app, "plain", "plain", "plain.child", "other", "log", "set")
        if event_type == "set" and rng.random() < 0.8:
            tx_type = TxType.DISTRIBUTED
        spec = self.spec(event_type, tx_type, access)
        may_enlist = tx_type is TxType.DISTRIBUTED and access is Access.PRIVATE and rng.random() < 0.4
        own = app.own_resources() if may_enlist else None
        try:
            tx = yield lambda request: app.site.core.begin(request, spec, own)
        except TopsError:
            return
        history = TxHistory(tx, spec, app.site.name, [])
        self.world.history.transactions[tx] = history
        try:
            try:
                yield from self._events(app, tx, history)
                changed_its_mind = rng.random() < 0.15
            except TransactionClosed:  # it has ended; an abort returns its outcome
                changed_its_mind = True
            if changed_its_mind:
                history.aborted_by_publisher = True
                outcome = yield lambda request: app.site.core.abort(request, tx, "changed its mind")
            else:
                outcome = yield from self._commit(app, tx)
            self.world.history.record_outcome(tx, "committed" if outcome.outcome is Outcome.COMMITTED else "aborted")
        except TransactionAborted:
            self.world.history.record_outcome(tx, "aborted")
        except OutcomeUnknown:
            self.world.history.record_outcome(tx, "unknown")

    def _events(self, app: SiteApp, tx: TxId, history: TxHistory) -> Steps:
        rng = self.world.rng
        for _ in range(rng.randint(0, 4)):
            # Events of any type travel under the transaction's own.
            event = self.event(history.spec.event_type if rng.random() < 0.8 else "other")
            yield lambda request, event=event: app.site.core.tx_publish(request, tx, event)  # type: ignore[misc]
            history.marks.append(event.body["mark"])
            if rng.random() < 0.3:
                yield Sleep(rng.uniform(0, 0.5))

    def _commit(self, app: SiteApp, tx: TxId) -> Steps:
        for _ in range(3):
            try:
                return (yield lambda request: app.site.core.commit(request, tx))
            except UncheckedTransaction:
                if self.world.rng.random() < 0.5:
                    return (yield lambda request: app.site.core.abort(request, tx, "waited long enough"))
        return (yield lambda request: app.site.core.abort(request, tx, "waited long enough"))

    def contribution(self, app: SiteApp, tx: TxId, spec: TxSpec) -> Script:
        """A participant of a public transaction publishes in it as well."""
        yield Sleep(self.world.rng.uniform(0.2, 1.0))
        app.site.core.contribute(tx, spec)
        event = self.event(spec.event_type)
        try:
            yield lambda request: app.site.core.tx_publish(request, tx, event)
        finally:
            if app.site.up and self.world.rng.random() < 0.8:
                app.site.act(lambda: app.site.core.done(tx))

    def one_shot(self, app: SiteApp) -> Script:
        """Everything in one message: with a census, with standing registrations, or logged first; some together."""
        rng = self.world.rng
        if rng.random() < 0.3:
            event_type, tx_type = self._one_of(app, "plain", "log", "set", "set"), TxType.LOCAL
        else:
            event_type, tx_type = self._one_of(app, "plain", "other", "other", "other.child"), TxType.DISTRIBUTED
        spec = self.spec(event_type, tx_type, Access.PRIVATE)
        if event_type != "plain":
            spec = _standing_only(spec)
        bundle = OneShotBundle(rng.choice([1, 1, 3]))
        for _ in range(bundle.size_max):
            events = [self.event(event_type) for _ in range(rng.randint(1, 3))]
            app.run(self._execute(app, spec, events, bundle))
        yield Sleep(0)

    def one_shot_on_set(self, app: SiteApp) -> Script:
        """A replicated write."""
        return self._execute(app, self._replicated_write(), self._written(), OneShotBundle(1))

    def burst_on_set(self, app: SiteApp) -> Script:
        """Many replicated writes at once: they share epochs, and those of one kind a message."""
        bundle, spec = OneShotBundle(self.world.rng.randint(1, 5)), self._replicated_write()
        for _ in range(bundle.size_max):
            app.run(self._execute(app, spec, self._written(), bundle))
        for _ in range(self.world.rng.randint(2, 5)):
            app.run(self.one_shot_on_set(app))
        yield Sleep(0)

    def _replicated_write(self) -> TxSpec:
        replicas = frozenset(self.world.replicas)
        enough = self.world.rng.choice([1, len(replicas) // 2 + 1, len(replicas)])
        return TxSpec(
            "set",
            TxType.DISTRIBUTED,
            limit=ScopeLimit.LOCAL,
            constraints=(AtLeast(enough, replicas), OnlyFrom(replicas)),
            attributes={"mark": "", "key": "a"},
            local_outcome=LocalOutcome.FOLLOWS,
            census=None,
            decide_when_met=1 < enough < len(replicas),
        )

    def _written(self) -> list[Event]:
        return [self.event("set") for _ in range(self.world.rng.randint(1, 2))]

    def _execute(self, app: SiteApp, spec: TxSpec, events: list[Event], bundle: "OneShotBundle") -> Script:
        """A one-shot that is sent when its bundle is complete."""
        started: list[TxId] = []

        def begun(tx: TxId) -> None:
            started.append(tx)
            marks = [e.body["mark"] for e in events]
            self.world.history.transactions[tx] = TxHistory(tx, spec, app.site.name, marks)

        try:
            outcome = yield lambda request: bundle.add(app, spec, Wanted(request, tuple(events), begun))
            self.world.history.record_outcome(started[0], outcome.outcome.value)
        except TransactionAborted as aborted:
            self.world.history.record_outcome(TxId(aborted.tx), "aborted")
        except OutcomeUnknown as unknown:
            self.world.history.record_outcome(TxId(unknown.tx), "unknown")

    def curious(self, app: SiteApp) -> Script:
        """A site requests the outcome of any transaction."""
        known = [t for t in self.world.history.transactions.values() if t.publisher == app.site.name]
        if not known:
            return
        chosen = self.world.rng.choice(known)
        query = GetOutcome(tx=chosen.tx, tx_type=chosen.spec.tx_type, event_type=chosen.spec.event_type)
        outcome = yield lambda request: app.site.core.get_outcome(request, query)
        if outcome.outcome is not Outcome.UNKNOWN:
            self.world.history.outcomes.setdefault(chosen.tx, set()).add(outcome.outcome.value)


BODY_BYTES = 100  # about what an event of the workload takes


class Wanted(msgspec.Struct, frozen=True):
    """A one-shot that waits for its bundle."""

    request: int
    events: tuple[Event, ...]
    begun: Callable[[TxId], None]


class OneShotBundle:
    """One-shots of one kind that a site sends together."""

    def __init__(self, size_max: int) -> None:
        self.size_max = size_max
        self._wanted: list[Wanted] = []

    def add(self, app: SiteApp, spec: TxSpec, wanted: Wanted) -> list[Effect]:
        self._wanted.append(wanted)
        if len(self._wanted) < self.size_max:
            return []
        core = app.site.core
        before = set(core.transactions)
        effects: list[Effect] = []
        for each in self._wanted:
            effects += core.gathering.add_one_shot(each.request, spec, each.events, BODY_BYTES * len(each.events))
        effects += core.gathering.send()
        for each, tx in zip(self._wanted, [tx for tx in core.transactions if tx not in before], strict=False):
            each.begun(tx)
        return effects


def _standing_only(spec: TxSpec) -> TxSpec:
    return TxSpec(
        spec.event_type,
        spec.tx_type,
        limit=spec.limit,
        constraints=spec.constraints,
        attributes=spec.attributes,
        local_outcome=spec.local_outcome,
        census=None,
        vote_timeout_s=spec.vote_timeout_s,
        decide_within_s=spec.decide_within_s,
        decide_when_met=spec.decide_when_met,
    )
