"""Every link message and every request, by every role, under one's own name, under another's, and on another set: the
verdict of a running cluster is what the tables of rights say.

The names `alpha` and `beta` are of sets that nobody serves: what a role is allowed to send there disturbs nobody.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

import pytest

from replication.rpc import calls
from replication.rpc.conversation import Caller
from replication.rpc.rights import JOINING, REQUEST_RIGHTS
from tests.attack.raw_link import RawLink, Verdict, raw_link
from tests.attack.samples import Named, sample
from tests.attack.secured_sets import SITES, SecuredSets
from tests.integration.overlay.secured import issue
from tests.replication.test_rights import example
from tops import Site
from tops.model.errors import NotReachable, PermissionDenied
from tops.model.ids import NodeId
from tops.protocol.messages import (
    AbortTx,
    Address,
    AddressedMessage,
    BeginRoutingTx,
    BeginTx,
    CensusOpened,
    CommitTx,
    Dissemination,
    EndRoutingTx,
    Envelope,
    EventsPublished,
    GetOutcome,
    LinkMessage,
    Publication,
    Published,
    PublisherDone,
    PublishInTx,
    RunOneShot,
    RunOneShots,
    StandingRegistered,
    TypeAdvertised,
)
from tops.protocol.set_types import set_definition
from tops.runtime.edge.rights import LINK_RIGHTS
from tops.security import Identity, Kind, Permissions, Verb, kind_of_name
from tops.security.identity import role_of_kind

pytestmark = pytest.mark.asyncio(loop_scope="session")

ROLES = ("reader", "writer", "alpha/r9", "beta/r9", "operator", "guest")
OWN, OTHERS, OTHER_SET = "own name", "another's name", "another set"
TARGETS = (OWN, OTHERS, OTHER_SET)
PERMISSIONS = Permissions()
PUBLICATIONS, LETTERS = frozenset(get_args(Publication)), frozenset(get_args(AddressedMessage))
CARRIERS = frozenset({Envelope, Dissemination})  # judged by what they carry
# Rights alone do not decide about transactions: these are for who began them, and begin nobody else's.
OF_ITS_INITIATOR = frozenset(
    {
        BeginTx,
        RunOneShot,
        RunOneShots,
        CommitTx,
        AbortTx,
        PublishInTx,
        PublisherDone,
        BeginRoutingTx,
        EndRoutingTx,
    }
)
# On a set's log only its replicas do this, whatever else a role allows: clients run what a replica has declared as the
# plan, and nobody has declared one for these sets.
OF_REPLICAS = frozenset({RunOneShot, RunOneShots, Published, EventsPublished, StandingRegistered})


@dataclass(frozen=True)
class Cell:
    kind: type
    role: str
    target: str


def cells() -> Iterator[Cell]:
    for kind in LINK_RIGHTS:
        if kind not in CARRIERS:
            yield from (Cell(kind, role, target) for role in ROLES for target in TARGETS)


def identity_of(role: str) -> Identity:
    kind = kind_of_name(role)
    return Identity("test", kind, role, role_of_kind(kind, SITES.get(role, "")))


def expected(cell: Cell, body: Any) -> Verdict:
    """From the tables, and from what else is checked at the edge."""
    need, identity = LINK_RIGHTS[cell.kind], identity_of(cell.role)
    if need is None:
        return Verdict.CLOSED

    def may(verb: Verb, event_type: str) -> bool:
        return PERMISSIONS.allowed(identity, verb, event_type)

    rights = list(need.rights(body))
    if cell.kind is GetOutcome:
        rights.append(((Verb.RESOLVE if cell.target == OTHERS else Verb.BEGIN,), body.event_type))
    if not all(any(may(verb, event_type) for verb in verbs) for verbs, event_type in rights):
        return Verdict.REJECTED
    if cell.target == OTHERS and cell.kind in OF_ITS_INITIATOR:
        return Verdict.REJECTED
    if cell.kind in OF_REPLICAS and identity.replica_set != ("beta" if cell.target == OTHER_SET else "alpha"):
        return Verdict.REJECTED
    return Verdict.TAKEN


def message_of(cell: Cell, link: RawLink) -> tuple[LinkMessage, Any]:
    node = f"{cell.role}:{link.instance}" if link.instance else cell.role
    node = node if cell.target != OTHERS else "victim:else"
    incarnation = link.incarnation if cell.target != OTHERS else 1
    named = Named("rs.beta" if cell.target == OTHER_SET else "rs.alpha", node, incarnation, "b1")
    body = sample(cell.kind, named)
    if cell.kind in PUBLICATIONS:
        return Dissemination(rendezvous=NodeId("b1"), upward=True, early=False, publication=body), body
    if cell.kind in LETTERS:
        return Envelope(to=Address(NodeId("b1")), body=body), body
    return body, body


async def advertise(sets: SecuredSets, name: str) -> None:
    """The set's log is known where the messages go."""
    keys = issue(sets.authority, f"{name}/r8")
    async with raw_link(sets.cluster.urls("b1")[0], "b1", keys, "") as link:
        advertised = TypeAdvertised(definitions=(set_definition(f"rs.{name}"),))
        assert await link.send(Envelope(to=Address(NodeId("b1")), body=advertised)) is Verdict.TAKEN


async def test_every_link_message_by_every_role(sets: SecuredSets) -> None:
    todo = list(cells())
    wrong: list[str] = []
    seen: Counter[Verdict] = Counter()

    async def judge(role: str) -> None:
        keys = sets.keys(role)
        url = sets.cluster.urls("b1")[0]
        async with raw_link(url, "b1", keys, "" if "/" in role else "matrix") as link:
            for cell in [c for c in todo if c.role == role]:
                await link.open()
                message, body = message_of(cell, link)
                verdict = await link.send(message)
                seen[verdict] += 1
                if verdict is not (wanted := expected(cell, body)):
                    wrong.append(f"{cell.kind.__name__} by {role}, {cell.target}: {verdict.value}, not {wanted.value}")

    for name in ("alpha", "beta"):
        await advertise(sets, name)
    await asyncio.gather(*map(judge, ROLES))

    assert not wrong, "\n".join(wrong)
    assert sum(seen.values()) == len(todo) >= 900
    assert min(seen.values()) >= 100, "each verdict is met often"


async def test_every_request_by_every_role(sets: SecuredSets) -> None:
    """At replicas that run: `shop` is one's own set, `stock` another one."""
    wrong: list[str] = []
    count = 0

    async def started(site: Site, replica_set: str) -> Caller | None:
        caller = Caller(site, replica_set, site.brokers)
        try:
            await caller.start()
        except PermissionDenied:
            return None
        return caller

    async def responds(caller: Caller | None, to: str, request: calls.ReplicaRequest[Any]) -> bool:
        if caller is None:
            return False
        try:
            await caller.request(to, request, 20.0)
        except PermissionDenied:
            return False
        except NotReachable:
            raise
        except Exception:
            return True  # it was allowed, and came to nothing
        return True

    for role in ("reader", "writer", "shop/r9", "stock/r9", "operator", "guest"):
        identity = identity_of(role)
        async with sets.site(role, "matrix") as site:
            for replica_set in ("shop", "stock"):
                caller = await started(site, replica_set)
                for kind, verb in REQUEST_RIGHTS.items():
                    for name in (role, "victim"):
                        request = example(kind, f"{name}:else.1.0000000001@r1")
                        log = f"rs.{replica_set}"
                        wanted = PERMISSIONS.allowed(identity, verb, log)
                        if "tx" in kind.__struct_fields__ and name != role:
                            wanted = wanted and PERMISSIONS.allowed(identity, Verb.OPERATE, log)
                        if identity.kind is Kind.REPLICA:  # neither is in its set's list
                            wanted = wanted and kind in JOINING
                        count += 1
                        if await responds(caller, f"{replica_set}/r1", request) is not wanted:
                            wrong.append(f"{kind.__name__} by {role} as {name} at {replica_set} is not {wanted}")
                if role == "operator" and caller is not None:
                    await caller.request(f"{replica_set}/r1", calls.Resume(), 20.0)

    assert wrong == []
    assert count >= 400
    async with sets.connect("victim") as shop:
        await shop.wait_in_sync()


async def test_the_oracle_notices_a_right_that_is_missing_or_too_much() -> None:
    named = Named("rs.alpha", "writer:matrix", 1, "b1")

    assert expected(Cell(Published, "writer", OWN), sample(Published, named)) is Verdict.REJECTED
    assert expected(Cell(Published, "alpha/r9", OWN), sample(Published, named)) is Verdict.TAKEN
    assert expected(Cell(CensusOpened, "writer", OWN), sample(CensusOpened, named)) is Verdict.REJECTED
