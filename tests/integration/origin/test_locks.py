"""Apply wins: an execution neither waits long for a lock nor keeps apply waiting."""

import asyncio
import time

import asyncpg

from adapters.changes import Member, Update
from adapters.postgres.apply.session import Options
from adapters.postgres.origin import Executed, Rejected
from tests.integration.origin.databases import OriginDatabase
from tests.support.polling import eventually
from tops.model.ids import TxId

SCHEMA = """
create table counters (id int primary key, n int not null);
insert into counters values (1, 0), (2, 0);
create function slow() returns int language plpgsql volatile as $$ begin perform pg_sleep(20); return 1; end $$;
"""


async def test_an_execution_that_apply_waits_for_is_cancelled_and_may_be_tried_again(database: OriginDatabase) -> None:
    await database.begin(SCHEMA)
    await database.sql("grant execute on function pg_sleep(float8) to public")
    executing = asyncio.create_task(database.execute("update counters set n = 5 where id = 1", "select slow()"))
    plain = await asyncpg.connect(database.dsn)
    holds = (
        "select exists (select from pg_stat_activity where application_name = 'tops-origin' and query like '%slow%')"
    )
    await eventually(lambda: plain.fetchval(holds))
    began = time.monotonic()

    vote = await database.adapter.write_local(Member(TxId("apply.1"), (Update("counters", {"id": 1}, {"n": 7}),)))

    assert vote.excluded is None
    assert time.monotonic() - began < 4.0, "the statement itself would take 20 s"
    outcome = await executing
    assert isinstance(outcome, Rejected)
    assert outcome.transient
    await plain.close()


async def test_an_execution_gives_up_a_lock_that_it_does_not_get(database: OriginDatabase) -> None:
    await database.begin(SCHEMA)
    database.origin = await database.another_origin(
        Options(lock_timeout_s=0.2, statement_timeout_s=10.0, connect_timeout_s=10.0)
    )
    holder = await asyncpg.connect(database.dsn)
    await holder.execute("begin; update counters set n = 1 where id = 2; prepare transaction 'held'")

    waiting = await database.execute("update counters set n = 2 where id = 2")
    free = await database.execute("update counters set n = 2 where id = 1")

    assert isinstance(waiting, Rejected)
    assert (waiting.sqlstate, waiting.transient) == ("55P03", True)
    assert isinstance(free, Executed)
    await holder.execute("rollback prepared 'held'")
    await holder.close()
