"""The ordering module of one subscriber and domain: delivers events by their timestamps.

An event of a topic is delivered when all before it in its topic are, and when as many events of each other topic are
delivered as its timestamp says. A topic that is not subscribed to does not count.

A change of the subscription is a line through the topic managers. What comes back, the *cut*, says which events are
before that line. New topics begin behind the cut:

    held topics only ──request──► waiting for the cut ──cut──► events up to the cut, without the new topics
                                  (an event that names            │ all of them are delivered
                                  a new topic waits)              ▼
                                                            adopted: all topics, from the cut on

One change is under way at a time; what is wanted meanwhile makes the next one.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable

import msgspec

from tops.core.ordering.arrivals import Arrivals, Arrived
from tops.model.ordering import OrderingDomain
from tops.protocol.effects import Effect, SetTimer

Deliver = Callable[[int, Arrived, bool], list[Effect]]
Request = Callable[[int, tuple[int, ...], tuple[int, ...]], list[Effect]]
RETRY_S = 1.0


class Change(msgspec.Struct):
    """A change of the subscription that is not adopted."""

    version: int
    topics: frozenset[int]  # the whole subscription behind it
    held: frozenset[int]  # the topics that events were delivered of before it
    cut: dict[int, int] | None = None


class OrderingModule:
    """Orders the events of one domain for one subscriber."""

    def __init__(
        self,
        domain: OrderingDomain,
        timer: tuple[str, ...],
        deliver: Deliver,
        request: Request,
        retry_s: float = RETRY_S,
    ) -> None:
        """`deliver` is called with topic, event and whether it is out of order; `request` with the version, the topics
        and the former topics of a change. Both return effects, which happen in the order of the calls."""
        self.domain, self._timer = domain, timer
        self._deliver, self._request, self._retry_s = deliver, request, retry_s
        self.wanted: set[int] = set()
        self.registered: frozenset[int] = frozenset()
        self.held: dict[int, Arrivals] = {}
        self.adding: dict[int, Arrivals] = {}
        self.version = 0
        self.change: Change | None = None
        self.out_of_order = 0
        self._arrived: OrderedDict[tuple[int, int], float] = OrderedDict()  # what is buffered, the oldest first
        self._blocked: dict[int, list[tuple[int, int]]] = {}  # topic -> index that is waited for, topic that waits
        self._suspended: set[int] = set()  # topics whose next event waits for the cut or its adoption
        self._given_until: dict[int, tuple[int, int]] = {}  # topic -> indexes that are missing, with a timer
        self._retrying = False

    # ------------------------------------------------------------------------------------------------ subscriptions

    def subscribe(self, topics: Iterable[int]) -> list[Effect]:
        """From here on, events of these topics, too. Their routes must be in place."""
        self.wanted.update(topics)
        return self._go_on_changing()

    def unsubscribe(self, topics: Iterable[int]) -> list[Effect]:
        """Nothing more of these topics, at once."""
        effects: list[Effect] = []
        for topic in topics:
            self.wanted.discard(topic)
            for state in (self.held.pop(topic, None), self.adding.pop(topic, None)):
                if state is not None:
                    self._forget(topic, state)
        effects += self._advance(set(self.held)) + self._adopt()
        return effects + self._go_on_changing()

    def resume(self, clocks: dict[int, int]) -> list[Effect]:
        """A durable subscriber goes on behind what it has taken of each topic: no cut is needed."""
        self.wanted.update(clocks)
        self.registered = frozenset(clocks)
        for topic, clock in clocks.items():
            self.held[topic] = Arrivals(clock=clock)
        return self._go_on_changing()

    def begin_again(self) -> list[Effect]:
        """Events may be lost from here back, since the link is new: all topics begin behind a new cut."""
        for topic, state in [*self.held.items(), *self.adding.items()]:
            self._forget(topic, state)
        self.held, self.adding, self.change = {}, {}, None
        self._suspended.clear()
        self._given_until.clear()
        return self._go_on_changing()

    def _forget(self, topic: int, state: Arrivals) -> None:
        for index in state.events:
            self._arrived.pop((topic, index), None)
        self._blocked.pop(topic, None)
        self._suspended.discard(topic)

    def _go_on_changing(self) -> list[Effect]:
        new = self.wanted - self.held.keys()
        if self.change is not None or not (new or self.registered != self.wanted):
            return []
        self.version += 1
        self.change = Change(self.version, frozenset(self.wanted), frozenset(self.held))
        self.adding = {topic: Arrivals() for topic in sorted(new)}
        return self._ask() + self._retry_later()

    def _ask(self) -> list[Effect]:
        change = self.change
        assert change is not None
        former = tuple(sorted(self.registered - change.topics))
        return self._request(change.version, tuple(sorted(change.topics)), former)

    def _retry_later(self) -> list[Effect]:
        if self._retrying:
            return []
        self._retrying = True
        return [SetTimer((*self._timer, "cut"), self._retry_s)]

    def on_cut(self, version: int, entries: dict[int, int]) -> list[Effect]:
        """The response to a request. Only the first one to the latest request counts."""
        change = self.change
        if change is None or change.version != version or change.cut is not None:
            return []
        change.cut = entries
        self.registered = change.topics
        suspended, self._suspended = self._suspended, set()
        return self._advance(suspended) + self._adopt() + self._watch()

    def _adopt(self) -> list[Effect]:
        """Once everything before the cut is delivered, the new topics count."""
        change = self.change
        if change is None or change.cut is None:
            return []
        cut = change.cut
        if self.adding and any(s.clock < cut.get(t, 0) for t, s in self.held.items() if t in change.held):
            return []
        for topic, state in self.adding.items():
            for index in [i for i in state.events if i <= cut.get(topic, 0)]:
                self._arrived.pop((topic, index), None)
            state.begin(cut.get(topic, 0))
            self.held[topic] = state
            if state.marker:
                self._mark(state, state.marker)
        todo = self._suspended | self.adding.keys()
        self.change, self.adding, self._suspended = None, {}, set()
        return self._advance(todo) + self._go_on_changing()

    # ------------------------------------------------------------------------------------------------ what arrives

    def on_event(self, topic: int, event: Arrived) -> list[Effect]:
        """An event, in any order."""
        state = self.held.get(topic)
        if state is None:
            state = self.adding.get(topic)
            if state is not None and event.index not in state.events:
                self._keep(topic, state, event)
            return []
        if state.is_late(event.index):
            return self._out_of_order(topic, event)
        if state.is_known(event.index):
            return []
        self._keep(topic, state, event)
        effects = self._advance({topic}) if event.index == state.clock + 1 or state.skips else []
        return effects + self._within_bound() + self._watch()

    def _keep(self, topic: int, state: Arrivals, event: Arrived) -> None:
        state.take(event)
        self._arrived[topic, event.index] = event.at

    def on_skipped(self, topic: int, after: int | None, upto: int) -> list[Effect]:
        """Indexes that are not for this subscriber. `after` None: all that is missing up to there is lost."""
        state = self.held.get(topic)
        if state is None:
            state = self.adding.get(topic)
            if state is not None and after is None:
                state.marker = max(state.marker, upto)
            elif state is not None and after is not None:
                state.skip(after + 1, upto)
            return []
        if after is None:
            self._mark(state, upto)
        else:
            state.skip(after + 1, upto)
        return self._advance({topic}) + self._watch()

    @staticmethod
    def _mark(state: Arrivals, upto: int) -> None:
        for lost in state.missing(upto):
            state.skip(lost.start, lost.stop - 1, lost=True)

    # --------------------------------------------------------------------------------------------------- delivering

    def _advance(self, todo: set[int]) -> list[Effect]:
        """Deliver what can be delivered, beginning with the next events of these topics."""
        effects: list[Effect] = []
        while todo:
            topic = todo.pop()
            state = self.held.get(topic)
            if state is None:
                continue
            before = state.clock
            while (event := state.head()) is not None and self._is_next(topic, event):
                del state.events[event.index]
                del self._arrived[topic, event.index]
                state.clock = event.index
                effects += self._deliver(topic, event, False)
            if state.clock > before:
                todo |= self._woken(topic, state.clock)
                if self.change is not None:
                    effects += self._adopt()
        return effects

    def _woken(self, topic: int, clock: int) -> set[int]:
        """The topics whose next event has waited for this one."""
        blocked = self._blocked.get(topic)
        woken: set[int] = set()
        while blocked and blocked[0][0] <= clock:
            woken.add(heapq.heappop(blocked)[1])
        return woken

    def _is_next(self, topic: int, event: Arrived) -> bool:
        """Whether everything before this event is delivered; if not, it is noted what it waits for."""
        change = self.change
        if change is not None and self.adding and self._waits_for_change(change, topic, event):
            self._suspended.add(topic)
            return False
        held = self.held
        for other, index in event.entries.items():
            state = held.get(other)
            if state is not None and state.clock < index and other != topic:
                heapq.heappush(self._blocked.setdefault(other, []), (index, topic))
                return False
        return True

    def _waits_for_change(self, change: Change, topic: int, event: Arrived) -> bool:
        if change.cut is None:
            return not self.adding.keys().isdisjoint(event.entries)
        return event.index > change.cut.get(topic, 0)

    def _out_of_order(self, topic: int, event: Arrived) -> list[Effect]:
        self.out_of_order += 1
        return self._deliver(topic, event, True)

    # ----------------------------------------------------------------------- events that are not durable may be lost

    def _watch(self) -> list[Effect]:
        """Set a timer for each topic of which indexes are missed."""
        unreliable = self.domain.unreliable
        cut = self.change.cut if self.change is not None else None
        if unreliable is None or not (self._arrived or cut):
            return []
        effects: list[Effect] = []
        for topic, state in self.held.items():
            upto = self._waited_for(topic, state)
            known = self._given_until.get(topic)
            if upto <= state.clock or (known is not None and known[0] > state.clock):
                continue
            if state.clock + 1 in state.events:
                continue  # it is there, and waits itself
            self._given_until[topic] = (state.clock + 1, upto)
            effects.append(SetTimer((*self._timer, "missing", str(topic), str(state.clock + 1)), unreliable.ttl_s))
        return effects

    def _waited_for(self, topic: int, state: Arrivals) -> int:
        """The highest index of a topic that something waits for."""
        own = max(state.events, default=0)
        if self.change is not None and self.change.cut is not None:
            own = max(own, self.change.cut.get(topic, 0))
        return max([own, *(index for index, _ in self._blocked.get(topic, ()))])

    def on_timer(self, kind: str, *of: str) -> list[Effect]:
        if kind == "cut":
            self._retrying = False
            waits = self.change is not None and self.change.cut is None
            return self._ask() + self._retry_later() if waits else []
        topic, index = int(of[0]), int(of[1])
        known = self._given_until.get(topic)
        if known is None or known[0] != index:
            return []
        del self._given_until[topic]
        state = self.held.get(topic)
        if state is None:
            return []
        if state.clock < known[1]:
            self._mark(state, known[1])
        return self._advance({topic}) + self._watch()

    def _within_bound(self) -> list[Effect]:
        """When too much is buffered, the oldest event is delivered: what it waits for is given up."""
        unreliable = self.domain.unreliable
        if unreliable is None or self.change is not None:
            return []
        effects: list[Effect] = []
        while len(self._arrived) > unreliable.buffer:
            topic, index = next(iter(self._arrived))
            given_up: dict[int, int] = {}
            self._give_up(topic, index, given_up)
            effects += self._advance(set(given_up))
        return effects

    def _give_up(self, topic: int, index: int, given_up: dict[int, int]) -> None:
        """Do not wait for anything that is missing before this event."""
        state = self.held.get(topic)
        if state is None or index <= max(state.clock, given_up.get(topic, 0)):
            return
        given_up[topic] = index
        for lost in state.missing(index):
            state.skip(lost.start, lost.stop - 1, lost=True)
        for event in [e for i, e in state.events.items() if i <= index]:
            for other, needed in event.entries.items():
                if other != topic:
                    self._give_up(other, needed, given_up)

    # ------------------------------------------------------------------------------------------------------ metrics

    @property
    def buffered(self) -> int:
        return len(self._arrived)

    def oldest_s(self, now: float) -> float:
        """Age of the oldest buffered event."""
        return now - next(iter(self._arrived.values())) if self._arrived else 0.0
