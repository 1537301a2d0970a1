"""What a broker puts together: every message and every record of it fits, and one member alone always does."""

from collections.abc import Iterable

import msgspec
import pytest

from tests.core.driven_rendezvous import ME, PUBLISHER, SET, DrivenRendezvous, sent_effects, standing_only
from tests.core.machines import address, disseminated, of, persisted, sent_messages
from tops.core.broker.broker import BrokerCore
from tops.core.client.publisher import PublisherTx
from tops.core.commit.outcomes import Outcomes
from tops.core.log.event_log import EventLog, Feed
from tops.core.overlay.topology import Topology
from tops.model.event_types import EventType
from tops.model.filters import Filter
from tops.model.ids import NodeId, TxId
from tops.model.rejections import RejectionCode
from tops.model.sizes import (
    BUNDLE_BYTES,
    MESSAGE_BYTES_MAX,
    SITE_MESSAGE_BYTES_MAX,
    TEXT_MAX,
    TX_BYTES_MAX,
    encoded_bytes,
    logged_bytes,
)
from tops.model.transactions import Access, Outcome, ScopeLimit, TxType
from tops.protocol.effects import Effect, SendOnLink
from tops.protocol.messages import (
    AbortTx,
    Address,
    BeginPublic,
    BeginTx,
    CensusOpened,
    CommitTx,
    EpochFinished,
    Event,
    FollowLog,
    GetLogState,
    LogDelivered,
    LogEntry,
    LoggedTx,
    LogStateReported,
    OneShot,
    PrepareEpoch,
    PublishInTx,
    PublishInTxHandled,
    RouteAdded,
    RoutesReset,
    RunOneShots,
    Sender,
    SubscriptionChanged,
    TxAbandoned,
    TxOpened,
    TxOutcome,
    TxOutcomes,
    TxPublished,
    TxSpec,
)
from tops.protocol.records import LogAppended

LOCAL = TxSpec("set", TxType.LOCAL, limit=ScopeLimit.LOCAL, census=None)
MEBIBYTES = "x" * 5 * 2**20
SENDER = Sender("publisher", "writer", incarnation=1)


def padded(spec: TxSpec, length: int) -> TxSpec:
    return msgspec.structs.replace(spec, attributes={"key": "x" * length})


def run(machine: DrivenRendezvous, spec: TxSpec, texts: Iterable[str]) -> list[Effect]:
    """One-shots in one letter, each with a text of its own."""
    ones = [
        OneShot(TxId(f"publisher.1.{n}"), (Event("set", {"mark": text, "key": ""}),))
        for n, text in enumerate(texts, start=1)
    ]
    return machine.deliver(RunOneShots(spec=spec, transactions=tuple(ones)), PUBLISHER)


def with_voter() -> DrivenRendezvous:
    machine = DrivenRendezvous()
    machine.stand("v", "set", "s1", position=0)
    return machine


def prepared(machine: DrivenRendezvous, effects: list[Effect]) -> list[PrepareEpoch]:
    """All epochs until nothing waits, each voted for and finished."""
    found: list[PrepareEpoch] = []
    while prepares := sent_effects(effects, PrepareEpoch):
        found += prepares
        machine.vote(prepares[0])
        finished = EpochFinished(epoch=prepares[0].epoch, voter=prepares[0].voter, note=False)
        effects = machine.deliver(finished, Address(ME, prepares[0].voter, 1))
    return found


def test_an_epoch_ends_where_its_members_would_be_too_long_for_a_message() -> None:
    machine = with_voter()
    effects: list[Effect] = []
    for n in range(6):
        one = OneShot(TxId(f"publisher.1.{n}"), (Event("set", {"mark": MEBIBYTES, "key": ""}),))
        effects += machine.deliver(RunOneShots(spec=standing_only("set"), transactions=(one,)), PUBLISHER)

    found = prepared(machine, effects)

    assert [len(p.members) for p in found] == [1] * 6
    assert all(encoded_bytes(p) < MESSAGE_BYTES_MAX for p in found)


def test_small_members_share_an_epoch_up_to_its_size() -> None:
    machine = with_voter()

    found = prepared(machine, run(machine, standing_only("set"), ["x" * (BUNDLE_BYTES // 5)] * 12))

    assert [len(p.members) for p in found] == [4, 4, 4]
    assert all(encoded_bytes(p) <= BUNDLE_BYTES for p in found)


def test_the_attributes_of_a_shared_specification_count_for_each_entry_of_a_log() -> None:
    machine = with_voter()

    prepared(machine, run(machine, padded(standing_only("set"), BUNDLE_BYTES // 2), ["m"] * 8))

    logged = persisted(machine.effects, LogAppended)
    kept = machine.core.logs["set"].tail.values()
    assert all(encoded_bytes(r) < 2 * BUNDLE_BYTES for r in (*logged, *kept))
    assert sum(len(e.transactions) for e in machine.core.logs["set"].tail.values()) == 8


@pytest.mark.parametrize("texts", [["x" * (2**20)] * 6, ["m"] * 6], ids=["events", "attributes"])
def test_local_one_shots_become_entries_that_fit(texts: list[str]) -> None:
    machine = DrivenRendezvous()
    spec = LOCAL if len(texts[0]) > 1 else padded(LOCAL, 2**20)

    effects = run(machine, spec, texts)

    entries = [record.entry for record in persisted(effects, LogAppended)]
    assert [entry.number for entry in entries] == [1, 2, 3, 4, 5, 6]
    outcomes = [o for m in sent_effects(effects, TxOutcomes) for o in m.outcomes] + sent_effects(effects, TxOutcome)
    assert [(o.tx, o.log_number) for o in outcomes] == [(TxId(f"publisher.1.{n}"), n) for n in range(1, 7)]


def test_small_local_one_shots_share_an_entry() -> None:
    effects = run(DrivenRendezvous(), LOCAL, ["m"] * 50)

    assert [len(r.entry.transactions) for r in persisted(effects, LogAppended)] == [50]


def test_a_delivery_counts_attributes_as_well_as_events() -> None:
    kept = EventLog("plain", 1, lambda name: (name,), 64)
    kept.want(Feed("r", "r", "plain", address("r"), Filter.everything(), 0, 0, 100))
    long = {"key": "x" * 3 * 2**20}
    for _ in range(4):
        logged = LoggedTx(TxId("t"), "plain", (), long, ScopeLimit.NONE, TxType.LOCAL)
        kept.fill(LogEntry(number=kept.reserve(), transactions=(logged,)))

    kept.feeds["r"].position = 0
    delivered = sent_messages(kept.pump_all(), LogDelivered)

    assert [len(d.entries) for d in delivered] == [1] * len(delivered)
    assert delivered


def test_the_entries_in_memory_are_bounded_in_bytes() -> None:
    kept = EventLog("plain", 1, lambda name: (name,), 4096)
    for _ in range(20):
        kept.fill(LogEntry(number=kept.reserve(), event=Event("plain", {"mark": MEBIBYTES})))

    assert list(kept.tail) == list(range(9, 21))


def test_outcomes_that_are_told_together_fit_a_message() -> None:
    outcomes = [
        (TxOutcome(tx=TxId(f"p.1.{n}"), outcome=Outcome.COMMITTED, result=bytes(5 * 2**20)), PUBLISHER)
        for n in range(3)
    ]

    told = sent_messages(Outcomes().settle_commits(outcomes), TxOutcome)

    assert [o.tx for o in told] == ["p.1.0", "p.1.1", "p.1.2"]


def test_a_neighbour_hears_of_all_routes_in_messages_that_fit() -> None:
    topology = Topology({NodeId("b1"): [NodeId("b2")], NodeId("b2"): []})
    broker = BrokerCore(NodeId("b1"), 1, topology, bytes)
    broker.broker_up(NodeId("b2"), 1, 0.0)
    event_type = next(EventType(name, {"n": str}) for name in map(str, range(100)) if topology.rendezvous(name) == "b2")
    for n in range(4):
        sender = Sender(f"s{n}", "reader", incarnation=1)
        broker.site_up(sender, 0.0)
        wanted = Filter.where("n", "=", f"{n}" + "x" * 3 * 2**19)
        changed = SubscriptionChanged(
            subscription=1, definitions=(event_type,), filter=wanted, scope=None, durable=False
        )
        broker.receive(sender.node, changed, 0.0)

    sent = [e.message for e in of(broker.broker_up(NodeId("b2"), 2, 0.0), SendOnLink)]

    assert all(encoded_bytes(message) < MESSAGE_BYTES_MAX for message in sent)
    first = sent[0]
    assert isinstance(first, RoutesReset)
    assert len(first.routes) + len([m for m in sent if isinstance(m, RouteAdded)]) == 4


def test_what_is_told_about_a_log_fits_a_message_and_names_its_replicas_first() -> None:
    machine = DrivenRendezvous()
    machine.feed("v", "zz/replica", 0)
    for n in range(3000):
        name = f"{n}".rjust(500, "n")
        wanted = FollowLog(
            name=name, definitions=(SET,), filter=Filter(), position=None, start="now", credit=1, voter=None
        )
        machine.deliver(wanted, Address(ME, "f", 1), Sender(f"f{n}", "reader", incarnation=1))

    told = sent_effects(machine.deliver(GetLogState(request=1, event_type="set"), PUBLISHER), LogStateReported)[0]

    assert encoded_bytes(told) < 2 * BUNDLE_BYTES
    assert told.followers[0].name == "zz/replica"


# --------------------------------------------------------------------------------------- one transaction, many events


def announced(machine: DrivenRendezvous, tx: str, spec: TxSpec) -> list[Effect]:
    census = CensusOpened(tx=TxId(tx), spec=spec, coordinator=ME, incarnation=1, initiator=PUBLISHER)
    return machine.core.on_publication(census, SENDER, PUBLISHER, 0.0)


def published(machine: DrivenRendezvous, tx: str, sequence: int, event: Event) -> list[Effect]:
    message = TxPublished(tx=TxId(tx), event_type="set", sequence=sequence, event=event)
    return machine.core.on_publication(message, SENDER, PUBLISHER, 0.0)


@pytest.mark.parametrize("spec", [LOCAL, TxSpec("set", TxType.DISTRIBUTED, limit=ScopeLimit.DISTRIBUTED, census=None)])
def test_a_transaction_that_grows_over_the_limit_is_aborted(spec: TxSpec) -> None:
    machine = DrivenRendezvous()
    machine.stand("v", "set", "s1", position=0)
    if spec.tx_type is TxType.LOCAL:
        announced(machine, "publisher.1.1", spec)
    else:
        machine.deliver(BeginTx(tx=TxId("publisher.1.1"), spec=spec), PUBLISHER, SENDER)

    assert not sent_effects(
        published(machine, "publisher.1.1", 1, Event("set", {"mark": MEBIBYTES, "key": ""})), TxOutcome
    )
    effects = published(machine, "publisher.1.1", 2, Event("set", {"mark": MEBIBYTES, "key": ""}))

    (outcome,) = sent_effects(effects, TxOutcome)
    assert outcome.outcome is Outcome.ABORTED
    assert outcome.reason.startswith("too-large: ")
    assert str(TX_BYTES_MAX) in outcome.reason
    assert disseminated(effects, TxAbandoned)
    assert TxId("publisher.1.1") not in machine.core.open


def test_the_attributes_of_a_transaction_count_as_well() -> None:
    machine = DrivenRendezvous()
    announced(machine, "publisher.1.1", padded(LOCAL, 4 * 2**20))

    effects = published(machine, "publisher.1.1", 1, Event("set", {"mark": MEBIBYTES, "key": ""}))

    assert sent_effects(effects, TxOutcome)[0].reason.startswith("too-large: ")


@pytest.mark.parametrize("tx_type", list(TxType))
def test_a_public_transaction_rejects_the_event_and_stays_open(tx_type: TxType) -> None:
    machine = DrivenRendezvous()
    machine.stand("v", "set", "s1", position=0)
    limit = ScopeLimit.LOCAL if tx_type is TxType.LOCAL else ScopeLimit.DISTRIBUTED
    spec = TxSpec("set", tx_type, Access.PUBLIC, limit, census=None)
    tx = sent_effects(machine.deliver(BeginPublic(request=1, spec=spec), PUBLISHER, SENDER), TxOpened)[0].tx

    answers: list[PublishInTxHandled] = []
    for request, text in enumerate([MEBIBYTES, MEBIBYTES, "m"]):
        message = PublishInTx(tx=tx, request=request, event=Event("set", {"mark": text, "key": ""}))
        answers += sent_effects(machine.deliver(message, PUBLISHER, SENDER), PublishInTxHandled)

    assert [answer.sequence for answer in answers] == [1, None, 2]
    assert answers[1].rejection is not None and answers[1].rejection.code is RejectionCode.TOO_LARGE
    assert answers[0].rejection is None
    commit = CommitTx(tx=tx, tx_type=tx_type, event_type="set", last_sequence=None)
    assert not [
        o for o in sent_effects(machine.deliver(commit, PUBLISHER, SENDER), TxOutcome) if o.outcome is Outcome.ABORTED
    ]


def test_the_longest_transaction_fits_the_delivery_of_its_entry() -> None:
    machine = DrivenRendezvous()
    machine.feed("v", "s1", 0)
    announced(machine, "publisher.1.1", LOCAL)
    size = machine.core.relays[TxId("publisher.1.1")].size
    around = encoded_bytes(Event("set", {"mark": "", "key": ""})) + 8
    half = "x" * ((TX_BYTES_MAX - size) // 2 - around)
    for sequence in (1, 2):
        published(machine, "publisher.1.1", sequence, Event("set", {"mark": half, "key": ""}))

    commit = CommitTx(tx=TxId("publisher.1.1"), tx_type=TxType.LOCAL, event_type="set", last_sequence=2)
    effects = machine.deliver(commit, PUBLISHER, SENDER)

    (delivered,) = sent_effects(effects, LogDelivered)
    assert SITE_MESSAGE_BYTES_MAX - 1024 < encoded_bytes(delivered) < MESSAGE_BYTES_MAX - 16 * 1024


def test_what_is_measured_of_a_transaction_is_never_less_than_what_is_encoded() -> None:
    events = tuple(Event("set", {"mark": "ä" * n, "n": n}) for n in (1, 40, 300, 70_000))
    logged = LoggedTx(TxId("publisher.1.1"), "set", events, {"key": 1.5}, ScopeLimit.DISTRIBUTED, TxType.DISTRIBUTED)

    measured = logged_bytes(logged.tx, logged.event_type, logged.attributes) + sum(map(encoded_bytes, events))

    assert encoded_bytes(logged) <= measured <= encoded_bytes(logged) + 64


def test_the_reason_for_an_abort_is_cut_to_what_a_broker_takes() -> None:
    own = PublisherTx.begun(TxId("publisher.1.1"), LOCAL, ME)

    (order,) = sent_messages(own.abort(1, "x" * 10_000), AbortTx)

    assert order.reason == "x" * TEXT_MAX
