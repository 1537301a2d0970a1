"""The coordinator of routing transactions answers questions alike, and lets nobody end what is another's."""

from tops.core.routing_tx.coordinator import RoutingCoordinator
from tops.model.ids import NodeId, TxId
from tops.model.routing import TxKind
from tops.protocol.effects import Effect, Persist, SendTo
from tops.protocol.messages import (
    Address,
    AskRoutingTx,
    BeginRoutingTx,
    BrokerJoins,
    DomainOpened,
    EndRoutingTx,
    RoutingTxBegan,
    RoutingTxDecided,
    RoutingTxEnded,
    RoutingTxVoted,
    Sender,
    TreeMessage,
)
from tops.protocol.records import RoutingTxCommitted, RoutingTxRefused

TX = TxId("e.1.r1")
OWNER, OTHER = Sender("e", "writer", incarnation=1), Sender("other", "writer", incarnation=1)
BROKER = Sender("b2", "broker", incarnation=1)
AT = Address(NodeId("b1"), "handle", 1)
BEGIN = BeginRoutingTx(tx=TX, kind=TxKind.ISOLATED, timeout_s=5.0)
COMMIT, ABORT = EndRoutingTx(tx=TX, commit=True), EndRoutingTx(tx=TX, commit=False)


class Flooded:
    """What a coordinator sends to every broker."""

    def __init__(self) -> None:
        self.messages: list[TreeMessage] = []
        self.coordinator = RoutingCoordinator(1, self.flood)

    def flood(self, message: TreeMessage) -> list[Effect]:
        self.messages.append(message)
        return []

    def decided(self) -> list[bool]:
        return [m.committed for m in self.messages if isinstance(m, RoutingTxDecided)]

    def commit(self) -> list[Effect]:
        self.coordinator.on_begin(BEGIN, OWNER, AT, 0.0)
        self.coordinator.on_end(COMMIT, OWNER, AT, 0.0)
        return self.coordinator.on_voted(RoutingTxVoted(tx=TX, epoch=self.coordinator.epoch, participants=("a",)))


def sent_messages(effects: list[Effect]) -> list[object]:
    return [effect.message for effect in effects if isinstance(effect, SendTo)]


def test_a_question_that_overtakes_a_begin_refuses_it_on_disk_before_it_is_answered() -> None:
    coordinator = Flooded().coordinator

    asked = coordinator.on_asked(AskRoutingTx(tx=TX), OWNER, AT, 0.0)
    begun = coordinator.on_begin(BEGIN, OWNER, AT, 0.0)

    assert asked[0] == Persist(RoutingTxRefused(tx=TX))
    assert [getattr(message, "committed", None) for message in sent_messages(asked)] == [False]
    assert isinstance(sent_messages(begun)[0], RoutingTxEnded)
    assert coordinator.open == {}


def test_a_refused_id_stays_refused_after_a_restart() -> None:
    coordinator = Flooded().coordinator
    coordinator.recover(RoutingTxRefused(tx=TX))

    begun = coordinator.on_begin(BEGIN, OWNER, AT, 0.0)

    assert not any(isinstance(message, RoutingTxBegan) for message in sent_messages(begun))


def test_a_commit_is_on_disk_before_anybody_is_sent_it_and_is_answered_alike_after_a_restart() -> None:
    flooded = Flooded()
    effects = flooded.commit()
    record = RoutingTxCommitted(tx=TX, number=1, participants=("a",))
    restarted = Flooded().coordinator
    restarted.recover(record)

    assert effects[0] == Persist(record)
    assert flooded.decided() == [True]
    for coordinator in (flooded.coordinator, restarted):
        assert sent_messages(coordinator.on_asked(AskRoutingTx(tx=TX), OWNER, AT, 0.0)) == [
            RoutingTxEnded(tx=TX, committed=True)
        ]


def test_only_its_initiator_commits_and_only_it_or_a_broker_aborts() -> None:
    flooded = Flooded()
    coordinator = flooded.coordinator
    coordinator.on_begin(BEGIN, OWNER, AT, 0.0)

    for end, sender in ((COMMIT, OTHER), (ABORT, OTHER), (COMMIT, BROKER)):
        assert coordinator.on_end(end, sender, AT, 0.0) == []
    assert flooded.messages == []
    coordinator.on_end(ABORT, BROKER, AT, 0.0)

    assert flooded.decided() == [False]


def test_one_isolated_transaction_is_prepared_at_a_time() -> None:
    flooded = Flooded()
    coordinator = flooded.coordinator
    second = TxId("e.1.r2")
    for tx in (TX, second):
        coordinator.on_begin(BeginRoutingTx(tx=tx, kind=TxKind.ISOLATED, timeout_s=5.0), OWNER, AT, 0.0)
        coordinator.on_end(EndRoutingTx(tx=tx, commit=True), OWNER, AT, 0.0)
    before = [getattr(m, "tx", None) for m in flooded.messages]

    coordinator.on_voted(RoutingTxVoted(tx=TX, epoch=coordinator.epoch))

    assert before == [TX]
    assert [getattr(m, "tx", None) for m in flooded.messages] == [TX, TX, second]


def test_a_new_epoch_aborts_what_is_open_and_lists_what_may_not_be_applied_everywhere() -> None:
    flooded = Flooded()
    flooded.commit()
    coordinator = flooded.coordinator
    coordinator.on_begin(BeginRoutingTx(tx=TxId("e.1.r2"), kind=TxKind.DYNAMIC, timeout_s=5.0), OWNER, AT, 0.0)

    coordinator.on_joins(BrokerJoins(incarnation=2, session=1), BROKER, AT, 0.0)

    opened, aborted = flooded.messages[-2:]
    assert isinstance(opened, DomainOpened)
    assert opened.committed == ((TX, 1),)
    assert isinstance(aborted, RoutingTxDecided)
    assert (aborted.tx, aborted.committed) == ("e.1.r2", False)
    assert coordinator.open == {}


def test_a_repeated_join_opens_no_further_epoch() -> None:
    coordinator = Flooded().coordinator
    joins = BrokerJoins(incarnation=2, session=1)
    coordinator.on_joins(joins, BROKER, AT, 0.0)
    epoch = coordinator.epoch

    coordinator.on_joins(joins, BROKER, AT, 0.0)

    assert coordinator.epoch == epoch
