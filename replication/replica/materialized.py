"""Materialized views are no part of a set: each replica shows what it held when its own view was refreshed."""

import asyncio

from adapters.changes import InvalidChange
from adapters.resource import Resource
from adapters.sql import NotParsed, parse

KEEP_S = 5.0  # for so long a new view may be read as if it were a table
# With the views that read one. A name without its schema is one of the search path's.
_NAMES = """
with recursive shown as (
    select c.oid, c.oid as source from pg_class c where c.relkind = 'm'
    union
    select r.ev_class, s.source from shown s
      join pg_depend d on d.refclassid = 'pg_class'::regclass and d.refobjid = s.oid
       and d.classid = 'pg_rewrite'::regclass
      join pg_rewrite r on r.oid = d.objid
)
select n.nspname::text as schema, c.relname::text as name, pg_table_is_visible(c.oid) as visible,
       min(s.source::regclass::text) as source
  from shown s join pg_class c on c.oid = s.oid join pg_namespace n on n.oid = c.relnamespace group by 1, 2, 3
"""


class MaterializedViews:
    """Those of one replica's database, by the names that queries give them; looked up again now and then."""

    def __init__(self, resource: Resource) -> None:
        self._resource = resource
        self._sources: dict[tuple[str | None, str], str] = {}
        self._checked_at = float("-inf")
        self._has_looked = False

    @property
    def is_due(self) -> bool:
        """Whether it is time to `look` again, so that `are_read_by` goes on to know."""
        return asyncio.get_running_loop().time() > self._checked_at + KEEP_S / 2

    def are_read_by(self, sql: str) -> bool | None:
        """Whether the query reads one of them; None if nobody has looked lately."""
        if not self._has_looked or asyncio.get_running_loop().time() > self._checked_at + KEEP_S:
            return None
        return bool(self._sources) and bool(self._named(sql))

    async def check_not_read(self, sql: str) -> None:
        """Reject a query that any replica may answer, and each in another way."""
        if asyncio.get_running_loop().time() > self._checked_at + KEEP_S:
            await self.look()
        if not self._sources:
            return
        for source in self._named(sql):
            raise InvalidChange(
                f"{source} is a materialized view, which is not replicated: replicas may show different rows; "
                'name the replica to read it at (tops read --replica NAME, replica="NAME"), or read the tables instead'
            )

    def _named(self, sql: str) -> list[str]:
        try:
            named = {name for parsed in parse(sql) for name in parsed.relations if name[1] not in parsed.with_queries}
        except NotParsed:
            return []  # the database says why
        return sorted(self._sources[name] for name in named & self._sources.keys())

    async def look(self) -> None:
        self._checked_at = asyncio.get_running_loop().time()
        found = (await self._resource.read_own(_NAMES)).rows
        self._sources = {(row["schema"], row["name"]): row["source"] for row in found}
        self._sources |= {(None, row["name"]): row["source"] for row in found if row["visible"]}
        self._has_looked = True
