"""A promise ends with its own decision and with nothing else."""

import msgspec

from tests.core.driven_site import BROKER, DrivenSite
from tops.core.commit.epochs import member_digest
from tops.core.participant.participation import Wish
from tops.model.event_types import EventType
from tops.model.filters import Filter
from tops.model.ids import TxId, hashed
from tops.model.log_points import LogPoint
from tops.model.transactions import Scope
from tops.protocol.effects import AbortTxCall, CommitTxCall, Memo, NotifyTx, PreparedWork
from tops.protocol.messages import (
    AppliedIndexReported,
    EpochDecided,
    EpochFinished,
    EpochId,
    EpochMember,
    EpochVoted,
    Event,
    GetAppliedIndex,
    GetEpochOutcome,
    PrepareEpoch,
)

OTHER = EventType("other", {"mark": str})
WISH = Wish((OTHER,), Filter.everything(), scope=Scope.DISTRIBUTED)
SET = EventType("set", {"mark": str}, durable=True)
REPLICA = Wish((SET,), Filter.everything(), scope=Scope.DISTRIBUTED, durable="R", replica=LogPoint("h", 1, "d"))


def prepare(voter: str, incarnation: int, tx: TxId) -> PrepareEpoch:
    epoch = EpochId("other", 1, 1, BROKER, incarnation)
    members = (EpochMember(tx, 1, (Event("other", {"mark": "m"}),)),)
    return PrepareEpoch(epoch=epoch, digest=member_digest([tx]), voter=voter, members=members)


def test_a_new_life_of_the_coordinator_that_counts_from_one_again_does_not_end_a_promise_of_the_old_one() -> None:
    site = DrivenSite()
    voter = site.subscribe(1, WISH)
    first, second = prepare(voter, 1, TxId("p.1.1")), prepare(voter, 2, TxId("p.1.2"))

    site.deliver(first)
    site.deliver(second)

    assert [v.epoch for v in site.sent_messages(EpochVoted)] == [first.epoch, second.epoch]
    assert not site.made(AbortTxCall)
    committing = frozenset([hashed(voter)])
    site.deliver(EpochDecided(epoch=first.epoch, digest=first.digest, voter=voter, committing=committing))
    assert [c.tx for c in site.made(CommitTxCall)] == [TxId("p.1.1")]


def test_a_transaction_that_is_prepared_again_while_it_is_being_undone_is_voted_on_after_that() -> None:
    site = DrivenSite()
    voter = site.subscribe(1, WISH)
    tx = TxId("p.1.1")
    first = prepare(voter, 1, tx)
    site.deliver(first)
    site.answering = False
    site.deliver(EpochDecided(epoch=first.epoch, digest=first.digest, voter=voter, committing=frozenset()))
    again = msgspec.structs.replace(first, epoch=EpochId("other", 2, 1, BROKER, 1))

    site.deliver(again)

    assert [c.tx for c in site.made(AbortTxCall)] == [tx]
    assert len(site.made(NotifyTx)) == 1
    site.answering = True
    site.answer(site.made(AbortTxCall)[0])
    assert len(site.made(NotifyTx)) == 2
    assert [(v.epoch, v.excluded) for v in site.sent_messages(EpochVoted)] == [(first.epoch, {}), (again.epoch, {})]


def test_the_decision_on_an_earlier_epoch_does_not_end_a_promise_that_a_later_one_renewed() -> None:
    site = DrivenSite()
    voter = site.subscribe(1, WISH)
    tx = TxId("p.1.1")
    first = prepare(voter, 1, tx)
    again = msgspec.structs.replace(first, epoch=EpochId("other", 2, 1, BROKER, 1))
    site.deliver(first)
    site.deliver(again)

    site.deliver(EpochDecided(epoch=first.epoch, digest=first.digest, voter=voter, committing=frozenset()))

    assert not site.made(AbortTxCall)
    committing = frozenset([hashed(voter)])
    site.deliver(EpochDecided(epoch=again.epoch, digest=again.digest, voter=voter, committing=committing))
    assert [c.tx for c in site.made(CommitTxCall)] == [tx]


def test_a_later_epoch_that_takes_a_transaction_over_does_not_leave_its_former_companions_without_a_vote() -> None:
    site = DrivenSite()
    voter = site.subscribe(1, WISH)
    event = Event("other", {"mark": "m"})
    members = tuple(EpochMember(TxId(tx), 1, (event,)) for tx in ("p.1.1", "p.1.2"))
    digest = member_digest(m.tx for m in members)
    both = PrepareEpoch(epoch=EpochId("other", 1, 1, BROKER, 1), digest=digest, voter=voter, members=members)
    site.answering = False
    site.deliver(both)
    alone = prepare(voter, 1, TxId("p.1.1"))

    site.deliver(msgspec.structs.replace(alone, epoch=EpochId("other", 2, 1, BROKER, 1)))
    site.answering = True
    for call in site.made(NotifyTx):
        site.answer(call)

    votes = {v.epoch.number: set(v.excluded) for v in site.sent_messages(EpochVoted)}
    assert votes == {1: {TxId("p.1.1")}, 2: set()}


def test_after_a_crash_promises_of_two_attempts_at_a_number_are_both_asked_about() -> None:
    site = DrivenSite()
    site.subscribe(1, WISH)
    epochs = [EpochId("other", 4, attempt, BROKER, 1) for attempt in (1, 2)]
    memos = [Memo(epoch, "d", "v", (TxId(f"p.1.{i}"),)) for i, epoch in enumerate(epochs)]

    site.take(site.core.recover(1, [PreparedWork(memos[0], memos[0].transactions)], memos[1:]))

    assert [a.epoch for a in site.sent_messages(GetEpochOutcome)] == epochs[:1]
    assert [f.epoch for f in site.sent_messages(EpochFinished)] == epochs[1:]
    site.take(site.core.timer(tuple(map(str, ("doubt", "v", 1, 4, 1))), 1.0))
    assert [a.epoch for a in site.sent_messages(GetEpochOutcome)] == epochs[:1] * 2


def test_a_participant_that_lost_the_events_in_a_crash_votes_no_on_the_next_attempt_and_undoes_the_former_one() -> None:
    site = DrivenSite()
    site.subscribe(1, WISH)
    first = prepare("v", 1, TxId("p.1.1"))
    memo = Memo(first.epoch, first.digest, "v", (TxId("p.1.1"),))
    site.take(site.core.recover(1, [PreparedWork(memo, memo.transactions)]))

    site.deliver(msgspec.structs.replace(first, epoch=EpochId("other", 1, 2, BROKER, 1)))

    (vote,) = site.sent_messages(EpochVoted)
    assert vote.epoch.attempt == 2
    assert set(vote.excluded) == {TxId("p.1.1")}
    assert [c.tx for c in site.made(AbortTxCall)] == [TxId("p.1.1")]


def test_what_a_site_heard_decided_after_a_log_went_on_does_not_put_its_replica_ahead_of_it() -> None:
    site = DrivenSite()
    site.subscribe(1, REPLICA)
    beside = site.subscribe(2, Wish((SET,), Filter.everything(), scope=Scope.DISTRIBUTED))

    def reached(resumed_in: int | None, since: int = 0) -> int:
        asked = GetAppliedIndex(name="R", event_type="set", incarnation=4, end=1, resumed_in=resumed_in, since=since)
        site.deliver(asked)
        return site.sent_messages(AppliedIndexReported)[-1].decided

    for incarnation, number in ((1, 2), (2, 5), (3, 7)):
        epoch = EpochId("set", number, 1, BROKER, incarnation)
        site.deliver(EpochDecided(epoch=epoch, digest="d", voter=beside, committing=frozenset([hashed(beside)])))

    assert [reached(incarnation) for incarnation in (1, 2, 3, None)] == [1, 2, 5, 7]
    assert reached(None, since=4) == 1, "what belongs to an earlier history is not meant"
