"""The log of a durable type: gap-free, served up to the lowest undecided number, each entry once."""

from tests.core.driven_rendezvous import SET, DrivenRendezvous
from tests.core.machines import address, event, of, sender, sent_messages, shown
from tops.core.log.event_log import EventLog, Feed, Repetition
from tops.model.event_types import EventType
from tops.model.filters import Filter
from tops.model.ids import NodeId, TxId
from tops.model.log_points import BEGINNING
from tops.model.transactions import ScopeLimit, TxType
from tops.protocol.effects import Effect, ReadLog
from tops.protocol.messages import FollowLog, FollowRejected, LogDelivered, LogEntry, LoggedTx, Sender, TypeAdvertised
from tops.protocol.records import Publisher


def log(tail: int = 64) -> EventLog:
    return EventLog("plain", 1, lambda name: (name,), tail)


def feed(position: int = 0, *, credit: int = 100, voter: str | None = None, name: str = "r") -> Feed:
    return Feed(name, name, "plain", address(name), Filter.everything(), position, position, credit, voter)


def append(kept: EventLog, count: int = 1) -> None:
    for _ in range(count):
        number = kept.reserve()
        kept.fill(LogEntry(number=number, event=event(f"m{number}")))


def numbers(effects: list[Effect]) -> list[int]:
    return [e.number for d in sent_messages(effects, LogDelivered) for e in d.entries]


def test_numbers_have_no_gap_and_none_is_given_twice() -> None:
    kept = log()

    assert [kept.reserve() for _ in range(4)] == [1, 2, 3, 4]


def test_nothing_is_served_beyond_the_lowest_undecided_number() -> None:
    """A reader that had taken 2 before 1 was decided would never see 1."""
    kept = log()
    kept.want(feed())
    first, second = kept.reserve(), kept.reserve()

    kept.fill(LogEntry(number=second, event=event("m2")))
    assert kept.pump_all() == []
    assert kept.decided_upto == 0
    kept.fill(LogEntry(number=first, event=event("m1")))

    assert numbers(kept.pump_all()) == [1, 2]


def test_a_void_number_is_passed_over_and_counted() -> None:
    kept = log()
    kept.fill(LogEntry(number=kept.reserve()))
    append(kept)

    delivered = sent_messages(kept.want(feed()), LogDelivered)

    assert (delivered[0].after, delivered[-1].upto) == (0, 2)
    assert [e.number for d in delivered for e in d.entries] == [2]


def test_no_more_than_the_credit_is_on_its_way() -> None:
    kept = log()
    append(kept, 10)

    assert numbers(kept.want(feed(credit=3))) == [1, 2, 3]
    assert kept.pump_all() == []
    assert numbers(kept.want(feed(2, credit=3))) == [4, 5]


def test_a_renewal_sends_nothing_again_unless_nothing_has_arrived_since() -> None:
    kept = log()
    append(kept, 3)
    assert numbers(kept.want(feed())) == [1, 2, 3]

    assert numbers(kept.want(feed(2))) == []
    assert numbers(kept.want(feed(2))) == [3]


def test_older_entries_are_read_from_disk_once_and_then_go_on_from_memory() -> None:
    kept = log(tail=2)
    append(kept, 4)

    wanted = kept.want(feed())
    assert of(wanted, ReadLog) == [ReadLog("plain", "r", 1, 4)]
    assert kept.pump_all() == []  # it is being read
    read = tuple(LogEntry(number=n, event=event(f"m{n}")) for n in (1, 2))

    assert numbers(kept.on_read("r", read)) == [1, 2, 3, 4]
    assert kept.on_read("r", read) == []


def test_a_position_that_is_no_longer_kept_is_refused() -> None:
    kept = log()
    kept.oldest = 5

    assert sent_messages(kept.want(feed(2)), FollowRejected) == [FollowRejected(name="r", event_type="plain", oldest=5)]
    assert sent_messages(kept.want(feed(4)), FollowRejected) == []


def test_what_a_voter_committed_itself_is_not_sent_to_it() -> None:
    kept = log()
    tx = LoggedTx(TxId("t"), "plain", (event(),), {}, ScopeLimit.LOCAL, TxType.DISTRIBUTED)
    kept.fill(LogEntry(number=kept.reserve(), transactions=(tx,), committing=shown(["me"])))
    kept.fill(LogEntry(number=kept.reserve(), transactions=(tx,), committing=shown(["others"])))

    assert numbers(kept.want(feed(voter="me"))) == [2]
    assert numbers(kept.want(feed(voter="others", name="o"))) == [1]


def test_a_publisher_is_recognised_by_its_own_numbers() -> None:
    kept = log()

    kept.published_by(Publisher(NodeId("P"), 1, 1))

    assert kept.recognise(sender("P"), 1) is Repetition.REPEATED
    assert kept.recognise(sender("P"), 2) is Repetition.NEW
    assert kept.recognise(sender("P"), 3) is Repetition.OUT_OF_TURN
    assert kept.recognise(sender("Q"), 1) is Repetition.NEW
    assert kept.recognise(sender("P", 2), 1) is Repetition.NEW
    kept.published_by(Publisher(NodeId("P"), 2, 1))
    assert kept.recognise(sender("P"), 2) is Repetition.OUT_OF_TURN  # an earlier incarnation's


def test_recovery_finds_the_numbers_that_were_given_out_and_never_decided() -> None:
    kept = log()
    for number in (1, 2, 4):
        kept.fill(LogEntry(number=number, event=event()))

    assert kept.missing_numbers() == [3]
    assert kept.reserve() == 5


def test_what_is_decided_while_a_subscriber_is_busy_is_delivered_together() -> None:
    kept = log()
    kept.want(feed())

    sent = []
    for _ in range(5):
        append(kept)
        sent.append(numbers(kept.pump_all()))
    acknowledged = kept.want(feed(position=1))

    assert sent == [[1], [2], [], [], []]
    assert [len(delivered.entries) for delivered in sent_messages(acknowledged, LogDelivered)] == [3]


def test_a_subscriber_that_does_not_move_gets_everything_again() -> None:
    kept = log()
    kept.want(feed())
    for _ in range(5):
        append(kept)
        kept.pump_all()

    again = kept.want(feed())

    assert numbers(again) == [1, 2, 3, 4, 5]


def test_followers_that_hold_too_much_are_dropped_and_listed_replicas_are_not() -> None:
    """Whoever gives a digest looks like a replica: only the list of the set says who is one."""
    driven = DrivenRendezvous()
    shop = EventType("rs.shop", {"mark": str, "key": str}, durable=True)
    r1 = Sender("shop/r1", "replica", incarnation=1)
    plain = Sender("hoarder", "writer", incarnation=1)
    declared = TypeAdvertised(definitions=(shop,), members=frozenset(["shop/r1"]))
    driven.deliver(declared, address("r1"), r1)
    for wanted, followers in ((shop, [r1, plain]), (SET, [plain])):
        for who in followers:
            asked = FollowLog(
                name=who.identity,
                definitions=(wanted,),
                filter=Filter.everything(),
                position=0,
                start="now",
                credit=10,
                voter=None,
                history=driven.core.logs[wanted.name].chain.history,
                digest=BEGINNING.digest,
            )
            driven.deliver(asked, address(who.identity), who)
        append(driven.core.logs[wanted.name], 5)

    keeper = driven.core.log_service
    dropped = {name: keeper.drop_followers(driven.core.logs[name], 4)[0] for name in ("rs.shop", "set")}

    assert {name: [feed.key for feed in feeds] for name, feeds in dropped.items()} == {
        "rs.shop": ["hoarder"],
        "set": ["hoarder"],
    }
    assert [feed.key for feed in driven.core.logs["rs.shop"].subscribers] == ["shop/r1"]
