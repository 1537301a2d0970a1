"""The machines alone: no network, no disk, no database; what the protocol itself costs.

One process holds a publisher, the broker that coordinates, and three participants; effects are handed from one machine
to the next, and participants answer at once.

    tops bench core            rows one_shot_epoch32 and interactive
    tops bench core --profile  where the time goes, by machine
"""

import cProfile
import os
import pstats
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

from bench.machine import describe_machine, package_versions
from bench.results import Result
from tops.core.broker import BrokerCore
from tops.core.epochs import EpochOptions
from tops.core.participation import Wish
from tops.core.rendezvous import RendezvousOptions
from tops.core.routing import Topology
from tops.core.site import SiteCore
from tops.effects import (
    Answer,
    ApplyEntries,
    AskJoin,
    BatchPrepared,
    Call,
    Effect,
    PrepareBatch,
    Send,
    SetTimer,
)
from tops.event_types import EventType
from tops.filters import Filter
from tops.ids import NodeId
from tops.messages import CensusPolicy, Event, TxSpec
from tops.transactions import LocalOutcome, Scope, ScopeLimit, TxType

EPOCH = 32
NOTES = ("notes", "plain")
BROKER = NodeId("b1")
LOGGED = EventType("set", {"n": int}, durable=True)
PLAIN = EventType("plain", {"n": int})
PARTICIPANTS = tuple(NodeId(f"p{i}") for i in range(1, 4))
PUBLISHER = NodeId("client")


class Machines:
    """All machines of a small cluster, and the queue of what they want done."""

    def __init__(self) -> None:
        options = RendezvousOptions(epochs=EpochOptions(members_max=EPOCH), log_tail=1024, keep_outcomes=10_000)
        self.broker = BrokerCore(BROKER, 1, Topology({BROKER: []}), options=options)
        self.sites = {n: SiteCore(n, 1, [BROKER], os.urandom) for n in (PUBLISHER, *PARTICIPANTS)}
        self.todo: deque[tuple[NodeId, list[Effect]]] = deque()
        self.answers: dict[int, Any] = {}
        self.request = 0
        for name, site in self.sites.items():
            self.feed(BROKER, self.broker.site_up(name, 1, 0.0))
            self.feed(name, site.link_up(BROKER, 0.0))
        for name in PARTICIPANTS:
            replica = Wish((LOGGED,), Filter.everything(), Scope.DISTRIBUTED, durable=name, replica=0)
            self.ask(name, partial(self._subscribe, name, 1, replica))
            self.ask(name, partial(self._subscribe, name, 2, Wish((PLAIN,), Filter.everything())))
        self.ask(PUBLISHER, lambda r: self.sites[PUBLISHER].advertise(r, (LOGGED,)))
        self.ask(PUBLISHER, lambda r: self.sites[PUBLISHER].advertise(r, (PLAIN,)))
        self.run()
        for name in PARTICIPANTS:  # known to the rendezvous now: renew the standing answers
            self.feed(name, self.sites[name].timer(("renew", "1"), 0.0))
        self.run()

    def ask(self, site: NodeId, call: Callable[[int], list[Effect]]) -> int:
        """A request of the application; its answer appears in `answers`."""
        self.request += 1
        self.feed(site, call(self.request))
        return self.request

    def _subscribe(self, site: NodeId, number: int, wish: Wish, request: int) -> list[Effect]:
        return self.sites[site].subscribe(request, number, wish)

    def feed(self, node: NodeId, effects: list[Effect]) -> None:
        self.todo.append((node, effects))

    def run(self) -> None:
        """Until nobody wants anything any more; no time passes but what it takes to note that commits are finished."""
        todo = self.todo
        while todo:
            node, effects = todo.popleft()
            for effect in effects:
                if type(effect) is Send:
                    if node is BROKER:
                        todo.append((effect.link, self.sites[effect.link].receive(effect.message, 0.0)))
                    else:
                        todo.append((BROKER, self.broker.receive(node, effect.message, 0.0)))
                elif type(effect) is Answer:
                    if effect.error is not None:
                        raise effect.error
                    self.answers[effect.request] = effect.value
                elif isinstance(effect, Call):
                    answer = AGREES.get(type(effect))
                    result = answer(effect) if answer is not None else None
                    todo.append((node, self.sites[node].call_done(effect.call, result)))
                elif type(effect) is SetTimer and effect.key == NOTES:
                    todo.append((node, self.broker.timer(NOTES, 0.0)))


# A participant that agrees to everything; what is not listed has no result.
AGREES: dict[type[Call], Callable[[Any], Any]] = {
    PrepareBatch: lambda call: BatchPrepared({}, ((1,),) * len(call.members)),
    ApplyEntries: lambda call: call.upto,
    AskJoin: lambda call: Scope.DISTRIBUTED,
}


def one_shot_epochs(machines: Machines) -> Iterator[int]:
    """One-shot distributed transactions that arrive together, in epochs of 32."""
    spec = TxSpec(
        "set",
        TxType.DISTRIBUTED,
        limit=ScopeLimit.LOCAL,
        attributes={"n": 0},
        local_outcome=LocalOutcome.FOLLOWS,
        census=None,
    )
    publisher = machines.sites[PUBLISHER]
    while True:
        for n in range(EPOCH):
            execute = partial(publisher.execute, spec=spec, events=(Event("set", {"n": n}),))
            machines.ask(PUBLISHER, execute)
        machines.run()
        machines.answers.clear()
        yield EPOCH


def interactive(machines: Machines) -> Iterator[int]:
    """Begin with a census of three, two events, commit: one transaction after the other."""
    spec = TxSpec("plain", TxType.DISTRIBUTED, attributes={"n": 0}, census=CensusPolicy(replies=3))
    publisher = machines.sites[PUBLISHER]
    while True:
        begun = machines.ask(PUBLISHER, lambda r: publisher.begin(r, spec))
        machines.run()
        tx = machines.answers.pop(begun)
        for n in range(2):
            machines.ask(PUBLISHER, partial(publisher.tx_publish, tx=tx, event=Event("plain", {"n": n})))
        machines.ask(PUBLISHER, partial(publisher.commit, tx=tx))
        machines.run()
        machines.answers.clear()
        yield 1


WORKLOADS = {"one_shot_epoch32": one_shot_epochs, "interactive": interactive}
AT_LEAST = {"one_shot_epoch32": 20_000, "interactive": 3_000}


def run(quick: bool = False, profile: bool = False) -> Result:
    """Transactions per second of each workload; medians over several rounds."""
    rounds, seconds = (3, 1.0) if quick else (7, 3.0)
    rows = []
    for name, workload in WORKLOADS.items():
        rates = [_rate(workload, seconds) for _ in range(rounds)]
        tps = median(rates)
        rows.append(
            {
                "system": name,
                "workload": "machines alone, 3 participants",
                "clients": 1,
                "tps": round(tps),
                "low": round(min(rates)),
                "high": round(max(rates)),
                "p50_ms": round(1000 / tps, 4),
                "p95_ms": None,
                "at_least": AT_LEAST[name],
            }
        )
        if profile:
            print_profile(name, workload, seconds)
    return {
        "name": "core",
        "machine": describe_machine(),
        "versions": package_versions(),
        "rows": rows,
        "figures": {},
    }


def _rate(workload: Callable[[Machines], Iterator[int]], seconds: float) -> float:
    batches = workload(Machines())
    for _ in range(20):
        next(batches)
    done, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        done += next(batches)
    return done / elapsed


def print_profile(name: str, workload: Callable[[Machines], Iterator[int]], seconds: float) -> None:
    """Where the time goes, by function, on standard output."""
    profiler = cProfile.Profile()
    profiler.runcall(_rate, workload, seconds)
    print(f"\n{name}: where the time goes")
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
