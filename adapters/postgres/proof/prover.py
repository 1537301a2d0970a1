"""The proof of a statement or of a row change at one connection."""

from collections.abc import Callable, Collection, Iterable

import asyncpg

from adapters.changes import Delete, Insert, RowChange, Update, Upsert
from adapters.postgres.proof.commands import Commands, inserted_values, target_of
from adapters.postgres.proof.expressions import Expressions
from adapters.postgres.proof.facts import Facts
from adapters.postgres.proof.printed import rewritten_tree
from adapters.postgres.proof.resolvable import sequences_of
from adapters.postgres.proof.tables import Tables
from adapters.postgres.proof.tree import Node, Unreadable, parse
from adapters.postgres.proof.verdict import SHIPPED, NotProved, Reason, Verdict
from adapters.postgres.sql.fixed_times import literal_at
from adapters.postgres.sql.stamps import Stamps

MakeProver = Callable[["asyncpg.Connection[asyncpg.Record]"], "Prover"]


class Prover:
    """Asks the server how it understands a statement, and the catalogue about everything that it mentions."""

    def __init__(self, connection: "asyncpg.Connection[asyncpg.Record]") -> None:
        self._connection = connection
        self._facts = Facts(connection)
        self.stamps: Stamps = {}  # of the tables on which the last verdict depends, as they were before it was made

    def forget(self) -> None:
        """The schema may have changed."""
        self._facts.forget()

    async def statement(self, sql: str) -> Verdict:
        """Raises the server's error for a statement that it does not understand."""
        self.stamps = {}
        try:
            query = await self._query(sql)
            if query is not None and (table := target_of(query)) != 0:
                if not self._facts.knows(table):
                    await self._facts.load_table(table)
                    query = await self._query(sql)  # it holds the table's defaults: not older than the stamps
                    if query is None or target_of(query) != table:
                        raise Unreadable(f"the table with id {table} changes while the statement is looked at")
                self.stamps = self._facts.stamps(table)
            if query is None:
                return NotProved(Reason.RULE, "the statement is rewritten into several or none")
            await self._facts.load_for([query])
            text = sql.encode()
            expressions = Expressions(
                self._facts, lambda node: literal_at(text, node.number("location")), of_client=True
            )
            return Commands(self._facts, expressions).check(query)
        except Unreadable as problem:
            return NotProved(Reason.UNREADABLE, str(problem))

    async def _query(self, sql: str) -> Node | None:
        """None if the statement is rewritten into several or none."""
        tree = parse(await rewritten_tree(self._connection, sql))
        return tree[0] if isinstance(tree, list) and len(tree) == 1 and isinstance(tree[0], Node) else None

    async def sequences(self, sql: str) -> frozenset[int] | None:
        """The sequences that the values of an INSERT … VALUES draw from; None if they can't be computed ahead of it.

        Raises the server's error for a statement that it does not understand."""
        try:
            query = await self._query(sql)
            values = inserted_values(query) if query is not None else None
            if values is None:
                return None
            await self._facts.load_for(values)
            text = sql.encode()
            return await sequences_of(
                self._connection, self._facts, values, lambda node: literal_at(text, node.number("location"))
            )
        except Unreadable:
            return None

    async def row_change(self, change: RowChange, oid: int) -> Verdict:
        """For all changes of the same shape: the values themselves are looked at as they are written down."""
        self.stamps = {}
        try:
            await self._facts.load_table(oid)
            self.stamps = self._facts.stamps(oid)
            return self._row_change(change, oid)
        except Unreadable as problem:
            return NotProved(Reason.UNREADABLE, str(problem))

    async def defaults(self, change: Insert, oid: int) -> Verdict:
        """Whether columns that a captured row does not have get the same values everywhere."""
        self.stamps = {}
        try:
            await self._facts.load_table(oid)
            self.stamps = self._facts.stamps(oid)
            return _first(self._left_out(Tables(self._facts), change.values, oid))
        except Unreadable as problem:
            return NotProved(Reason.UNREADABLE, str(problem))

    def _row_change(self, change: RowChange, oid: int) -> Verdict:
        table, tables = self._facts.tables[oid], Tables(self._facts)
        numbers = {column.name: column.number for column in table.columns.values()}
        verdicts = [tables.check_write(table)]
        match change:
            case Delete(_, key):
                verdicts += [tables.check_values(table, key), tables.check_delete(table)]
            case Update(_, key, values, add):
                assigned = frozenset(numbers[name] for name in (*values, *add) if name in numbers)
                verdicts += [tables.check_values(table, (*key, *values, *add)), tables.check_update(table, assigned)]
                verdicts += [tables.check_sum(table, add)]
            case Insert(_, values):
                verdicts += self._new_row(tables, values, oid)
            case Upsert(_, key, values, _, add):
                verdicts += self._new_row(tables, {**key, **values, **add}, oid)
                assigned = frozenset(numbers[name] for name in (*values, *add) if name in numbers)
                verdicts += [tables.check_update(table, assigned), tables.check_sum(table, add)]
        return _first(verdicts)

    def _new_row(self, tables: Tables, given: dict[str, object], oid: int) -> list[Verdict]:
        return [tables.check_values(self._facts.tables[oid], given), *self._left_out(tables, given, oid)]

    def _left_out(self, tables: Tables, given: Collection[str], oid: int) -> list[Verdict]:
        table = self._facts.tables[oid]
        left_out = [column for column in table.columns.values() if column.name not in given and not column.is_generated]
        return [tables.check_default(table, column) for column in left_out]


def _first(verdicts: Iterable[Verdict]) -> Verdict:
    return next((verdict for verdict in verdicts if isinstance(verdict, NotProved)), SHIPPED)
