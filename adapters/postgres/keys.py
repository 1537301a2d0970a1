"""Idempotency keys: how a transaction that comes again is recognised, here or at another replica.

A key that an application chose is a row with what it stands for. A transaction without one is known by its own id;
the ids of one writer are counted, so one row holds many of them, a bit each. A key that is an id and stands for
something else (the empty transaction that settles an outcome) is both: the row tells what came in the id's place.
"""

from collections.abc import Sequence

import asyncpg

from adapters.postgres.literals import BIGINT, TEXT, array_literal, quote
from adapters.postgres.progress import Job
from adapters.postgres.schema import IDS_PER_ROW
from adapters.postgres.statements import Statements
from tops.changes import OWN, Member, Value, content_digest, is_known_by_id, own_key
from tops.ids import counted, counted_all
from tops.ports import Exclusion, Why

_Ids = dict[tuple[str, int], int]  # the bits by series and block

_NEW_KEYS = """
insert into tops.idempotency_keys (replica_set, key, content, tx, number, expires_ms)
select $1::text, unnest($2::text[]), unnest($3::text[]), unnest($4::text[]), unnest($5::bigint[]), unnest($6::bigint[])
"""
_KEY = """with changed as (
    insert into tops.idempotency_keys as known (replica_set, key, content, tx, number, expires_ms)
    select $1::text, s.* from unnest($2::text[], $3::text[], $4::text[], $5::bigint[], $6::bigint[])
        as s(key, content, tx, number, expires_ms)
    on conflict (key, replica_set) do update set
        content = excluded.content, tx = excluded.tx, number = excluded.number, expires_ms = excluded.expires_ms
     where known.expires_ms <= $7::bigint returning 1)
  select tops.affected(1, count(*)) from changed"""
_NEW_IDS = """with changed as (
    insert into tops.known_ids as known (replica_set, series, block, seen, expires_ms)
    select $1::text, s.*, $5::bigint from unnest($2::text[], $3::bigint[], $4::bigint[]) as s(series, block, seen)
    on conflict (series, block, replica_set) do update set
        seen = known.seen | excluded.seen, expires_ms = greatest(known.expires_ms, excluded.expires_ms)
     where (known.seen & excluded.seen) = 0 returning 1)
  select tops.affected($6::int, count(*)) from changed"""
_KNOWN_KEY = """
select content, tx, number from tops.idempotency_keys where replica_set = $1 and key = $2 and expires_ms > $3
"""
_KNOWN_ID = """
select from tops.known_ids where replica_set = $1 and series = $2 and block = $3 and (seen & $4) <> 0
"""
_KNOWN = """
select key, tx from tops.idempotency_keys where replica_set = $1 and key = any($2::text[])
 union all
select asked.key, asked.tx from tops.known_ids i
  join unnest($3::text[], $4::text[], $5::text[], $6::bigint[], $7::bigint[]) as asked(key, tx, series, block, bit)
    on i.series = asked.series and i.block = asked.block and (i.seen & asked.bit) <> 0
 where i.replica_set = $1
"""


async def new_keys_texts(statements: Statements, replica_set: str, jobs: Sequence[Job]) -> list[str] | None:
    """Record the members' keys; that fails if one of them is known, alive or not. None: the same id comes twice."""
    keyed = [job for job in jobs if job.member.content == OWN or job.member.idempotency_key]
    noted = _noted(keyed)
    if noted is None:
        return None
    ids, rows = noted
    texts = [await _ids_text(statements, replica_set, ids, keyed)] if ids else []
    if rows:
        texts.append(f"EXECUTE {await statements.named(_NEW_KEYS)}({quote(replica_set)},{_key_arrays(rows)})")
    return texts


async def key_texts(statements: Statements, replica_set: str, job: Job) -> list[str]:
    """The same for one member whose key may have been there before; fails only if it is still alive."""
    if not job.member.key:
        return []
    noted = _noted([job])
    assert noted is not None, "one comes once"
    ids, rows = noted
    texts = [await _ids_text(statements, replica_set, ids, [job])] if ids else []
    if rows:
        name = await statements.named(_KEY)
        texts.append(f"EXECUTE {name}({quote(replica_set)},{_key_arrays(rows)},{job.at_ms})")
    return texts


async def why_known(connection: "asyncpg.Connection[asyncpg.Record]", replica_set: str, job: Job) -> Exclusion | None:
    """What a member is told whose key is known and alive; None if it is new. An id is never used for another one, so
    it is known for as long as its bit is there."""
    member = job.member
    if not member.key:
        return None
    row = await connection.fetchrow(_KNOWN_KEY, replica_set, member.key, job.at_ms)
    place = _place(member)
    if row is not None and (place is None or row["tx"] == member.tx):  # an id is a key to itself alone
        first_tx, number, same = row["tx"], row["number"], row["content"] == content_digest(member)
    elif place is not None and await connection.fetchrow(_KNOWN_ID, replica_set, *_block(place)) is not None:
        first_tx, number, same = member.tx, 0, member.content == OWN
    else:
        return None
    says = "committed already" if same else "in use with other content"
    return Exclusion(
        why=Why.DUPLICATE if same else Why.KEY_REUSED,
        sqlstate="",
        message=f"idempotency key {member.key!r} is {says} by transaction {first_tx}",
        first_tx=first_tx,
        first_number=number,
    )


def known_keys(replica_set: str, members: Sequence[Member]) -> tuple[str, tuple[Value, ...]]:
    """A query, and its arguments, for `key` and `tx` of those members' keys that were committed here."""
    ids = [(m.key, m.tx, *_block(place)) for m in members if (place := _place(m)) is not None]
    columns = [list(column) for column in zip(*ids, strict=True)] or [[], [], [], [], []]
    return _KNOWN, (replica_set, [m.key for m in members], *columns)


def _noted(keyed: Sequence[Job]) -> tuple[_Ids, list[Job]] | None:
    """How these keys are written down: the bits by series and block, and those that are rows."""
    rows: list[Job] = []
    by_id = [job.member.tx for job in keyed if is_known_by_id(job.member)]
    series = counted_all(by_id) if by_id and len(by_id) == len(keyed) else None
    if series is None:
        series = {}
        for job in keyed:
            place = _place(job.member)
            if place is not None:
                series.setdefault(place[0], []).append(place[1])
            if place is None or not is_known_by_id(job.member):
                rows.append(job)
    ids: _Ids = {}
    for name, numbers in series.items():
        for number in numbers:
            block, bit = divmod(number, IDS_PER_ROW)
            seen = ids.get((name, block), 0)
            if seen >> bit & 1:
                return None
            ids[name, block] = seen | 1 << bit
    return ids, rows


def _place(member: Member) -> tuple[str, int] | None:
    """The series and number of a member that is known, also, by its own id."""
    return counted(member.tx) if member.key == own_key(member.tx) else None


def _block(place: tuple[str, int]) -> tuple[str, int, int]:
    """The series, and the block and bit that stand for the number."""
    series, number = place
    return series, number // IDS_PER_ROW, 1 << number % IDS_PER_ROW


async def _ids_text(statements: Statements, replica_set: str, ids: _Ids, jobs: Sequence[Job]) -> str:
    series = array_literal([name for name, _ in ids], TEXT)
    blocks = array_literal([block for _, block in ids], BIGINT)
    seen = array_literal(list(ids.values()), BIGINT)
    expires_ms = max(map(_expires_ms, jobs))
    name = await statements.named(_NEW_IDS)
    return f"EXECUTE {name}({quote(replica_set)},{series},{blocks},{seen},{expires_ms},{len(ids)})"


def _key_arrays(keyed: Sequence[Job]) -> str:
    arrays = [
        array_literal([job.member.key for job in keyed], TEXT),
        array_literal([content_digest(job.member) for job in keyed], TEXT),
        array_literal([job.member.tx for job in keyed], TEXT),
        array_literal([job.number for job in keyed], BIGINT),
        array_literal([_expires_ms(job) for job in keyed], BIGINT),
    ]
    return ",".join(arrays)


def _expires_ms(job: Job) -> int:
    return job.at_ms + job.member.key_ttl_s * 1000
