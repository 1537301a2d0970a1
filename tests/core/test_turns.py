"""A compensatable participant takes one epoch at a time, and nothing that waits for its turn is left behind."""

import msgspec

from tests.core.driven_site import BROKER, DrivenSite
from tests.core.test_prepared_epochs import WISH, prepare
from tops.core.commit.epochs import member_digest
from tops.model.ids import TxId, hashed, standing_pseudonym
from tops.model.transactions import TxType
from tops.protocol.effects import AbortTxCall, NotifyTx, PrepareTx
from tops.protocol.messages import (
    Address,
    CensusOpened,
    Dissemination,
    EpochDecided,
    EpochId,
    EpochMember,
    EpochVoted,
    Event,
    PrepareEpoch,
    StandingRegistered,
    TxBegan,
    TxPublished,
    TxSpec,
)

EARLY = msgspec.structs.replace(WISH, compensatable=True)


def numbered(voter: str, number: int, attempt: int = 1) -> PrepareEpoch:
    epoch = EpochId("other", number, attempt, BROKER, 1)
    return msgspec.structs.replace(prepare(voter, 1, TxId(f"p.1.{number}")), epoch=epoch)


def undone(asked: PrepareEpoch) -> EpochDecided:
    return EpochDecided(epoch=asked.epoch, digest=asked.digest, voter=asked.voter, committing=frozenset())


def voted(site: DrivenSite) -> list[tuple[int, int, bool]]:
    return [(v.epoch.number, v.epoch.attempt, not v.excluded) for v in site.sent_messages(EpochVoted)]


def test_the_next_epoch_is_prepared_when_the_one_before_is_settled() -> None:
    site = DrivenSite()
    voter = site.subscribe(1, EARLY)
    first = numbered(voter, 1)

    for number in (1, 3, 2):
        site.deliver(numbered(voter, number))
    before = voted(site)
    site.deliver(undone(first))

    assert before == [(1, 1, True)]
    assert voted(site) == [(1, 1, True), (2, 1, True)]


def test_another_attempt_at_what_is_at_work_does_not_wait_and_one_at_what_waits_replaces_it() -> None:
    site = DrivenSite()
    voter = site.subscribe(1, EARLY)

    for number, attempt in ((1, 1), (2, 1), (2, 2), (1, 2)):
        site.deliver(numbered(voter, number, attempt))
    site.deliver(undone(numbered(voter, 1, 2)))

    assert voted(site) == [(1, 1, True), (1, 2, True), (2, 2, True)]


def test_an_epoch_before_the_one_at_work_is_declined() -> None:
    site = DrivenSite()
    voter = site.subscribe(1, EARLY)

    for number in (2, 1):
        site.deliver(numbered(voter, number))

    assert voted(site) == [(2, 1, True), (1, 1, False)]
    assert [call.tx for call in site.made(PrepareTx)] == ["p.1.2"]


def test_what_was_decided_while_it_waited_is_not_prepared_and_holds_up_nothing() -> None:
    site = DrivenSite()
    other, voter = site.subscribe(1, WISH), site.subscribe(2, EARLY)
    for number in (1, 2, 3, 4):
        site.deliver(numbered(voter, number))

    site.deliver(undone(numbered(voter, 2)))
    site.deliver(undone(numbered(other, 3)))  # the site knows, though this participant has not heard
    site.deliver(undone(numbered(voter, 1)))

    assert voted(site) == [(1, 1, True), (4, 1, True)]


def together(voter: str, attempt: int, *transactions: str) -> PrepareEpoch:
    members = tuple(EpochMember(TxId(tx), 1, (Event("other", {"mark": tx}),)) for tx in transactions)
    digest = member_digest(m.tx for m in members)
    return PrepareEpoch(epoch=EpochId("other", 1, attempt, BROKER, 1), digest=digest, voter=voter, members=members)


def test_an_attempt_with_fewer_members_is_prepared_when_the_one_before_is_undone_from_its_end() -> None:
    site = DrivenSite()
    voter = site.subscribe(1, EARLY)
    site.deliver(together(voter, 1, "p.1.1", "p.1.2", "p.1.3"))
    site.answering = False
    site.deliver(numbered(voter, 2))  # waits, and goes on waiting

    site.deliver(together(voter, 2, "p.1.1", "p.1.3"))

    for undone_so_far in (["p.1.3"], ["p.1.3", "p.1.2"], ["p.1.3", "p.1.2", "p.1.1"]):
        assert [call.tx for call in site.made(AbortTxCall)] == undone_so_far
        assert len(site.made(PrepareTx)) == 3
        site.answering = len(undone_so_far) == 3
        site.answer(site.made(AbortTxCall)[-1])
    assert [call.tx for call in site.made(NotifyTx)[3:]] == ["p.1.1", "p.1.3"]
    assert [call.tx for call in site.made(PrepareTx)[3:]] == ["p.1.1", "p.1.3"]
    assert voted(site) == [(1, 1, True), (1, 2, True)]


def test_an_interactive_transaction_is_executed_anew_with_the_events_that_were_published_once() -> None:
    site = DrivenSite()
    voter = site.subscribe(1, EARLY)
    tx, event = TxId("p.1.2"), Event("other", {"mark": "m"})
    name = standing_pseudonym(site.sent_messages(StandingRegistered)[-1].secret, tx)
    spec, publisher = TxSpec("other", TxType.DISTRIBUTED), Address(BROKER)
    for publication in (
        CensusOpened(tx=tx, spec=spec, coordinator=BROKER, incarnation=1, initiator=publisher),
        TxBegan(tx=tx, event_type="other", members=frozenset([hashed(name)])),
        TxPublished(tx=tx, event_type="other", sequence=1, event=event),
    ):
        site.receive(
            Dissemination(rendezvous=BROKER, upward=False, early=False, publication=publication, lineage=("other",))
        )
    received = EpochMember(tx, 1, None)
    first, second = together(voter, 1, "p.1.1"), together(voter, 2)
    site.deliver(msgspec.structs.replace(first, members=(*first.members, received)))

    site.deliver(msgspec.structs.replace(second, members=(received,)))

    assert [call.tx for call in site.made(AbortTxCall)] == ["p.1.2", "p.1.1"]
    assert [call.event for call in site.made(NotifyTx) if call.tx == tx] == [event, event]
    assert voted(site) == [(1, 1, True), (1, 2, True)]


def test_an_attempt_that_is_refused_is_at_work_until_what_the_one_before_committed_is_undone() -> None:
    site = DrivenSite()
    voter = site.subscribe(1, EARLY)
    site.deliver(numbered(voter, 1))
    site.answering = False
    site.deliver(numbered(voter, 1, attempt=2))
    site.deliver(numbered(voter, 2))

    site.take(site.core.call_done(site.made(PrepareTx)[-1].call, "it can't any more"))

    before = voted(site)
    site.answering = True
    site.answer(site.made(AbortTxCall)[0])
    assert before == [(1, 1, True)]
    assert voted(site) == [(1, 1, True), (1, 2, False), (2, 1, True)]
