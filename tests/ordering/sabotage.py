"""Planted bugs of the ordering layer: builds that are broken on purpose, one way each."""

from collections.abc import Callable
from typing import Any

from tests.sim.sabotage import _patched, _together
from tops.core.log.event_log import EventLog, Repetition
from tops.core.ordering.arrivals import Arrived
from tops.core.ordering.broker import DomainAtBroker
from tops.core.ordering.chain import Incoming, Outgoing
from tops.core.ordering.groups import Group, Groups
from tops.core.ordering.managers import TopicManagers
from tops.core.ordering.module import Change, OrderingModule
from tops.model.ids import NodeId
from tops.protocol.effects import Effect, Persist, SendTo
from tops.protocol.messages import EventConfirmed, KnownSubscription, PartialTimestamp, Sender

SABOTAGES: dict[str, Callable[[], Any]] = {}


def _sabotage(function: Callable[[], Any]) -> Callable[[], Any]:
    SABOTAGES[function.__name__] = function
    return function


@_sabotage
def a_hop_of_the_chain_is_left_out() -> Any:
    """Timestamps go straight to the next stage with a member of the group, and may overtake others."""
    honest_to, honest_number, honest_take = TopicManagers._to, TopicManagers._number, TopicManagers._take_timestamp

    class Straight:
        """Queues each line for the nearest stage that it concerns."""

        def __init__(self, owner: TopicManagers) -> None:
            self.owner = owner

        def put(self, item: Any) -> int:
            stage_of, owner = self.owner.layout.stage_of, self.owner
            members = item.group if isinstance(item, PartialTimestamp) else item.members
            nearest = max(stage for stage in (stage_of[t] for t in members) if stage < owner.stage)
            return honest_to(owner, owner.layout.stages[nearest]).put(item)

        def recover(self, place: int, item: Any) -> None:
            honest_to(self.owner, self.owner.layout.stages[self.owner.stage - 1]).recover(place, item)

    def to(self: TopicManagers, broker: NodeId) -> Any:
        above = self.stage > 0 and broker == self.layout.stages[self.stage - 1]
        return Straight(self) if above and not _called_by(self) else honest_to(self, broker)

    def _called_by(self: TopicManagers) -> bool:
        return not getattr(self, "passing", False)

    def passing(honest: Any) -> Any:
        def call(self: TopicManagers, *args: Any) -> list[Effect]:
            self.passing = True  # type: ignore[attr-defined]
            try:
                effects: list[Effect] = honest(self, *args)
                return effects
            finally:
                self.passing = False  # type: ignore[attr-defined]

        return call

    return _together(
        _patched(TopicManagers, "_to", to),
        _patched(TopicManagers, "_number", passing(honest_number)),
        _patched(TopicManagers, "_take_timestamp", passing(honest_take)),
        _patched(TopicManagers, "on_cut", passing(TopicManagers.on_cut)),
    )


@_sabotage
def timestamps_must_equal_the_clock() -> Any:
    """The paper's rule, instead of at least as many."""
    honest = OrderingModule._is_next

    def strict(self: OrderingModule, topic: int, event: Arrived) -> bool:
        if not honest(self, topic, event):
            return False
        held = self.held
        return all(held[t].clock == index for t, index in event.entries.items() if t in held and t != topic)

    return _patched(OrderingModule, "_is_next", strict)


@_sabotage
def a_cut_sets_the_clocks_of_topics_that_are_held() -> Any:
    honest = OrderingModule.on_cut

    def hasty(self: OrderingModule, version: int, entries: dict[int, int]) -> list[Effect]:
        change = self.change
        if change is not None and change.version == version and change.cut is None:
            for topic, state in self.held.items():
                if entries.get(topic, 0) > state.clock:
                    for index in [i for i in state.events if i <= entries[topic]]:
                        self._arrived.pop((topic, index), None)
                    state.begin(entries[topic])
        return honest(self, version, entries)

    return _patched(OrderingModule, "on_cut", hasty)


@_sabotage
def events_do_not_wait_while_a_subscription_is_pending() -> Any:
    def impatient(self: OrderingModule, change: Change, topic: int, event: Arrived) -> bool:
        return False

    return _patched(OrderingModule, "_waits_for_change", impatient)


@_sabotage
def events_behind_the_cut_do_not_wait_for_its_adoption() -> Any:
    def impatient(self: OrderingModule, change: Change, topic: int, event: Arrived) -> bool:
        return change.cut is None and not self.adding.keys().isdisjoint(event.entries)

    return _patched(OrderingModule, "_waits_for_change", impatient)


@_sabotage
def groups_shrink_at_once() -> Any:
    """The first event after a change does not have the topics of the group before it."""

    def hasty(self: Groups, topic: int) -> Group:
        self._left.pop(topic, None)
        return self.of(topic)

    return _patched(Groups, "for_next_event", hasty)


@_sabotage
def older_versions_of_a_subscription_are_accepted() -> Any:
    honest = Groups.store

    def credulous(self: Groups, subscription: KnownSubscription) -> bool:
        known = self.known.get(subscription.subscriber)
        if known is not None and known.version > subscription.version:
            self._count(frozenset(known.topics), frozenset(subscription.topics))
            self.known[subscription.subscriber] = subscription
            return True
        return honest(self, subscription)

    return _patched(Groups, "store", credulous)


@_sabotage
def a_restarted_manager_forgets_what_has_passed() -> Any:
    honest = TopicManagers.recover

    def forgetful(self: TopicManagers, record: Any) -> None:
        honest(self, record)
        self.lower.clear()

    return _patched(TopicManagers, "recover", forgetful)


@_sabotage
def a_repeated_request_is_numbered_again_after_a_restart() -> Any:
    honest = DomainAtBroker.recover

    def forgetful(self: DomainAtBroker, record: Any) -> None:
        honest(self, record)
        for log in self._logs.values():
            log.published.clear()

    return _together(
        _patched(DomainAtBroker, "recover", forgetful),
        _patched(EventLog, "recognise", _anything_is_new),
    )


def _anything_is_new(self: EventLog, sender: Sender, number: int) -> Repetition:
    incarnation, last = self.published.get(sender.node, (0, 0))
    if (incarnation, last) == (0, 0):
        return Repetition.NEW
    return Repetition.REPEATED if number <= last else Repetition.NEW


@_sabotage
def a_confirmation_comes_before_the_timestamp_is_complete() -> Any:
    honest = DomainAtBroker.on_published

    def hasty(self: DomainAtBroker, published: Any, topic: int, sender: Sender, at: Any) -> list[Effect]:
        effects = honest(self, published, topic, sender, at)
        return [*effects, SendTo(at, EventConfirmed(origin=published.origin))]

    return _patched(DomainAtBroker, "on_published", hasty)


@_sabotage
def what_was_passed_is_not_repeated_after_a_loss() -> Any:
    return _patched(Outgoing, "send_again", lambda self: None)


@_sabotage
def a_gap_between_stages_is_not_noticed() -> Any:
    def careless(self: Incoming, sender: NodeId, passed: Any) -> Any:
        cursor = self.taken.get(sender, 0)
        for place, item in passed.items:
            if place > cursor:
                cursor = self.taken[sender] = place
                yield place, item
        self.taken.setdefault(sender, cursor)

    return _patched(Incoming, "fresh", careless)


@_sabotage
def lost_lines_are_not_numbered_again() -> Any:
    return _patched(TopicManagers, "_number_again", lambda self, topic, lost: [])


@_sabotage
def events_are_released_as_their_timestamps_complete() -> Any:
    """Not strictly by index, which the log must not do, and no skip is sent for what comes later."""

    def hasty(self: TopicManagers, topic: int) -> list[Effect]:
        pending = self.pending[topic]
        complete = [(i, p) for i, p in pending.items() if p.entries is not None]
        effects: list[Effect] = []
        for index, p in complete[:1]:
            del pending[index]
            effects += self._release(topic, index, p.waiting, p.entries or {})
        return effects

    return _patched(TopicManagers, "_release_all", hasty)


@_sabotage
def a_timestamp_is_passed_on_before_it_is_journaled() -> Any:
    honest = TopicManagers._take_timestamp

    def careless(self: TopicManagers, *args: Any) -> list[Effect]:
        return [e for e in honest(self, *args) if not isinstance(e, Persist)]

    return _patched(TopicManagers, "_take_timestamp", careless)
