"""Inserts whose values are computed ahead of them: clocks, random numbers, sequences and defaults become given values.

An INSERT of listed values into a table that does nothing by itself needs no execution. A query computes its values
once, and the rows are shipped: no lock, no captured key, no image, nothing to roll back. Of requests with one text all
values are computed by one query.

What can go wrong with such rows (a constraint, a value that does not fit) is found when they are applied. PostgreSQL's
own words about that come from an execution, which follows then; the same holds where the query fails.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import asyncpg
from asyncpg.prepared_stmt import PreparedStatement

from adapters.changes import Change, Insert, InvalidChange, Row, Statement
from adapters.postgres.apply.orphans import Orphans
from adapters.postgres.apply.reading import plain_rows
from adapters.postgres.apply.session import Connection, Options, connect
from adapters.postgres.origin.insert_text import Expression, InsertText, insert_text
from adapters.postgres.origin.outcomes import Captured, Executed
from adapters.postgres.proof import Prover
from adapters.postgres.sql.catalog import Table, find_table, find_types, sql_name
from adapters.postgres.sql.literals import SqlType, identifier, text_form
from adapters.postgres.sql.sqlstates import is_connection_loss
from adapters.postgres.sql.stamps import stamp_sql
from adapters.sql import check_statement
from tops.model.errors import TopsError

RESOLVE_S = 1.0  # what takes longer is executed: others wait for their values meanwhile
LEARN_AGAIN_S = 5.0  # until what a table's stamp does not tell is known, such as a domain's check
_KEPT_MAX = 200
# Whatever a function does besides must not stay. What draws from sequences can't be read-only, and is rolled back; what
# was drawn stays drawn.
_READ_ONLY = {"default_transaction_read_only": "on"}
_TABLE = """
select has_table_privilege(c.oid, 'insert') as may_insert, has_table_privilege(c.oid, 'select') as may_return,
       (select array_agg(name) from unnest($2::text[], $3::text[]) as known(name, sql) where to_regclass(sql) = c.oid)
       as names
  from pg_class c where c.oid = $1
"""
# A value is cast to its column's type. A cast that is written down would cut texts to a length that an assignment
# only checks, so lengths are left to the insert.
_COLUMNS = """
select a.attname::text as name, a.attgenerated <> '' as is_generated,
       a.atttypmod >= 0 and t.typcategory in ('S', 'V', 'A') as is_limited,
       t.typtype = 'd' and (t.typtypmod >= 0 or b.typtype = 'd') or t.typdefault is not null and t.typdefaultbin is null
       as is_outlier,
       case when t.typcategory in ('S', 'V', 'A') then format_type(a.atttypid, -1)
            else format_type(a.atttypid, a.atttypmod) end as type_name,
       case when a.attidentity <> '' then format('nextval(%L::regclass)',
                pg_get_serial_sequence(format('%I.%I', n.nspname, c.relname), a.attname))
            else coalesce(pg_get_expr(d.adbin, d.adrelid), pg_get_expr(t.typdefaultbin, 0)) end as expression
  from pg_attribute a join pg_class c on c.oid = a.attrelid join pg_namespace n on n.oid = c.relnamespace
  join pg_type t on t.oid = a.atttypid left join pg_type b on b.oid = t.typbasetype
  left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
 where a.attrelid = $1 and a.attnum > 0 and not a.attisdropped order by a.attnum
"""
_SEQUENCES = """
select c.oid::bigint as oid, format('%I.%I', n.nspname, c.relname) as name
  from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.oid = any($1::oid[]) order by 2
"""

Request = tuple[Change, ...]
_Call = tuple[int, int, Statement]  # the place of a request, the place of a change in it, the change


class _TableChanged(TopsError):
    """The table is not what it was when the query was made."""


@dataclass(frozen=True, slots=True)
class _Query:
    """How the values of one text are computed.

    Its columns: the number of the call, the values of the table's columns, what is returned, the last values of the
    sequences, and the table's stamp, which shows whether the query was made for another definition of the table."""

    table: str
    columns: tuple[str, ...]
    types: tuple[SqlType, ...]
    labels: tuple[str, ...]
    sequences: tuple[str, ...]
    stamp: str
    prepared: PreparedStatement


@dataclass(slots=True)
class _Column:
    is_generated: bool
    is_limited: bool
    type_name: str
    default: str


@dataclass(slots=True)
class _Computed:
    """What one change becomes; `sequences` have at least these last values then."""

    sequences: tuple[tuple[str, int], ...]
    inserts: list[Insert] = field(default_factory=list)
    returned: list[Row] = field(default_factory=list)


class Resolver:
    """Computes values in one database, as the write login; one `resolve` at a time."""

    def __init__(
        self, write_dsn: str, where: str, options: Options, orphans: Orphans, *, may_draw: bool = True
    ) -> None:
        """Not `may_draw`: only an execution tells whether the values of a sequence are this replica's."""
        self._orphans = orphans
        self._dsn, self._where, self._options, self._may_draw = write_dsn, where, options, may_draw
        self._connection: Connection | None = None
        self._pid = 0  # of the connection's backend
        self._prover: Prover | None = None
        self._queries: dict[str, _Query | None] = {}
        self._learned_at = 0.0

    async def resolve(
        self, requests: Sequence[Request], tables: Collection[str], who: str = ""
    ) -> list[Executed | None]:
        """What the requests do, in order; None: that one must be executed. `tables`: those that write sets may name;
        `who`: the identity whose requests they are."""
        calls: dict[str, list[_Call]] = defaultdict(list)
        for place, request in enumerate(requests):
            statements = [_statement(change) for change in request]
            if any(statement is None for statement in statements):
                continue
            for number, statement in enumerate(statements):
                assert statement is not None
                calls[statement.sql].append((place, number, statement))
        if not calls:
            return [None] * len(requests)
        try:
            async with asyncio.timeout(RESOLVE_S):
                return await self._resolved(requests, calls, tables)
        except BaseException as error:
            self._drop(who)
            if isinstance(error, TopsError | asyncpg.PostgresError) or is_connection_loss(error):
                return [None] * len(requests)  # an execution tells what is wrong
            raise

    async def close(self) -> None:
        self._drop("")

    async def _resolved(
        self, requests: Sequence[Request], calls: Mapping[str, list[_Call]], tables: Collection[str]
    ) -> list[Executed | None]:
        connection = await self._connected()
        queries = {sql: await self._query(connection, sql, tables) for sql in calls}
        unfit = {place for sql, of_text in calls.items() if queries[sql] is None for place, _, _ in of_text}
        work = [(query, fit) for sql, query in queries.items() if (fit := _without(calls[sql], unfit)) and query]
        found: dict[tuple[int, int], _Computed] = {}
        draws = any(query.sequences for query, _ in work)
        one_transaction = draws or len(work) > 1  # in which now() is one time
        if one_transaction:
            await connection.execute("BEGIN READ WRITE" if draws else "BEGIN")
        for query, fit in work:
            found.update(await _computed(query, fit))
        if one_transaction:
            await connection.execute("ROLLBACK")
        return [_executed(place, request, found) for place, request in enumerate(requests)]

    # ------------------------------------------------------------------------------------------------- what is known

    async def _query(self, connection: Connection, sql: str, tables: Collection[str]) -> _Query | None:
        if time.monotonic() - self._learned_at > LEARN_AGAIN_S or len(self._queries) > _KEPT_MAX:
            self._queries.clear()
            self._learned_at = time.monotonic()
            if self._prover is not None:
                self._prover.forget()
        if sql not in self._queries:
            self._queries[sql] = None
            with suppress(InvalidChange, asyncpg.InternalClientError):
                try:
                    self._queries[sql] = await self._learned(connection, sql, tables)
                except asyncpg.PostgresError as error:
                    if is_connection_loss(error):
                        raise
        return self._queries[sql]

    async def _learned(self, connection: Connection, sql: str, tables: Collection[str]) -> _Query | None:
        check_statement(sql)
        text = insert_text(sql)
        if text is None:
            return None
        named = identifier(text.table)
        oid_name = named if text.schema is None else f"{identifier(text.schema)}.{named}"
        oid = await connection.fetchval("select to_regclass($1)::oid", oid_name)
        if oid is None:
            return None
        known = await connection.fetchrow(_TABLE, oid, list(tables), [sql_name(name) for name in tables])
        if known is None or not known["names"] or not known["may_insert"]:
            return None
        name = known["names"][0]
        table = await find_table(connection, name)
        if table.has_side_effects or table.claimed or not table.key or (text.returned and not known["may_return"]):
            return None
        sequences = await self._sequences(connection, sql)
        columns = await _columns(connection, oid)
        if sequences is None or columns is None or (sequences and not self._may_draw):
            return None
        prepared = await connection.prepare(sql)
        types = await find_types(connection, [parameter.oid for parameter in prepared.get_parameters()])
        return await _prepared(connection, name, table, text, columns, types, sequences)

    async def _sequences(self, connection: Connection, sql: str) -> dict[str, int] | None:
        if self._prover is None:
            self._prover = Prover(connection)
        oids = await self._prover.sequences(sql)
        if oids is None:
            return None
        return {row["name"]: row["oid"] for row in await connection.fetch(_SEQUENCES, list(oids))}

    async def _connected(self) -> Connection:
        if self._connection is None or self._connection.is_closed():
            self._drop("")
            self._connection = await connect(self._dsn, self._where, "tops-resolve", self._options, _READ_ONLY)
            self._pid = self._connection.get_server_pid()
        return self._connection

    def _drop(self, who: str) -> None:
        if self._connection is not None:
            self._connection.terminate()
            self._orphans.watch(self._pid, who)
        self._connection = self._prover = None
        self._queries.clear()


async def _computed(query: _Query, calls: Sequence[_Call]) -> dict[tuple[int, int], _Computed]:
    """By request and change; nothing if one of the values can't be computed."""
    written = [(call, texts) for call in calls if (texts := _texts(call[2], query.types)) is not None]
    if not written:
        return {}
    arrays = [[texts[place] for _, texts in written] for place in range(len(query.types))]
    try:
        records = await query.prepared.fetch(list(range(len(written))), *arrays)
    except (asyncpg.PostgresError, ValueError, OverflowError) as error:
        if is_connection_loss(error) or isinstance(error, asyncpg.exceptions.InvalidCachedStatementError):
            raise
        return {}
    if any(record[-1] != query.stamp for record in records):
        raise _TableChanged
    columns, labels = len(query.columns), len(query.labels)
    returned = plain_rows(list(records)) if labels else []
    # Rows are computed in their order: what the last one has found is what was drawn last.
    sequences = tuple(zip(query.sequences, records[-1][columns + labels + 1 : -1], strict=True))
    found: dict[tuple[int, int], _Computed] = {}
    for row, record in enumerate(records):
        (place, number, _), _ = written[record[0]]
        computed = found.setdefault((place, number), _Computed(sequences))
        values = dict(zip(query.columns, record[1 : columns + 1], strict=True))
        computed.inserts.append(Insert(query.table, values, captured=True))
        if labels:
            computed.returned.append({label: returned[row][f"r{n}"] for n, label in enumerate(query.labels)})
    return found


def _executed(place: int, request: Request, found: Mapping[tuple[int, int], _Computed]) -> Executed | None:
    parts = [part for number in range(len(request)) if (part := found.get((place, number))) is not None]
    if not parts or len(parts) < len(request):
        return None
    returned = tuple(tuple(part.returned) for part in parts)
    return Executed(
        rows=tuple(len(part.inserts) for part in parts),
        returned=returned if any(returned) else (),
        notices=(),
        write_set=Captured(
            changes=tuple(insert for part in parts for insert in part.inserts),
            sequences=tuple(dict.fromkeys(drawn for part in parts for drawn in part.sequences)),
        ),
    )


def _without(calls: Sequence[_Call], unfit: Collection[int]) -> list[_Call]:
    return [call for call in calls if call[0] not in unfit]


def _statement(change: Change) -> Statement | None:
    """A row change as the INSERT that it is; None: it is something else."""
    if isinstance(change, Statement):
        return change
    if not isinstance(change, Insert) or change.captured:
        return None
    names = ", ".join(map(identifier, change.values))
    places = ", ".join(f"${place}" for place in range(1, len(change.values) + 1))
    given = f"({names}) overriding system value values ({places})" if names else "default values"
    return Statement(f"insert into {sql_name(change.table)} {given}", tuple(change.values.values()))


def _texts(statement: Statement, types: Sequence[SqlType]) -> list[str | None] | None:
    """The arguments as texts; None if an execution has to tell what is wrong with them."""
    if len(statement.args) != len(types):
        return None
    try:
        return [text_form(value, kind) for value, kind in zip(statement.args, types, strict=True)]
    except InvalidChange:
        return None


async def _columns(connection: Connection, oid: int) -> dict[str, _Column] | None:
    rows = await connection.fetch(_COLUMNS, oid)
    if any(row["is_outlier"] for row in rows):
        return None
    return {
        row["name"]: _Column(row["is_generated"], row["is_limited"], row["type_name"], row["expression"] or "null")
        for row in rows
    }


async def _prepared(
    connection: Connection,
    name: str,
    table: Table,
    text: InsertText,
    columns: Mapping[str, _Column],
    types: Sequence[SqlType],
    sequences: Mapping[str, int],
) -> _Query | None:
    """None if something is returned, or given, that is not known before the row is there."""
    labels = _labels(text, columns)
    selects = [_select(row, text.columns or tuple(columns), columns, types) for row in text.rows]
    if labels is None or None in selects:
        return None
    read = [kind.readable(f"v.{identifier(column)}") for column, kind in table.columns.items()]
    read += [f"v.{identifier(column)} as r{place}" for place, (_, column) in enumerate(labels)]
    read += [f"pg_sequence_last_value({oid})" for oid in sequences.values()]
    read.append(stamp_sql(f"{table.oid}::oid"))
    # Inside, values are computed once each: a query with volatile functions is not merged into the one around it.
    sql = f"select v.call, {', '.join(read)} from ({' union all '.join(filter(None, selects))}) as v"
    prepared = await connection.prepare(sql)
    await connection.execute("select")  # ends the transaction of the prepare, which the driver leaves open
    return _Query(
        name,
        tuple(table.columns),
        tuple(types),
        tuple(label for label, _ in labels),
        tuple(sequences),
        table.stamp,
        prepared,
    )


def _labels(text: InsertText, columns: Mapping[str, _Column]) -> list[tuple[str, str]] | None:
    """What is returned, by label and column."""
    labels: list[tuple[str, str]] = []
    for label, column in text.returned:
        labels += [(label, column)] if column is not None else [(each, each) for each in columns]
    if any(column not in columns for _, column in labels):
        return None  # the server says that there is no such column
    if any(columns[column].is_generated or columns[column].is_limited for _, column in labels):
        return None
    return labels


def _select(
    row: Sequence[Expression | None],
    named: Sequence[str],
    columns: Mapping[str, _Column],
    types: Sequence[SqlType],
) -> str | None:
    """The values of one row, for every call."""
    given = dict(zip(named, row, strict=False))
    if any(columns[name].is_generated and given[name] is not None for name in given):
        return None
    values = []
    for name, column in columns.items():
        if column.is_generated:
            continue
        expression = given.get(name)
        value = column.default if expression is None else _written(expression, types)
        values.append(f"cast(\n{value}\nas {column.type_name}) as {identifier(name)}")
    arrays = ", ".join(["$1::int[]", *(f"${place}::text[]" for place in range(2, len(types) + 2))])
    names = ", ".join(["call", *_arguments(types)])
    return f"select p.call, {', '.join(values)} from unnest({arrays}) as p({names})"


def _written(expression: Expression, types: Sequence[SqlType]) -> str:
    return "".join(
        piece if isinstance(piece, str) else f"(p.a{piece}::{types[piece - 1].name})" for piece in expression
    )


def _arguments(types: Sequence[SqlType]) -> Iterable[str]:
    return (f"a{place}" for place in range(1, len(types) + 1))
