"""Some replicas synchronous, the others following."""

from dataclasses import dataclass

from replication.policies.base import Voting


@dataclass(frozen=True, slots=True)
class Combined(Voting):
    """The replicas under `sync` commit together; the others get the log, and never hold up a write."""

    def voters(self) -> list[str]:
        return self.config.sync
