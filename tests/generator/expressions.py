"""Random SQL expressions of a wanted type, harmless ones and treacherous ones mixed."""

import random
from dataclasses import dataclass

TREACHERY = 0.12  # of expressions: one that differs from replica to replica


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    type: str


class Expressions:
    """Expressions over the columns of one table; `table` and `other` are there for subqueries."""

    def __init__(self, dice: random.Random, columns: list[Column], table: str) -> None:
        self._dice, self._columns, self._table = dice, columns, table

    def of(self, type_: str, depth: int = 2, *, constant: bool = False) -> str:
        """`constant`: without columns, as in VALUES."""
        dice = self._dice
        if dice.random() < TREACHERY / (depth + 1):
            return dice.choice(_TREACHEROUS[type_]).format(table=self._table)
        if depth == 0 or dice.random() < 0.35:
            return self._leaf(type_, constant)
        template = dice.choice(_TEMPLATES[type_])
        parts = {
            name: self.of(part, depth - 1, constant=constant)
            for name, part in (("i", "int"), ("j", "int"), ("t", "text"), ("u", "text"), ("b", "boolean"))
            if f"{{{name}}}" in template
        }
        parts |= {
            name: self.of(part, depth - 1, constant=constant)
            for name, part in (("f", "double precision"), ("z", "timestamptz"), ("d", "date"), ("n", "numeric"))
            if f"{{{name}}}" in template
        }
        return template.format(**parts)

    def _leaf(self, type_: str, constant: bool) -> str:
        names = [column.name for column in self._columns if column.type == type_]
        if names and not constant and self._dice.random() < 0.6:
            return self._dice.choice(names)
        return self._dice.choice(_LEAVES[type_])

    def condition(self) -> str:
        """Of a WHERE: mostly what people write."""
        dice = self._dice
        match dice.randrange(10):
            case 0 | 1 | 2 | 3:
                return f"id = {dice.randint(1, 20)}"
            case 4:
                return f"id between {dice.randint(1, 10)} and {dice.randint(10, 20)}"
            case 5:
                return f"id in ({dice.randint(1, 20)}, {dice.randint(1, 20)}) and {self.of('boolean', 1)}"
            case 6:
                return f"id = {dice.randint(1, 20)} and {self.of('boolean')}"
            case _:
                return self.of("boolean")


_LEAVES = {
    "int": ["0", "1", "7", "-3", "42", "null", "2147483647"],
    "text": ["''", "'a'", "'Z'", "'now'", "'it''s'", "'ä'", "null", "'text 5'"],
    "boolean": ["true", "false", "null"],
    "double precision": ["0.1", "1e10", "-2.5", "'NaN'", "0.3::float8"],
    "numeric": ["1.50", "0", "-7.125", "3"],
    "timestamptz": ["'2020-01-01 00:00:00+00'", "'2026-05-05T10:00:00Z'", "null", "'infinity'"],
    "date": ["'2020-01-01'", "'2026-05-05'", "null"],
}
_TEMPLATES = {
    "int": [
        *("({i} + {j})", "({i} - {j})", "({i} * {j})", "({i} / {j})", "({i} % {j})", "abs({i})", "length({t})"),
        *("coalesce({i}, {j})", "case when {b} then {i} else {j} end", "greatest({i}, {j})", "nullif({i}, {j})"),
        *("({t})::int", "({f})::int", "({b})::int", "({d} - {d})", "extract(year from {d})::int", "strpos({t}, {u})"),
        *("(array[{i}, {j}])[1]", "({n})::int", "ascii({t})", "extract(hour from {z})::int"),
    ],
    "text": [
        *("({t} || {u})", "upper({t})", 'lower({t} collate "C")', "md5({t})", "substr({t}, 1, 3)", "({i})::text"),
        *("coalesce({t}, {u})", "case when {b} then {t} else {u} end", "replace({t}, 'a', {u})", "({b})::text"),
        *(
            "trim({t})",
            "reverse({t})",
            "repeat({t}, 2)",
            "({z})::text",
            "({f})::text",
            "({n})::text",
            "greatest({t}, {u})",
        ),
        *("format('%s', {i})", "to_char({i}, '999')", "concat({t}, {i})", "left({t}, {i})", "lpad({t}, 5)"),
    ],
    "boolean": [
        *("({i} = {j})", "({i} < {j})", "({i} <> {j})", "({t} = {u})", "({t} < {u})", "({t} like 'a%')", "({t} ~ 'a')"),
        *("({b} and {b})", "({b} or {b})", "(not {b})", "({i} is null)", "({t} is not null)", "({i} in (1, 2, {j}))"),
        *("({f} > 1)", "({n} >= {n})", "({z} < {z})", "({d} = {d})", "({i} between {j} and 50)", "({t} in ('a', {u}))"),
        *(
            "({i} is distinct from {j})",
            "({b} is true)",
            '({t} > {u} collate "C")',
            "(length({t}) > 3)",
            "({t} ilike 'A%')",
        ),
    ],
    "double precision": [
        *(
            "({f} + {f})",
            "({f} * 1.1)",
            "({f} / {f})",
            "sqrt({f})",
            "exp({f})",
            "({i})::float8",
            "abs({f})",
            "sin({f})",
        ),
        *("round({f})", "coalesce({f}, 0)"),
    ],
    "numeric": [
        *("({n} + {n})", "({n} * 1.19)", "({n} / {n})", "round({n}, 1)", "({i})::numeric", "abs({n})", "trunc({n})"),
        *("power({n}, 2)", "least({n}, 5)"),
    ],
    "timestamptz": [
        *("({z} + interval '1 day')", "coalesce({z}, {z})", "date_trunc('hour', {z})", "({d})::timestamptz"),
        *("case when {b} then {z} else {z} end", "greatest({z}, {z})", "({t})::timestamptz"),
    ],
    "date": ["({d} + {i})", "({z})::date", "coalesce({d}, {d})", "({d} - 1)", "make_date(2020, 1, 1)"],
}
_TREACHEROUS = {
    "int": [
        *(
            "(random() * 1000000)::int",
            "nextval('numbers')::int",
            "pg_backend_pid()",
            "dice()",
            "six()",
            "(ctid::text)::int",
        ),
        *("(select count(*) from {table})::int", "extract(microseconds from clock_timestamp())::int"),
        *("(select id from {table} limit 1)", "(row_number() over ())::int", "(select v from trick limit 1)"),
    ],
    "text": [
        *(
            "now()::text",
            "clock_timestamp()::text",
            "gen_random_uuid()::text",
            "current_user",
            "ctid::text",
            "random()::text",
        ),
        *("(select string_agg(id::text, ',') from {table})", "current_setting('timezone')", "current_database()"),
        *("pg_current_snapshot()::text", "inet_server_port()::text", "(select t from trick limit 1)", "liar()"),
    ],
    "boolean": ["(random() < 0.5)", "(now() > clock_timestamp() - interval '1 us')", "(dice() % 2 = 0)"],
    "double precision": ["random()", "(select sum(f) from trick)", "extract(epoch from clock_timestamp())::float8"],
    "numeric": ["random()::numeric", "(select avg(v) from trick)", "dice()::numeric"],
    "timestamptz": [
        "now()",
        "clock_timestamp()",
        "current_timestamp",
        "'now'",
        "'now'::timestamptz",
        "'today'::timestamptz",
    ],
    "date": ["current_date", "now()::date", "'tomorrow'", "'now'::date"],
}
