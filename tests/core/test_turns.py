"""A compensatable participant takes one epoch at a time, and nothing that waits for its turn is left behind."""

import msgspec

from tests.core.driven_site import BROKER, DrivenSite
from tests.core.test_promises import WISH, prepare
from tops.effects import PrepareTx
from tops.ids import TxId
from tops.messages import EpochDecided, EpochId, EpochVoted, PrepareEpoch

EARLY = msgspec.structs.replace(WISH, compensatable=True)


def numbered(voter: str, number: int, attempt: int = 1) -> PrepareEpoch:
    epoch = EpochId("other", number, attempt, BROKER, 1)
    return msgspec.structs.replace(prepare(voter, 1, TxId(f"p.1.{number}")), epoch=epoch)


def undone(asked: PrepareEpoch) -> EpochDecided:
    return EpochDecided(epoch=asked.epoch, digest=asked.digest, voter=asked.voter, committing=frozenset())


def voted(site: DrivenSite) -> list[tuple[int, int, bool]]:
    return [(v.epoch.number, v.epoch.attempt, not v.excluded) for v in site.posted(EpochVoted)]


def test_the_next_epoch_is_prepared_when_the_one_before_is_settled() -> None:
    site = DrivenSite()
    voter = site.subscribe(1, EARLY)
    first = numbered(voter, 1)

    for number in (1, 3, 2):
        site.hear(numbered(voter, number))
    before = voted(site)
    site.hear(undone(first))

    assert before == [(1, 1, True)]
    assert voted(site) == [(1, 1, True), (2, 1, True)]


def test_another_attempt_at_what_is_at_work_does_not_wait_and_one_at_what_waits_replaces_it() -> None:
    site = DrivenSite()
    voter = site.subscribe(1, EARLY)

    for number, attempt in ((1, 1), (2, 1), (2, 2), (1, 2)):
        site.hear(numbered(voter, number, attempt))
    site.hear(undone(numbered(voter, 1, 2)))

    assert voted(site) == [(1, 1, True), (1, 2, True), (2, 2, True)]


def test_an_epoch_before_the_one_at_work_is_declined() -> None:
    site = DrivenSite()
    voter = site.subscribe(1, EARLY)

    for number in (2, 1):
        site.hear(numbered(voter, number))

    assert voted(site) == [(2, 1, True), (1, 1, False)]
    assert [call.tx for call in site.made(PrepareTx)] == ["p.1.2"]


def test_what_was_decided_while_it_waited_is_not_prepared_and_holds_up_nothing() -> None:
    site = DrivenSite()
    other, voter = site.subscribe(1, WISH), site.subscribe(2, EARLY)
    for number in (1, 2, 3, 4):
        site.hear(numbered(voter, number))

    site.hear(undone(numbered(voter, 2)))
    site.hear(undone(numbered(other, 3)))  # the site knows, though this participant has not heard
    site.hear(undone(numbered(voter, 1)))

    assert voted(site) == [(1, 1, True), (4, 1, True)]
