"""A table's stamp: a short text that differs whenever the table's definition has changed.

It covers the rows of the catalogue about the table itself, its columns, defaults, constraints, triggers and indexes:
how many there are and the sum of the transactions that wrote them. A changed row has a later writer than every row
before it, so the sum of as many rows can only grow. A stamp that is read while a transaction holds the lock of a write
to the table is the stamp of the definition under which that write ran.
"""

from collections.abc import Iterable, Mapping

import asyncpg

from adapters.postgres.sql.sqlstates import WRONG_COUNT

Stamps = Mapping[int, str]  # by the table's oid


def stamp_sql(oid: str) -> str:
    """An expression for the stamp of the table with this oid, which is an SQL expression."""
    return f"""(select concat(count(*), ' ', sum(part.writer::text::bigint)) from (
        select k.xmin as writer from pg_catalog.pg_class k where k.oid = {oid}
        union all select k.xmin from pg_catalog.pg_attribute k where k.attrelid = {oid} and k.attnum > 0
        union all select k.xmin from pg_catalog.pg_attrdef k where k.adrelid = {oid}
        union all select k.xmin from pg_catalog.pg_constraint k where k.conrelid = {oid}
        union all select k.xmin from pg_catalog.pg_trigger k where k.tgrelid = {oid}
        union all select k.xmin from pg_catalog.pg_index k where k.indrelid = {oid}) as part)"""


_STAMPS = f"select t.oid, {stamp_sql('t.oid')} as stamp from unnest($1::oid[]) as t(oid)"
_CHANGED = (
    f"select count(*) from unnest($1::oid[], $2::text[]) as known(oid, stamp) "
    f"where known.stamp <> {stamp_sql('known.oid')}"
)

# `tops.expect_stamp` is declared immutable although it reads the catalogue, so that the planner calls it once per plan
# and keeps the result; PostgreSQL drops the plan as soon as a table that the statement names has changed. The statement
# names the table for that reason alone. A function that is not volatile sees the catalogue as of the statement's
# beginning, which may be older than the change that made the server plan again: a volatile one looks at it anew.
FUNCTIONS = f"""
create or replace function tops.stamp(of_table oid) returns text language plpgsql volatile as $$
begin
    return {stamp_sql("of_table")};
end $$;
create or replace function tops.expect_stamp(of_table oid, expected text) returns boolean
    language plpgsql immutable as $$
begin
    if tops.stamp(of_table) is distinct from expected then
        raise exception 'table % has changed', of_table::regclass using errcode = '{WRONG_COUNT}';
    end if;
    return true;
end $$;
"""


def expect_sql(oid: int, name: str, stamp: str) -> str:
    """A statement that fails if the table has another stamp, which is made of digits and a space; prepared, it costs
    next to nothing while the table stays as it is."""
    return f"select where tops.expect_stamp({oid}, '{stamp}') and not exists (select from {name} where false)"


async def read_stamps(connection: "asyncpg.Connection[asyncpg.Record]", oids: Iterable[int]) -> dict[int, str]:
    return {row["oid"]: row["stamp"] for row in await connection.fetch(_STAMPS, list(oids))}


async def have_changed(connection: "asyncpg.Connection[asyncpg.Record]", stamps: Stamps) -> bool:
    """Whether a table has another stamp by now."""
    return bool(stamps) and await connection.fetchval(_CHANGED, list(stamps), list(stamps.values())) > 0
