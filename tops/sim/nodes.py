"""Brokers and sites in a simulated world: the real machines, and effects that are carried out one by one.

A node can be crashed between any two effects. Effects behind a `Persist` wait for the disk, and so do all effects of
later inputs.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from hashlib import blake2b
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from tops.core.broker.broker import BrokerCore
from tops.core.client.site import SiteCore
from tops.model.ids import NodeId, hashed
from tops.protocol.effects import (
    AbortTxCall,
    Alarm,
    ApplyEntries,
    CancelTimer,
    CommitTxCall,
    CompleteRequest,
    Deliver,
    DropMemo,
    Effect,
    FinishBatch,
    JoinTx,
    Note,
    NotifyTx,
    Persist,
    PrepareBatch,
    PrepareTx,
    ReadLog,
    SendOnLink,
    SetTimer,
    TakeEvent,
    TakeTcm,
    TxEnded,
)
from tops.protocol.messages import PROTOCOL, DecisionRelayed, Envelope, LinkMessage, LogEntry, QueryPeers
from tops.protocol.records import Started
from tops.sim.disk import SimDisk

if TYPE_CHECKING:
    from tops.sim.site_app import SiteApp
    from tops.sim.world import World


Step = Callable[..., list[Effect]]
READING_S = 0.001
CALLS = (
    JoinTx,
    TakeEvent,
    TakeTcm,
    NotifyTx,
    PrepareTx,
    CommitTxCall,
    AbortTxCall,
    PrepareBatch,
    FinishBatch,
    ApplyEntries,
)


class SimNode(ABC):
    """What brokers and sites have in common: being up, paused or down, and a queue of effects."""

    def __init__(self, world: "World", name: NodeId) -> None:
        self.world, self.name = world, name
        self.up = False
        self.incarnation = 0
        self.paused_until = 0.0
        self._pipeline: deque[Effect] = deque()
        self._inbox: deque[tuple[Step, tuple[Any, ...]]] = deque()  # inputs that arrived while the node was paused
        self._blocked = False
        self._draining = False
        self._timers: dict[Hashable, int] = {}
        self._timer_count = 0
        self._perform: dict[type, Callable[[Any], None]] = {
            SendOnLink: self._send,
            SetTimer: self._set_timer,
            CancelTimer: self._cancel_timer,
            Alarm: self._alarm,
        }

    # ---------------------------------------------------------------------------------------------- start and crash

    def crash(self) -> None:
        if not self.up:
            return
        self.world.trace.add(self.world.clock.now, self.name, "CRASH")
        self.world.crashes += 1
        self.up = False
        self._pipeline.clear()
        self._inbox.clear()
        self._timers.clear()
        self._blocked = False
        self.lose_state()
        self.world.network.node_down(self.name)

    def start(self) -> None:
        if self.up:
            return
        self.up = True
        self.incarnation += 1
        self.world.trace.add(self.world.clock.now, self.name, f"START incarnation {self.incarnation}")
        self.wake_up()
        if self.up:
            self.world.network.node_up(self.name)

    @abstractmethod
    def lose_state(self) -> None:
        """Lose everything that is not on disk."""

    @abstractmethod
    def wake_up(self) -> None:
        """Begin an incarnation with what is on disk."""

    # ------------------------------------------------------------------------------------------------------- effects

    def act(self, step: Step, *args: Any) -> None:
        """Give the machine an input, now or when the node is no longer paused, and carry out its effects."""
        if not self.up:
            return
        if self._inbox or self.paused_until > self.world.clock.now:
            self._inbox.append((step, args))
            return
        self._act(step, args)

    @property
    def behind(self) -> bool:
        """Whether inputs wait because the node is or was paused."""
        return self.paused_until > self.world.clock.now or bool(self._inbox)

    def pause(self, seconds: float) -> None:
        """Process no input for a while; the inputs are processed in order when the node resumes."""
        self.paused_until = max(self.paused_until, self.world.clock.now + seconds)
        self.world.clock.at(self.paused_until, self.wake)

    def wake(self, now: bool = False) -> None:
        if now:
            self.paused_until = 0.0
        while self.up and self._inbox and self.paused_until <= self.world.clock.now:
            self._act(*self._inbox.popleft())

    def _act(self, step: Step, args: tuple[Any, ...]) -> None:
        try:
            self._pipeline.extend(step(*args))
        except Exception as error:  # a machine never raises: every input is either processed or ignored
            raised = f"{self.name}: the machine raised {error!r}"
            self.world.history.broken.append(raised)
            self.world.history.machine_faults.append(raised)
            self.world.trace.add(self.world.clock.now, self.name, f"BROKEN {error!r}")
            return
        if self._pipeline and not self._draining:
            self.drain()

    def drain(self) -> None:
        """Carry out effects in order, until one of them has to wait or the node crashes."""
        self._draining = True
        incarnation, pipeline, world = self.incarnation, self._pipeline, self.world
        try:
            while pipeline and not self._blocked:
                effect = pipeline.popleft()
                world.on_effect(self, effect)
                if not self.up or self.incarnation != incarnation:
                    return
                perform = self._perform.get(type(effect))
                if perform is not None:
                    perform(effect)
        finally:
            self._draining = False

    def _send(self, send: SendOnLink) -> None:
        self.world.network.send(self.name, send.link, send.message)

    def _alarm(self, alarm: Alarm) -> None:
        self.world.alarms.append((self.name, alarm.kind, alarm.text))
        self.world.trace.add(self.world.clock.now, self.name, f"ALARM {alarm.kind}: {alarm.text}")

    def _set_timer(self, timer: SetTimer) -> None:
        self._timer_count += 1
        self._timers[timer.key] = self._timer_count
        self.world.clock.after(timer.after_s, self._fire, timer.key, self._timer_count)

    def _cancel_timer(self, timer: CancelTimer) -> None:
        self._timers.pop(timer.key, None)

    def _fire(self, key: Hashable, number: int) -> None:
        if self._timers.get(key) == number:
            del self._timers[key]
            self.act(self._timer, key)

    @abstractmethod
    def _timer(self, key: Any) -> list[Effect]:
        """The machine's effects for a timer."""

    def receive(self, link: NodeId, message: LinkMessage) -> None:
        self.act(self._take, link, message)

    @abstractmethod
    def _take(self, link: NodeId, message: LinkMessage) -> list[Effect]:
        """The machine's effects for a message."""


def proof_of(broker: NodeId, text: bytes) -> bytes:
    """A broker's simulated signature: no other node makes it."""
    return blake2b(text, key=broker.encode(), digest_size=8).digest()


def check_proof(text: bytes, broker: NodeId, proof: bytes) -> str:
    return "" if proof == proof_of(broker, text) else "the signature does not fit"


class Liar:
    """Invents decisions for peers in doubt, and signs them with another broker's name, or not at all."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def respond(self, query: QueryPeers) -> DecisionRelayed:
        committing = frozenset([hashed(query.voter)] if self._rng.random() < 0.5 else [])
        forged = DecisionRelayed(epoch=query.epoch, digest=query.digest, committing=committing)
        if self._rng.random() < 0.5:
            return forged
        return msgspec.structs.replace(forged, proof=proof_of(NodeId("liar"), forged.text))


class SimBroker(SimNode):
    """A broker with its journal."""

    def __init__(self, world: "World", name: NodeId) -> None:
        super().__init__(world, name)
        self.disk = SimDisk()
        self.core: BrokerCore
        self._perform |= {Persist: self._persist, Note: self._note, ReadLog: self._read_log}

    def lose_state(self) -> None:
        self.disk.crash(self.world.rng)

    def wake_up(self) -> None:
        self.core = BrokerCore(
            self.name,
            self.incarnation,
            self.world.topology,
            # Separate from the world's random numbers: what a broker draws must not change the rest of the run.
            Random(f"{self.world.seed} {self.name} {self.incarnation}").randbytes,
            self.world.predicates,
            self.world.broker_options,
            partial(proof_of, self.name),
            # It does not check relayed decisions, so that the checkers notice a participant that trusts a liar.
        )
        self.disk.append(Started(incarnation=self.incarnation, protocol=PROTOCOL))
        self.disk.sync()
        for record in self.disk.records:
            self.core.recover(record)
        self.act(self.core.recovered, self.world.clock.now)

    def _persist(self, persist: Persist) -> None:
        record = persist.record
        self.world.trace.add(self.world.clock.now, self.name, f"persist {type(record).__name__}", record)
        self.disk.append(record)
        self._blocked = True
        self.world.clock.after(self.world.nemesis.writing_s(self), self._synced, self.incarnation)

    def _synced(self, incarnation: int) -> None:
        if self.up and self.incarnation == incarnation:
            self.disk.sync()
            self._blocked = False
            self.drain()

    def _note(self, note: Note) -> None:
        self.disk.append(note.record)

    def _read_log(self, read: ReadLog) -> None:
        entries = self.disk.log_entries(read.event_type, read.first, read.last)
        self.world.clock.after(READING_S, self.act, self._log_read, read.event_type, read.feed, entries)

    def _log_read(self, event_type: str, feed: str, entries: tuple[LogEntry, ...]) -> list[Effect]:
        return self.core.log_read(event_type, feed, entries, self.world.clock.now)

    def _timer(self, key: Any) -> list[Effect]:
        return self.core.timer(tuple(map(str, key)), self.world.clock.now)

    def _take(self, link: NodeId, message: LinkMessage) -> list[Effect]:
        return self.core.receive(link, message, self.world.clock.now)


class SimSite(SimNode):
    """A site with its application; databases of its participants outlive it."""

    def __init__(self, world: "World", name: NodeId, app: "SiteApp") -> None:
        super().__init__(world, name)
        self.app = app
        self.core: SiteCore
        self.liar: Liar | None = None  # makes the false responses to peers in doubt
        self._perform |= dict.fromkeys(CALLS, lambda call: self.app.on_call(call))
        self._perform |= {
            CompleteRequest: self._complete,
            Deliver: self._deliver,
            DropMemo: lambda forget: self.app.on_drop_memo(forget),
            TxEnded: self._tx_ended,
        }

    def lose_state(self) -> None:
        self.app.crash()

    def wake_up(self) -> None:
        self.core = SiteCore(
            self.name,
            self.incarnation,
            self.world.topology.brokers,
            self.world.entropy,
            self.world.site_options,
            check_proof,
        )
        self.app.start(self)

    def _complete(self, respond: CompleteRequest) -> None:
        self.app.on_response(respond.request, respond.value, respond.error)

    def _deliver(self, deliver: Deliver) -> None:
        self.app.on_deliver(deliver.subscription, deliver.event, deliver.tx)

    def _tx_ended(self, ended: TxEnded) -> None:
        self.app.on_tx_ended(ended.tx, ended.committed)

    def _timer(self, key: Any) -> list[Effect]:
        return self.core.timer(tuple(map(str, key)), self.world.clock.now)

    def _take(self, link: NodeId, message: LinkMessage) -> list[Effect]:
        effects = self.core.receive(message, self.world.clock.now)
        if self.liar is not None and type(message) is Envelope and type(message.body) is QueryPeers:
            effects.append(SendOnLink(link, Envelope(to=message.reply_to, body=self.liar.respond(message.body))))
        return effects
