"""SQL that the product itself puts into a set's log; it is not proved, but argued here.

A client's statement must be proved deterministic; these are known by their text. They only touch the schema `tops`,
apart from a repair, which is meant to change one replica alone.
"""

from replication.conflicts.tables import CLOCKS
from tops.changes import SUMS

# Rows by their full primary key, as far as they are still what the sender saw: every replica is at the same log index.
DROP_TOMBSTONES = (
    f"delete from {CLOCKS} where deleted and (table_name, key, clock, site) in "
    "(select * from unnest($1::text[], $2::text[], $3::bigint[], $4::text[]))"
)
DROP_SUMS = (
    f"delete from {SUMS} s where (table_name, key) in (select * from unnest($1::text[], $2::text[])) "
    f"and not exists (select from {CLOCKS} c where c.table_name = s.table_name and c.key = s.key)"
)
# Carried out by the replica that is repaired, and by no other.
REPAIR_CALL = "select tops.repair_row($1, $2)"

OWN_STATEMENTS = frozenset({DROP_TOMBSTONES, DROP_SUMS, REPAIR_CALL})
