"""What a policy decides: the properties of the transaction that carries a write, and where a write goes first."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from replication.model.config import ReplicaSetConfig
from tops.model.constraints import AnyConstraint, AtLeast, OnlyFrom
from tops.model.event_types import EventType
from tops.model.transactions import Access, LocalOutcome, Scope, ScopeLimit, TxType
from tops.protocol.messages import TxSpec


class OnApplyFailure(Enum):
    """What a replica does with a transaction of the log that it can't apply."""

    STOP = "stop"  # apply nothing more until an operator resumes
    SKIP = "skip"  # leave it out and record it
    QUARANTINE = "set-aside"  # keep it for `tops rs retry`


class EntryKind(Enum):
    """How entries of a log are applied; a replica can't follow entries of one kind by the rules of another."""

    PLAIN = "plain"  # as they are
    CERTIFIED = "serializable"  # write sets, each with what its writer has read
    VERSIONED = "peer-to-peer"  # with the versions of rows


class Route(Enum):
    """Who begins the transaction."""

    COORDINATOR = "coordinator"  # the client itself, at the set's coordinator
    REPLICA = "replica"  # any replica's agent, which commits first and publishes then
    PRIMARY = "primary"  # the primary's agent, the same way


@dataclass(frozen=True, slots=True)
class TxPlan:
    """The properties of the transactions that carry a set's writes."""

    tx_type: TxType
    access: Access
    limit: ScopeLimit
    constraints: tuple[AnyConstraint, ...] = ()
    decide_when_met: bool = False  # by the first replicas that are enough, and not by all that are in sync

    @property
    def local_outcome(self) -> LocalOutcome:
        return LocalOutcome.FOLLOWS if self.tx_type is TxType.DISTRIBUTED else LocalOutcome.INDEPENDENT

    def spec(self, event_type: str) -> TxSpec:
        """The properties as a coordinator takes them."""
        return TxSpec(
            event_type,
            self.tx_type,
            limit=self.limit,
            constraints=self.constraints,
            local_outcome=self.local_outcome,
            census=None,
            decide_when_met=self.decide_when_met,
        )


@dataclass(frozen=True, slots=True)
class Policy(ABC):
    """One way of replicating: a value made from the set's configuration, which the rest of the code asks.

    What is said here holds for most policies; a policy overrides what it does differently."""

    config: ReplicaSetConfig
    route: ClassVar[Route]
    local_first: ClassVar[bool] = False  # a replica commits before it publishes
    entry_kind: ClassVar[EntryKind] = EntryKind.PLAIN
    # Whether a read waits until the outcome of everything that its replica has prepared is known there.
    reads_await_prepared: ClassVar[bool] = False

    @abstractmethod
    def plan(self) -> TxPlan:
        """The properties of the transactions that carry the set's writes."""

    @abstractmethod
    def consistencies(self) -> frozenset[str]:
        """Which reads the set can promise."""

    def scope_of(self, replica: str) -> Scope:
        """How a replica takes part: with a vote, or by following the log."""
        return Scope.LOCAL

    def responses_needed(self) -> int:
        """How many replicas must say where they are, so that one of them surely has everything acknowledged."""
        return len(self.config.replica)

    def on_apply_failure(self) -> OnApplyFailure:
        """What a replica does with a transaction of the log that it can't apply."""
        return OnApplyFailure(self.config.on_apply_error)

    @property
    def acknowledges_from_log(self) -> bool:
        """Whether a replica that commits first responds to the writer only once the log has the write."""
        return False

    @property
    def merges_rows(self) -> bool:
        """Whether a row can become what no single writer has written."""
        return False


def write_spec(log_type: EventType, policy: Policy) -> TxSpec:
    """The specification of the transactions that carry a set's writes."""
    return policy.plan().spec(log_type.name)


def client_plans(log_type: EventType, policy: Policy) -> tuple[TxSpec, ...]:
    """What the set's log takes from clients: nothing where replicas commit writes first."""
    return (write_spec(log_type, policy),) if policy.route is Route.COORDINATOR else ()


@dataclass(frozen=True, slots=True)
class Voting(Policy):
    """What the synchronous policies share: replicas vote on a write, and whoever has not voted follows from the log."""

    route = Route.COORDINATOR

    @property
    def decide_when_met(self) -> bool:
        """Whether a write is decided by the first replicas that are enough, and not by all that are in sync."""
        return False

    def voters(self) -> list[str]:
        return self.config.names

    def plan(self) -> TxPlan:
        constraints: tuple[AnyConstraint, ...] = (
            AtLeast(self.config.writes_needed, self.config.sites(self.voters())),
            OnlyFrom(self.config.sites()),
        )
        return TxPlan(TxType.DISTRIBUTED, Access.PRIVATE, ScopeLimit.LOCAL, constraints, self.decide_when_met)

    def scope_of(self, replica: str) -> Scope:
        return Scope.DISTRIBUTED if replica in self.voters() else Scope.LOCAL

    def consistencies(self) -> frozenset[str]:
        return frozenset({"any", "current", "quorum"})


@dataclass(frozen=True, slots=True)
class LocalFirst(Policy):
    """What the asynchronous policies share: a replica commits and publishes then; the others follow the log."""

    local_first = True

    def plan(self) -> TxPlan:
        return TxPlan(TxType.LOCAL, Access.PRIVATE, ScopeLimit.LOCAL)


@dataclass(frozen=True, slots=True)
class LogFirst(Policy):
    """What the ordered policies share: nothing is applied before it comes back from the log, in one order.

    A write is acknowledged once any one replica has applied it."""

    route = Route.COORDINATOR

    def plan(self) -> TxPlan:
        return TxPlan(TxType.LOCAL, Access.PUBLIC, ScopeLimit.LOCAL)

    def consistencies(self) -> frozenset[str]:
        return frozenset({"any", "current"})

    def on_apply_failure(self) -> OnApplyFailure:
        return OnApplyFailure.SKIP  # every replica finds the same rows, so every replica fails in the same way
