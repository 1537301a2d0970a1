"""Golden transcripts of the main scenarios: what is received, sent and journaled, in order.

`python -m pytest tests/scenarios/test_transcripts.py --record` writes them again; review the difference.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.scenarios.cluster import Cluster, content_of
from tests.scenarios.test_replica_set import ReplicaSet
from tests.scenarios.test_stale_journal import is_stale, restore
from tests.scenarios.transcript import Transcript
from tops.model.constraints import MinParticipants
from tops.model.errors import JournalStale, TransactionAborted
from tops.model.ids import NodeId
from tops.model.transactions import Outcome, Scope, TxType
from tops.protocol.messages import EpochDecided, LinkMessage, PrepareEpoch

FOLDER = Path(__file__).parent / "transcripts"


def one_shot_write_all() -> Transcript:
    """A write of a replica set that all three replicas prepare and commit: one epoch, one record, one log index."""
    replica_set = ReplicaSet()
    transcript = Transcript(replica_set.cluster)
    transcript.say("P writes; all replicas must commit")
    assert replica_set.write("one", enough=3).outcome is Outcome.COMMITTED
    return transcript


def no_vote() -> Transcript:
    """A replica rejects a write that needs all replicas: nothing is committed, and the log index becomes a no-op."""
    replica_set = ReplicaSet()
    transcript = Transcript(replica_set.cluster)
    transcript.say("P writes what no replica can apply; all replicas must commit")
    with pytest.raises(TransactionAborted):
        replica_set.write("one", enough=3, bad=True)
    return transcript


def excluded_and_caught_up() -> Transcript:
    """A replica misses a prepare. The others commit without it; it follows the log and votes on the next write."""
    replica_set = ReplicaSet()
    cluster = replica_set.cluster
    transcript = Transcript(cluster)

    def prepare_for_c(_: NodeId, peer: NodeId, message: LinkMessage) -> bool:
        return peer == "C" and isinstance(content_of(message), PrepareEpoch)

    transcript.say("what is sent to C to prepare is lost; two replicas are enough")
    cluster.lose(prepare_for_c)
    replica_set.write("one")
    transcript.say("C is reached again and catches up")
    cluster.lose_nothing()
    cluster.until(lambda: replica_set.databases["C"].position == 1, "C did not catch up")
    cluster.until(lambda: len(replica_set.epochs.standing.in_sync) == 3, "C is not in sync")
    transcript.say("P writes again; all replicas must commit")
    replica_set.write("two", enough=3)
    return transcript


def interactive_with_census() -> Transcript:
    """A distributed transaction with a census: two subscribers join, receive two events, and vote."""
    cluster = Cluster("P", "A", "B")
    cluster["P"].advertise("plain")
    for name in "AB":
        cluster[name].subscribe("plain")
    transcript = Transcript(cluster)
    transcript.say("P begins; at least two participants are needed")
    tx = cluster["P"].begin("plain", constraints=(MinParticipants(2),))
    transcript.say("P publishes two events and commits")
    cluster["P"].publish("plain", "one", tx=tx)
    cluster["P"].publish("plain", "two", tx=tx)
    assert cluster["P"].commit(tx).outcome is Outcome.COMMITTED
    return transcript


def local_transaction() -> Transcript:
    """A local transaction: each subscriber commits by itself, and the rendezvous only relays."""
    cluster = Cluster("P", "A", "B")
    cluster["P"].advertise("plain")
    for name in "AB":
        cluster[name].subscribe("plain", Scope.LOCAL)
    transcript = Transcript(cluster)
    transcript.say("P begins a local transaction, publishes an event and commits")
    tx = cluster["P"].begin("plain", TxType.LOCAL)
    cluster["P"].publish("plain", "one", tx=tx)
    assert cluster["P"].commit(tx).outcome is Outcome.COMMITTED
    cluster.run(0.3)
    return transcript


def in_doubt() -> Transcript:
    """A replica has prepared and does not receive the decision: it asks the coordinator, and then commits."""
    replica_set = ReplicaSet()
    cluster = replica_set.cluster
    transcript = Transcript(cluster)

    def decision_for_c(_: NodeId, peer: NodeId, message: LinkMessage) -> bool:
        return peer == "C" and isinstance(content_of(message), EpochDecided)

    transcript.say("the decision for C is lost")
    cluster.lose(decision_for_c)
    pending = replica_set.write_soon("one", enough=3)
    cluster.until(lambda: replica_set.databases["A"].position == 1, "A did not commit")
    cluster.run(0.1)
    transcript.say("C is reached again, and asks")
    cluster.lose_nothing()
    cluster.until(lambda: replica_set.databases["C"].position == 1, "C stays in doubt")
    pending.wait()
    return transcript


def durable_subscriber_returns() -> Transcript:
    """A durable subscriber restarts: the log goes on from its position, and it gets what was published meanwhile."""
    cluster = Cluster("P", "S")
    cluster["P"].advertise("log")
    subscriber = cluster["S"].subscribe("log", Scope.LOCAL, durable="reader")
    transcript = Transcript(cluster)
    transcript.say("P publishes one event; S takes it")
    cluster["P"].publish("log", "one")
    cluster.until(lambda: subscriber.seen() == ["one"], "S got nothing")
    transcript.say("S dies; P publishes another event")
    cluster.kill("S")
    cluster["P"].publish("log", "two")
    transcript.say("S starts again")
    cluster.node("S").start()
    cluster.until(lambda: subscriber.seen()[-1] == "two", "S got nothing more")
    return transcript


def stale_journal() -> Transcript:
    """A coordinator starts on an older copy of its journal. It finds that replicas are ahead, and rejects writes."""
    replica_set = ReplicaSet()
    for mark in ("one", "two"):
        replica_set.write(mark)
    replica_set.cluster.run(2.0)
    restore(replica_set, 1)
    transcript = Transcript(replica_set.cluster)
    transcript.say("the coordinator starts on a journal that ends at index 1; the replicas are at index 2")
    replica_set.cluster.restart(replica_set.coordinator)
    replica_set.cluster.until(lambda: is_stale(replica_set), "it was not noticed")
    transcript.say("P writes")
    assert isinstance(replica_set.write_soon("three").failure(), JournalStale)
    return transcript


SCENARIOS: tuple[Callable[[], Transcript], ...] = (
    one_shot_write_all,
    no_vote,
    excluded_and_caught_up,
    interactive_with_census,
    local_transaction,
    in_doubt,
    durable_subscriber_returns,
    stale_journal,
)


def text_of(scenario: Callable[[], Transcript]) -> str:
    summary = " ".join((scenario.__doc__ or "").split())
    return "\n".join([summary, *scenario().lines, ""])


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_a_scenario_is_as_it_was_recorded(scenario: Callable[[], Transcript], request: pytest.FixtureRequest) -> None:
    file = FOLDER / f"{scenario.__name__}.txt"
    text = text_of(scenario)
    if request.config.getoption("--record"):
        file.write_text(text)

    assert text == file.read_text(), "if this is meant, record it again with --record and review the difference"


def test_no_transcript_is_left_without_its_scenario() -> None:
    assert {file.stem for file in FOLDER.glob("*.txt")} == {scenario.__name__ for scenario in SCENARIOS}


def test_a_run_that_differs_is_found() -> None:
    assert text_of(no_vote).partition("\n")[2] != (FOLDER / "one_shot_write_all.txt").read_text().partition("\n")[2]
