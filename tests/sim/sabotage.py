"""Planted bugs: protocol builds that are broken on purpose, one way each.

If a checker went blind, its bug would no longer be found; that is what these are for.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec

from tops.core.broker.edge import Edge
from tops.core.commit import ballot, epoch_queue, epochs
from tops.core.commit.ballot import Verdict
from tops.core.commit.census import Census
from tops.core.commit.epoch_queue import EpochQueue
from tops.core.commit.epochs import EpochCoordinator, Stage
from tops.core.commit.outcomes import Outcomes
from tops.core.commit.standing_registrations import StandingRegistrations
from tops.core.coordinator import log_opening
from tops.core.coordinator.local_relay import LocalRelay
from tops.core.coordinator.log_opening import LogOpenings
from tops.core.coordinator.rendezvous import Rendezvous
from tops.core.coordinator.tx_coordinator import TxCoordinator
from tops.core.link.session import LinkSession
from tops.core.log import chain as log_chain
from tops.core.log.event_log import EventLog, Relation, Repetition
from tops.core.participant.callback_epoch import CallbackEpoch
from tops.core.participant.doubt import Doubt
from tops.core.participant.epoch_executor import EpochExecutor
from tops.core.participant.participation import Participation
from tops.core.participant.sub_tx_executor import SubTxExecutor, SubTxState
from tops.model.ids import hashed, voter_key
from tops.model.log_points import NO_DIGEST
from tops.model.rejections import Rejection, RejectionCode
from tops.model.transactions import Scope
from tops.protocol.effects import Effect, Note, Persist
from tops.protocol.messages import EpochId, Sender
from tops.sim import databases, nodes
from tops.sim.databases import CallbackDatabase, Done

SABOTAGES: dict[str, Callable[[], Any]] = {}


@contextmanager
def _patched(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    original = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def _together(*patches: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def _sabotage(function: Callable[[], Any]) -> Callable[[], Any]:
    SABOTAGES[function.__name__] = function
    return function


@_sabotage
def commit_is_told_before_it_is_journaled() -> Any:
    honest = EpochCoordinator._apply

    def hasty(self: EpochCoordinator, epoch: Any, verdict: Verdict) -> list[Effect]:
        effects = honest(self, epoch, verdict)
        persists = [e for e in effects if isinstance(e, Persist)]
        return [e for e in effects if not isinstance(e, Persist)] + persists

    return _patched(EpochCoordinator, "_apply", hasty)


@_sabotage
def commit_is_not_journaled_at_all() -> Any:
    honest = EpochCoordinator._apply

    def careless(self: EpochCoordinator, epoch: Any, verdict: Verdict) -> list[Effect]:
        return [e for e in honest(self, epoch, verdict) if not isinstance(e, Persist)]

    return _patched(EpochCoordinator, "_apply", careless)


@_sabotage
def constraints_are_not_retested_after_the_votes() -> Any:
    def trusting(members: Any, voters: Any, votes: Any, lost: Any, required: Any, *_: Any, **__: Any) -> Verdict:
        yes = frozenset(key for key, vote in votes.items() if not vote.excluded)
        return Verdict(
            yes, {} if yes else {m.tx: Rejection(RejectionCode.CONSTRAINTS_UNMET, "nobody voted yes") for m in members}
        )

    return _patched(epochs, "count_votes", trusting)


@_sabotage
def votes_are_counted_twice_after_a_reconnection() -> Any:
    """A link sends again what has arrived, its other end takes it, and votes are counted without looking whose."""
    honest = EpochCoordinator.on_voted
    repeated: Counter[EpochId] = Counter()

    def forgetful(self: LinkSession, frame: Any) -> Any:
        while self.unacknowledged and self.unacknowledged[0].number <= frame.received:
            self.unacknowledged.popleft()
        self.received = max(self.received, frame.number)
        return frame.messages

    def counting(self: EpochCoordinator, voted: Any, sender: Sender) -> list[Effect]:
        epoch = self.in_flight.get(voted.epoch.number)
        if epoch is None or epoch.id != voted.epoch or voter_key(sender.identity, voted.voter) not in epoch.votes:
            return honest(self, voted, sender)
        repeated[epoch.id] += 1
        enough = len(epoch.votes) + repeated[epoch.id] >= len(epoch.counted)
        return self._resolve(epoch) if enough and epoch.stage is Stage.VOTING else []

    return _together(
        _patched(LinkSession, "resume", lambda self, received: list(self.unacknowledged)),
        _patched(LinkSession, "unpack", forgetful),
        _patched(EpochCoordinator, "on_voted", counting),
    )


@_sabotage
def an_event_with_a_wrong_number_is_accepted() -> Any:
    def lax(self: SubTxExecutor, sequence: int, event: Any) -> list[Effect]:
        if self.state is not SubTxState.ACTIVE or self._failed is not None or self.scope is Scope.NON_TRANSACTIONAL:
            return []
        self.last_sequence = sequence
        self.events.append(event)
        return self._do(lambda: self._notify(sequence, event, 1))

    def lax_coordinator(self: TxCoordinator, published: Any) -> list[Effect]:
        self.last_sequence = published.sequence
        self.events.append(published.event)
        return []

    def lax_relay(self: LocalRelay, published: Any) -> None:
        self.last_sequence = published.sequence
        self.events.append(published.event)

    return _together(
        _patched(SubTxExecutor, "on_event", lax),
        _patched(TxCoordinator, "on_event", lax_coordinator),
        _patched(LocalRelay, "on_event", lax_relay),
    )


@_sabotage
def compensation_runs_twice() -> Any:
    honest = CallbackDatabase.abort

    def twice(self: CallbackDatabase, tx: Any) -> None:
        undone = self.early.get(tx)
        honest(self, tx)
        if undone is not None:
            self.early[tx] = undone
            self.committed[tx] = Done(tx, undone[1])
            honest(self, tx)

    return _patched(CallbackDatabase, "abort", twice)


@_sabotage
def compensation_runs_forwards() -> Any:
    honest = CallbackDatabase.abort

    def forwards(self: CallbackDatabase, tx: Any) -> None:
        known = self.early.get(tx)
        honest(self, tx)
        if known is not None and tx in self.compensated:
            self.compensated[tx] = known[1]

    return _patched(CallbackDatabase, "abort", forwards)


@_sabotage
def a_participant_in_doubt_guesses_commit() -> Any:
    def guess(self: CallbackEpoch) -> list[Effect]:
        return self.on_decided(frozenset([hashed(self.memo.voter)]))

    return _patched(CallbackEpoch, "on_timer", guess)


@_sabotage
def a_participant_in_doubt_guesses_abort() -> Any:
    honest = CallbackEpoch.on_timer

    def guess(self: CallbackEpoch) -> list[Effect]:
        return self.on_decided(frozenset()) if self.doubt.queries_sent else honest(self)

    return _patched(CallbackEpoch, "on_timer", guess)


@_sabotage
def a_peers_word_counts_without_a_signature() -> Any:
    return _patched(nodes, "check_proof", lambda text, broker, proof: "")


@_sabotage
def an_epoch_commits_with_differing_exclusions() -> Any:
    honest = ballot.count_votes

    def sloppy(members: Any, voters: Any, votes: Any, lost: Any, *rest: Any, **named: Any) -> Verdict:
        if votes and not lost:
            first = votes[min(votes)]
            if len(first.excluded) < len(members):
                return Verdict(frozenset(votes), dict(first.excluded))
        return honest(members, voters, votes, lost, *rest, **named)

    return _patched(epochs, "count_votes", sloppy)


@_sabotage
def a_local_subscriber_is_rolled_back_by_a_distributed_abort() -> Any:
    honest = TxCoordinator._fail

    def harsh(self: TxCoordinator, rejection: Rejection, *args: Any, **named: Any) -> list[Effect]:
        named["distributed_only"] = False
        return honest(self, rejection, *args, **named)

    return _patched(TxCoordinator, "_fail", harsh)


@_sabotage
def an_unknown_transaction_is_presumed_committed() -> Any:
    honest = EpochCoordinator.on_outcome_requested

    def generous(self: EpochCoordinator, epoch: Any, digest: str, voter: str, requester: Any) -> list[Effect]:
        found = []
        for effect in honest(self, epoch, digest, voter, requester):
            message = getattr(effect, "message", None)
            if message is not None and not message.committing:
                message = msgspec.structs.replace(message, committing=frozenset([hashed(voter)]))
                effect = msgspec.structs.replace(effect, message=message)
            found.append(effect)
        return found

    return _patched(EpochCoordinator, "on_outcome_requested", generous)


@_sabotage
def a_question_does_not_refuse_the_id() -> Any:
    def forgetful(self: Outcomes, tx: Any) -> None:
        return None

    def never(self: Outcomes, tx: Any) -> bool:
        return tx in self.committed

    return _together(_patched(Outcomes, "reject", forgetful), _patched(Outcomes, "is_rejected", never))


@_sabotage
def a_lagging_replica_votes() -> Any:
    def everyone(self: StandingRegistrations, standing: Any) -> bool:
        return True

    def eager(self: EpochExecutor, prepare: Any) -> list[Effect]:
        if prepare.epoch.number - 1 > self.position:
            self.point = prepare.before
        self._held = prepare
        return self._go_on()

    return _together(
        _patched(StandingRegistrations, "counted", everyone),
        _patched(EpochExecutor, "on_prepare", eager),
    )


@_sabotage
def a_dropped_replica_commits_anyway() -> Any:
    honest = EpochExecutor.learn

    def stubborn(self: EpochExecutor, epoch: Any, digest: str, committing: Any, log_digest: str) -> list[Effect]:
        if self.memo is not None and self.memo.epoch == epoch:
            committing = committing | {hashed(self.memo.voter)}
        return honest(self, epoch, digest, committing, log_digest)

    return _patched(EpochExecutor, "learn", stubborn)


@_sabotage
def a_repeated_publication_is_logged_again() -> Any:
    return _patched(EventLog, "recognise", lambda self, sender, number: Repetition.NEW)


@_sabotage
def events_are_not_withheld_from_those_who_chose_nothing() -> Any:
    honest = SubTxExecutor.take

    def curious(self: SubTxExecutor, scope: Scope) -> list[Effect]:
        return honest(self, Scope.NON_TRANSACTIONAL if scope is Scope.NONE else scope)

    return _together(
        _patched(Edge, "pass_on", lambda self, name, tx, publication, types: True),
        _patched(SubTxExecutor, "take", curious),
    )


@_sabotage
def the_census_ignores_its_constraints() -> Any:
    return _together(
        _patched(
            Census,
            "unfulfilled",
            lambda self: None if self.members else Rejection(RejectionCode.CONSTRAINTS_UNMET, "no participant joined"),
        ),
        _patched(ballot, "shortfall", lambda *args: None),
        _patched(epoch_queue, "shortfall", lambda *args: None),
        _patched(EpochQueue, "_lacking", lambda self, ready, voters, met: None if voters else "nobody is there"),
    )


@_sabotage
def a_dead_participant_is_waited_for_without_end() -> Any:
    return _together(
        _patched(Rendezvous, "_lose", lambda self, keys, reason: []),
        _patched(EpochCoordinator, "on_timer", lambda self, number: []),
        _patched(Rendezvous, "_deadline", lambda self, tx: []),
    )


@_sabotage
def nobody_asks_for_a_missed_decision() -> Any:
    return _patched(Doubt, "query", lambda self: [])


@_sabotage
def a_finished_epoch_is_noted_without_the_disk() -> Any:
    honest = EpochCoordinator.write_notes

    def lazy(self: EpochCoordinator) -> list[Effect]:
        return [Note(e.record) if isinstance(e, Persist) else e for e in honest(self)]

    return _patched(EpochCoordinator, "write_notes", lazy)


@_sabotage
def a_second_copy_of_a_transaction_is_executed() -> Any:
    honest = Participation._census

    def amnesiac(self: Participation, census: Any, lineage: Any, link: Any) -> list[Effect]:
        self.ended.clear()
        return honest(self, census, lineage, link)

    return _patched(Participation, "_census", amnesiac)


@_sabotage
def an_older_journal_is_gone_on_from() -> Any:
    """As if logs had no digests, and a coordinator that starts asked nobody."""

    def trusting(self: LogOpenings) -> list[Effect]:
        return [effect for log in self._known.logs.values() for effect in log_opening._fill_gaps(log)]

    return _together(
        _patched(LogOpenings, "recovered", trusting),
        _patched(log_chain, "chained", lambda history, before, index, ids: NO_DIGEST),
        _patched(databases, "chained_digest", lambda history, before, index, ids: NO_DIGEST),
        _patched(EventLog, "relation", lambda self, point: Relation.PREFIX),
    )
