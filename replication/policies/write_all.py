"""Synchronous write-all, read-any."""

from dataclasses import dataclass

from replication.policies.base import Voting


@dataclass(frozen=True, slots=True)
class WriteAll(Voting):
    """A write is at every replica when it is acknowledged, so any of them answers for all.

    With one of them down, writes are refused; or, with `on_failure = "degrade"`, go on with those in sync."""

    reads_await_prepared = True
