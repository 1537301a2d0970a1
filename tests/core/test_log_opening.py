"""A rendezvous that has just started, message by message: which journals are gone on from, and which are not."""

import msgspec

from tests.core.driven_rendezvous import ME, PUBLISHER, DrivenRendezvous, sent_effects, standing_only
from tests.core.test_joining import commit
from tops.core.coordinator.rendezvous import Rendezvous, RendezvousOptions
from tops.model.event_types import EventType
from tops.model.filters import Filter
from tops.model.log_points import LogPoint
from tops.model.transactions import Outcome
from tops.protocol.effects import Alarm, Effect, Note, Persist
from tops.protocol.messages import (
    Address,
    AppliedIndexReported,
    EndLog,
    Event,
    EventConfirmed,
    EventsRejected,
    FollowLog,
    GetAppliedIndex,
    GetLogState,
    HistoryDiffers,
    HistoryRejected,
    LogDelivered,
    LogEntry,
    LogRecovered,
    LogStateReported,
    Origin,
    PrepareEpoch,
    Published,
    RecoverLog,
    Sender,
    StaleJournal,
    TxOutcome,
    TypeAdvertised,
)
from tops.protocol.records import AnyRecord, HistoryBegun, LogAppended, LogStale


def records(driven: DrivenRendezvous) -> list[AnyRecord]:
    return [e.record for e in driven.effects if isinstance(e, Persist | Note)]


def started(journal: list[AnyRecord], incarnation: int = 2, entropy: bytes = b"n") -> DrivenRendezvous:
    """The next incarnation, on these records."""
    driven = DrivenRendezvous.__new__(DrivenRendezvous)
    driven.now, driven.effects, driven.sites = 0.0, [Persist(record) for record in journal], {}
    driven.core = Rendezvous(ME, incarnation, {}, RendezvousOptions(), lambda size: entropy * size)
    for record in journal:
        driven.core.recover(record)
    driven.effects += driven.core.recovered()
    return driven


def with_replicas(names: str = "ab", writes: int = 1) -> DrivenRendezvous:
    rendezvous = DrivenRendezvous()
    for name in names:
        rendezvous.stand(name, "set", name.upper(), position=0)
        rendezvous.feed(name, name.upper(), 0)
    for n in range(1, writes + 1):
        commit(rendezvous, f"p.1.{n}")
    return rendezvous


def older(journal: list[AnyRecord], end: int) -> list[AnyRecord]:
    """A copy that was taken when the log ended there."""
    beyond = [n for n, r in enumerate(journal) if isinstance(r, LogAppended) and r.entry.number > end]
    return journal[: beyond[0]] if beyond else journal


def tell(
    rendezvous: DrivenRendezvous, site: str, point: LogPoint, decided: int = 0, incarnation: int = 2
) -> list[Effect]:
    told = AppliedIndexReported(
        event_type="set",
        incarnation=incarnation,
        point=point,
        decided=max(decided, point.index),
        transactions=(),
    )
    return rendezvous.deliver(told, Address(ME, site, 1))


def point(rendezvous: DrivenRendezvous, index: int) -> LogPoint:
    return LogPoint(rendezvous.history, index, rendezvous.digest(index))


def alarms(effects: list[Effect]) -> list[str]:
    return [e.kind for e in effects if isinstance(e, Alarm)]


def waits(rendezvous: DrivenRendezvous) -> bool:
    return rendezvous.core.logs["set"].opening is not None


# ------------------------------------------------------------------------------------------------------- opening


def test_every_replica_that_was_in_sync_is_asked_on_every_start_and_nothing_is_given_out_before() -> None:
    former = with_replicas()
    rendezvous = started(records(former))

    (asked,) = sent_effects(rendezvous.feed("a", "A", 1), GetAppliedIndex)
    rendezvous.stand("a", "set", "A", position=1)
    early = sent_effects(rendezvous.one_shot("p.1.9", standing_only("set")), PrepareEpoch)
    tell(rendezvous, "A", point(former, 1))
    effects = tell(rendezvous, "B", point(former, 1))

    assert (asked.end, asked.incarnation, asked.resumed_in) == (1, 2, None)
    assert not early
    assert [p.before for p in sent_effects(effects, PrepareEpoch)] == [point(former, 1)]
    assert not alarms(rendezvous.effects)


def test_a_journal_that_nobody_followed_opens_at_once() -> None:
    rendezvous = started(records(DrivenRendezvous()))

    assert not waits(rendezvous)


def test_what_was_told_to_an_earlier_incarnation_does_not_count() -> None:
    former = with_replicas()
    rendezvous = started(records(former))

    for site in "AB":
        tell(rendezvous, site, point(former, 1), incarnation=1)

    assert waits(rendezvous)


def test_feeds_that_came_while_the_log_was_closed_are_served_when_it_opens() -> None:
    former = with_replicas()
    rendezvous = started(records(former))
    rendezvous.feed("b2", "B", 0)
    tell(rendezvous, "A", point(former, 1))

    effects = tell(rendezvous, "B", point(former, 0))

    (delivered,) = sent_effects(effects, LogDelivered)
    assert (delivered.after, delivered.upto, delivered.history) == (0, 1, former.history)
    assert len(delivered.digests) == 2 * 16


def test_replicas_that_stay_silent_are_not_waited_for_without_end() -> None:
    former = with_replicas()
    rendezvous = started(records(former))
    tell(rendezvous, "A", point(former, 1))

    effects = rendezvous.core.on_timer(("tail", "set"), 10.0)
    rendezvous.effects += effects

    assert not waits(rendezvous)
    assert alarms(effects) == ["replicas-silent"]
    assert rendezvous.core.epochs["set"].standing.in_sync == {"A"}
    assert sent_effects(rendezvous.feed("b", "B", 1), GetAppliedIndex), "it tells before it is served"


def test_a_log_of_which_no_replica_was_heard_stays_closed() -> None:
    rendezvous = started(records(with_replicas()))

    effects = rendezvous.core.on_timer(("tail", "set"), 10.0)

    assert waits(rendezvous)
    assert alarms(effects) == ["replicas-silent"]


def test_a_silent_replica_is_asked_for_what_was_decided_before_the_log_went_on_also_by_later_incarnations() -> None:
    former = with_replicas()
    rendezvous = started(records(former))
    (waiting,) = sent_effects(rendezvous.feed("b", "B", 1), GetAppliedIndex)
    rendezvous.stand("a", "set", "A", position=1)
    tell(rendezvous, "A", point(former, 1))
    rendezvous.effects += rendezvous.core.on_timer(("tail", "set"), 10.0)
    commit(rendezvous, "p.1.2")

    (late,) = sent_effects(rendezvous.feed("b", "B", 1), GetAppliedIndex)
    again = started(records(rendezvous), 3)
    tell(again, "A", point(rendezvous, 2), incarnation=3)
    (later,) = sent_effects(again.feed("b", "B", 1), GetAppliedIndex)
    tell(again, "B", point(former, 1), incarnation=3)

    assert [(m.incarnation, m.end, m.resumed_in) for m in (waiting, late, later)] == [
        (2, 1, None),
        (2, 1, 2),
        (3, 1, 2),
    ]
    assert [(d.after, d.upto) for d in sent_effects(again.feed("b", "B", 1), LogDelivered)] == [(1, 2)]


def test_a_silent_replica_that_comes_back_ahead_is_named_and_takes_no_part() -> None:
    former = with_replicas(writes=3)
    rendezvous = started(older(records(former), 1))
    tell(rendezvous, "A", point(former, 1))
    rendezvous.core.on_timer(("tail", "set"), 10.0)

    rendezvous.feed("b", "B", 3)
    effects = tell(rendezvous, "B", point(former, 3))
    rendezvous.stand("b", "set", "B", position=3)

    assert alarms(effects) == ["ahead-of-log"]
    assert rendezvous.core.epochs["set"].standing.in_sync == {"A"}
    assert not waits(rendezvous), "the others go on: that was decided when it was silent"


def ahead() -> tuple[DrivenRendezvous, DrivenRendezvous]:
    """A log that went on without a replica that has come back with more than it had."""
    former = with_replicas(writes=3)
    rendezvous = started(older(records(former), 1))
    rendezvous.stand("a", "set", "A", position=1)
    tell(rendezvous, "A", point(former, 1))
    rendezvous.effects += rendezvous.core.on_timer(("tail", "set"), 10.0)
    commit(rendezvous, "p.1.7")
    rendezvous.feed("b", "B", 3)
    tell(rendezvous, "B", point(former, 3))
    return former, rendezvous


def test_a_replica_that_came_back_ahead_is_told_so_each_time_it_asks_and_alarmed_about_once() -> None:
    former, rendezvous = ahead()

    asked = rendezvous.feed("b", "B", 3)
    again = tell(rendezvous, "B", point(former, 3))

    (rejected,) = sent_effects(asked, HistoryRejected)
    assert (rejected.name, rejected.point) == ("B", rendezvous.core.logs["set"].chain.end)
    assert not alarms(again)


def test_a_copy_of_another_replica_in_place_of_one_that_was_ahead_follows_the_log() -> None:
    _, rendezvous = ahead()
    end = rendezvous.core.logs["set"].chain.end.index

    asked = rendezvous.feed("b2", "B", end, incarnation=2)
    effects = tell(rendezvous, "B", point(rendezvous, end))
    later = rendezvous.feed("b2", "B", end, incarnation=2)

    assert not alarms(effects)
    assert not sent_effects(asked + later, HistoryRejected)
    assert "B" not in rendezvous.core.logs["set"].unconfirmed


def test_a_replica_whose_subscription_an_operator_ends_is_not_waited_for() -> None:
    former = with_replicas()
    rendezvous = started(records(former))
    rendezvous.stand("a", "set", "A", position=1)
    rendezvous.one_shot("p.1.2", standing_only("set"))
    tell(rendezvous, "A", point(former, 1))

    effects = rendezvous.deliver(EndLog(request=1, event_type="set", name="B", operator=True), PUBLISHER)

    assert [p.epoch.number for p in sent_effects(effects, PrepareEpoch)] == [2]


def test_an_index_that_was_given_out_and_never_decided_is_void_only_once_the_log_is_open() -> None:
    """In an older copy of the journal it may be what replicas have committed."""
    former = with_replicas()
    rendezvous_before = records(former)
    publish(former, 1)  # an event that took index 2
    gap = LogAppended(event_type="set", entry=last_entry(former, number=3))
    rendezvous = started([*rendezvous_before, gap])

    early = [r for r in records(rendezvous) if isinstance(r, LogAppended) and r.entry.number == 2]
    tell(rendezvous, "A", point(former, 1))
    tell(rendezvous, "B", point(former, 1))
    late = [r for r in records(rendezvous) if isinstance(r, LogAppended) and r.entry.number == 2]

    assert (len(early), len(late)) == (0, 1)


def publish(rendezvous: DrivenRendezvous, number: int) -> list[Effect]:
    published = Published(event=Event("set", {"mark": "m", "key": "a"}), origin=Origin("set", number))
    effects = rendezvous.core.on_publication(published, Sender("publisher", "writer", incarnation=1), PUBLISHER, 0.0)
    rendezvous.effects += effects
    return effects


def last_entry(rendezvous: DrivenRendezvous, number: int) -> LogEntry:
    last = [r for r in records(rendezvous) if isinstance(r, LogAppended)][-1]
    return msgspec.structs.replace(last.entry, number=number)


# --------------------------------------------------------------------------------------------------------- stale


def stale(writes: int = 3, end: int = 1, names: str = "ab") -> tuple[DrivenRendezvous, DrivenRendezvous, list[Effect]]:
    """The true log, a rendezvous on an older copy of its journal, and what it did when it was told the truth."""
    former = with_replicas(names, writes)
    rendezvous = started(older(records(former), end))
    effects = tell(rendezvous, "A", point(former, writes))
    return former, rendezvous, effects


def test_a_journal_that_is_older_than_a_replica_gives_out_no_index() -> None:
    _, rendezvous, effects = stale()
    rendezvous.stand("a", "set", "A", position=3)

    rejected = sent_effects(rendezvous.one_shot("p.1.9", standing_only("set")), TxOutcome)
    later = rendezvous.core.on_timer(("tail", "set"), 10.0)

    assert alarms(effects) == ["journal-stale"]
    assert [(o.outcome, o.stale) for o in rejected] == [(Outcome.ABORTED, StaleJournal("set", 1, "A", 3))]
    assert waits(rendezvous) and not later
    assert [e.record for e in effects if isinstance(e, Persist) and isinstance(e.record, LogStale)]


def test_what_waited_for_an_index_is_rejected_when_the_journal_turns_out_to_be_stale() -> None:
    former = with_replicas(writes=3)
    rendezvous = started(older(records(former), 1))
    rendezvous.one_shot("p.1.9", standing_only("set"))

    effects = tell(rendezvous, "A", point(former, 3))

    assert [o.stale is not None for o in sent_effects(effects, TxOutcome)] == [True]


def test_events_are_refused_by_a_stale_journal() -> None:
    _, rendezvous, _ = stale()

    effects = publish(rendezvous, 1)

    assert sent_effects(effects, EventsRejected) and not sent_effects(effects, EventConfirmed)


def test_a_stale_log_names_nobody_in_sync() -> None:
    _, rendezvous, _ = stale()

    (told,) = sent_effects(rendezvous.deliver(GetLogState(request=1, event_type="set"), PUBLISHER), LogStateReported)

    assert told.in_sync == ()
    assert told.stale == StaleJournal("set", 1, "A", 3)
    assert not any(follower.in_sync for follower in told.followers)


def test_a_decision_that_a_replica_heard_of_counts_also_if_it_has_not_applied_it() -> None:
    former = with_replicas(writes=3)
    rendezvous = started(older(records(former), 1))

    effects = tell(rendezvous, "A", point(former, 1), decided=2)

    assert alarms(effects) == ["journal-stale"]


def test_a_stale_journal_stays_stale_when_the_broker_starts_again_and_the_replica_is_silent() -> None:
    former, rendezvous, _ = stale()

    again = started(records(rendezvous), 3)
    tell(again, "B", point(former, 1), incarnation=3)
    again.core.on_timer(("tail", "set"), 10.0)

    assert again.core.logs["set"].stale is not None
    assert waits(again)


def test_an_operator_who_ends_the_replica_that_is_ahead_lets_the_others_go_on() -> None:
    former, rendezvous, _ = stale()
    rendezvous.stand("b", "set", "B", position=1)
    tell(rendezvous, "B", point(former, 1))

    rendezvous.deliver(EndLog(request=1, event_type="set", name="A", operator=True), PUBLISHER)
    again = started(records(rendezvous), 3)

    assert not waits(rendezvous)
    assert again.core.logs["set"].stale is None


def test_a_journal_that_disagrees_with_every_replica_is_stale() -> None:
    former = with_replicas()
    rendezvous = started(records(former))
    other = LogPoint("f" * 32, 1, "e" * 32)

    tell(rendezvous, "A", other)
    effects = tell(rendezvous, "B", other)

    assert alarms(effects) == ["journal-stale"]


def test_a_replica_that_disagrees_while_another_one_confirms_the_journal_is_excluded_alone() -> None:
    former = with_replicas()
    rendezvous = started(records(former))
    rendezvous.feed("b", "B", 1)
    other = LogPoint("f" * 32, 1, "e" * 32)

    tell(rendezvous, "B", other)
    tell(rendezvous, "A", point(former, 1))

    assert not waits(rendezvous)
    assert rendezvous.core.epochs["set"].standing.in_sync == {"A"}


def test_another_replica_that_is_further_behind_confirms_nothing() -> None:
    """What we would call void under the last index may be what this replica has committed there."""
    former = with_replicas(writes=2)
    rendezvous = started(records(former))

    tell(rendezvous, "B", LogPoint(former.history, 2, "e" * 32))
    effects = tell(rendezvous, "A", point(former, 1))

    assert alarms(effects) == ["journal-stale"]


# ----------------------------------------------------------------------------------------------- while it is open


def test_a_replica_with_another_history_is_told_so_and_takes_no_part() -> None:
    rendezvous = with_replicas("ab", 2)
    rendezvous.digest = lambda index: "e" * 32  # type: ignore[method-assign]

    effects = rendezvous.stand("c", "set", "C", position=2) + rendezvous.feed("c", "C", 2)

    (rejected,) = sent_effects(effects, HistoryRejected)
    assert rejected.name == "C"
    assert rejected.point == rendezvous.core.logs["set"].chain.end
    assert alarms(effects) == ["other-history"], "once"
    assert not sent_effects(effects, LogDelivered)
    assert "C" not in rendezvous.core.epochs["set"].standing.in_sync
    asked = [p.voter for p in sent_effects(rendezvous.one_shot("p.1.9", standing_only("set")), PrepareEpoch)]
    assert asked == ["a", "b"]


def test_a_replica_that_found_out_by_itself_is_excluded() -> None:
    rendezvous = with_replicas("ab", 2)

    differs = HistoryDiffers(name="B", event_type="set", point=LogPoint("f" * 32, 2, "e" * 32))
    effects = rendezvous.deliver(differs, Address(ME, "B", 1))

    assert alarms(effects) == ["other-history"]
    assert rendezvous.core.epochs["set"].standing.in_sync == {"A"}


def test_a_replica_restored_from_an_older_backup_follows_the_log() -> None:
    rendezvous = with_replicas("ab", 3)

    effects = rendezvous.feed("b2", "B", 1, incarnation=2)

    assert [(d.after, d.upto) for d in sent_effects(effects, LogDelivered)] == [(1, 3)]
    assert not alarms(effects)


def test_a_replica_that_nobody_knew_of_and_that_is_ahead_closes_the_log() -> None:
    rendezvous = with_replicas("ab", 2)

    effects = rendezvous.feed("c", "C", 7)

    assert alarms(effects) == ["journal-stale"]
    assert waits(rendezvous)


def test_an_emptied_journal_is_stale_as_soon_as_a_replica_shows_up() -> None:
    rendezvous = DrivenRendezvous()

    effects = rendezvous.feed("a", "A", 7)

    assert alarms(effects) == ["journal-stale"]


# ------------------------------------------------------------------------------------------------------- recovery


def recover(
    rendezvous: DrivenRendezvous, replicas: str = "AB", needed: int = 2, accept_loss: bool = False
) -> LogRecovered:
    m = RecoverLog(request=1, event_type="set", replicas=tuple(replicas), needed=needed, accept_loss=accept_loss)
    (recovered,) = sent_effects(rendezvous.deliver(m, PUBLISHER), LogRecovered)
    return recovered


def test_a_new_history_goes_on_behind_the_most_advanced_replica() -> None:
    former, rendezvous, _ = stale()
    for name in "ab":
        rendezvous.stand(name, "set", name.upper(), position=3)
    tell(rendezvous, "B", point(former, 3))

    recovered = recover(rendezvous)

    log = rendezvous.core.logs["set"]
    assert (recovered.problem, recovered.following, recovered.behind) == ("", ("A", "B"), ())
    assert log.chain.end == LogPoint("6e" * 16, 3, former.digest(3))
    assert rendezvous.core.epochs["set"].standing.in_sync == {"A", "B"}
    prepares = sent_effects(rendezvous.one_shot("p.1.9", standing_only("set")), PrepareEpoch)
    assert [(p.epoch.number, p.before) for p in prepares] == [(4, log.chain.end)] * 2


def test_a_new_history_survives_the_next_start() -> None:
    former, rendezvous, _ = stale()
    for name in "ab":
        rendezvous.stand(name, "set", name.upper(), position=3)
    tell(rendezvous, "B", point(former, 3))
    recover(rendezvous)
    commit(rendezvous, "p.1.9")

    again = started(records(rendezvous), 3)
    end = again.core.logs["set"].chain.end
    for site in "AB":
        tell(again, site, end, incarnation=3)

    assert end == rendezvous.core.logs["set"].chain.end
    assert (end.index, again.core.logs["set"].oldest) == (4, 4)
    assert not waits(again)
    assert [r.point.index for r in records(again) if isinstance(r, HistoryBegun)] == [3]


def test_too_few_responses_are_no_reason_to_go_on_unless_the_loss_is_accepted() -> None:
    _, rendezvous, _ = stale()

    rejected = recover(rendezvous)
    accepted = recover(rendezvous, accept_loss=True)

    assert "may be at B alone" in rejected.problem
    assert rejected.silent == ("B",)
    assert (accepted.problem, accepted.following, accepted.silent) == ("", ("A",), ("B",))


def test_what_somebody_heard_of_and_nobody_holds_is_a_loss_too() -> None:
    former, rendezvous, _ = stale()
    tell(rendezvous, "B", point(former, 3), decided=4)

    rejected = recover(rendezvous)

    assert "4 was decided" in rejected.problem


def test_replicas_that_differ_at_the_same_index_are_not_chosen_from() -> None:
    _, rendezvous, _ = stale()
    tell(rendezvous, "B", LogPoint("h", 3, "e" * 32))

    rejected = recover(rendezvous, accept_loss=True)

    assert "hold different data" in rejected.problem


def test_a_replica_that_is_not_at_the_new_beginning_needs_a_copy() -> None:
    former, rendezvous, _ = stale()
    tell(rendezvous, "B", point(former, 1))
    recovered = recover(rendezvous)

    effects = rendezvous.feed("b", "B", 1)

    assert recovered.behind == ("B",)
    assert not sent_effects(effects, LogDelivered)
    assert [e.message.oldest for e in effects if hasattr(e, "message") and hasattr(e.message, "oldest")] == [4]


def test_a_journal_that_is_not_stale_is_not_recovered() -> None:
    assert "not stale" in recover(with_replicas()).problem


def test_no_abort_is_presumed_of_what_replicas_alone_know() -> None:
    former, rendezvous, _ = stale()
    tell(rendezvous, "B", point(former, 3))
    recover(rendezvous)

    assert list(rendezvous.core.logs["set"].missing) == [2, 3]


# -------------------------------------------------------------------------------------------------- who may say so


def test_only_a_replica_of_the_set_can_close_its_log() -> None:
    """A client of the set that claims to be ahead would stop all writes."""
    rendezvous = DrivenRendezvous()
    log = EventType("rs.shop", {"mark": str}, durable=True)
    rendezvous.deliver(TypeAdvertised(definitions=(log,)), PUBLISHER)
    wanted = FollowLog(
        name="x",
        definitions=(log,),
        filter=Filter.everything(),
        position=7,
        start="now",
        credit=1,
        voter=None,
        history="h",
        digest="e" * 32,
    )

    rendezvous.deliver(wanted, PUBLISHER, Sender("client", "writer"))
    by_a_client = rendezvous.core.logs["rs.shop"].stale
    rendezvous.deliver(wanted, PUBLISHER, Sender("shop/r1", "replica"))
    by_a_replica = rendezvous.core.logs["rs.shop"].stale

    assert by_a_client is None
    assert by_a_replica == StaleJournal("rs.shop", 0, "shop/r1", 7)


def test_only_replicas_that_follow_the_log_are_listened_to_after_a_start() -> None:
    former = with_replicas()
    rendezvous = started(records(former))

    tell(rendezvous, "Z", LogPoint(former.history, 99, "e" * 32))

    assert rendezvous.core.logs["set"].stale is None
