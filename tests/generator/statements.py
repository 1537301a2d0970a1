"""Random statements over a random schema."""

import random

from tests.generator.expressions import Expressions
from tests.generator.schemas import Table


def random_statement(dice: random.Random, tables: list[Table]) -> str:
    table = dice.choice(tables)
    made = Expressions(dice, table.columns, table.name)
    match dice.choices(["insert", "update", "delete", "upsert", "strange"], weights=[5, 8, 2, 3, 2])[0]:
        case "insert":
            return _insert(dice, table, made)
        case "update":
            return f"update {table.name} set {_assignments(dice, table, made)}{_where(dice, made)}{_returning(dice)}"
        case "delete":
            return f"delete from {table.name} where {made.condition()}{_returning(dice)}"
        case "upsert":
            return f"{_insert(dice, table, made)} on conflict {_conflict(dice, table)}"
        case _:
            return _strange(dice, table, dice.choice(tables), made)


def _insert(dice: random.Random, table: Table, made: Expressions) -> str:
    columns = [column for column in table.columns if dice.random() < 0.7]
    rows = []
    for _ in range(dice.choice([1, 1, 1, 2, 3])):
        values = [_value(dice, column.name, column.type, made) for column in columns]
        rows.append(f"({', '.join([str(dice.randint(1, 60)), *values])})")
    names = ", ".join(["id", *(column.name for column in columns)])
    return f"insert into {table.name} ({names}) values {', '.join(rows)}"


def _value(dice: random.Random, name: str, type_: str, made: Expressions) -> str:
    if name == "up":
        return str(dice.choice([dice.randint(1, 12), "null"]))
    return "default" if dice.random() < 0.05 else made.of(type_, 1, constant=True)


def _assignments(dice: random.Random, table: Table, made: Expressions) -> str:
    chosen = dice.sample(table.columns, dice.choice([1, 1, 2]))
    parts = [f"{column.name} = {made.of(column.type)}" for column in chosen]
    if dice.random() < 0.04:
        parts.append("id = id + 1")
    return ", ".join(parts)


def _where(dice: random.Random, made: Expressions) -> str:
    return f" where {made.condition()}" if dice.random() < 0.85 else ""


def _returning(dice: random.Random) -> str:
    return dice.choice(["", "", "", "", " returning id"])


def _conflict(dice: random.Random, table: Table) -> str:
    column = dice.choice(table.columns)
    return dice.choice(
        ["do nothing", "(id) do nothing"]
        + [f"(id) do update set {column.name} = excluded.{column.name}"] * 3
        + [f"(id) do update set {column.name} = coalesce({table.name}.{column.name}, excluded.{column.name})"]
    )


def _strange(dice: random.Random, table: Table, other: Table, made: Expressions) -> str:
    """What is never proved today, but people write it."""
    column = dice.choice(table.columns)
    value = made.of(column.type, 1)
    return dice.choice(
        [
            f"insert into {table.name} (id) select row_number() over () + 100 from {other.name}",
            f"insert into {table.name} (id, {column.name}) select id + 60, {column.name} from {table.name} limit 2",
            f"with x as (select id as i from {other.name} limit 1) delete from {table.name} using x where x.i = id",
            f"update {table.name} set {column.name} = {value} where id in (select id from {other.name} limit 2)",
            f"update {table.name} set {column.name} = null from trick where trick.v % 5 = {table.name}.id",
            f"delete from {table.name} where ctid in (select ctid from {table.name} limit 1)",
            f"update trick set t = (select string_agg(t, '') from trick) where id = {dice.randint(1, 5)}",
            f"merge into {table.name} using {other.name} s on s.id = {table.name}.id when matched then delete",
        ]
    )
