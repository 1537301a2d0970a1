"""The list of a set's replicas holds under every policy: who has a replica's certificate and is not in the list, or is
a replica of another set, neither writes to the log, nor takes part in it, nor changes what the set has declared.

The sets are declared at a running broker and served by nobody, so that all policies fit into one cluster.
"""

import secrets
import tomllib
from collections.abc import Iterator
from typing import Any

import aiohttp
import msgspec
import pytest

from adapters.changes import Member, Upsert
from replication.model.config import ReplicaConfig, ReplicaSetConfig
from replication.model.events import log_type, write_body
from replication.policies import client_plans, policy_of, write_spec
from replication.rpc import calls
from tests.attack.raw_link import Verdict, raw_link
from tests.attack.secured_sets import SecuredSets
from tests.attack.test_fair_share import execute
from tests.attack.test_requests import EVIL, caller_of, undisturbed
from tests.attack.test_routes import tls_of
from tests.integration.origin.policies import POLICIES
from tests.integration.overlay.secured import issue
from tests.support.polling import eventually
from tops import Site
from tops.core.overlay.topology import rendezvous_of
from tops.model.errors import NotListed
from tops.model.filters import Filter
from tops.model.ids import NodeId, TxId
from tops.model.log_points import LogPoint
from tops.model.transactions import Access, LocalOutcome, Scope, ScopeLimit, TxType
from tops.protocol.messages import (
    Address,
    BeginPublic,
    BeginTx,
    CensusOpened,
    Dissemination,
    Envelope,
    Event,
    EventsPublished,
    FollowLog,
    HistoryDiffers,
    LinkMessage,
    OneShot,
    Origin,
    Published,
    RunOneShot,
    RunOneShots,
    StandingRegistered,
    TxSpec,
    TypeAdvertised,
    encode_body,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")

BROKERS = (NodeId("b1"), NodeId("b2"))
UNLISTED, OTHER_SET = "unlisted", "other set"


def config_of(policy: str, attacker: str) -> ReplicaSetConfig:
    """A set of its own for each policy and kind of attacker."""
    name = f"{policy}-{attacker}".replace(" ", "-")
    replicas = [ReplicaConfig(name=replica, broker="b1") for replica in ("r1", "r2", "r3")]
    return ReplicaSetConfig(name=name, replica=replicas, **tomllib.loads(POLICIES[policy]))


def attacks(config: ReplicaSetConfig, who: str, incarnation: int) -> Iterator[tuple[str, LinkMessage]]:
    """Everything that a replica does with its set's log, each under the attacker's own name."""
    log, home = log_type(config.name), rendezvous_of(BROKERS, f"rs.{config.name}")
    local = TxSpec(log.name, TxType.LOCAL, limit=ScopeLimit.LOCAL, census=None)
    voted = TxSpec(
        log.name, TxType.DISTRIBUTED, limit=ScopeLimit.LOCAL, local_outcome=LocalOutcome.FOLLOWS, census=None
    )
    public = TxSpec(log.name, TxType.LOCAL, Access.PUBLIC, limit=ScopeLimit.LOCAL, census=None)
    specs = {
        "as planned": write_spec(log, policy_of(config)),
        "local": local,
        "voted": voted,
        "operator": TxSpec(log.name, TxType.LOCAL, limit=ScopeLimit.LOCAL, census=None, operator=True),
    }
    write = write_body(Member(TxId(""), (EVIL,)))
    bodies = {
        "write": write,
        "batch": {**write, "batch": b"x"},
        "captured": {**write, "origin": "r1"},
        "control": {**write, "control": b"x"},
    }
    count = 0

    def tx() -> TxId:
        nonlocal count
        count += 1
        return TxId(f"{who}.{incarnation}.{count}")

    def message(body: object) -> LinkMessage:
        return Envelope(to=Address(home), body=body)  # type: ignore[arg-type]

    def spread(publication: object) -> LinkMessage:
        return Dissemination(rendezvous=home, upward=True, early=True, publication=publication)  # type: ignore[arg-type]

    yield "declare plans", message(TypeAdvertised(definitions=(log,), plans=(local, voted)))
    yield "declare members", message(TypeAdvertised(definitions=(log,), members=frozenset({who})))
    for spec_name, spec in specs.items():
        for body_name, body in bodies.items():
            event = Event(log.name, body)
            yield f"run {body_name}, {spec_name}", message(RunOneShot(tx=tx(), spec=spec, events=(event,)))
    one = OneShot(tx(), (Event(log.name, write),))
    yield "run together", message(RunOneShots(spec=specs["as planned"], transactions=(one,)))
    yield "publish", spread(Published(event=Event(log.name, write), origin=Origin(log.name, 1)))
    encoded = msgspec.Raw(encode_body(write))
    together = EventsPublished(event_type=log.name, bodies=(encoded,), origin=Origin(log.name, 1))
    yield "publish together", spread(together)
    yield "begin", message(BeginTx(tx=tx(), spec=voted))
    yield "begin a public one", message(BeginPublic(request=1, spec=public))
    opened = CensusOpened(tx=tx(), spec=local, coordinator=home, incarnation=1, initiator=Address(home))
    yield "begin a local one", spread(opened)
    yield (
        "register",
        message(
            StandingRegistered(
                voter="forged",
                event_type=log.name,
                filter=Filter.everything(),
                scope=Scope.DISTRIBUTED,
                secret=b"s" * 32,
                position=99,
                subscription=1,
            )
        ),
    )
    differs = HistoryDiffers(name=who, event_type=log.name, point=LogPoint("h", 1, "e" * 32))
    yield "hold another history", message(differs)


async def declared(sets: SecuredSets, config: ReplicaSetConfig) -> None:
    """By a replica of the list, at the broker that is the rendezvous of the set's log."""
    log = log_type(config.name)
    plans = client_plans(log, policy_of(config))
    keys = issue(sets.authority, config.site_of("r1"))
    async with raw_link(sets.cluster.urls("b1")[0], "b1", keys, "") as link:
        home = rendezvous_of(BROKERS, log.name)
        advertised = TypeAdvertised(definitions=(log,), plans=plans, members=config.sites())
        assert await link.send(Envelope(to=Address(home), body=advertised)) is Verdict.TAKEN


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("role", [UNLISTED, OTHER_SET])
async def test_only_replicas_of_the_list_write_to_a_log_or_change_its_plan(
    sets: SecuredSets, policy: str, role: str
) -> None:
    config = config_of(policy, role)
    log, home = log_type(config.name), rendezvous_of(BROKERS, f"rs.{config.name}")
    await declared(sets, config)
    who = f"{config.name}/r9" if role == UNLISTED else f"elsewhere-{config.name}/r1"
    keys = issue(sets.authority, who)
    taken: list[str] = []
    count = 0

    async with raw_link(sets.cluster.urls(home)[0], home, keys, "") as link:
        for name, message in attacks(config, who, link.incarnation):
            count += 1
            if await link.send(message) is not Verdict.REJECTED:
                taken.append(name)
        ahead = FollowLog(
            name=who,
            definitions=(log,),
            filter=Filter.everything(),
            position=99,
            start="now",
            credit=1,
            voter=None,
            history="h",
            digest="e" * 32,
        )
        await link.send(Envelope(to=Address(home), body=ahead))  # to read is its right, to be believed is not

    assert taken == []
    assert count == 26
    async with Site.connect(sets.cluster.urls(home), keys=sets.keys("operator"), instance="members") as site:
        told = await site.get_log_state(log)
    assert (told.decided, told.is_open, told.in_sync) == (0, True, ())


@pytest.mark.parametrize("policy", POLICIES)
async def test_replicas_of_the_list_are_taken(sets: SecuredSets, policy: str) -> None:
    """The same messages by a member: else the test above proves nothing."""
    config = config_of(policy, "member")
    home = rendezvous_of(BROKERS, f"rs.{config.name}")
    await declared(sets, config)
    who = config.site_of("r2")
    rejected: set[str] = set()

    async with raw_link(sets.cluster.urls(home)[0], home, issue(sets.authority, who), "") as link:
        for name, message in attacks(config, who, link.incarnation):
            if name != "declare members" and await link.send(message) is Verdict.REJECTED:
                rejected.add(name)

    # No replica has the right to operate.
    assert rejected == {f"run {body}, operator" for body in ("write", "batch", "captured", "control")}


@pytest.mark.parametrize("replica_set", ["shop", "stock"])
async def test_a_running_set_is_not_disturbed_by_a_replica_outside_its_list(
    sets: SecuredSets, replica_set: str
) -> None:
    config = sets.cluster.replica_set(replica_set)
    who = f"{replica_set}/r9"
    home = rendezvous_of(BROKERS, f"rs.{replica_set}")

    async def attack() -> None:
        async with raw_link(sets.cluster.urls(home)[0], home, sets.keys(who), "") as link:
            for name, message in attacks(config, who, link.incarnation):
                assert await link.send(message) is Verdict.REJECTED, name

    await undisturbed(sets, attack)

    async with sets.connect("victim", replica_set) as client:
        await client.write([Upsert("accounts", {"id": 8}, {"owner": "w", "balance": 1})])
        await client.wait_in_sync()

    async def audited() -> bool:
        return f'"who":"{who}","act":"originate rs.{replica_set}"' in sets.audit(home)

    await eventually(audited, what="the record of it")


@pytest.mark.parametrize("replica_set", ["shop", "stock"])
async def test_a_replica_outside_the_list_does_not_write_as_a_client(sets: SecuredSets, replica_set: str) -> None:
    """Neither with a request to an agent, nor with a client's transaction, nor over HTTP."""
    who, row = f"{replica_set}/r9", 6_000_000 + secrets.randbelow(10**6)
    insert = "insert into accounts select $1, (random() * 0)::text, 1"
    async with sets.site(who) as site:
        caller = await caller_of(site, replica_set)
        requests: list[calls.ReplicaRequest[Any]] = [
            execute(site, insert, row),
            calls.Write(tx=f"{site.name}.1.1@r1", member=b""),
        ]
        for request in requests:
            with pytest.raises(NotListed, match="not in the list of replicas"):
                await caller.request(f"{replica_set}/r1", request, 5.0)
        await caller.request(f"{replica_set}/r1", calls.Status(), 5.0)  # a newcomer needs it
    statuses = [
        await post(sets, who, replica_set, {"sql": sql, "args": [row]})
        for sql in (insert, "insert into accounts values ($1, 'x', 1)")
    ]

    assert [status in (403, 409) for status in statuses] == [True, True], statuses
    async with sets.connect("victim", replica_set) as client:
        assert await client.fetchval("select count(*) from accounts where id = $1", row) == 0
    assert f'"who":"{who}","act":"Execute rs.{replica_set}"' in sets.audit(f"{replica_set}/r1")


async def post(sets: SecuredSets, who: str, replica_set: str, body: object) -> int:
    """The status of a write over HTTP that shows this replica's certificate."""
    url = f"{sets.cluster.urls('b1')[0].replace('wss', 'https')}/v1/replica-sets/{replica_set}/write"
    async with aiohttp.ClientSession() as session, session.post(url, json=body, ssl=tls_of(sets.keys(who))) as response:
        return response.status
