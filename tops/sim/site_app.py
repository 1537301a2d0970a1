"""The application at a simulated site: participants with databases, and scripts that use the site's interface.

A script is a generator: it yields requests to the site and gets the results, or an error is thrown into it.
"""

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import msgspec

from tops.core.participant.participation import Wish
from tops.model.errors import TopsError
from tops.model.ids import TxId
from tops.model.transactions import Access, Scope, granted_scope
from tops.protocol.effects import (
    AbortTxCall,
    ApplyEntries,
    Call,
    CommitTxCall,
    CompleteRequest,
    DropMemo,
    Effect,
    FinishBatch,
    JoinTx,
    NotifyTx,
    PrepareBatch,
    PrepareTx,
    TakeEvent,
)
from tops.protocol.messages import Definitions, Event, TxSpec
from tops.sim.databases import Broken, CallbackDatabase, ReplicaDatabase, WronglyApplied

if TYPE_CHECKING:
    from tops.sim.nodes import SimSite
    from tops.sim.world import World


class Sleep(msgspec.Struct, frozen=True):
    """A script does nothing for a while."""

    seconds: float


MakeRequest = Callable[[int], list[Effect]]  # a request number -> the site's effects
Script = Generator[MakeRequest | Sleep, Any, None]


class SimSubscription(msgspec.Struct):
    """A subscription of an application, with the database behind it."""

    number: int
    wish: Wish
    database: CallbackDatabase | ReplicaDatabase
    prefers: tuple[Scope, ...] = (Scope.DISTRIBUTED,)
    busy: int = 0  # calls under way
    own: bool = False  # no subscription: resources for the site's own transactions


class SiteApp:
    """The application of one site. Its subscriptions and databases survive crashes, its scripts do not."""

    def __init__(self, world: "World", advertises: tuple[Definitions, ...]) -> None:
        self.world, self.advertises = world, advertises
        self.subscriptions: dict[int, SimSubscription] = {}
        self.site: SimSite
        self._requests: dict[int, Script | None] = {}
        self._last_request = 0

    # ----------------------------------------------------------------------------------------------- start and crash

    def start(self, site: "SimSite") -> None:
        self.site = site
        for s in self.subscriptions.values():
            prepared_work, kept = s.database.prepared_work(), s.database.kept()
            if s.own:
                site.act(site.core.enlist, s.number, prepared_work, kept, s.wish.compensatable)
                continue
            self._subscribe(s)
            site.act(site.core.recover, s.number, prepared_work, kept)
        for definitions in self.advertises:
            self._request(None, lambda request, d=definitions: site.core.advertise(request, d))  # type: ignore[misc]

    def _subscribe(self, s: SimSubscription) -> None:
        wish = s.wish
        if isinstance(s.database, ReplicaDatabase):
            wish = msgspec.structs.replace(wish, replica=s.database.point)
        else:
            s.database.offered.clear()
        self._request(None, lambda request: self.site.core.subscribe(request, s.number, wish))

    def resubscribe(self, number: int, after_s: float) -> None:
        """End a subscription; subscribe again once its prepared work has ended."""
        world, incarnation = self.world, self.site.incarnation
        s = self.subscriptions[number]

        def end() -> list[Effect]:
            world.trace.add(world.clock.now, self.site.name, f"UNSUBSCRIBE {number}")
            world.clock.after(after_s, again)
            return self.site.core.unsubscribe(number)

        def again() -> None:
            if not self.site.up or self.site.incarnation != incarnation:
                return  # it subscribed when it started
            if self.site.behind or s.busy or s.database.memos():
                world.clock.after(after_s, again)
                return
            if number in self.site.core.participation.subscriptions:
                return
            world.trace.add(world.clock.now, self.site.name, f"SUBSCRIBE {number}")
            self._subscribe(s)

        self.site.act(end)

    def own_resources(self) -> int | None:
        """The number of the resources that this site can enlist in its own transactions."""
        return next((n for n, s in self.subscriptions.items() if s.own), None)

    def crash(self) -> None:
        scripts, self._requests = self._requests, {}
        for script in scripts.values():
            if script is not None:
                script.close()
        for s in self.subscriptions.values():
            s.busy = 0
            if isinstance(s.database, CallbackDatabase):
                s.database.crash()

    # ------------------------------------------------------------------------------------------------------- scripts

    def run(self, script: Script) -> None:
        if self.site.up:
            self._resume(script, lambda: next(script))
        else:
            script.close()

    def _resume(self, script: Script, step: Callable[[], MakeRequest | Sleep]) -> None:
        try:
            wanted = step()
        except StopIteration:
            return
        except TopsError as error:
            # Its frames refer to the `CompleteRequest` that refers to it, and messages are not garbage collected.
            error.__traceback__ = None
            return
        if isinstance(wanted, Sleep):
            incarnation = self.site.incarnation

            def wake() -> None:
                if self.site.up and self.site.incarnation == incarnation:
                    self._resume(script, lambda: next(script))
                else:
                    script.close()

            self.world.clock.after(wanted.seconds, wake)
            return
        self._request(script, wanted)

    def _request(self, script: Script | None, make: MakeRequest) -> None:
        self._last_request += 1
        request = self._last_request
        self._requests[request] = script
        self.site.act(make, request)

    def publish(self, request: int, event: Event) -> list[Effect]:
        """One event in a message of its own."""
        return self.site.core.publish(request, event)

    def gather_event(self, request: int, event: Event) -> list[Effect]:
        """As the client library publishes: what is published at one moment travels together. For an event of a type
        that is not durable nothing is waited for."""
        core = self.site.core
        if event.type not in core.advertised:
            return core.publish(request, event)  # rejects it
        whole = core.types.whole(event.type)
        whole.check(event.body)
        if core.gathering.is_empty:
            incarnation = self.site.incarnation
            self.world.clock.after(0, self._send_gathered, incarnation)
        if whole.durable:
            return core.gathering.add_event(request, event.type, event.body)
        return [*core.gathering.add_event(0, event.type, event.body), CompleteRequest(request)]

    def _send_gathered(self, incarnation: int) -> None:
        if self.site.up and self.site.incarnation == incarnation:
            self.site.act(lambda: self.site.core.gathering.send())

    def open_requests(self) -> int:
        """Number of requests of scripts without a response."""
        return sum(script is not None for script in self._requests.values())

    def on_response(self, request: int, value: Any, error: TopsError | None) -> None:
        script = self._requests.pop(request, None)
        if script is None:
            return
        if error is None:
            self._resume(script, lambda: script.send(value))
        else:
            self._resume(script, lambda: script.throw(error))

    # --------------------------------------------------------------------------------------------------- participants

    def on_deliver(self, subscription: int, event: Event, tx: TxId | None) -> None:
        self._saw(subscription, tx, event)

    def on_drop_memo(self, forget: DropMemo) -> None:
        database = self.subscriptions[forget.subscription].database
        if isinstance(database, CallbackDatabase):
            database.finished.pop(forget.memo.epoch, None)

    def on_tx_ended(self, tx: TxId, committed: bool) -> None:
        self.world.trace.add(self.world.clock.now, self.site.name, f"outcome of {tx}: committed={committed}")

    def _saw(self, subscription: int, tx: TxId | None, event: Event) -> None:
        self.world.history.events.setdefault(event.body["mark"], event)
        seen = self.world.history.seen.setdefault((self.site.name, subscription, self.site.incarnation), [])
        seen.append((tx, event.body["mark"]))

    def on_call(self, call: Call) -> None:
        """The work is done some time after the call, and the result arrives some time after the work."""
        world, incarnation = self.world, self.site.incarnation
        slow = world.nemesis.active and world.rng.random() < world.faults.slow_call
        before = world.rng.uniform(0.0001, 3.0 if slow else 0.002)
        after = world.rng.uniform(0.0001, 0.001)

        subscription = self.subscriptions[call.subscription]
        subscription.busy += 1

        def alive() -> bool:
            return self.site.up and self.site.incarnation == incarnation

        def work() -> None:
            if not alive():
                return
            try:
                result = self._work(subscription, call)
            except Broken as broken:
                world.history.broken.append(f"{self.site.name}: {broken}")
                if isinstance(broken, WronglyApplied):
                    world.history.machine_faults.append(f"{self.site.name}: {broken}")
                world.trace.add(world.clock.now, self.site.name, f"BROKEN {broken}")
                return
            world.trace.add(world.clock.now, self.site.name, f"did {type(call).__name__} {_brief(call)}", result)
            world.clock.after(after, reply, result)

        def reply(result: object) -> None:
            if alive():
                subscription.busy -= 1
                self.site.act(self.site.core.call_done, call.call, result)

        world.clock.after(before, work)

    def _work(self, s: SimSubscription, call: Call) -> Any:
        database = s.database
        if isinstance(database, ReplicaDatabase):
            match call:
                case PrepareBatch(memo=memo, members=members, before=before):
                    self.world.history.voters[memo.voter] = self.site.name
                    return database.prepare(memo, members, before)
                case FinishBatch(memo=memo, committed=committed):
                    return database.finish(memo, committed)
                case ApplyEntries(entries=entries, upto=upto, history=history, digests=digests):
                    return database.apply(entries, upto, history, digests)
            raise Broken(f"a replica got a {type(call).__name__}")
        return self._callback(s, database, call)

    def _callback(self, s: SimSubscription, database: CallbackDatabase, call: Call) -> Any:
        world = self.world
        match call:
            case JoinTx(tx=tx, spec=spec):
                return self._join(s, tx, spec)
            case NotifyTx(tx=tx, event=event):
                self._saw(s.number, tx, event)
                if world.nemesis.active and world.rng.random() < world.faults.reject_event:
                    return "the event can't be processed"
                database.notify(tx, event)
                return None
            case TakeEvent(number=number, event=event):
                self._saw(s.number, None, event)
                return database.take(number)
            case PrepareTx(tx=tx, memo=memo):
                if world.nemesis.active and world.rng.random() < world.faults.reject_prepare:
                    return "the resource can't prepare"
                database.prepare(tx, memo)
                if memo is not None:
                    world.history.voters[memo.voter] = None if s.own else self.site.name
                    world.history.prepared_work.setdefault(tx, set()).add((self.site.name, s.number))
                return None
            case CommitTxCall(tx=tx, number=number):
                return database.commit(tx, number)
            case AbortTxCall(tx=tx, rejection=rejection):
                chosen = world.history.scopes.get((tx, self.site.name, s.number, self.site.incarnation), s.wish.scope)
                if chosen is Scope.LOCAL:
                    world.history.local_aborts.append((tx, self.site.name, rejection))
                return database.abort(tx)
        raise Broken(f"a participant got a {type(call).__name__}")

    def _join(self, s: SimSubscription, tx: TxId, spec: TxSpec) -> Scope:
        chosen = self.world.rng.choice(s.prefers)
        if chosen is Scope.DISTRIBUTED and spec.tx_type.value == "local":
            chosen = Scope.LOCAL
        granted = granted_scope(chosen, spec.limit, spec.tx_type)
        self.world.history.scopes[tx, self.site.name, s.number, self.site.incarnation] = granted
        if spec.access is Access.PUBLIC and granted is Scope.DISTRIBUTED and self.world.rng.random() < 0.5:
            self.run(self.world.workload.contribution(self, tx, spec))
        return chosen


def _brief(call: Call) -> str:
    tx = getattr(call, "tx", None)
    if tx is not None:
        return f"{tx} sub {call.subscription}"
    memo = getattr(call, "memo", None)
    if memo is not None:
        return f"{memo.epoch} committed={getattr(call, 'committed', None)}"
    return f"upto {getattr(call, 'upto', '')}"
