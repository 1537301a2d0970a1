"""What a rejection becomes for the writer, and in the conflict log."""

import itertools

import msgspec
import pytest

from adapters.changes import NotDeterministic, Upsert
from adapters.postgres.sql.sqlstates import exclusion
from adapters.resource import Exclusion, Why
from replication.conflicts.tables import rejection_in, rejection_record
from replication.rpc.rejections import (
    ChangeNotProved,
    Duplicate,
    SerializationFailure,
    TooFewReplicas,
    VersionConflict,
    WriteRejected,
    WriteTooLarge,
    error_for,
    rejection,
)
from tops.model.constraints import AtLeast, OnlyFrom, unmet
from tops.model.errors import ResourceError, Retry, TopsError
from tops.model.ids import TxId
from tops.model.rejections import Rejection, RejectionCode

# Texts that were decided by when they were all that travelled.
MISLEADING = (
    "",
    "participant",
    "duplicate of t0 at 7: x",
    "a participant is not on the list of those allowed",
    "not proved deterministic [default]: x",
    "serialization: x",
)
WHOLE = Rejection(RejectionCode.DUPLICATE, "it is there", "23505", "default", TxId("t0"), 7)


def test_a_replica_that_the_writer_does_not_know_is_named_with_the_cure() -> None:
    rejected = unmet((OnlyFrom(frozenset({"shop-r1", "shop-r2"})),), ["shop-r1", "shop-r2", "shop-r3"], {})
    assert rejected is not None

    write_error = error_for("t", rejected)

    assert type(write_error) is WriteRejected
    assert (write_error.why, write_error.retry) == ("unknown-replica", Retry.SAFE)
    assert "shop-r3" in str(write_error)
    assert "start them with the same one" in str(write_error)


def test_replicas_that_are_missing_are_named() -> None:
    rejected = unmet((AtLeast(2, frozenset({"shop-r1", "shop-r2"})),), ["shop-r1"], {})
    assert rejected is not None

    write_error = error_for("t", rejected)

    assert isinstance(write_error, TooFewReplicas)
    assert "missing: shop-r2" in str(write_error)


def test_a_change_that_is_not_proved_keeps_its_reason_on_the_way() -> None:
    rejected = NotDeterministic("default", "now() is not known to give the same result everywhere; give the value")

    write_error = error_for("t", rejection(exclusion(rejected)))

    assert isinstance(write_error, ChangeNotProved)
    assert (write_error.why, write_error.reason, write_error.sqlstate) == ("not-deterministic", "default", "0A000")
    assert write_error.retry is Retry.NEVER


EXPECTED: dict[RejectionCode, tuple[type[TopsError], str, Retry]] = {
    RejectionCode.PLAN_UNKNOWN: (WriteRejected, "plan-unknown", Retry.SAFE),
    RejectionCode.AGAINST_PLAN: (WriteRejected, "against-plan", Retry.SAFE),
    RejectionCode.NOT_LISTED: (WriteRejected, "not-listed", Retry.SAFE),
    RejectionCode.UNAVAILABLE: (WriteRejected, "unavailable", Retry.SAFE),
    RejectionCode.CONFLICT: (WriteRejected, "conflict", Retry.SAFE),
    RejectionCode.PARTICIPANT_NOT_ALLOWED: (WriteRejected, "unknown-replica", Retry.SAFE),
    RejectionCode.CONSTRAINTS_UNMET: (TooFewReplicas, "too-few-replicas", Retry.SAFE),
    RejectionCode.CENSUS_UNFULFILLED: (TooFewReplicas, "too-few-replicas", Retry.SAFE),
    RejectionCode.SERIALIZATION: (SerializationFailure, "serialization", Retry.SAFE),
    RejectionCode.VERSION: (VersionConflict, "version", Retry.SAFE),
    RejectionCode.TOO_LARGE: (WriteTooLarge, "too-large", Retry.NEVER),
    RejectionCode.INVALID: (WriteRejected, "invalid", Retry.NEVER),
    RejectionCode.CONSTRAINT: (WriteRejected, "constraint", Retry.NEVER),
    RejectionCode.KEY_REUSED: (WriteRejected, "key-reused", Retry.NEVER),
    RejectionCode.ERROR: (WriteRejected, "error", Retry.NEVER),
    RejectionCode.DUPLICATE: (WriteRejected, "duplicate", Retry.NEVER),  # without the transaction that was first
}


@pytest.mark.parametrize(("code", "text"), list(itertools.product(RejectionCode, MISLEADING)), ids=str)
def test_what_the_writer_gets_follows_from_the_code_whatever_the_text_is(code: RejectionCode, text: str) -> None:
    kind, why, retry = EXPECTED.get(code, (WriteRejected, "aborted", Retry.SAFE))

    write_error = error_for("t", Rejection(code, text))

    assert isinstance(write_error, WriteRejected)
    assert (type(write_error), write_error.why, write_error.retry) == (kind, why, retry)
    assert text in write_error.text


def test_a_duplicate_names_the_transaction_that_was_first() -> None:
    first = error_for("t", Rejection(RejectionCode.DUPLICATE, "known", first_tx=TxId("t0"), first_number=7))

    assert isinstance(first, Duplicate)
    assert (first.tx, first.number) == ("t0", 7)


@pytest.mark.parametrize("why", Why)
def test_every_exclusion_of_a_database_has_a_code(why: Why) -> None:
    excluded = Exclusion(why, "23505", "text", TxId("t0"), 7, "default")

    assert rejection(excluded) == Rejection(RejectionCode(why.value), "text", "23505", "default", TxId("t0"), 7)


def test_people_see_the_code_the_sqlstate_and_the_first_transaction() -> None:
    assert str(WHOLE) == "duplicate [23505] of t0 at 7: it is there"
    assert str(Rejection(RejectionCode.ABORTED, "changed its mind")) == "changed its mind"


@pytest.mark.parametrize("stored", [WHOLE, Rejection(RejectionCode.SERIALIZATION, "x was changed")], ids=str)
def test_a_rejection_comes_back_from_the_conflict_log(stored: Rejection) -> None:
    (line,) = rejection_record(3, "t", "apply_error", stored, "skip").changes

    assert isinstance(line, Upsert)
    assert rejection_in(line.values["discarded"]) == stored


@pytest.mark.parametrize(
    "discarded",
    [
        '["constraint [23505]: taken"]',
        "[]",
        '[{"code": "gone"}]',
        '[{"text": "x"}]',
        '[{"code": "error", "more": 1}]',
        "{",
    ],
)
def test_a_line_of_another_version_in_the_conflict_log_is_rejected(discarded: str) -> None:
    with pytest.raises(ResourceError, match=r"tops\.conflicts.*format"):
        rejection_in(discarded)


def test_a_rejection_is_cut_so_that_all_its_texts_together_are_short_enough() -> None:
    long = msgspec.structs.replace(WHOLE, text="x" * 10_000)

    assert long.bounded().text_length == 2048
    assert msgspec.structs.replace(long.bounded(), text="") == msgspec.structs.replace(WHOLE, text="")
    assert WHOLE.bounded() is WHOLE
