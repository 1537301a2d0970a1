"""What brokers and agents measure, and how they name it."""

import ast
import inspect
import textwrap
from collections.abc import Iterator

import pytest
from prometheus_client.core import Metric

from replication.replica.write_meter import WriteMeter
from replication.rpc.calls import DatabaseError, ExecuteDone, Failed, WriteDone
from tests.support.metric_names import bad_help, bad_name
from tops.core.log.event_log import EventLog
from tops.model.errors import NotReachable, OutcomeUnknown
from tops.model.ids import TxId
from tops.model.rejections import Rejection, RejectionCode
from tops.model.transactions import Outcome, TxType
from tops.protocol.messages import CommitTx, LogEntry, OneShot, RunOneShots, TxOutcome, TxOutcomes, TxSpec
from tops.runtime.broker_node import BrokerNode
from tops.runtime.histogram import BOUNDS_S, Histogram
from tops.runtime.tx_meter import OPEN_MAX, TxMeter
from tops.server.log_age import MARKS_MAX, LogAges
from tops.server.metrics import COUNTERS, write_metrics

SPEC = TxSpec("rs.shop", TxType.DISTRIBUTED)


def event_log(name: str = "rs.shop") -> EventLog:
    return EventLog(name, 1, lambda event_type: (event_type,), 100)


def entry(number: int) -> LogEntry:
    return LogEntry(number=number, transactions=())


def one_shots(*ids: str) -> RunOneShots:
    return RunOneShots(spec=SPEC, transactions=tuple(OneShot(TxId(tx), ()) for tx in ids))


def committed(tx: str) -> TxOutcome:
    return TxOutcome(tx=TxId(tx), outcome=Outcome.COMMITTED)


def aborted(tx: str, code: RejectionCode) -> TxOutcome:
    return TxOutcome(tx=TxId(tx), outcome=Outcome.ABORTED, rejection=Rejection(code))


def new_meter() -> TxMeter:
    return TxMeter({"rs.shop": event_log(), "orders": event_log("orders")})


def samples(metrics: Iterator[Metric] | tuple[Metric, ...]) -> dict[tuple[str, tuple[str, ...]], float]:
    return {(s.name, tuple(s.labels.values())): s.value for metric in metrics for s in metric.samples}


def test_a_duration_counts_in_every_range_that_it_does_not_exceed() -> None:
    histogram = Histogram()

    for duration_s in (BOUNDS_S[0], BOUNDS_S[0] * 1.01, 1_000.0):
        histogram.observe(duration_s)

    counts = dict(histogram.buckets())
    assert (counts["0.001"], counts["0.0025"], counts["10.0"], counts["+Inf"]) == (1, 2, 2, 3)
    assert histogram.sum_s == pytest.approx(1_000, abs=1)


def test_writes_are_counted_by_set_policy_outcome_and_code() -> None:
    meter = new_meter()
    meter.request(one_shots("a", "b", "c"), 10.0)
    meter.outcome(TxOutcomes(outcomes=(committed("a"), committed("b"))), 10.004)
    meter.outcome(aborted("c", RejectionCode.CONSTRAINT), 10.2)

    found = samples(tuple(write_metrics(meter, lambda name: {"shop": "quorum"}[name])))

    assert found["tops_coordinated_writes_total", ("shop", "quorum", "committed", "")] == 2
    assert found["tops_coordinated_writes_total", ("shop", "quorum", "aborted", "constraint")] == 1
    assert found["tops_coordinated_write_latency_seconds_bucket", ("shop", "quorum", "0.005")] == 2
    assert found["tops_coordinated_write_latency_seconds_count", ("shop", "quorum")] == 3


def test_transactions_of_other_types_are_no_writes_of_a_set() -> None:
    meter = new_meter()
    meter.request(CommitTx(tx=TxId("a"), tx_type=TxType.DISTRIBUTED, event_type="orders", last_sequence=1), 1.0)
    meter.outcome(committed("a"), 2.0)

    assert meter.ended == {("orders", "committed", ""): 1}
    assert samples(tuple(write_metrics(meter, lambda _: ""))) == {}


def test_a_repeated_request_counts_from_its_first_arrival_and_once() -> None:
    meter = new_meter()
    meter.request(one_shots("a"), 1.0)
    meter.request(one_shots("a"), 3.0)

    meter.outcome(committed("a"), 4.0)
    meter.outcome(committed("a"), 5.0)

    assert meter.ended == {("rs.shop", "committed", ""): 1}
    assert meter.latency["rs.shop"].sum_s == 3.0


def test_an_outcome_that_another_broker_has_decided_is_not_counted() -> None:
    meter = new_meter()

    meter.outcome(committed("elsewhere.1.1"), 1.0)

    assert meter.ended == {}


def test_requests_without_an_outcome_take_bounded_memory() -> None:
    meter = new_meter()
    for number in range(OPEN_MAX + 1):
        meter.request(one_shots(str(number)), 1.0)

    meter.outcome(TxOutcomes(outcomes=(committed("0"), committed("1"))), 2.0)

    assert meter.ended == {("rs.shop", "committed", ""): 1}


def test_lag_in_seconds_is_the_age_of_the_first_entry_that_is_not_taken() -> None:
    log = event_log()
    ages = LogAges({"rs.shop": log})
    for second, number in ((100, 1), (110, 2), (120, 3)):
        log.fill(entry(number))
        ages.look(second)

    assert ages.lag_s("rs.shop", 3, 130) == 0
    assert ages.lag_s("rs.shop", 2, 130) == 10
    assert ages.lag_s("rs.shop", 0, 130) == 30


def test_a_lag_that_is_longer_than_the_marks_reach_back_is_at_least_as_long() -> None:
    log = event_log()
    ages = LogAges({"rs.shop": log})
    for number in range(1, MARKS_MAX + 100):
        log.fill(entry(number))
        ages.look(float(number))

    assert ages.lag_s("rs.shop", 0, MARKS_MAX + 100) == MARKS_MAX


def counters_of_a_broker() -> set[str]:
    """The keys of `BrokerNode.counters`, from the source: a node needs a journal and a loop to be made."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(BrokerNode.__init__)))):
        match node:
            case ast.Assign(targets=[ast.Attribute(attr="counters")], value=ast.Dict(keys=keys)):
                return {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
    raise AssertionError("a broker has no counters")


def test_each_counter_of_a_broker_has_a_name_and_a_help_text() -> None:
    assert set(COUNTERS) == counters_of_a_broker()
    for name, text in COUNTERS.values():
        assert bad_name(name, "counter") + bad_help(name, text) == ""


@pytest.mark.parametrize("name", ["tops_replica_lag_s", "lag_seconds", "tops_Lag"])
def test_a_name_against_the_rules_is_found(name: str) -> None:
    assert bad_name(name, "gauge")


def test_a_help_text_that_does_not_say_what_is_measured_is_found() -> None:
    assert bad_help("tops_links", "Connected links.")


async def test_an_agent_counts_its_writes_by_outcome_and_code() -> None:
    meter = WriteMeter()
    conflict = Rejection(RejectionCode.CONFLICT)
    answers: dict[tuple[str, str], WriteDone | ExecuteDone | Failed] = {
        ("committed", ""): WriteDone(replica="r1", tx="a", rows=()),
        ("aborted", "conflict"): WriteDone(replica="r1", tx="b", rows=(), rejection=conflict),
        ("aborted", "database"): ExecuteDone(replica="r1", tx="c", error=DatabaseError("23505", "duplicate key")),
        ("unknown", "outcome-unknown"): Failed(code="outcome-unknown", text="", retry="ask-first"),
    }

    await meter.all(done(tuple(answers.values())), len(answers))

    assert meter.ended == dict.fromkeys(answers, 1)
    assert sum(meter.latency.counts) == len(answers)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(NotReachable("no database"), "aborted"), (OutcomeUnknown(TxId("a"), "r1"), "unknown")],
)
async def test_a_write_that_raises_is_counted_and_raises(error: Exception, outcome: str) -> None:
    meter = WriteMeter()

    async def fail() -> WriteDone:
        raise error

    with pytest.raises(type(error)):
        await meter.one(fail())

    assert [found for found, _ in meter.ended] == [outcome]


async def done(answers: tuple[WriteDone | ExecuteDone | Failed, ...]) -> tuple[WriteDone | ExecuteDone | Failed, ...]:
    return answers
