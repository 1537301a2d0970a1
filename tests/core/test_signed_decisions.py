"""Decisions carry the coordinator's signature, and a peer's word counts only with it."""

import msgspec
import pytest

from tests.core.driven_rendezvous import ME, DrivenRendezvous, sent_effects, standing_only
from tests.core.driven_site import BROKER, DrivenSite
from tests.core.test_prepared_epochs import SET, WISH, prepare
from tops.core.participant.participation import Wish
from tops.model.constraints import AtLeast
from tops.model.filters import Filter
from tops.model.ids import NodeId, TxId, hashed
from tops.model.log_points import LogPoint
from tops.model.transactions import Scope
from tops.protocol.effects import AbortTxCall, Alarm, CommitTxCall, Effect, FinishBatch
from tops.protocol.messages import (
    Address,
    DecisionRelayed,
    Envelope,
    EpochDecided,
    EpochId,
    EpochMember,
    Event,
    GetEpochOutcome,
    PrepareEpoch,
    QueryPeers,
    decision_text,
)

POINT = LogPoint("h", 1, "d" * 32)
REPLICA = Wish((SET,), Filter.everything(), scope=Scope.DISTRIBUTED, durable="R", replica=POINT)
ASKER = Address(BROKER, "asker", 1)


def proof_of(text: bytes) -> bytes:
    return b"signed:" + text


def check(text: bytes, broker: NodeId, proof: bytes) -> str:
    return "" if broker == BROKER and proof == proof_of(text) else "it is not signed"


class Signing(DrivenRendezvous):
    """Counts its signatures."""

    def __init__(self) -> None:
        self.signed: list[bytes] = []
        super().__init__(sign=self._sign)

    def _sign(self, text: bytes) -> bytes:
        self.signed.append(text)
        return proof_of(text)

    def prepared(self, tx: str, event_type: str) -> list[PrepareEpoch]:
        return sent_effects(self.one_shot(tx, standing_only(event_type)), PrepareEpoch)

    def asked(self, epoch: EpochId, digest: str, voter: str) -> list[EpochDecided]:
        return sent_effects(
            self.deliver(GetEpochOutcome(epoch=epoch, digest=digest, voter=voter), Address(ME, voter, 1)), EpochDecided
        )


def two_voters(event_type: str) -> Signing:
    rendezvous = Signing()
    for name in "ab":
        rendezvous.stand(name, event_type, name.upper(), position=0 if event_type == "set" else None)
    return rendezvous


def is_proven(decided: EpochDecided) -> bool:
    text = decision_text(decided.epoch, decided.digest, decided.committing, decided.log_digest)
    return decided.proof == proof_of(text)


@pytest.mark.parametrize("event_type", ["set", "other"])
def test_a_decision_is_signed_once_for_all_its_voters(event_type: str) -> None:
    rendezvous = two_voters(event_type)
    prepares = rendezvous.prepared("p.1.1", event_type)

    effects: list[Effect] = [effect for p in prepares for effect in rendezvous.vote(p)]

    decided = sent_effects(effects, EpochDecided)
    assert len(decided) == 2
    assert all(d.committing and is_proven(d) for d in decided)
    assert len(rendezvous.signed) == 1


def test_an_abort_is_signed_too() -> None:
    rendezvous = two_voters("other")
    prepares = rendezvous.prepared("p.1.1", "other")

    effects = [effect for p in prepares for effect in rendezvous.vote(p, TxId("p.1.1"))]

    decided = sent_effects(effects, EpochDecided)
    assert decided
    assert all(not d.committing and is_proven(d) for d in decided)


@pytest.mark.parametrize("event_type", ["set", "other"])
def test_an_answer_about_an_attempt_that_is_over_is_signed(event_type: str) -> None:
    rendezvous = two_voters(event_type)
    first, second = rendezvous.prepared("p.1.1", event_type)
    for p in (first, second):
        rendezvous.vote(p)
    of_an_earlier_life = msgspec.structs.replace(first.epoch, incarnation=0)

    (committed,) = rendezvous.asked(first.epoch, first.digest, first.voter)
    (aborted,) = rendezvous.asked(of_an_earlier_life, first.digest, first.voter)

    assert committed.committing
    assert not aborted.committing
    assert is_proven(committed)
    assert is_proven(aborted)


@pytest.mark.parametrize("event_type", ["set", "other"])
def test_who_asks_about_an_attempt_in_advance_gets_no_signature_to_show_when_it_has_committed(event_type: str) -> None:
    rendezvous = two_voters(event_type)
    first, _ = rendezvous.prepared("p.1.1", event_type)
    next_attempt = msgspec.structs.replace(first.epoch, attempt=2)
    next_number = msgspec.structs.replace(first.epoch, number=first.epoch.number + 1)
    next_incarnation = msgspec.structs.replace(first.epoch, incarnation=2)

    answers = [
        answer
        for epoch in (next_attempt, next_number, next_incarnation)
        for answer in rendezvous.asked(epoch, first.digest, first.voter)
    ]

    assert not [answer for answer in answers if answer.proof]
    assert not rendezvous.signed


def test_a_second_attempt_makes_an_abort_of_the_first_one_final() -> None:
    rendezvous = two_voters("set")
    both = rendezvous.one_shots(standing_only("set", AtLeast(2, frozenset("AB"))), "p.1.1", "p.1.2")
    first, second = sent_effects(both, PrepareEpoch)
    again = rendezvous.vote(first, TxId("p.1.1")) + rendezvous.vote(second)
    assert [p.epoch.attempt for p in sent_effects(again, PrepareEpoch)] == [2, 2]

    (aborted,) = rendezvous.asked(first.epoch, first.digest, first.voter)

    assert not aborted.committing
    assert is_proven(aborted)


def test_without_keys_nothing_is_signed() -> None:
    rendezvous = DrivenRendezvous()
    rendezvous.stand("a", "other", "A")
    (only,) = sent_effects(rendezvous.one_shot("p.1.1", standing_only("other")), PrepareEpoch)

    (decided,) = sent_effects(rendezvous.vote(only), EpochDecided)

    assert decided.proof == b""


# ------------------------------------------------------------------------------------------------------- participants


def relayed(p: PrepareEpoch, commits: bool, signed: bool) -> DecisionRelayed:
    committing = frozenset([hashed(p.voter)] if commits else [])
    known = DecisionRelayed(epoch=p.epoch, digest=p.digest, committing=committing)
    return msgspec.structs.replace(known, proof=proof_of(known.text)) if signed else known


def at_epoch(kind: str, check_proof: bool = True) -> tuple[DrivenSite, PrepareEpoch]:
    """A participant, by callbacks or as a replica, that has promised an epoch."""
    site = DrivenSite(check_proof=check if check_proof else None)
    if kind == "callbacks":
        p = prepare(site.subscribe(1, WISH), 1, TxId("p.1.1"))
    else:
        voter = site.subscribe(1, REPLICA)
        member = EpochMember(TxId("p.1.1"), 1, (Event("set", {"mark": "m"}),))
        p = PrepareEpoch(
            epoch=EpochId("set", 2, 1, BROKER, 1), digest="d", voter=voter, members=(member,), before=POINT
        )
    site.deliver(p)
    return site, p


def ended(site: DrivenSite) -> list[bool]:
    batches = [batch.committed for batch in site.made(FinishBatch)]
    return batches + [True for _ in site.made(CommitTxCall)] + [False for _ in site.made(AbortTxCall)]


@pytest.mark.parametrize("kind", ["callbacks", "replica"])
@pytest.mark.parametrize("commits", [True, False])
def test_a_participant_ignores_a_peer_that_shows_no_signature_and_raises_an_alarm(kind: str, commits: bool) -> None:
    site, p = at_epoch(kind)

    site.deliver(relayed(p, commits, signed=False))

    assert ended(site) == []
    assert [alarm.kind for alarm in site.made(Alarm)] == ["unsigned-decision"]


@pytest.mark.parametrize("kind", ["callbacks", "replica"])
@pytest.mark.parametrize("commits", [True, False])
def test_a_participant_believes_a_peer_that_shows_the_coordinators_signature(kind: str, commits: bool) -> None:
    site, p = at_epoch(kind)

    site.deliver(relayed(p, commits, signed=True))

    assert ended(site) == [commits]
    assert not site.made(Alarm)


@pytest.mark.parametrize("kind", ["callbacks", "replica"])
def test_without_keys_a_peer_is_believed(kind: str) -> None:
    site, p = at_epoch(kind, check_proof=False)

    site.deliver(relayed(p, True, signed=False))

    assert ended(site) == [True]


def test_a_signature_is_not_looked_at_if_the_decision_concerns_nothing_here() -> None:
    looked_at: list[bytes] = []

    def looking(text: bytes, broker: NodeId, proof: bytes) -> str:
        looked_at.append(text)
        return "it is not signed"

    site = DrivenSite(check_proof=looking)
    site.subscribe(1, WISH)

    site.deliver(relayed(prepare("somebody", 1, TxId("p.1.1")), True, signed=True))

    assert looked_at == []
    assert not site.made(Alarm)


@pytest.mark.parametrize("signed", [True, False])
def test_a_peer_passes_on_the_signature_that_it_heard_and_is_silent_if_it_heard_none(signed: bool) -> None:
    site, p = at_epoch("callbacks")
    known = relayed(p, True, signed)
    site.deliver(
        EpochDecided(epoch=p.epoch, digest=p.digest, voter=p.voter, committing=known.committing, proof=known.proof)
    )

    asked = QueryPeers(epoch=p.epoch, digest=p.digest, voter="in doubt")
    site.receive(Envelope(to=Address(BROKER, site.core.name), body=asked, reply_to=ASKER))

    assert site.sent_messages(DecisionRelayed) == ([known] if signed else [])
