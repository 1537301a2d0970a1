"""Synchronous voting: m of n."""

from dataclasses import dataclass

from replication.policies.base import Voting


@dataclass(frozen=True, slots=True)
class Quorum(Voting):
    """Any m of the n replicas commit together and the others follow; a read of n−m+1 meets every write.

    Goes on while m replicas are in sync and takes as long as the m quickest; what it gives up is that any single
    replica is current."""

    @property
    def decide_when_met(self) -> bool:
        """By the m quickest, where any two writes have a replica in common; else by all that are in sync."""
        return 2 * self.config.writes_needed > len(self.config.replica)

    def responses_needed(self) -> int:
        """A write is at m of n, so n−m+1 include one that has it."""
        return len(self.config.replica) - self.config.writes_needed + 1
