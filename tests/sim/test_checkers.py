"""Every checker stays silent on a good run and names what is wrong with a bad one."""

from collections.abc import Callable

import msgspec
import pytest

from tests.scenarios.cluster import Cluster
from tops.model.constraints import AtLeast, MinParticipants, OnlyFrom, Required
from tops.model.errors import TransactionAborted
from tops.model.ids import TxId, voter_of
from tops.model.rejections import Rejection, RejectionCode
from tops.model.transactions import LocalOutcome, Scope, ScopeLimit, TxType
from tops.protocol.effects import Memo
from tops.protocol.messages import EpochId
from tops.protocol.records import AnyRecord, EpochCommitted, LogAppended
from tops.sim import checkers
from tops.sim.databases import CallbackDatabase, Done, ReplicaDatabase


class Run:
    """A cluster in which one transaction of each kind has ended well, and one was compensated."""

    def __init__(self) -> None:
        cluster = self.cluster = Cluster("P", "S", "T", "L", "N", "A", "B", "R")
        p = cluster["P"]
        p.advertise("plain", "other", "set", "log")
        self.s = cluster["S"].subscribe("plain", compensatable=True)
        self.t = cluster["T"].subscribe("plain")
        self.l = cluster["L"].subscribe("plain", Scope.LOCAL)
        self.n = cluster["N"].subscribe("plain", Scope.NONE)
        self.a, self.b = cluster["A"].replicate("set"), cluster["B"].replicate("set")
        self.reader = cluster["R"].subscribe("log", durable="reader", start="oldest")

        self.free = self._transaction(())
        self.bound = self._transaction((MinParticipants(2), Required(frozenset("S")), OnlyFrom(frozenset("ST"))))
        self.local = self._transaction((), TxType.LOCAL)
        self.t.rejects_prepare = True
        self.undone = p.begin("plain")
        for mark in ("u1", "u2", "u3"):
            p.publish("plain", mark, tx=self.undone)
        with pytest.raises(TransactionAborted):
            p.commit(self.undone)
        replicas = frozenset("AB")
        for mark in ("w1", "w2"):
            p.execute(
                "set",
                [mark],
                constraints=(AtLeast(2, replicas),),
                limit=ScopeLimit.LOCAL,
                local_outcome=LocalOutcome.FOLLOWS,
                census=None,
            )
        self.written = p.last_tx()
        for mark in ("e1", "e2", "e3"):
            number = p.publish("log", mark)
            cluster.world.history.confirmed.setdefault("log", []).append((number, mark))
        cluster.settle()
        cluster.run(2.0)
        self.world = cluster.world

    def _transaction(self, constraints: tuple[msgspec.Struct, ...], tx_type: TxType = TxType.DISTRIBUTED) -> TxId:
        p = self.cluster["P"]
        if tx_type is TxType.LOCAL:
            self.s.scope = self.t.scope = Scope.NONE
        tx = p.begin("plain", tx_type, constraints=constraints)
        marks = [f"{tx}/{i}" for i in (1, 2, 3)]
        for mark in marks:
            p.publish("plain", mark, tx=tx)
        p.commit(tx)
        self.s.scope = self.t.scope = Scope.DISTRIBUTED
        return tx

    # ------------------------------------------------------------------------------------- where wrong data is planted

    def callback(self, name: str) -> CallbackDatabase:
        found = next(iter(self.world.sites[self.cluster[name].name].app.subscriptions.values())).database
        assert isinstance(found, CallbackDatabase)
        return found

    def replica(self, name: str) -> ReplicaDatabase:
        found = next(iter(self.world.sites[self.cluster[name].name].app.subscriptions.values())).database
        assert isinstance(found, ReplicaDatabase)
        return found

    def records(self, event_type: str) -> list[AnyRecord]:
        return self.cluster.broker(self.cluster.rendezvous(event_type)).disk.records

    def decision(self, tx: TxId) -> EpochCommitted:
        return next(r for r in self.records("plain") if isinstance(r, EpochCommitted) and tx in r.transactions)

    def replace_decision(self, tx: TxId, *new: EpochCommitted) -> None:
        records = self.records("plain")
        index = records.index(self.decision(tx))
        records[index : index + 1] = new

    def hold(self, names: str, tx: TxId, *marks: str) -> None:
        """The databases of these participants hold these events of the transaction, whatever happened."""
        for name in names:
            self.callback(name).committed[tx] = Done(tx, marks)

    def show(self, name: str, tx: TxId | None, mark: str, incarnation: int = 1) -> None:
        """The application at this site was shown an event of type plain."""
        self.cluster.event("plain", mark, {})
        self.world.history.seen.setdefault((self.cluster[name].name, 1, incarnation), []).append((tx, mark))


Plant = Callable[[Run], object]
MARKS = ("/1", "/2", "/3")


def drop_voters(run: Run, keep: int) -> None:
    """The decision lets only so many of the promised commit, and only they do."""
    decided = run.decision(run.bound)
    kept = frozenset(sorted(decided.committing)[:keep])
    run.replace_decision(run.bound, msgspec.structs.replace(decided, committing=kept))


def commits_without(run: Run, name: str) -> None:
    owners = run.world.history.voters
    decided = run.decision(run.bound)
    kept = frozenset(key for key in decided.committing if owners[voter_of(key)] != name)
    run.replace_decision(run.bound, msgspec.structs.replace(decided, committing=kept))


def commits_with_a_stranger(run: Run) -> None:
    run.world.history.voters["key-of-L"] = run.cluster["L"].name
    decided = run.decision(run.bound)
    more = decided.committing | {"key-of-L"}
    run.replace_decision(run.bound, msgspec.structs.replace(decided, committing=more))


def promised_and_left_out(run: Run) -> None:
    run.world.history.prepared_work[run.free].add((run.cluster["T"].name, 1))
    del run.callback("T").committed[run.free]


def decided_without_one_that_promised(run: Run) -> None:
    decided = run.decision(run.free)
    kept = frozenset(key for key in decided.committing if run.world.history.voters[voter_of(key)] != "T")
    run.replace_decision(run.free, msgspec.structs.replace(decided, committing=kept))
    del run.callback("T").committed[run.free]


def logged_twice(run: Run) -> None:
    last = next(r for r in reversed(run.records("set")) if isinstance(r, LogAppended) and r.event_type == "set")
    run.records("set").append(
        LogAppended(event_type="set", entry=msgspec.structs.replace(last.entry, number=last.entry.number + 1))
    )


def lose_from_log(run: Run) -> None:
    records = run.records("log")
    records.remove(next(r for r in records if isinstance(r, LogAppended) and r.event_type == "log"))


def repeat_in_log(run: Run) -> None:
    records = run.records("log")
    entry = next(r.entry for r in records if isinstance(r, LogAppended) and r.event_type == "log")
    records.append(LogAppended(event_type="log", entry=msgspec.structs.replace(entry, number=9)))


def without_a_write(*names: str) -> Plant:
    """These replicas count the number of the last write as theirs and do not hold it."""

    def plant(run: Run) -> None:
        for name in names:
            database = run.replica(name)
            del database.applied[run.written]
            for marks in database.rows.values():
                if "w2" in marks:
                    marks.remove("w2")
            database.hashes[database.position] = database.hashes[database.position - 1]

    return plant


def orphan(run: Run) -> None:
    memo = Memo(EpochId("plain", 99, 1, run.cluster["P"].name, 1), "", "voter", (TxId("x.1.1"),))
    run.callback("T").prepared[TxId("x.1.1")] = (memo, ())


def forged_everywhere(run: Run) -> None:
    for name in "AB":
        run.replica(name).hashes[1] = "another"


def undone_for_others(run: Run) -> None:
    why = Rejection(RejectionCode.CONSTRAINTS_UNMET, "the participant died: 1 of at least 2 participants")
    vars(run.world.history).setdefault("local_aborts", []).append((run.free, run.cluster["L"].name, why))


GHOST = TxId("ghost.1.1")

BAD: list[tuple[str, str, Plant]] = [
    (
        "a participant was asked to commit twice",
        "check_nothing_was_broken",
        lambda run: run.world.history.broken.append("S: committed twice"),
    ),
    (
        "two brokers decided",
        "check_decided_once",
        lambda run: run.records("other").append(run.decision(run.free)),
    ),
    ("one transaction under two numbers", "check_decided_once", logged_twice),
    (
        "the decision is on no disk",
        "check_no_commit_without_decision",
        lambda run: run.replace_decision(run.free),
    ),
    (
        "a ghost commit",
        "check_no_commit_without_decision",
        lambda run: run.hold("S", GHOST, "boo"),
    ),
    (
        "one was told committed, another aborted",
        "check_responses_were_true",
        lambda run: run.world.history.outcomes[run.free].add("aborted"),
    ),
    (
        "told committed and never decided",
        "check_responses_were_true",
        lambda run: run.replace_decision(run.free),
    ),
    (
        "told aborted and decided",
        "check_responses_were_true",
        lambda run: run.world.history.outcomes.update({run.free: {"aborted"}}),
    ),
    (
        "a local transaction told aborted and committed somewhere",
        "check_responses_were_true",
        lambda run: run.world.history.outcomes.update({run.local: {"aborted"}}),
    ),
    (
        "an event is missing at one participant",
        "check_complete",
        lambda run: run.hold("T", run.free, f"{run.free}/1", f"{run.free}/3"),
    ),
    (
        "the last event is missing everywhere",
        "check_complete",
        lambda run: run.hold("ST", run.free, f"{run.free}/1", f"{run.free}/2"),
    ),
    (
        "everyone applied in the wrong order",
        "check_complete",
        lambda run: run.hold("ST", run.free, *(f"{run.free}{m}" for m in reversed(MARKS))),
    ),
    (
        "an event was applied twice",
        "check_complete",
        lambda run: run.hold("ST", run.free, *(f"{run.free}{m}" for m in ("/1", *MARKS))),
    ),
    (
        "a local subscriber applied half",
        "check_complete",
        lambda run: run.callback("L").local.update({run.local: Done(run.local, (f"{run.local}/1",))}),
    ),
    ("fewer than the minimum commit", "check_constraints_held", lambda run: drop_voters(run, 1)),
    ("a required one does not commit", "check_constraints_held", lambda run: commits_without(run, "S")),
    ("a stranger commits", "check_constraints_held", commits_with_a_stranger),
    ("a promise was neither kept nor given back", "check_every_participant_commits", promised_and_left_out),
    ("it was decided without one that promised", "check_every_participant_commits", decided_without_one_that_promised),
    (
        "one of two participants at a site was left out",
        "check_every_participant_commits",
        lambda run: run.world.history.prepared_work[run.free].add((run.cluster["T"].name, 2)),
    ),
    (
        "who chose nothing saw an event",
        "check_scope_none_saw_nothing",
        lambda run: run.show("N", run.free, "secret"),
    ),
    (
        "compensated and still there",
        "check_compensation",
        lambda run: run.hold("S", run.undone, "u1", "u2", "u3"),
    ),
    (
        "compensated forwards",
        "check_compensation",
        lambda run: run.callback("S").compensated.update({run.undone: ("u1", "u2", "u3")}),
    ),
    (
        "only the first events were compensated backwards",
        "check_compensation",
        lambda run: run.callback("S").compensated.update({run.undone: ("u3", "u2")}),
    ),
    (
        "two replicas differ at one position",
        "check_replicas_agree",
        lambda run: run.replica("B").hashes.update({1: "another"}),
    ),
    ("one replica skipped a write", "check_replicas_agree", without_a_write("B")),
    ("all replicas skipped a write", "check_replicas_hold_the_log", without_a_write("A", "B")),
    (
        "a replica holds what is in no log",
        "check_replicas_hold_the_log",
        lambda run: run.replica("A").applied.update({GHOST: ("boo",)}),
    ),
    (
        "a replica holds a write with other events",
        "check_replicas_hold_the_log",
        lambda run: run.replica("A").applied.update({run.written: ("w2", "w3")}),
    ),
    ("a confirmed event is on no disk", "check_log_delivery", lose_from_log),
    ("a confirmed event is on disk twice", "check_log_delivery", repeat_in_log),
    (
        "a reader took an entry twice",
        "check_log_delivery",
        lambda run: run.callback("R").taken.append(3),
    ),
    (
        "a reader took entries out of order",
        "check_log_delivery",
        lambda run: run.callback("R").taken.reverse(),
    ),
    (
        "a transaction is still being coordinated",
        "check_everything_ended",
        lambda run: run.cluster["P"].begin("plain"),
    ),
    (
        "a replica is behind",
        "check_everything_ended",
        lambda run: setattr(run.replica("A"), "position", 1),
    ),
    ("something stays prepared", "check_no_orphans", orphan),
    (
        "something stays running",
        "check_no_orphans",
        lambda run: run.callback("T").running.update({GHOST: []}),
    ),
    (
        "a member of the committing set has not committed",
        "check_all_committed",
        lambda run: run.callback("T").committed.pop(run.free),
    ),
    (
        "a reader lacks an entry",
        "check_log_reached_everyone",
        lambda run: run.callback("R").taken.remove(2),
    ),
    (
        "a local subscriber was undone for the distributed part",
        "check_locals_are_independent",
        undone_for_others,
    ),
    (
        "all replicas agree on what is in no log",
        "check_replicas_are_prefixes",
        forged_everywhere,
    ),
    (
        "a write was told aborted and is in the log",
        "check_acknowledged_is_logged",
        lambda run: run.world.history.outcomes.update({run.written: {"aborted"}}),
    ),
    (
        "a write was told committed and is in no log",
        "check_acknowledged_is_logged",
        lambda run: run.records("set").remove(
            next(r for r in reversed(run.records("set")) if isinstance(r, LogAppended) and r.event_type == "set")
        ),
    ),
    (
        "an ordinary event of a type that was not subscribed to",
        "check_only_matching_events",
        lambda run: run.show("R", None, "stray"),
    ),
    (
        "an event of a transaction of a type that was not subscribed to",
        "check_scopes_were_honoured",
        lambda run: run.show("R", run.free, "stray"),
    ),
    (
        "a broker remembers a publisher for ever",
        "check_state_is_removed",
        lambda run: run.cluster.broker("b1").core.rendezvous.publishers.update({GHOST: (run.cluster["P"].name, 1)}),
    ),
]


def test_every_checker_is_silent_on_a_good_run() -> None:
    run = Run()

    for checker in checkers.SAFETY + checkers.LIVENESS:
        assert checker(run.world) == [], checker.__name__
    assert checkers.violations(run.world, live=True) == []


CHECKERS = {checker.__name__: checker for checker in checkers.SAFETY + checkers.LIVENESS}
CASES = [pytest.param(CHECKERS[checker], plant, id=name) for name, checker, plant in BAD if checker in CHECKERS]


@pytest.mark.parametrize(("checker", "plant"), CASES)
def test_a_checker_names_what_is_wrong(checker: checkers.Checker, plant: Plant) -> None:
    run = Run()

    plant(run)

    assert checker(run.world)
    assert any(v.startswith(checker.__name__) for v in checkers.violations(run.world, live=True))


def test_what_a_subscription_saw_in_another_life_does_not_contradict_its_choice_of_nothing_in_this_one() -> None:
    run = Run()

    run.show("N", run.free, "seen before a crash", incarnation=0)

    assert checkers.check_scope_none_saw_nothing(run.world) == []


def test_a_run_is_not_over_while_a_reader_s_application_is_at_an_entry_of_the_log() -> None:
    run = Run()
    reader = run.world.sites[run.cluster["R"].name].app.subscriptions[1]

    run.cluster["P"].publish_soon("log", "slow")
    run.cluster.until(lambda: reader.busy > 0, "the reader was not given the entry")
    while_busy = run.world.open_work()
    run.cluster.settle()

    assert "R is at a call for 1" in while_busy
    assert run.world.open_work() == []
    assert not reader.busy


def test_every_checker_has_a_bad_history_to_prove_it() -> None:
    assert CHECKERS.keys() <= {checker for _, checker, _ in BAD}
