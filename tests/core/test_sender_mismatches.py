"""Messages whose stamped sender is not the member that they speak for: not acted on, and reported for the audit."""

from tests.core.driven_rendezvous import ME, DrivenRendezvous, sent_effects, standing_only
from tests.core.test_epochs import Machine, ready
from tests.core.test_log_opening import point, records, started, tell, waits, with_replicas
from tops.core.broker.broker import BrokerCore
from tops.core.overlay.topology import Topology
from tops.model.event_types import EventType
from tops.model.ids import NodeId
from tops.model.log_points import LogPoint
from tops.protocol.effects import Effect, Reject, SendOnLink
from tops.protocol.messages import (
    Address,
    AppliedIndexReported,
    DecisionRelayed,
    Envelope,
    EpochFinished,
    EpochId,
    EpochVoted,
    HistoryDiffers,
    ParticipantLost,
    PrepareEpoch,
    PublisherLost,
    Sender,
    TypeAdvertised,
)

STRANGER = Sender("stranger", "participant", incarnation=1)
LOG = EventType("rs.shop", {"reads": bytes, "write": bytes}, durable=True)


def rejected(effects: list[Effect]) -> list[tuple[str, str, str]]:
    return [(e.sender.identity, e.verb, e.code) for e in effects if isinstance(e, Reject)]


def test_a_vote_under_a_name_that_was_not_asked_is_reported_and_counts_for_nobody() -> None:
    machine = Machine()
    machine.core.submit(ready("t1"))
    forged = EpochVoted(epoch=machine.epoch.id, digest=machine.epoch.digest, voter="a", excluded={})

    effects = machine.core.on_voted(forged, STRANGER)

    assert rejected(effects) == [("stranger", "participate", "not-yours")]
    assert machine.epoch.votes == {}


def test_a_finish_under_a_name_that_was_not_asked_is_reported_and_counts_for_nobody() -> None:
    machine = Machine()
    machine.core.submit(ready("t1"))
    for name in "abc":
        machine.vote(name)

    effects = machine.core.on_finished(
        EpochFinished(epoch=machine.epoch.id, voter="a", note=False), STRANGER, Address(ME, "s", 1)
    )

    assert rejected(effects) == [("stranger", "participate", "not-yours")]
    assert machine.epoch.finished == set()


def test_a_vote_of_an_earlier_incarnation_of_the_voter_is_merely_late() -> None:
    machine = Machine()
    machine.core.submit(ready("t1"))
    late = EpochVoted(epoch=machine.epoch.id, digest=machine.epoch.digest, voter="a", excluded={})

    assert machine.core.on_voted(late, Sender("a", "participant", incarnation=7)) == []


def test_a_stranger_does_not_tell_how_far_it_is() -> None:
    former = with_replicas()
    rendezvous = started(records(former))

    effects = tell(rendezvous, "stranger", LogPoint(former.history, 99, "e" * 32))

    assert rejected(effects) == [("stranger", "participate", "not-yours")]
    assert waits(rendezvous)
    for site in "AB":
        assert rejected(tell(rendezvous, site, point(former, 1))) == []
    assert not waits(rendezvous)


def test_on_a_sets_log_only_its_replicas_say_what_they_hold() -> None:
    rendezvous = DrivenRendezvous()
    rendezvous.deliver(TypeAdvertised(definitions=(LOG,)), Address(ME, "shop/r1", 1))
    held = LogPoint("h", 9, "e" * 32)
    told = AppliedIndexReported(event_type="rs.shop", incarnation=1, point=held, decided=9, transactions=())
    differs = HistoryDiffers(name="shop/r1", event_type="rs.shop", point=held)

    for message in (told, differs):
        effects = rendezvous.deliver(message, Address(ME, "stock/r1", 1))
        assert rejected(effects) == [("stock/r1", "participate", "not-yours")]
    assert rendezvous.core.logs["rs.shop"].differing == set()


def test_a_broker_speaks_of_its_own_sites_only() -> None:
    rendezvous = DrivenRendezvous()
    rendezvous.stand("a", "set", "A", position=0)
    rendezvous.feed("a", "A", 0)
    foreign = Sender("b9", "broker", incarnation=1)

    effects = rendezvous.deliver(ParticipantLost(address=Address(ME, "a", 1)), Address(NodeId("b9")), foreign)

    assert rejected(effects) == [("b9", "participate", "not-yours")]
    assert len(sent_effects(rendezvous.one_shot("p.1.1", standing_only("set")), PrepareEpoch)) == 1


def test_a_site_does_not_say_that_another_one_is_gone() -> None:
    rendezvous = DrivenRendezvous()

    effects = rendezvous.deliver(PublisherLost(site=NodeId("victim"), incarnation=1), Address(ME, "s", 1), STRANGER)

    assert rejected(effects) == [("stranger", "publish", "not-yours")]


def test_a_decision_that_an_outsider_passes_on_is_not_delivered() -> None:
    core = BrokerCore(NodeId("b1"), 1, Topology({NodeId("b1"): []}), bytes)
    for name in ("shop/r1", "shop/r2", "stock/r1"):
        core.site_up(Sender(name, "replica", incarnation=1), 0.0)
    victim = core.edge.sites[NodeId("shop/r1")].address
    epoch = EpochId("rs.shop", 1, 1, NodeId("b1"), 1)
    known = Envelope(to=victim, body=DecisionRelayed(epoch=epoch, digest="d", committing=frozenset()))

    forged = core.receive(NodeId("stock/r1"), known, 0.0)
    passed = core.receive(NodeId("shop/r2"), known, 0.0)

    assert rejected(forged) == [("stock/r1", "participate", "not-yours")]
    assert not [e for e in forged if isinstance(e, SendOnLink)]
    assert [e.link for e in passed if isinstance(e, SendOnLink)] == ["shop/r1"]
