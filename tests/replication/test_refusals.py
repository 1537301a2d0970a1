"""What a coordinator's reason becomes for the writer."""

from adapters.changes import NotDeterministic
from adapters.resource import Exclusion, Why
from replication.rpc.refusals import ChangeNotProved, TooFewReplicas, WriteRefused, describe, understand
from tops.model.constraints import AtLeast, OnlyFrom, unmet
from tops.model.errors import Retry


def test_a_replica_that_the_writer_does_not_know_is_named_with_the_cure() -> None:
    reason = unmet((OnlyFrom(frozenset({"shop-r1", "shop-r2"})),), ["shop-r1", "shop-r2", "shop-r3"], {})

    refused = understand("t", reason or "")

    assert type(refused) is WriteRefused
    assert (refused.why, refused.retry) == ("unknown-replica", Retry.SAFE)
    assert "shop-r3" in str(refused)
    assert "start them with the same one" in str(refused)


def test_replicas_that_are_missing_are_named() -> None:
    reason = unmet((AtLeast(2, frozenset({"shop-r1", "shop-r2"})),), ["shop-r1"], {})

    refused = understand("t", reason or "")

    assert isinstance(refused, TooFewReplicas)
    assert "missing: shop-r2" in str(refused)


def test_a_change_that_is_not_proved_keeps_its_reason_on_the_way() -> None:
    rejected = NotDeterministic("default", "now() is not known to give the same result everywhere; give the value")

    refused = understand("t", describe(Exclusion(Why.INVALID, "0A000", str(rejected))))

    assert isinstance(refused, ChangeNotProved)
    assert (refused.why, refused.reason, refused.sqlstate) == ("not-deterministic", "default", "0A000")
    assert refused.retry is Retry.NEVER
