"""What becomes of a transaction that an origin executes."""

from dataclasses import dataclass

import asyncpg

from adapters.changes import Row, RowChange
from adapters.postgres.sql.sqlstates import sqlstate
from tops.model.errors import ResourceError


@dataclass(frozen=True, slots=True)
class Captured:
    """The write set: row changes in an order in which they can be applied, and sequences with their last values."""

    changes: tuple[RowChange, ...]
    sequences: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Executed:
    """Executed and rolled back; what it changed is in the write set, what it gave back is PostgreSQL's own."""

    rows: tuple[int, ...]
    returned: tuple[tuple[Row, ...], ...]
    notices: tuple[str, ...]
    write_set: Captured


@dataclass(frozen=True, slots=True)
class Rejected:
    """PostgreSQL has rejected it, or what it did can't be replicated.

    `transient`: the same may succeed in a moment. `proof`: of a change that is not proved deterministic and that an
    origin can't execute either, the code of the proof's reason.
    """

    sqlstate: str
    message: str
    detail: str = ""
    hint: str = ""
    table: str = ""
    constraint: str = ""
    transient: bool = False
    proof: str = ""

    @classmethod
    def by(cls, error: asyncpg.PostgresError, *, transient: bool = False) -> "Rejected":
        return cls(
            sqlstate=sqlstate(error),
            message=str(getattr(error, "message", None) or error),
            detail=getattr(error, "detail", None) or "",
            hint=getattr(error, "hint", None) or "",
            table=getattr(error, "table_name", None) or "",
            constraint=getattr(error, "constraint_name", None) or "",
            transient=transient,
        )


class Interrupted(ResourceError):
    """The origin's transaction ended before its rows were known; it has left nothing behind."""
