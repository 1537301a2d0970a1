"""The properties of a transaction: type, access, scope, limit, states, and which of them may be combined."""

from enum import Enum, IntEnum

from tops.model.errors import InvalidTransaction


class TxType(Enum):
    LOCAL = "local"  # every subscriber commits by itself
    DISTRIBUTED = "distributed"  # the participants commit together or not at all

    __hash__ = object.__hash__  # part of a key that is looked up for every transaction; `Enum.__hash__` is slow


class Access(Enum):
    PRIVATE = "private"  # only the initiator publishes
    PUBLIC = "public"  # every site that knows the transaction may publish


class Scope(IntEnum):
    """The scope that a subscriber requests or gets; ordered from least to most bound."""

    NONE = 0
    NON_TRANSACTIONAL = 1
    LOCAL = 2
    DISTRIBUTED = 3


class ScopeLimit(IntEnum):
    """The least scope, apart from none, that the initiator allows."""

    NONE = 0
    LOCAL = 2
    DISTRIBUTED = 3

    __hash__ = int.__hash__  # as for `TxType`


class LocalOutcome(Enum):
    """What decides the outcome at local subscribers of a distributed transaction."""

    INDEPENDENT = "independent"  # the publisher's commit request, whatever the distributed part does
    FOLLOWS = "follows"  # the distributed part: they commit only after a distributed commit


class TxState(Enum):
    CENSUS = "census"  # ends when the census closes
    CENSUS_UNFULFILLED = "census-unfulfilled"  # final
    ACTIVE = "active"  # events are accepted; ends with a commit request or an abort
    COMMITTING = "committing"  # votes are being collected; ends with the decision
    COMMITTED = "committed"  # final
    ABORTED = "aborted"  # final


class Outcome(Enum):
    """What is known of a transaction's outcome."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    UNKNOWN = "unknown"  # not decided yet, or no node that knows it was reached


# Read with every transaction, and access to a member of an enum through its class is slow.
_LOCAL_TX, _NO_SCOPE = TxType.LOCAL, Scope.NONE


def granted_scope(requested: Scope, limit: ScopeLimit, tx_type: TxType) -> Scope:
    """The scope a subscriber gets (thesis, table 4-A); a local transaction offers at most `LOCAL`."""
    if tx_type is _LOCAL_TX and requested is Scope.DISTRIBUTED:
        requested = Scope.LOCAL
    return requested if requested >= limit else _NO_SCOPE


def check_limit(tx_type: TxType, limit: ScopeLimit, local_outcome: LocalOutcome) -> None:
    """Raise InvalidTransaction for a combination that can't be carried out."""
    if tx_type is not _LOCAL_TX:
        return
    if limit is ScopeLimit.DISTRIBUTED:
        raise InvalidTransaction("scope limit 'distributed' is higher than the transaction type 'local'")
    if local_outcome is LocalOutcome.FOLLOWS:
        raise InvalidTransaction("local_outcome 'follows' needs a distributed transaction to follow")
