"""Messages that are repeated or late: the effect is that of one, and none at all on another life or attempt."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.scenarios.cluster import Cluster, Participant, content_of
from tops.model.constraints import AtLeast, MinParticipants
from tops.model.errors import TopsError
from tops.model.ids import NodeId
from tops.model.transactions import Access, LocalOutcome, Scope, ScopeLimit, TxType
from tops.protocol.messages import (
    BeginPublic,
    CommitTx,
    Envelope,
    LinkMessage,
    Published,
    PublishInTx,
    PublishInTxHandled,
    TxOpened,
    TxOutcome,
    TxPublished,
)

Recorded = tuple[NodeId, NodeId, LinkMessage]


def record(cluster: Cluster) -> list[Recorded]:
    """Everything that is sent from here on."""
    found: list[Recorded] = []

    def look(owner: NodeId, peer: NodeId, message: LinkMessage) -> bool:
        found.append((owner, peer, message))
        return False

    cluster.lose(look)
    return found


def deliver(cluster: Cluster, recorded: Recorded) -> None:
    """The message arrives once more, past the link's own protection."""
    owner, peer, message = recorded
    node = cluster.node(peer)
    if node.up:
        node.receive(owner, message)


# --------------------------------------------------------------------------------------- one story of each kind


class Story:
    """A cluster, what happens in it, and what must be true in the end."""

    def __init__(self) -> None:
        self.cluster = Cluster("P", "Q", "S", "T", "L")
        for name in ("P", "Q"):
            self.cluster[name].advertise("plain", "other", "set", "log")
        self.at: dict[str, Participant] = {}

    def participants(self, standing: bool = False) -> None:
        event_type = "other" if standing else "plain"
        self.at = {name: self.cluster[name].subscribe(event_type, standing=standing) for name in ("S", "T")}
        self.at["L"] = self.cluster["L"].subscribe(event_type, Scope.LOCAL)

    def replicas(self) -> None:
        self.at = {name: self.cluster[name].replicate("set") for name in ("S", "T", "L")}

    def ends(self, tx: Any) -> dict[str, Any]:
        return {name: p.committed(tx) for name, p in self.at.items()}


def private(story: Story) -> Any:
    story.participants()
    p = story.cluster["P"]
    tx = p.begin("plain")
    p.publish("plain", "one", tx=tx)
    p.publish("plain", "two", tx=tx)
    p.commit(tx)
    return tx


def public(story: Story) -> Any:
    story.participants()
    p, q = story.cluster["P"], story.cluster["Q"]
    tx = p.begin("plain", access=Access.PUBLIC)
    p.publish("plain", "one", tx=tx)
    q.contribute(tx)
    q.publish("plain", "two", tx=tx)
    q.done(tx)
    p.commit(tx)
    return tx


def local(story: Story) -> Any:
    story.participants()
    for participant in story.at.values():
        participant.scope = Scope.LOCAL
    p = story.cluster["P"]
    tx = p.begin("plain", TxType.LOCAL)
    p.publish("plain", "one", tx=tx)
    p.publish("plain", "two", tx=tx)
    p.commit(tx)
    return tx


def aborted(story: Story) -> Any:
    story.participants()
    story.at["T"].rejects_prepare = True
    p = story.cluster["P"]
    tx = p.begin("plain", local_outcome=LocalOutcome.FOLLOWS)
    p.publish("plain", "one", tx=tx)
    with pytest.raises(TopsError):
        p.commit(tx)
    return tx


def one_shot(story: Story) -> Any:
    story.participants(standing=True)
    story.cluster["P"].execute("other", ["one", "two"], census=None, constraints=(MinParticipants(2),))
    return story.cluster["P"].last_tx()


def replicated(story: Story) -> Any:
    story.replicas()
    story.cluster["P"].execute(
        "set",
        ["one", "two"],
        census=None,
        constraints=(AtLeast(3, frozenset("STL")),),
        limit=ScopeLimit.LOCAL,
        local_outcome=LocalOutcome.FOLLOWS,
    )
    return story.cluster["P"].last_tx()


def interactive_on_a_set(story: Story) -> Any:
    story.replicas()
    p = story.cluster["P"]
    tx = p.begin("set", limit=ScopeLimit.LOCAL, local_outcome=LocalOutcome.FOLLOWS)
    p.publish("set", "one", tx=tx)
    p.publish("set", "two", tx=tx)
    p.commit(tx)
    return tx


STORIES: dict[Callable[[Story], Any], set[Any]] = {
    private: {("one", "two")},
    public: {("one", "two")},
    local: {("one", "two")},
    aborted: {None},
    one_shot: {("one", "two")},
    replicated: {("one", "two")},
    interactive_on_a_set: {("one", "two")},
}
stories = pytest.mark.parametrize("tell", STORIES, ids=lambda tell: tell.__name__)


@pytest.mark.parametrize("copies", [2, 3, 5])
@stories
def test_letters_that_are_delivered_several_times_have_the_effect_of_one(
    tell: Callable[[Story], Any], copies: int
) -> None:
    story = Story()
    story.cluster.repeat(copies)

    tx = tell(story)
    story.cluster.settle()

    assert set(story.ends(tx).values()) == STORIES[tell]
    story.cluster.check()


@stories
def test_everything_that_was_ever_said_changes_nothing_when_it_is_said_again_at_the_end(
    tell: Callable[[Story], Any],
) -> None:
    story = Story()
    recorded = record(story.cluster)
    tx = tell(story)
    story.cluster.settle()
    story.cluster.lose_nothing()
    calls = {name: list(p.calls) for name, p in story.at.items()}

    for late in recorded:
        deliver(story.cluster, late)
    story.cluster.run(3.0)

    assert set(story.ends(tx).values()) == STORIES[tell]
    assert {name: [c for c in p.calls if c[0] != "JoinTx"] for name, p in story.at.items()} == {
        name: [c for c in asked if c[0] != "JoinTx"] for name, asked in calls.items()
    }
    story.cluster.check()


@stories
def test_what_was_said_to_a_former_life_means_nothing_to_the_next(tell: Callable[[Story], Any]) -> None:
    """Every node is restarted; then all that was said before arrives once more, and a new transaction runs."""
    story = Story()
    recorded = record(story.cluster)
    first = tell(story)
    story.cluster.settle()
    story.cluster.lose_nothing()
    before = story.ends(first)
    for node in story.cluster.world.nodes():
        node.crash()
    for node in story.cluster.world.nodes():
        node.start()
    story.cluster.run(4.0)

    for late in recorded:
        if isinstance(late[2], Envelope):
            deliver(story.cluster, late)
    story.cluster.run(3.0)

    assert story.ends(first) == before
    story.cluster.check()


def test_a_repeated_frame_is_dropped_by_the_link_so_events_are_never_doubled() -> None:
    """The sequence of events rests on this: at a participant a repeated number would be an error."""
    story = Story()
    story.participants()
    network = story.cluster.world.network
    honest = network._transmit

    def thrice(*arguments: Any) -> None:
        for _ in range(3):
            honest(*arguments)

    network._transmit = thrice  # type: ignore[method-assign,assignment]
    p = story.cluster["P"]
    tx = p.begin("plain")
    p.publish("plain", "one", tx=tx)
    p.publish("plain", "ordinary")
    p.publish("plain", "two", tx=tx)
    p.commit(tx)
    story.cluster.settle()

    assert set(story.ends(tx).values()) == {("one", "two")}
    assert [participant.seen() for participant in story.at.values()] == [["ordinary"]] * 3
    story.cluster.check()


def test_an_ordinary_event_that_comes_again_on_another_path_is_not_delivered_twice() -> None:
    story = Story()
    story.participants()
    recorded = record(story.cluster)
    story.cluster["P"].publish("plain", "one")
    story.cluster.run(0.5)
    story.cluster.lose_nothing()

    for late in [r for r in recorded if isinstance(content_of(r[2]), Published) and r[1] in ("S", "T", "L")]:
        deliver(story.cluster, late)
    story.cluster.run(0.5)

    assert [participant.seen() for participant in story.at.values()] == [["one"]] * 3


def test_a_repeated_event_of_a_transaction_never_commits_twice() -> None:
    """A repeated number is not what comes next: the participant gives up rather than apply it again."""
    story = Story()
    story.participants()
    recorded = record(story.cluster)
    p = story.cluster["P"]
    tx = p.begin("plain")
    p.publish("plain", "one", tx=tx)
    story.cluster.run(0.3)

    for late in [r for r in recorded if isinstance(content_of(r[2]), TxPublished) and r[1] == "S"]:
        deliver(story.cluster, late)
    ending = p.commit_soon(tx)
    story.cluster.until(lambda: ending.done, "the commit was not answered")
    story.cluster.settle()

    assert story.at["S"].committed(tx) in (None, ("one",))
    story.cluster.check()


@pytest.mark.parametrize("lost", [PublishInTx, PublishInTxHandled, BeginPublic, TxOpened, CommitTx, TxOutcome])
def test_a_lost_letter_of_a_publisher_is_said_again_and_counts_once(lost: type) -> None:
    story = Story()
    first: list[type] = [lost]

    def lose(owner: NodeId, peer: NodeId, message: LinkMessage) -> bool:
        if "P" in (owner, peer) and first and isinstance(content_of(message), lost):
            first.clear()
            return True
        return False

    story.cluster.lose(lose)
    tx = public(story)
    story.cluster.settle()

    assert first == []
    assert set(story.ends(tx).values()) == {("one", "two")}
    story.cluster.check()
