"""The server is killed at every step of an epoch: afterwards each transaction is wholly there or wholly not."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import asyncpg
import pytest

from adapters import EmbeddedPostgres, PostgresAdapter
from adapters.changes import Change, Insert, Member, Statement, Update
from adapters.resource import Position
from tests.contract.harness import attempt, entry, epoch, member
from tops.model.errors import TopsError

ROWS = 50
STEPS = ["before prepare", "during prepare", "after prepare", "during commit", "after commit", "during apply"]


class Ledger:
    """Epochs of transfers over one table; every one also inserts its number, so that the data tells what is applied."""

    def __init__(self, adapter: PostgresAdapter, seed: int) -> None:
        self.adapter, self.random = adapter, random.Random(seed)
        self.number = 0

    def members(self) -> list[Member]:
        rows = self.random.sample(range(1, ROWS + 1), 4)
        amount = self.random.randint(1, 9)
        changes: list[Change] = [
            Update("acct", {"id": rows[0]}, add={"bal": amount}),
            Update("acct", {"id": rows[1]}, add={"bal": -amount}),
        ]
        changes.append(Insert("done", {"number": self.number}))
        by_sql = Statement("update acct set bal = bal + $1 where id = $2", (0, rows[2]))
        return [member(f"t{self.number}", *changes), member(f"s{self.number}", by_sql)]


async def crash_at(step: str, server: EmbeddedPostgres, ledger: Ledger) -> bool:
    """Drive one epoch and kill the server at the step; whether the coordinator has decided to commit."""
    adapter = ledger.adapter
    ledger.number += 1
    number = ledger.number
    asked = epoch(number, *ledger.members())

    async def interrupted(work: Callable[[], Awaitable[object]]) -> bool:
        """Start the work, kill the server a moment later; whether the work was done before."""
        task = asyncio.ensure_future(work())
        await asyncio.sleep(ledger.random.random() * 0.004)
        await server.crash("kill" if ledger.random.random() < 0.8 else "immediate")
        result = (await asyncio.gather(task, return_exceptions=True))[0]
        assert result is None or not isinstance(result, BaseException) or isinstance(result, TopsError), result
        return not isinstance(result, BaseException)

    if step == "before prepare":
        await server.crash()
        return False
    if step == "during prepare":
        return await interrupted(lambda: adapter.prepare(asked)) and ledger.random.random() < 0.5
    if step == "during apply":
        entries = [entry(number, *asked.members)]
        await interrupted(lambda: adapter.apply(entries))
        return True  # it is in the log: whatever happened, it will be applied again
    await adapter.prepare(asked)
    if step == "after prepare":
        await server.crash()
        return ledger.random.random() < 0.5
    if step == "during commit":
        await interrupted(lambda: adapter.commit(asked.attempt))
        return True
    await adapter.commit(asked.attempt)
    await server.crash()
    return True


async def check_whole(connection: asyncpg.Connection, position: Position, expected: set[int]) -> None:
    assert await connection.fetchval("select sum(bal) from acct") == ROWS * 100
    done = {row["number"] for row in await connection.fetch("select number from done")}
    assert done == expected
    assert {number for number in expected if not position.holds(number)} == set()
    assert {number for number in range(1, position.prefix + 1) if position.holds(number)} >= done


async def rounds(count: int, seed: int) -> None:
    async with EmbeddedPostgres() as server:
        connection = await asyncpg.connect(server.dsn)
        await connection.execute(
            "create table acct (id int primary key, bal bigint not null);"
            "create table done (number bigint primary key);"
            f"insert into acct select n, 100 from generate_series(1, {ROWS}) n"
        )
        adapter = PostgresAdapter(await server.provision("acct", "*"), cluster="crash", replica_set="acct")
        await adapter.start()
        ledger, committed = Ledger(adapter, seed), set[int]()
        for turn in range(count):
            step = STEPS[turn % len(STEPS)]
            state = ledger.random.getstate()
            decided = await crash_at(step, server, ledger)
            number = ledger.number

            await server.start()
            doubts = await adapter.recover()
            before = await adapter.applied()
            for doubt in doubts:
                await (adapter.commit if decided else adapter.rollback)(doubt.attempt)
            if decided:
                committed.add(number)
                if not before.holds(number) and not doubts:
                    ledger.random.setstate(state)
                    await adapter.apply([entry(number, *ledger.members())])
            else:
                await adapter.apply([entry(number)])

            connection = await asyncpg.connect(server.dsn)
            assert await connection.fetchval("select count(*) from pg_prepared_xacts") == 0, (step, turn)
            await check_whole(connection, await adapter.applied(), committed)
            assert (await adapter.applied()).prefix == number
            await connection.close()
        await adapter.close()


async def test_after_a_crash_at_any_step_data_and_position_agree() -> None:
    await rounds(len(STEPS), seed=1)


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_after_a_hundred_crashes_data_and_position_agree() -> None:
    await rounds(102, seed=2)


async def test_promises_survive_a_crash_inside_a_checkpoint() -> None:
    async with EmbeddedPostgres() as server:
        connection = await asyncpg.connect(server.dsn)
        await connection.execute(
            "create table acct (id int primary key, bal bigint not null);"
            "insert into acct select n, 0 from generate_series(1, 40) n"
        )
        names = [f"set{n}" for n in range(8)]
        adapters = [PostgresAdapter(await server.provision(n, "*"), cluster="c", replica_set=n) for n in names]
        for place, adapter in enumerate(adapters, 1):
            await adapter.start()
            await adapter.prepare(epoch(1, member("t1", Update("acct", {"id": place}, add={"bal": 1}))))

        checkpoint = asyncio.ensure_future(connection.execute("checkpoint"))
        await asyncio.sleep(0.001)
        await server.crash()
        await asyncio.gather(checkpoint, return_exceptions=True)
        await server.start()

        for adapter in adapters:
            assert [doubt.attempt for doubt in await adapter.recover()] == [attempt(1)]
            await adapter.commit(attempt(1))
            await adapter.close()
        connection = await asyncpg.connect(server.dsn)
        assert await connection.fetchval("select sum(bal) from acct") == 8
        await connection.close()
