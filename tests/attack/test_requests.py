"""Attacks on requests, responses and logs of replica sets, with real keys against real processes.

Each is rejected and audited, changes nothing, and disturbs no other client.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, cast

import pytest

from adapters.changes import Member, Statement, Upsert, encode_member
from replication.model.events import log_type, request_type, response_type, write_body
from replication.model.values import pack_values
from replication.policies import policy_of, write_spec
from replication.rpc import calls
from replication.rpc.conversation import Caller
from replication.rpc.rejections import WriteRejected
from tests.attack.raw_link import RawLink, Verdict, raw_link
from tests.attack.secured_sets import SecuredSets
from tests.support.polling import eventually
from tops import EventType, Site
from tops.model.errors import PermissionDenied, TransactionAborted
from tops.model.filters import Filter
from tops.model.ids import NodeId, TxId
from tops.model.transactions import ScopeLimit, TxType
from tops.protocol.messages import (
    Address,
    CensusOpened,
    Dissemination,
    Envelope,
    Event,
    Origin,
    Published,
    RunOneShot,
    SubscriptionChanged,
    TxSpec,
    TypeAdvertised,
)
from tops.runtime.participants import Participant, Received

pytestmark = pytest.mark.asyncio(loop_scope="session")

BROKERS = ("b1", "b2")
FORGED = calls.ReadDone(replica="r1", rows=b"", position=666)
READ = calls.Read(sql="select 1", args=pack_values([]))
EVIL = Statement("insert into accounts values (666, 'mallory', 1000000)")


_rows = itertools.count(1000)


async def undisturbed(sets: SecuredSets, attack: Callable[[], Awaitable[None]]) -> None:
    """The attack while a client writes and reads: all of that succeeds, and the attack changed nothing."""
    stop, row = asyncio.Event(), next(_rows)

    async def work() -> int:
        done = 0
        async with sets.connect("victim") as shop:
            await shop.execute("insert into accounts values ($1, 'victim', 0)", row)
            while not stop.is_set() or done < 5:
                done += 1
                await shop.execute("update accounts set balance = $1 where id = $2", done, row)
                query = "select balance from accounts where id = $1"
                assert await shop.fetchval(query, row, consistency="current") == done
        return done

    working = asyncio.ensure_future(work())
    try:
        await attack()
    finally:
        stop.set()
        done = await working
    assert done >= 5
    for replica in ("shop/r1", "shop/r2", "stock/r1", "stock/r2"):
        assert await sets.rows(replica, "select id from accounts where id = 666") == []


def raw(sets: SecuredSets, name: str) -> AbstractAsyncContextManager[RawLink]:
    return raw_link(sets.cluster.urls("b1")[0], "b1", sets.keys(name), "" if "/" in name else "raw")


def rendezvous(site: Site, event_type: EventType) -> NodeId:
    return site._node.core.directory.rendezvous(event_type.name)


def published(event_type: str, body: dict[str, Any], to: str) -> Dissemination:
    event = Published(event=Event(event_type, body), origin=Origin(event_type, 1))
    return Dissemination(rendezvous=NodeId(to), upward=True, early=True, publication=event)


# ----------------------------------------------------------------------------------------------------------- requests


async def caller_of(site: Site, replica_set: str = "shop") -> Caller:
    caller = Caller(site, replica_set, site.brokers)
    await caller.start()
    return caller


@pytest.mark.parametrize("who", ["reader", "writer", "shop/r9"])
@pytest.mark.parametrize("request_", [calls.Pause(), calls.Reload(), calls.GuardRows(repair="x", row_keys=())])
async def test_only_operators_operate(sets: SecuredSets, who: str, request_: calls.ReplicaRequest[Any]) -> None:
    async def attack() -> None:
        async with sets.site(who) as site:
            caller = await caller_of(site)
            with pytest.raises(PermissionDenied) as denied:
                await caller.request("shop/r1", request_, 20.0)
            assert (denied.value.verb, denied.value.event_type) == ("operate", "rs.shop")

    await undisturbed(sets, attack)

    assert f'"who":"{who}","act":"{type(request_).__name__} rs.shop"' in sets.audit("shop/r1")


async def test_a_reader_reads_and_does_not_write(sets: SecuredSets) -> None:
    async with sets.connect("reader") as shop:
        assert await shop.fetchval("select count(*) from accounts where id = 666", consistency="current") == 0
        with pytest.raises(PermissionDenied):
            await shop.write([EVIL])
    async with sets.connect("reader", "stock") as stock:
        with pytest.raises(PermissionDenied) as denied:
            await stock.write([EVIL])
        assert denied.value.verb == "write"


@pytest.mark.parametrize("who", ["reader", "writer", "stock/r1"])
async def test_nobody_but_its_replicas_gets_a_copy_of_a_set(sets: SecuredSets, who: str) -> None:
    if who == "stock/r1":  # a replica of another set does not even get its request to the replicas
        async with raw(sets, "stock/r9") as link:
            asked = request_type("shop", BROKERS).name
            assert await link.send(published(asked, {"to": "shop/r1", "body": b""}, "b1")) is Verdict.REJECTED
        return
    async with sets.site(who) as site:
        requests: list[calls.ReplicaRequest[Any]] = [
            calls.OpenCopy(copy="mine"),
            calls.GetCopyChunk(copy="mine", piece=0, number=0),
        ]
        for request in requests:
            with pytest.raises(PermissionDenied):
                await (await caller_of(site)).request("shop/r1", request, 20.0)


async def test_a_write_under_the_next_id_of_another_client_is_rejected(sets: SecuredSets) -> None:
    member = encode_member(Member(TxId(""), (EVIL,)))

    async def attack() -> None:
        async with sets.site("writer") as site:
            caller = await caller_of(site, "stock")
            with pytest.raises(PermissionDenied, match="operate"):
                await caller.request("stock/r1", calls.Write(tx="victim:0a.77.0000000002@r1", member=member), 20.0)

    await undisturbed(sets, attack)


# ---------------------------------------------------------------------------------------------------------- responses


async def test_no_forged_response_reaches_a_client(sets: SecuredSets) -> None:
    """The forger knows the victim's name, the type and even the request's id."""
    responses = response_type("shop", BROKERS).name
    async with sets.site("victim", "reads") as victim:
        caller = await caller_of(victim)
        received_of: list[Received] = []
        cast(Any, caller).on_notify = _listening(caller, received_of)
        for forger in ("writer", "reader", "operator", "stock/r9", "shop/r9"):
            async with raw(sets, forger) as link:
                results = []
                for _ in range(60):
                    reading = asyncio.ensure_future(caller.request("shop/r1", READ, 20.0))
                    await asyncio.sleep(0)
                    (request_id,) = caller._waiting
                    body = {"to": victim.name, "body": calls.encode_bundle([(request_id, FORGED)])}
                    verdict = await link.send(published(responses, body, rendezvous(victim, EventType(responses))))
                    results.append((verdict, (await reading).position))
                assert 666 not in [position for _, position in results], forger
                if forger not in ("shop/r9", "operator"):  # these have the right to respond, and nobody believes them
                    assert {verdict for verdict, _ in results} == {Verdict.REJECTED}, forger
        assert {event.sender.identity for event in received_of if event.sender} <= {"shop/r1", "shop/r9", "operator"}
    assert '"who":"writer"' in sets.audit("b1")


def _listening(caller: Caller, received_of: list[Received]) -> Callable[[Received], None]:
    honest = caller.on_notify

    def listen(event: Received) -> None:
        received_of.append(event)
        honest(event)

    return listen


@pytest.mark.parametrize("who", ["reader", "writer", "operator", "shop/r9", "stock/r9"])
async def test_nobody_receives_what_is_addressed_to_others(sets: SecuredSets, who: str) -> None:
    taken: list[Received] = []

    class Tap(Participant):
        def on_notify(self, event: Received) -> None:
            taken.append(event)

    wishes = [
        Filter(),
        Filter.where("to", "=", "victim:reads"),
        Filter.where("to", "in", ["victim:reads", "shop/r1", "*"]),
        Filter.where("to", "!=", "x"),
    ]

    async def attack() -> None:
        for event_type in (response_type("shop", BROKERS), request_type("shop", BROKERS)):
            for wish in wishes:
                async with sets.site(who) as site:
                    with pytest.raises(PermissionDenied):
                        await site.subscribe(event_type, wish, participant=Tap())

    await undisturbed(sets, attack)

    assert taken == []


# --------------------------------------------------------------------------------------------------------------- logs


async def test_a_writer_publishes_nothing_into_a_log(sets: SecuredSets) -> None:
    body = write_body(Member(TxId(""), (EVIL,)))

    async def attack() -> None:
        for name in ("shop", "stock"):
            async with raw(sets, "audited") as link:
                for broker in BROKERS:
                    assert await link.send(published(f"rs.{name}", body, broker)) is Verdict.REJECTED

    await undisturbed(sets, attack)

    assert '"act":"originate rs.shop"' in sets.audit("b1")


def specs(sets: SecuredSets, name: str) -> dict[str, TxSpec]:
    log = log_type(name)
    return {
        "local": TxSpec(log.name, TxType.LOCAL, limit=ScopeLimit.LOCAL, census=None),
        "nobody votes": TxSpec(log.name, TxType.DISTRIBUTED, limit=ScopeLimit.DISTRIBUTED, census=None),
    }


@pytest.mark.parametrize("name", ["shop", "stock"])
async def test_a_writer_runs_no_transaction_on_a_log_past_its_policy(sets: SecuredSets, name: str) -> None:
    async def attack() -> None:
        async with sets.site("writer") as site:
            await site.advertise(log_type(name))
            for spec in specs(sets, name).values():
                with pytest.raises(TransactionAborted, match="against-plan"):
                    await site.run(spec, [write_body(Member(TxId(""), (EVIL,)))])

    await undisturbed(sets, attack)

    await eventually(lambda: _audited(sets, f'"act":"run rs.{name}"'), what="the record of it")


async def _audited(sets: SecuredSets, text: str) -> bool:
    return any(text in sets.audit(broker) for broker in BROKERS)


async def test_a_writer_neither_declares_plans_nor_poses_as_operator_nor_submits_what_was_captured(
    sets: SecuredSets,
) -> None:
    log = log_type("shop")
    weak = specs(sets, "shop")["local"]
    planned = write_spec(log, policy_of(sets.cluster.replica_set("shop")))
    body = write_body(Member(TxId(""), (EVIL,)))

    async def attack() -> None:
        async with raw(sets, "writer") as link:
            tx = TxId(f"writer:raw.{link.incarnation}.1")
            to = Address(NodeId("b1"))
            operator = TxSpec(log.name, TxType.LOCAL, limit=ScopeLimit.LOCAL, census=None, operator=True)
            for message in (
                TypeAdvertised(definitions=(log,), plans=(weak,)),
                RunOneShot(tx=tx, spec=operator, events=(Event(log.name, body),)),
                RunOneShot(tx=tx, spec=planned, events=(Event(log.name, {**body, "batch": b"x"}),)),
                RunOneShot(tx=tx, spec=planned, events=(Event(log.name, {**body, "origin": "r1"}),)),
                RunOneShot(tx=tx, spec=planned, events=(Event(log.name, {**body, "control": b"x"}),)),
                RunOneShot(tx=tx, spec=planned, events=(Event("other", {"id": 1}),)),
            ):
                assert await link.send(Envelope(to=to, body=message)) is Verdict.REJECTED, message
            opened = CensusOpened(tx=tx, spec=weak, coordinator=NodeId("b1"), incarnation=1, initiator=to)
            for broker in BROKERS:
                announced = Dissemination(rendezvous=NodeId(broker), upward=True, early=True, publication=opened)
                assert await link.send(announced) is Verdict.REJECTED

    await undisturbed(sets, attack)


async def test_no_child_type_leads_into_a_log_and_nobody_defines_a_sets_types(sets: SecuredSets) -> None:
    log = log_type("shop")
    child = EventType("mallory", parent=log.name, durable=True)
    other = EventType("rs.fresh", {"x": int}, durable=True)
    misnamed = EventType("rs.shop.mine", {"to": str, "body": bytes})

    async with raw(sets, "writer") as link:
        for definitions in ((log, child), (other,), (misnamed,)):
            wanted = SubscriptionChanged(
                subscription=1, definitions=definitions, filter=Filter(), scope=None, durable=False
            )
            assert await link.send(wanted) is Verdict.REJECTED, definitions
            advertised = Envelope(to=Address(NodeId("b1")), body=TypeAdvertised(definitions=definitions))
            assert await link.send(advertised) is Verdict.REJECTED, definitions


async def test_what_the_policy_plans_still_works_for_writers_and_checks(sets: SecuredSets) -> None:
    async with sets.connect("writer") as shop, sets.connect("writer", "stock") as stock:
        await shop.execute("insert into accounts values (7, 'w', 1) on conflict (id) do nothing")
        await stock.write([Upsert("accounts", {"id": 7}, {"owner": "w", "balance": 1})])
        with pytest.raises(WriteRejected):
            await shop.execute("insert into accounts values (8, 'w', -1)")
    async with sets.connect("operator") as shop:
        assert "paused" in await shop.order("r2", "pause")
        assert "goes on" in await shop.order("r2", "resume")


BAD_WRITES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "no member": {"at": 0, "write": b"\xff\xff", "reads": b""},
    "another kind": {"at": "x", "write": 7, "reads": None},
    "no bytes": {"at": 0, "write": b"", "reads": b""},
}


@pytest.mark.parametrize("body", BAD_WRITES.values(), ids=BAD_WRITES)
async def test_a_write_that_cannot_be_read_stops_no_replica(sets: SecuredSets, body: dict[str, Any]) -> None:
    log = log_type("shop")
    planned = write_spec(log, policy_of(sets.cluster.replica_set("shop")))

    async def attack() -> None:
        async with raw(sets, "writer") as link:
            tx = TxId(f"writer:raw.{link.incarnation}.1")
            for broker in BROKERS:
                run = RunOneShot(tx=tx, spec=planned, events=(Event(log.name, body),))
                await link.send(Envelope(to=Address(NodeId(broker)), body=run))

    await undisturbed(sets, attack)

    async with sets.connect("victim") as shop:
        await shop.wait_in_sync()
