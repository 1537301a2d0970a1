"""One client asks for as much as its key allows: the others go on, and operators can look at the set and administer it.

All attacks use keys of a reader or a writer against real processes.
"""

import asyncio
import math
import os
import secrets
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import pytest

from adapters.changes import Member, Statement, encode_member
from replication.model.events import request_type
from replication.model.values import pack_values
from replication.rpc import calls
from replication.rpc.calls import AnyRequest, ReplicaFailed
from replication.rpc.conversation import UNDER_WAY_MAX, Caller
from replication.rpc.rejections import WriteRejected
from tests.attack.secured_sets import SecuredSets
from tests.attack.test_requests import BROKERS, caller_of
from tests.support.polling import eventually
from tops import Site
from tops.model.errors import Retry, TopsError
from tops.model.ids import TxId

pytestmark = pytest.mark.asyncio(loop_scope="session")

BEYOND = 2**60
ONE = calls.Read(sql="select 1 as x", args=pack_values([]))
VOLATILE = "update accounts set balance = (random() * 0)::int + $1 where id = $2"


async def flood(site: Site, to: str, requests: Sequence[AnyRequest]) -> None:
    """Requests that nobody waits for, in one bundle."""
    bundle = calls.encode_bundle([(os.urandom(16), request) for request in requests])
    asked = request_type(to.partition("/")[0], BROKERS)
    await site.publish(asked, {"to": to, "body": bundle})
    await site.flush()


def read(sql: str, at_least: int = 0, wait_s: float = 5.0) -> calls.Read:
    return calls.Read(sql=sql, args=pack_values([]), at_least=at_least, wait_s=wait_s)


def execute(site: Site, sql: str, *args: object, at_least: int = 0) -> calls.Execute:
    tx = f"{site.name}.{secrets.token_hex(8)}.0000000001@r1"
    member = Member(TxId(""), (Statement(sql, args),))
    return calls.Execute(tx=tx, member=encode_member(member), at_least=at_least)


async def within(timeout_s: float, work: Awaitable[object]) -> object:
    async with asyncio.timeout(timeout_s):
        return await work


async def head_of(caller: Caller, replica: str) -> int:
    status = await caller.request(replica, calls.Status(), 5.0)
    assert isinstance(status, calls.StatusReported)
    return int(status.fields["head"])


async def test_requests_that_wait_for_a_position_do_not_hold_up_others(sets: SecuredSets) -> None:
    async with sets.site("reader", "flood") as attacker, sets.site("victim", "calm") as victim:
        await caller_of(attacker)
        caller = await caller_of(victim)
        far = await head_of(caller, "shop/r1") + 100  # so near that it may be on its way
        await flood(attacker, "shop/r1", [read("select 1", far, 20.0) for _ in range(1500)])
        await flood(attacker, "shop/r1", [read("select 1", BEYOND, 1e9) for _ in range(300)])

        await within(4.0, caller.request("shop/r1", ONE, 4.0))
        await within(4.0, caller.request("shop/r1", calls.Status(), 4.0))


@pytest.mark.parametrize("wait_s", [math.nan, math.inf, -math.inf, -1.0])
async def test_a_wait_that_is_no_time_is_rejected(sets: SecuredSets, wait_s: float) -> None:
    async with sets.site("reader") as site:
        with pytest.raises(ReplicaFailed, match="can't wait") as rejected:
            await (await caller_of(site)).request("shop/r1", read("select 1", 1, wait_s), 5.0)
        assert rejected.value.retry is Retry.NEVER


@pytest.mark.parametrize("max_lag_s", [math.nan, -1.0])
async def test_a_lag_that_is_no_time_is_rejected(sets: SecuredSets, max_lag_s: float) -> None:
    async with sets.site("reader") as site:
        with pytest.raises(ReplicaFailed, match="max_lag_s"):
            request = calls.Read(sql="select 1", args=pack_values([]), max_lag_s=max_lag_s)
            await (await caller_of(site)).request("shop/r1", request, 5.0)


@pytest.mark.parametrize(
    "request_",
    [
        read("select 1", BEYOND, 20.0),
        calls.Held(key="k", at_least=BEYOND, wait_s=20.0),
        calls.Judgement(asked=((BEYOND, "tx"),), wait_s=20.0),
    ],
)
async def test_a_position_beyond_the_log_is_rejected_at_once(
    sets: SecuredSets, request_: calls.ReplicaRequest[Any]
) -> None:
    async with sets.site("reader") as site:
        with pytest.raises(ReplicaFailed, match="beyond the end of the log"):
            await (await caller_of(site)).request("shop/r1", request_, 5.0)


async def test_requests_over_the_quota_are_rejected_and_may_be_sent_again(sets: SecuredSets) -> None:
    async with sets.site("reader", "flood") as attacker, sets.site("victim", "calm") as victim:
        caller = await caller_of(attacker)
        near = await head_of(caller, "shop/r1") + 100
        requests = [read("select 1", near, 4.0)] * (UNDER_WAY_MAX // 4)
        for _ in range(5):
            await flood(attacker, "shop/r1", requests)

        with pytest.raises(ReplicaFailed, match="the quota is") as rejected:
            await caller.request("shop/r1", calls.Status(), 6.0)
        await within(4.0, (await caller_of(victim)).request("shop/r1", ONE, 4.0))

        async def is_served() -> bool:
            return bool(await caller.request("shop/r1", calls.Status(), 2.0))

        await eventually(is_served, what="the end of the requests that wait")

    assert rejected.value.retry is Retry.SAFE
    assert '"who":"reader","act":"Read rs.shop"' in sets.audit("shop/r1")


def peak_mib(sets: SecuredSets, replica: str) -> int:
    """The most memory that the agent's process has had."""
    status = Path(f"/proc/{sets.processes.pid(replica)}/status").read_text()
    (peak,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(peak.split()[1]) // 1024


@pytest.mark.parametrize(
    "sql",
    [
        "select repeat('x', 1000) as a from generate_series(1, 1500000)",
        "select i as a from generate_series(1, 1500000) i",
        "select repeat('x', 500000000) as a",
        "select repeat('x', 50000000) as a from generate_series(1, 20)",
    ],
)
async def test_a_result_that_is_too_large_ends_early(sets: SecuredSets, sql: str) -> None:
    before = peak_mib(sets, "shop/r2")
    async with sets.site("reader", "large") as site:
        with pytest.raises(ReplicaFailed, match="MiB: add LIMIT") as rejected:
            await (await caller_of(site)).request("shop/r2", read(sql), 20.0)

    assert rejected.value.retry is Retry.NEVER
    assert peak_mib(sets, "shop/r2") < before + 250


async def test_slow_queries_of_one_client_leave_connections_to_the_others(sets: SecuredSets) -> None:
    async with sets.site("reader", "slow") as attacker, sets.site("victim", "calm") as victim:
        await caller_of(attacker, "stock")
        caller = await caller_of(victim, "stock")
        await flood(attacker, "stock/r1", [read("select pg_sleep(8)") for _ in range(40)])

        await within(4.0, caller.request("stock/r1", ONE, 4.0))
        await within(4.0, caller.request("stock/r1", calls.Status(), 4.0))


async def test_an_execution_that_waits_for_its_token_does_not_hold_up_others(sets: SecuredSets) -> None:
    async with sets.site("writer", "waits") as attacker, sets.site("victim", "calm") as victim:
        await caller_of(attacker)
        caller = await caller_of(victim)
        near = await head_of(caller, "shop/r1") + 1000
        sql = "insert into accounts select $1, (random() * 0)::text, 1"
        row = 8_000_000 + secrets.randbelow(10**6)
        await flood(attacker, "shop/r1", [execute(attacker, sql, row + k, at_least=near) for k in range(3)])

        done = await within(3.0, caller.request("shop/r1", execute(victim, sql, row + 10), 3.0))

        assert isinstance(done, calls.ExecuteDone)
        assert done.error is None
        with pytest.raises(ReplicaFailed, match="beyond the end of the log"):
            await caller.request("shop/r1", execute(victim, sql, row + 11, at_least=BEYOND), 3.0)


async def test_a_returned_value_that_is_too_large_fails_its_own_execution_only(sets: SecuredSets) -> None:
    before = peak_mib(sets, "shop/r1")
    async with sets.site("writer", "large") as attacker, sets.connect("victim") as shop:
        await caller_of(attacker)
        row = 9_000_000 + secrets.randbelow(10**6)
        await shop.execute("insert into accounts values ($1, 'victim', 0)", row)
        large = "insert into accounts select $1, (random() * 0)::text, 1 returning repeat('x', 200000000)"
        for replica in ("shop/r1", "shop/r2"):
            await flood(attacker, replica, [execute(attacker, large, row + k) for k in range(1, 4)])

        outcomes = await asyncio.gather(*(shop.execute(VOLATILE, 2, row) for _ in range(2)), return_exceptions=True)

        assert not [outcome for outcome in outcomes if isinstance(outcome, TopsError)]
        caller = await caller_of(attacker)
        with pytest.raises(ReplicaFailed, match="MiB: add LIMIT"):
            await caller.request("shop/r1", execute(attacker, large, row + 9), 30.0)
    assert peak_mib(sets, "shop/r1") < before + 250


async def test_an_execution_that_takes_too_long_says_so(sets: SecuredSets) -> None:
    async with sets.connect("victim") as shop:
        with pytest.raises(WriteRejected, match="took longer than 5 s") as rejected:
            await shop.execute("insert into accounts select 7, pg_sleep(20)::text, 1")
    assert rejected.value.sqlstate == "57014"
    assert rejected.value.database is not None
    assert "execute_timeout_s" in rejected.value.database.hint


async def test_an_execution_of_many_statements_has_one_time(sets: SecuredSets) -> None:
    async with sets.site("writer") as site:
        slow = Statement("insert into accounts select $1, pg_sleep(3)::text, 1", (808_808,))
        member = Member(TxId(""), (slow,) * 5)
        request = calls.Execute(tx=f"{site.name}.1.1@r1", member=encode_member(member))
        done = await (await caller_of(site)).request("shop/r1", request, 9.0)
    assert isinstance(done, calls.ExecuteDone)
    assert done.error is not None
    assert done.error.sqlstate == "57014"


@pytest.mark.parametrize(
    "sql",
    [
        "update accounts set owner = pg_sleep(25)::text where id = $1",
        "insert into accounts values ($1, pg_sleep(25)::text, 1)",
        "insert into accounts select $1, pg_sleep(25)::text, 1 returning owner",
    ],
)
async def test_slow_executions_of_one_client_do_not_hold_up_others(sets: SecuredSets, sql: str) -> None:
    async with sets.site("writer", "slow") as attacker, sets.connect("victim") as shop:
        await caller_of(attacker)
        row = 7_000_000 + secrets.randbelow(10**6)
        await shop.execute("insert into accounts values ($1, 'victim', 0)", row)
        await shop.execute(VOLATILE, 1, row)
        for replica in ("shop/r1", "shop/r2"):
            await flood(attacker, replica, [execute(attacker, sql, row + k) for k in range(4)])

        await within(9.0, shop.execute(VOLATILE, 2, row))
        await within(9.0, shop.execute(VOLATILE, 3, row))

        query = "select balance from accounts where id = $1"
        assert await shop.fetchval(query, row, consistency="current") == 3
