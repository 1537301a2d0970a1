"""What an origin captures, applied, leaves what plain PostgreSQL leaves: rows, counts and returned rows."""

import asyncio

import asyncpg
import pytest

from adapters import EmbeddedPostgres
from adapters.postgres.copy.scripts import user_tables
from adapters.postgres.origin import Executed
from tests.integration.origin.databases import OriginDatabase, rows_of

SHOP = """
create table items (
    id int primary key, name text not null, price numeric(10, 2), stock int default 0 check (stock >= 0));
create table coded (code numeric primary key, label text unique deferrable initially immediate, doc json);
create table pairs (a int, b text, note text, sum int generated always as (a + length(b)) stored, primary key (a, b));
create table parts (region text, id int, weight float8, primary key (region, id)) partition by list (region);
create table parts_n partition of parts for values in ('n');
create table parts_s partition of parts for values in ('s');
create table swaps (id int primary key deferrable initially immediate, u int unique deferrable, v text);
create table parents (id int primary key, code text not null unique, name text, children int not null default 0);
create table children (
    id int primary key, parent int references parents on delete cascade on update cascade,
    code text references parents (code) on update cascade on delete set null, note text);
create table grandchildren (id int primary key, child int not null references children on delete cascade);
create table nodes (id int primary key, up int references nodes deferrable initially deferred);
create table invoices (id int primary key, total int not null default 0);
create table lines (invoice int references invoices, line int, amount int not null, primary key (invoice, line));
create table audit (id serial primary key, what text not null, at timestamptz not null default clock_timestamp());
create function count_children() returns trigger language plpgsql as $$ begin
    if tg_op <> 'INSERT' then update parents set children = children - 1 where id = old.parent; end if;
    if tg_op <> 'DELETE' then update parents set children = children + 1 where id = new.parent; end if;
    return null; end $$;
create trigger counted after insert or update or delete on children for each row execute function count_children();
create function stamp() returns trigger language plpgsql as $$ begin
    new.note := coalesce(new.note, '') || '!'; insert into audit (what) values (tg_op || new.id); return new; end $$;
create trigger stamped before insert or update on children for each row execute function stamp();
"""
ROWS = """
insert into items values (1, 'one', 1.00, 10), (2, 'two', 2.50, 20), (3, 'three', null, 30);
insert into coded values (1.0, 'a', '{"x": 1}'), (2, 'b', '[]');
insert into pairs values (1, 'x', 'first'), (2, 'y', 'second');
insert into parts values ('n', 1, 1.5), ('s', 1, 2.5);
insert into parents values (1, 'a', 'first'), (2, 'b', 'second');
insert into children values (1, 1, 'a'), (2, 1, 'b'), (3, 2, null);
insert into grandchildren values (1, 1), (2, 3);
insert into nodes values (1, null), (2, 1);
insert into invoices values (1, 5);
insert into lines values (1, 1, 5);
insert into swaps values (1, 10, 'one'), (2, 20, 'two'), (3, 30, 'three');
"""
CLOCKS = {"audit": "id, what"}  # in what can be compared with another server
CASES = {
    "insert": ["insert into items (id, name, price) values (4, 'four', 4.5), (5, 'five', 5)"],
    "insert returning": ["insert into items (id, name) values (4, 'four') returning *"],
    "update by key": ["update items set stock = stock - 1 where id = 1"],
    "update all": ["update items set price = coalesce(price, 0) * 2, name = upper(name) returning id, price"],
    "update of nothing": ["update items set stock = 0 where id = 99"],
    "identity update": ["update items set stock = stock"],
    "delete": ["delete from items where stock > 15 returning name"],
    "on conflict": [
        "insert into items (id, name) values (1, 'uno'), (9, 'nine') "
        "on conflict (id) do update set name = excluded.name"
    ],
    "on conflict do nothing": ["insert into items (id, name) values (1, 'uno') on conflict do nothing"],
    "merge": [
        "merge into items i using (values (1, 'm1'), (7, 'm7')) as s(id, name) on i.id = s.id "
        "when matched then update set name = s.name when not matched then insert (id, name) values (s.id, s.name)"
    ],
    "with": [
        "with gone as (delete from items where id = 2 returning *) "
        "insert into items select id + 10, name, price, stock from gone"
    ],
    "limit": ["update items set stock = 1 where id in (select id from items order by id desc limit 1)"],
    "key change": ["update items set id = id + 100 where id > 1"],
    "key respelled": ["update coded set code = 1.00 where code = 1"],
    "json": ["update coded set doc = '{\"x\":   1}' where code = 1", "update coded set doc = '[1]' where code = 2"],
    "two keys": ["update pairs set note = b || a", "delete from pairs where a = 1 and b = 'x'"],
    "partition move": ["update parts set region = 's', id = 7 where region = 'n'"],
    "partitions": [
        "insert into parts values ('n', 2, 0.1), ('s', 3, 'infinity')",
        "update parts set weight = weight * 3 returning *",
    ],
    "swap of keys": ["update swaps set id = case id when 1 then 2 when 2 then 1 else id end"],
    "swap of unique values": ["update swaps set u = case u when 10 then 20 when 20 then 10 else u end"],
    "shift of unique values": ["update swaps set u = u + 10"],
    "delete and insert again": ["delete from items where id = 1", "insert into items values (1, 'again', 9.99, 1)"],
    "insert and delete": ["insert into items (id, name) values (50, 'fifty')", "delete from items where id = 50"],
    "trigger": ["insert into children values (4, 2, null, 'x')"],
    "nested triggers": ["update children set parent = 3 - parent", "delete from children where id = 2"],
    "cascade": ["delete from parents where id = 1"],
    "cascade of a key": ["update parents set id = id + 10, code = code || 'x'"],
    "cascade and insert": [
        "delete from parents",
        "insert into parents values (1, 'z')",
        "insert into children values (9, 1, 'z')",
    ],
    "deferred foreign key": ["insert into nodes values (4, 5)", "insert into nodes values (5, 4)"],
    "parent and child": ["insert into invoices values (7)", "insert into lines values (7, 1, 3), (7, 2, 4)"],
    "child and parent go": ["delete from lines", "delete from invoices"],
    "child moves to a new parent": [
        "insert into invoices values (8)",
        "update lines set invoice = 8",
        "delete from invoices where id = 1",
    ],
    "several tables": [
        "insert into items (id, name) values (60, 'x')",
        "delete from pairs",
        "update parts set weight = 0",
    ],
}


@pytest.fixture(scope="module")
def pair(server: EmbeddedPostgres) -> tuple[OriginDatabase, OriginDatabase]:
    """One in which an origin executes, and a plain one."""

    async def made() -> tuple[OriginDatabase, OriginDatabase]:
        database, twin = await OriginDatabase.make(server), await OriginDatabase.make(server)
        await database.set_up(SHOP)
        await twin.sql(SHOP)
        return database, twin

    return asyncio.run(made())


@pytest.mark.parametrize("case", CASES)
async def test_a_captured_write_set_leaves_what_plain_postgresql_leaves(
    pair: tuple[OriginDatabase, OriginDatabase], case: str
) -> None:
    database, twin = pair
    await database.begin()
    tables = await user_tables(database.dsn)
    for one in pair:
        await one.sql(f"truncate {', '.join(tables)} restart identity;{ROWS}")
    plain, oracle = await asyncpg.connect(database.dsn), await asyncpg.connect(twin.dsn)
    before = await rows_of(plain, tables)

    executed = await database.execute(*CASES[case])

    assert isinstance(executed, Executed), executed
    assert await rows_of(plain, tables) == before, "an execution leaves nothing behind"
    vote = await database.apply(f"t{case}", executed)
    assert vote.excluded is None, vote
    async with oracle.transaction():
        for place, sql in enumerate(CASES[case]):
            statement = await oracle.prepare(sql)
            returned = [dict(row) for row in await statement.fetch()]
            assert executed.rows[place] == int((statement.get_statusmsg() or "").split()[-1])
            assert list(executed.returned[place] if executed.returned else ()) == returned
    assert await rows_of(plain, tables, CLOCKS) == await rows_of(oracle, tables, CLOCKS)
    await plain.close()
    await oracle.close()
    await database.close()
