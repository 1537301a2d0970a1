"""Sequences of a set whose replicas commit by themselves: each replica draws from blocks of values of its own.

Two replicas that drew the same value at the same time would insert different rows under one key, and one of the rows
would lose. So the values of a sequence are cut into blocks, and the blocks are dealt out in turn to 16 slots: a replica
draws only from blocks of its slot. Nothing about a sequence's definition changes. The agent moves a sequence to the
next free block of its slot (`setval`) when it stands, or comes to stand, in a block of another slot; what was drawn
there is rolled back with the origin's transaction, and the chain is executed again.

    value    1 ........ 65535 | 65536 ... 131071 | 131072 ... 196607 | ... | 16 * 65536 ...
    slot           0          |        1         |         2         | ... |      0

A block is free if no row holds one of its values, so a slot can pass to another replica, which has applied what the
former one has published, and a value that somebody has given by hand is not met.
"""

from collections.abc import Sequence

import asyncpg

from adapters.changes import InvalidChange
from adapters.postgres.sql.literals import identifier

SLOTS = 16
BLOCK = 65_536
BLOCKS_MIN = 256  # so many blocks has even a sequence of small values
TABLE = """
create table if not exists tops.sequence_slots (sequence text primary key, slot int not null, block bigint not null)
"""
_TRIED_MAX = 10_000
_FACTS = """
select s.seqincrement as increment, s.seqmin as least, s.seqmax as most, s.seqcycle as cycles, s.seqcache as cache,
       coalesce(pg_sequence_last_value(s.seqrelid) + s.seqincrement, s.seqstart) as next,
       case when c.oid is not null then format('%I.%I', n.nspname, c.relname) end as table_name,
       a.attname as column_name
  from pg_sequence s
  left join pg_depend d on d.classid = 'pg_class'::regclass and d.objid = s.seqrelid
       and d.refclassid = 'pg_class'::regclass and d.refobjsubid > 0 and d.deptype in ('a', 'i')
  left join pg_class c on c.oid = d.refobjid left join pg_namespace n on n.oid = c.relnamespace
  left join pg_attribute a on a.attrelid = d.refobjid and a.attnum = d.refobjsubid
 where s.seqrelid = to_regclass($1)
"""
_SEQUENCES = """
select format('%I.%I', n.nspname, c.relname) as name from pg_class c join pg_namespace n on n.oid = c.relnamespace
 where c.relkind = 'S' and n.nspname not in ('tops', 'pg_catalog', 'information_schema')
   and case when c.relkind = 'S' then has_sequence_privilege(c.oid, 'update') else false end
"""
_KEEP = """
insert into tops.sequence_slots values ($1, $2, $3)
on conflict (sequence) do update set slot = excluded.slot, block = excluded.block
"""


def block_size(most: int) -> int:
    """How many values a block has, from the largest value of the sequence."""
    return max(1, min(BLOCK, most // BLOCKS_MIN))


class Slots:
    """The blocks that one replica draws from; `slot` is its place in the list of the set's replicas."""

    def __init__(self, slot: int) -> None:
        self._slot = slot
        self._blocks: dict[str, int] = {}  # by sequence, the block that it stands in

    async def load(self, agent: asyncpg.Connection) -> None:
        """Look up which blocks the sequences stand in; one that is about to enter a block of this slot stays there."""
        rows = await agent.fetch("select sequence, block from tops.sequence_slots where slot = $1", self._slot)
        self._blocks = {row["sequence"]: row["block"] for row in rows}
        for row in await agent.fetch(_SEQUENCES):
            name = row["name"]
            if name not in self._blocks:
                facts = await _facts(agent, name)
                block = facts["next"] // block_size(facts["most"])
                if block % SLOTS == self._slot:
                    await self._keep(agent, name, block)

    async def are_own(self, agent: asyncpg.Connection, drawn: Sequence[tuple[str, int]]) -> bool:
        """Whether all values up to these last ones are from blocks of this slot. If not, the sequences stand in such
        blocks now: what was executed must be executed again. InvalidChange: a sequence can't be shared like this."""
        own = True
        for name, last in drawn:
            facts = await _facts(agent, name)
            if problem := _problem(facts, self._slot):
                raise InvalidChange(f"sequence {name} {problem}, so replicas that commit first can't share its values")
            block = last // block_size(facts["most"])
            if self._blocks.get(name) != block:
                await self._move(agent, name, facts, block)
                own = False
        return own

    async def _move(self, agent: asyncpg.Connection, name: str, facts: asyncpg.Record, block: int) -> None:
        """To the next free block of this slot. It is noted first: after a crash in between it is moved once more."""
        size, most = block_size(facts["most"]), facts["most"]
        following = block + 1 + (self._slot - block - 1) % SLOTS
        for candidate in range(following, following + _TRIED_MAX * SLOTS, SLOTS):
            first = candidate * size
            if first + size - 1 > most:
                break
            if await self._is_free(agent, facts, first, first + size - 1):
                await self._keep(agent, name, candidate)
                await agent.execute("select setval($1::text::regclass, $2, false)", name, max(first, facts["least"]))
                return
        raise InvalidChange(f"sequence {name} has no free values left for this replica")

    async def _is_free(self, agent: asyncpg.Connection, facts: asyncpg.Record, first: int, last: int) -> bool:
        if facts["table_name"] is None:
            return True
        column = identifier(facts["column_name"])
        sql = f"select exists (select from {facts['table_name']} where {column} between $1 and $2)"
        return not await agent.fetchval(sql, first, last)

    async def _keep(self, agent: asyncpg.Connection, name: str, block: int) -> None:
        await agent.execute(_KEEP, name, self._slot, block)
        self._blocks[name] = block


async def problem_with(agent: asyncpg.Connection, name: str, slot: int) -> str:
    """Why replicas that commit first can't share the values of a sequence; empty if they can."""
    return _problem(await _facts(agent, name), slot)


def _problem(facts: asyncpg.Record, slot: int) -> str:
    if slot >= SLOTS:
        return f"has {SLOTS} slots, and the set has more replicas"
    if facts["increment"] < 0 or facts["least"] < 0:
        return "counts down or has negative values"
    if facts["cycles"]:
        return "begins again at its end (CYCLE)"
    if facts["cache"] > 1:
        return f"hands out {facts['cache']} values at once (CACHE)"
    return ""


async def _facts(agent: asyncpg.Connection, name: str) -> asyncpg.Record:
    found = await agent.fetchrow(_FACTS, name)
    if found is None:
        raise InvalidChange(f"sequence {name} was dropped while it was drawn from")
    return found
