"""The machines alone: no network, no disk, no database; what the protocol itself costs.

One process holds a publisher, the broker that coordinates, and three participants; effects are handed from one machine
to the next, and participants answer at once.

    tops bench core            rows one_shot_epoch32 and interactive, and where the time goes, by machine
    tops bench core --profile  the same by function
"""

import cProfile
import os
import pstats
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from bench.harness import say
from bench.machine import describe_machine, package_versions
from bench.results import Result
from tops.core.broker.broker import BrokerCore
from tops.core.client.site import SiteCore
from tops.core.commit.epochs import EpochOptions
from tops.core.coordinator.rendezvous import RendezvousOptions
from tops.core.overlay.topology import Topology
from tops.core.participant.participation import Wish
from tops.model.event_types import EventType
from tops.model.filters import Filter
from tops.model.ids import NodeId
from tops.model.log_points import BEGINNING, LogPoint, chained
from tops.model.transactions import LocalOutcome, Scope, ScopeLimit, TxType
from tops.protocol.effects import (
    ApplyEntries,
    BatchPrepared,
    CommitTxCall,
    CompleteRequest,
    Effect,
    FinishBatch,
    JoinTx,
    Memo,
    NotifyTx,
    PrepareBatch,
    PrepareTx,
    SendOnLink,
    SetTimer,
)
from tops.protocol.messages import CensusPolicy, Event, Sender, TxSpec
from tops.runtime.garbage import collect_rarely

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
        self.broker = BrokerCore(BROKER, 1, Topology({BROKER: []}), os.urandom, options=options)
        self.sites = {n: SiteCore(n, 1, [BROKER], os.urandom) for n in (PUBLISHER, *PARTICIPANTS)}
        self.todo: deque[tuple[NodeId, list[Any]]] = deque()
        self.answers: dict[int, Any] = {}
        self.request = 0
        for name, site in self.sites.items():
            self.feed(BROKER, self.broker.site_up(Sender(name, "writer", incarnation=1), 0.0))
            self.feed(name, site.link_up(BROKER, 0.0))
        for name in PARTICIPANTS:
            replica = Wish((LOGGED,), Filter.everything(), Scope.DISTRIBUTED, durable=name, replica=BEGINNING)
            self.call_site(name, partial(self._subscribe, name, 1, replica))
            self.call_site(name, partial(self._subscribe, name, 2, Wish((PLAIN,), Filter.everything())))
        self.call_site(PUBLISHER, lambda r: self.sites[PUBLISHER].advertise(r, (LOGGED,)))
        self.call_site(PUBLISHER, lambda r: self.sites[PUBLISHER].advertise(r, (PLAIN,)))
        self.run()
        for name in PARTICIPANTS:  # known to the rendezvous now: renew the standing answers
            self.feed(name, self.sites[name].timer(("renew", "1"), 0.0))
        self.run()

    def call_site(self, site: NodeId, call: Callable[[int], list[Effect]]) -> int:
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
        todo, sites, broker = self.todo, self.sites, self.broker
        while todo:
            node, effects = todo.popleft()
            if node is BROKER:
                for effect in effects:
                    kind = type(effect)
                    if kind is SendOnLink:
                        following = sites[effect.link].receive(effect.message, 0.0)
                        if following:
                            todo.append((effect.link, following))
                    elif kind is SetTimer and effect.key == NOTES:
                        todo.append((BROKER, broker.timer(NOTES, 0.0)))
                continue
            for effect in effects:
                kind = type(effect)
                if kind is SendOnLink:
                    following = broker.receive(node, effect.message, 0.0)
                    if following:
                        todo.append((BROKER, following))
                elif kind in AGREEMENT:
                    following = sites[node].call_done(effect.call, AGREEMENT[kind])
                    if following:
                        todo.append((node, following))
                elif kind in AGREES:
                    todo.append((node, sites[node].call_done(effect.call, AGREES[kind](effect))))
                elif kind is CompleteRequest:
                    if effect.error is not None:
                        raise effect.error
                    self.answers[effect.request] = effect.value


# A participant that agrees to everything: whatever it is asked, or according to what it is asked.
AGREEMENT: dict[type[Any], Scope | None] = {
    JoinTx: Scope.DISTRIBUTED,
    NotifyTx: None,
    PrepareTx: None,
    CommitTxCall: None,
}
AGREES: dict[type[Any], Callable[[Any], Any]] = {
    PrepareBatch: lambda call: BatchPrepared({}, ((1,),) * len(call.members), log_digest=_prepared(call)),
    FinishBatch: lambda call: LogPoint(*PREPARED.pop(call.memo)),
    ApplyEntries: lambda call: LogPoint(call.history, call.upto, call.digests.at(call.upto)),
}
PREPARED: dict[Memo, tuple[str, int, str]] = {}  # what the databases would hold


def _prepared(call: PrepareBatch) -> str:
    before, index = call.before, call.memo.epoch.number
    digest = chained(before.history, before.digest, index, [m.tx for m in call.members])
    PREPARED[call.memo] = (before.history, index, digest)
    return digest


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
            machines.call_site(PUBLISHER, execute)
        machines.run()
        machines.answers.clear()
        yield EPOCH


def interactive(machines: Machines) -> Iterator[int]:
    """Begin with a census of three, two events, commit: one transaction after the other."""
    spec = TxSpec("plain", TxType.DISTRIBUTED, attributes={"n": 0}, census=CensusPolicy(replies=3))
    publisher = machines.sites[PUBLISHER]
    while True:
        begun = machines.call_site(PUBLISHER, lambda r: publisher.begin(r, spec))
        machines.run()
        tx = machines.answers.pop(begun)
        for n in range(2):
            machines.call_site(PUBLISHER, partial(publisher.tx_publish, tx=tx, event=Event("plain", {"n": n})))
        machines.call_site(PUBLISHER, partial(publisher.commit, tx=tx))
        machines.run()
        machines.answers.clear()
        yield 1


class Round(NamedTuple):
    """One round of a workload. `per_cpu_s` is its rate per second of processor time, which a busy machine leaves alone;
    the latencies are those of what is under way together: one interactive transaction, one epoch."""

    tps: float
    per_cpu_s: float
    p50_ms: float
    p95_ms: float


Workload = Callable[[Machines], Iterator[int]]
WORKLOADS: dict[str, Workload] = {"one_shot_epoch32": one_shot_epochs, "interactive": interactive}
AT_LEAST = {"one_shot_epoch32": 20_000, "interactive": 3_000}


def run(quick: bool = False, profile: bool = False) -> Result:
    """Transactions per second of each workload; medians over several rounds."""
    collect_rarely()  # as the processes do that these machines run in
    rounds, seconds = (3, 1.0) if quick else (7, 3.0)
    rows, costs = [], {}
    for name, workload in WORKLOADS.items():
        measured = [_measure(workload, seconds) for _ in range(rounds)]
        rates = [round_.tps for round_ in measured]
        tps = median(rates)
        rows.append(
            {
                "system": name,
                "workload": "machines alone, 3 participants",
                "clients": 1,
                "tps": round(tps),
                "low": round(min(rates)),
                "high": round(max(rates)),
                "per_cpu_s": round(median(round_.per_cpu_s for round_ in measured)),
                "p50_ms": round(median(round_.p50_ms for round_ in measured), 4),
                "p95_ms": round(median(round_.p95_ms for round_ in measured), 4),
                "at_least": AT_LEAST[name],
            }
        )
        profiled = _profile(workload, seconds)
        costs[name] = cost_of(profiled)
        say(f"{name}: {costs[name]['text']}")
        if profile:
            print(f"\n{name}: where the time goes")
            profiled.sort_stats("tottime").print_stats(25)
    return {
        "name": "core",
        "machine": describe_machine(),
        "versions": package_versions(),
        "rows": rows,
        "figures": {},
        "costs": costs,
    }


def _measure(workload: Workload, seconds: float) -> Round:
    batches = workload(Machines())
    for _ in range(20):
        next(batches)
    took_s: list[float] = []
    done, cpu_start_s = 0, time.process_time()
    start = now = time.perf_counter()
    while now - start < seconds:
        done += next(batches)
        before, now = now, time.perf_counter()
        took_s.append(now - before)
    slices = quantiles(took_s, n=20)
    return Round(done / (now - start), done / (time.process_time() - cpu_start_s), 1000 * slices[9], 1000 * slices[18])


def _profile(workload: Workload, seconds: float) -> pstats.Stats:
    profiler = cProfile.Profile()
    profiler.runcall(_measure, workload, seconds)
    return pstats.Stats(profiler)


def cost_of(stats: pstats.Stats) -> dict[str, Any]:
    """What one transaction costs: messages, calls of participants, and the share of each module in the time.

    What the interpreter's own functions take counts for the module that called them.
    """
    counted: dict[str, int] = {}
    spent: dict[str, float] = {}
    for (file, _, function), (_, calls, own_s, _, callers) in stats.stats.items():  # type: ignore[attr-defined]
        counted[f"{_module(file)}.{function}"] = calls
        if _module(file):
            spent[_module(file)] = spent.get(_module(file), 0.0) + own_s
            continue
        for (caller, _, _), (_, _, for_caller_s, _) in callers.items():
            spent[_module(caller)] = spent.get(_module(caller), 0.0) + for_caller_s
    transactions = counted.get("core/own_transactions._new_id", 0) or 1
    messages = sum(counted.get(f"core/{node}.receive", 0) for node in ("site", "broker")) / transactions
    calls = counted.get("core/site.call_done", 0) / transactions
    whole = sum(spent.values())
    most_first = sorted(spent.items(), key=lambda item: -item[1])
    shares = {module or "others": round(own_s / whole, 3) for module, own_s in most_first if own_s > whole / 50}
    text = f"{messages:.1f} messages and {calls:.1f} calls of participants per transaction; time in " + ", ".join(
        f"{module} {share:.0%}" for module, share in shares.items()
    )
    return {"messages": round(messages, 2), "calls": round(calls, 2), "shares": shares, "text": text}


def _module(file: str) -> str:
    """`core/broker` for a file of the middleware, `bench` for this one, nothing for what is not ours."""
    path = Path(file)
    if path == Path(__file__):
        return "bench"
    root = Path(__file__).parent.parent / "tops"
    return str(path.relative_to(root).with_suffix("")) if path.is_relative_to(root) else ""
