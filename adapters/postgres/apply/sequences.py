"""Sequences follow what origins have drawn: each replica raises its own to at least the values of a write set.

Never by values in rows: one explicit key could exhaust a sequence everywhere. `setval` is not rolled back, which is
right here: a value that an origin has drawn is drawn, whatever becomes of its transaction. A sequence that counts down
is raised downwards, and one that is not the set's is left alone.
"""

from collections.abc import Iterable

from adapters.changes import Member
from adapters.postgres.sql.literals import quote

_RAISE = """
SELECT setval(s.seqrelid::regclass, {value:d}) FROM pg_sequence s WHERE s.seqrelid = to_regclass({name})
   AND CASE WHEN has_sequence_privilege(s.seqrelid, 'update')
            THEN ({value:d} - coalesce(pg_sequence_last_value(s.seqrelid), s.seqstart - s.seqincrement))
                 * sign(s.seqincrement) > 0 ELSE false END"""


def raise_texts(members: Iterable[Member]) -> list[str]:
    """A statement per sequence and value; what is overtaken does nothing."""
    drawn = dict.fromkeys(drawn for member in members for drawn in member.sequences)
    return [_RAISE.format(name=quote(name), value=value) for name, value in drawn]
