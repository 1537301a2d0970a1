"""Tables of a replica that are known to differ from those of the others: a check found it, or a transaction of this
replica was never published. Both stay known, also after a restart, until a later check finds the table equal.
"""

from collections.abc import Mapping, Sequence

from adapters.postgres.copy.scripts import run_own_script
from adapters.postgres.sql.literals import quote
from adapters.resource import Resource
from replication.model.touched_rows import table_name
from tops.model.errors import ConfigError

DDL = """
create table if not exists tops.known_differences (
    replica_set text not null, table_name text not null, reason text not null, at timestamptz not null default now(),
    primary key (replica_set, table_name));
-- Records of the outbox that were taken out of it because they can't be published.
create table if not exists tops.quarantined (
    replica_set text not null, id bigint not null, size int not null, members bytea not null,
    at timestamptz not null default now(), primary key (replica_set, id));
"""
_KNOWN = "select table_name, reason from tops.known_differences where replica_set = $1 order by 1"


class Differences:
    """What one replica knows about itself; an SQLite file remembers it until its agent ends."""

    def __init__(self, replica_set: str, dsn: str, resource: Resource) -> None:
        self._set, self._dsn, self._resource = replica_set, dsn, resource
        self._is_sqlite = dsn.startswith("sqlite:")
        self.known: dict[str, str] = {}  # by table: how it differs

    async def start(self) -> None:
        if self._is_sqlite:
            return
        await run_own_script(self._dsn, DDL)
        found = (await self._resource.read_own(_KNOWN, (self._set,))).rows
        self.known = {row["table_name"]: row["reason"] for row in found}

    @property
    def text(self) -> str:
        """What an operator has to know; empty if nothing is known to differ."""
        if not self.known:
            return ""
        tables = "; ".join(f"{table}: {reason}" for table, reason in self.known.items())
        return f"differs from the others ({tables}): see `tops divergence repair`, which also checks again"

    async def note(self, checked: Sequence[str], found: Mapping[str, str]) -> None:
        """A check has compared these tables wholly, and found these to differ."""
        equal = {table_name(table) for table in checked}
        different = {table_name(table): reason for table, reason in found.items()}
        if not self._is_sqlite:
            gone = [f"delete from tops.known_differences where {self._where(table)}" for table in sorted(equal)]
            await run_own_script(self._dsn, ";".join([*gone, *self._kept(different)]))
        self.known = {table: reason for table, reason in self.known.items() if table not in equal} | different

    async def quarantine(self, entry: int, found: Mapping[str, str]) -> None:
        """Take a record out of the outbox, and remember which tables differ because of it."""
        if self._is_sqlite:
            raise ConfigError("records of an SQLite file can't be quarantined: empty the file and start the replica")
        different = {table_name(table): reason for table, reason in found.items()}
        moved = f"""
with moved as (delete from tops.outbox where replica_set = {quote(self._set)} and id = {entry:d} returning *)
insert into tops.quarantined (replica_set, id, size, members) select replica_set, id, size, members from moved"""
        await run_own_script(self._dsn, ";".join([moved, *self._kept(different)]))
        self.known |= different

    def _where(self, table: str) -> str:
        return f"replica_set = {quote(self._set)} and table_name = {quote(table)}"

    def _kept(self, different: Mapping[str, str]) -> list[str]:
        return [
            "insert into tops.known_differences (replica_set, table_name, reason) values "
            f"({quote(self._set)}, {quote(table)}, {quote(reason)}) "
            "on conflict (replica_set, table_name) do update set reason = excluded.reason, at = now()"
            for table, reason in different.items()
        ]
