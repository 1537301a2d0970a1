"""Idempotency keys: how a transaction that comes again is recognised, here or at another replica.

A key that an application chose is a row with what it stands for. A transaction without one is known by its own id;
the ids of one writer are counted, so one row holds many of them, a bit each. A second bit tells of an id that something
else has come in its place: the empty transaction by which somebody settled that it will never come. Where its key is
told as well, an id has a row beside its bit, for those who ask which number it was logged under.

A key is forgotten when the log's clock passes its end, all ids of a row together.
"""

from collections.abc import Sequence

import asyncpg

from adapters.changes import OWN, Member, Value, content_digest, is_known_by_id, own_key
from adapters.postgres.apply.progress import Job
from adapters.postgres.apply.statements import Statements
from adapters.postgres.sql.literals import BIGINT, TEXT, array_literal, quote
from adapters.postgres.sql.schema import IDS_PER_ROW
from adapters.resource import Exclusion, Why
from tops.model.ids import counted, counted_all

_Place = tuple[str, int]  # the series of a counted id, and its number there
_Ids = dict[tuple[str, int], tuple[int, int]]  # by series and block: the bits seen, and of them those settled

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
    insert into tops.known_ids as known (replica_set, series, block, seen, settled, expires_ms)
    select $1::text, s.*, $6::bigint from unnest($2::text[], $3::bigint[], $4::bigint[], $5::bigint[])
        as s(series, block, seen, settled)
    on conflict (series, block, replica_set) do update set
        seen = excluded.seen | case when known.expires_ms > $7::bigint then known.seen else 0 end,
        settled = excluded.settled | case when known.expires_ms > $7::bigint then known.settled else 0 end,
        expires_ms = greatest(known.expires_ms, excluded.expires_ms)
     where (known.seen & excluded.seen) = 0 or known.expires_ms <= $7::bigint returning 1)
  select tops.affected($8::int, count(*)) from changed"""
_KNOWN_KEY = """
select content, tx, number from tops.idempotency_keys where replica_set = $1 and key = $2 and expires_ms > $3
"""
_KNOWN_ID = """
select (settled & $4) <> 0 as settled from tops.known_ids
 where replica_set = $1 and series = $2 and block = $3 and (seen & $4) <> 0 and expires_ms > $5
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
    if not keyed:
        return []
    by_id = [job.member.tx for job in keyed if is_known_by_id(job.member)]
    places: Sequence[_Place | None] | None = counted_all(by_id) if len(by_id) == len(keyed) else None
    rows: list[Job] = []
    if places is None:  # some have more than a bit
        places = [_place(job.member) for job in keyed]
        rows = [job for job, place in zip(keyed, places, strict=True) if _is_row(job.member, place)]
    ids = _ids(keyed, places)
    if ids is None:
        return None
    texts = [await _ids_text(statements, replica_set, ids, keyed)] if ids else []
    if rows:
        texts.append(f"EXECUTE {await statements.named(_NEW_KEYS)}({quote(replica_set)},{_key_arrays(rows)})")
    return texts


async def key_texts(statements: Statements, replica_set: str, job: Job) -> list[str]:
    """The same for one member whose key may have been there before; fails only if it is still alive."""
    if not job.member.key:
        return []
    place = _place(job.member)
    ids = _ids([job], [place])
    texts = [await _ids_text(statements, replica_set, ids, [job])] if ids else []
    if _is_row(job.member, place):
        name = await statements.named(_KEY)
        texts.append(f"EXECUTE {name}({quote(replica_set)},{_key_arrays([job])},{job.at_ms})")
    return texts


async def why_known(connection: "asyncpg.Connection[asyncpg.Record]", replica_set: str, job: Job) -> Exclusion | None:
    """What a member is told whose key is known and alive; None if it is new."""
    member, place = job.member, _place(job.member)
    if not member.key:
        return None
    if place is not None:
        known = await connection.fetchrow(_KNOWN_ID, replica_set, *_block(place), job.at_ms)
        itself = member.content == OWN  # or something that comes in its place
        first_tx, number, same = member.tx, 0, known is not None and known["settled"] is not itself
    else:
        known = await connection.fetchrow(_KNOWN_KEY, replica_set, member.key, job.at_ms)
        if known is not None:
            first_tx, number, same = known["tx"], known["number"], known["content"] == content_digest(member)
    if known is None:
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


def _ids(keyed: Sequence[Job], places: Sequence[_Place | None]) -> _Ids | None:
    """The bits of those that have a place; None if one comes twice."""
    ids: _Ids = {}
    for job, place in zip(keyed, places, strict=True):
        if place is None:
            continue
        series, block, bit = _block(place)
        seen, settled = ids.get((series, block), (0, 0))
        if seen & bit:
            return None
        ids[series, block] = seen | bit, settled if job.member.content == OWN else settled | bit
    return ids


def _is_row(member: Member, place: _Place | None) -> bool:
    """Whether its key is written down as a row, instead of its bit or beside it."""
    return place is None or (member.content == OWN and bool(member.idempotency_key))


def _place(member: Member) -> _Place | None:
    """The series and number of a member that is known, also, by its own id."""
    return counted(member.tx) if member.key == own_key(member.tx) else None


def _block(place: _Place) -> tuple[str, int, int]:
    """The series, and the block and bit that stand for the number."""
    series, number = place
    return series, number // IDS_PER_ROW, 1 << number % IDS_PER_ROW


async def _ids_text(statements: Statements, replica_set: str, ids: _Ids, jobs: Sequence[Job]) -> str:
    arrays = [
        array_literal([series for series, _ in ids], TEXT),
        array_literal([block for _, block in ids], BIGINT),
        array_literal([seen for seen, _ in ids.values()], BIGINT),
        array_literal([settled for _, settled in ids.values()], BIGINT),
    ]
    # What is over for some of the jobs only is looked at one by one.
    times = f"{max(map(_expires_ms, jobs))},{min([job.at_ms for job in jobs])}"
    name = await statements.named(_NEW_IDS)
    return f"EXECUTE {name}({quote(replica_set)},{','.join(arrays)},{times},{len(ids)})"


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
