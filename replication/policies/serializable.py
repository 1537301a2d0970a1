"""Serializable without two-phase commit: write sets in one total order, each with what its writer has read."""

from dataclasses import dataclass

from replication.policies.base import EntryKind, LogFirst


@dataclass(frozen=True, slots=True)
class Serializable(LogFirst):
    """One-copy serializable: reads are local, write sets are committed in log order at every replica.

    A transaction whose reads an earlier write set has changed is aborted with an error that is safe to retry; every
    replica comes to that verdict by itself, since the entry tells what was read."""

    entry_kind = EntryKind.CERTIFIED
