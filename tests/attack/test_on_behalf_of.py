"""A service acts for others with no more rights than they have; nobody else can claim to act for another identity."""

import ssl
from typing import Any

import aiohttp
import pytest

from replication import connect
from replication.client.replica_set import ReplicaSet
from replication.rpc.conversation import Caller
from tests.attack.raw_link import raw_link
from tests.attack.secured_sets import SecuredSets
from tests.support.polling import eventually
from tops import Site
from tops.http.client import http_address
from tops.model.errors import ConfigError, NotReachable, PermissionDenied, ProtocolError
from tops.model.ids import NodeId
from tops.protocol.messages import Address, EndLog, Envelope, Principal, Sender
from tops.runtime.links.dialling import client_session, open_socket
from tops.runtime.links.identity import Self
from tops.runtime.links.link import exchange_link_hello
from tops.runtime.links.wire import make_link_hello
from tops.runtime.site_journal import new_incarnation

pytestmark = pytest.mark.asyncio(loop_scope="session")

OPERATOR = Principal("operator", "admin")
INSERT = "insert into accounts values ($1, $2, $3)"


async def post(sets: SecuredSets, who: str, replica_set: str, body: Any) -> tuple[int, dict[str, Any]]:
    """One write over HTTP at `b1`."""
    keys = sets.keys(who)
    tls = ssl.create_default_context(cafile=keys / "ca.crt")
    tls.load_cert_chain(keys / "node.crt", keys / "node.key")
    address = http_address(sets.cluster.urls("b1")[0], f"/v1/replica-sets/{replica_set}/write")
    async with aiohttp.ClientSession() as session, session.post(address, json=body, ssl=tls) as response:
        return response.status, await response.json()


def insert(id_: int, owner: str) -> dict[str, Any]:
    return {"sql": INSERT, "args": [id_, owner, 10]}


@pytest.mark.parametrize(("replica_set", "id_"), [("shop", 7001), ("stock", 7002)])
async def test_a_caller_with_the_right_writes_over_http(sets: SecuredSets, replica_set: str, id_: int) -> None:
    status, done = await post(sets, "victim", replica_set, insert(id_, "victim"))

    assert (status, done.get("rows")) == (200, [1]), done

    async def everywhere() -> bool:
        query = f"select owner from accounts where id = {id_}"
        return [await sets.rows(f"{replica_set}/{r}", query) for r in ("r1", "r2")] == [[("victim",)]] * 2

    await eventually(everywhere, what="the row at both replicas")


@pytest.mark.parametrize("replica_set", ["shop", "stock"])
async def test_a_reader_writes_nothing_over_http(sets: SecuredSets, replica_set: str) -> None:
    status, body = await post(sets, "reader", replica_set, insert(7003, "reader"))

    assert (status, "reader (reader) may not write" in body["error"]) == (403, True)
    assert await sets.rows(f"{replica_set}/r1", "select 1 from accounts where id = 7003") == []


async def test_the_replica_goes_by_the_caller_and_not_by_the_service(sets: SecuredSets) -> None:
    """The service may read, and the caller may not: what the connection begins with is rejected at a replica."""
    status, body = await post(sets, "inserter", "stock", insert(7004, "inserter"))

    assert (status, "site inserter (inserter) may not read" in body["error"]) == (403, True)
    audited = sets.audit("stock/r1") + sets.audit("stock/r2")
    assert '"who":"inserter","act":"Describe rs.stock"' in audited
    assert "through http-b1:" in audited
    assert await sets.rows("stock/r1", "select 1 from accounts where id = 7004") == []


@pytest.mark.parametrize(("claimed", "verb"), [(Principal("reader", "reader"), "write"), (OPERATOR, "operate")])
async def test_a_service_has_no_more_rights_than_it_and_its_principal_have(
    sets: SecuredSets, claimed: Principal, verb: str
) -> None:
    async def attempt(shop: ReplicaSet) -> None:
        if verb == "write":
            await shop.execute(INSERT, 7005, "reader", 10)
        else:
            await shop.order("r1", "pause")

    url = sets.cluster.urls("b1")
    async with connect(url, "shop", keys=sets.keys("http-b1"), on_behalf_of=claimed, timeout_s=15.0) as shop:
        with pytest.raises(PermissionDenied, match=f"may not {verb}"):
            await attempt(shop)

    if verb == "write":
        assert '"who":"reader","act":"write rs.shop"' in sets.audit("b1")
    assert await sets.rows("shop/r1", "select 1 from accounts where id = 7005") == []


@pytest.mark.parametrize("name", ["reader", "audited", "operator"])
async def test_a_site_that_is_no_service_can_not_claim_to_act_for_another(sets: SecuredSets, name: str) -> None:
    with pytest.raises(NotReachable):
        async with Site.connect(
            sets.cluster.urls("b1"), keys=sets.keys(name), instance="claims", on_behalf_of=OPERATOR, timeout_s=1.0
        ):
            pytest.fail("it must not get in")

    audited = sets.audit("b1") + sets.audit("b2")
    assert f'"who":"{name}:claims","act":"represent"' in audited
    assert "may not act on behalf of site operator (admin)" in audited


async def test_a_replica_can_not_claim_it_either(sets: SecuredSets) -> None:
    with pytest.raises(ConfigError, match="only sites do"):
        async with Site.connect(
            sets.cluster.urls("b1"), keys=sets.keys("shop/r9"), on_behalf_of=OPERATOR, timeout_s=1.0
        ):
            pytest.fail("it must not get in")


async def test_a_claim_inside_a_message_is_not_read(sets: SecuredSets) -> None:
    url = sets.cluster.urls("b1")[0]
    forged = Sender("http-b1", "service", on_behalf_of=OPERATOR)
    async with raw_link(url, "b1", sets.keys("writer"), "claims") as link:
        end = EndLog(request=1, event_type="rs.shop", name="shop/r1", operator=True)
        verdict = await link.send(Envelope(to=Address(NodeId("b1")), body=end, sender=forged))

    assert verdict.value == "rejected"


async def test_what_one_principal_began_is_not_anothers_although_the_service_is_the_same(sets: SecuredSets) -> None:
    keys, url = sets.keys("http-b1"), sets.cluster.urls("b1")
    victim, writer = Principal("victim", "writer"), Principal("writer", "writer")
    async with connect(url, "stock", keys=keys, on_behalf_of=victim, timeout_s=15.0) as stock:
        done = await stock.execute(INSERT, 7006, "victim", 10)
    async with connect(url, "stock", keys=keys, on_behalf_of=writer, timeout_s=15.0) as stock:
        with pytest.raises(PermissionDenied, match="may not operate"):
            await stock.outcome(done.tx)


async def test_a_session_can_not_change_whom_it_acts_for(sets: SecuredSets) -> None:
    """The same instance and incarnation once more, for another principal."""
    url, own = sets.cluster.urls("b1")[0], Self.with_keys(sets.keys("http-b2"), new_incarnation(), instance="same")

    async def enter(principal: Principal, session: aiohttp.ClientSession) -> None:
        acting = own.acting_for(principal)
        socket = await open_socket(session, url, acting, 15.0)
        await acting.introduce(socket, "127.0.0.1")
        await exchange_link_hello(socket, make_link_hello("", 0, "", (), ()), 15.0)

    async with client_session() as session:
        await enter(Principal("victim", "writer"), session)
        with pytest.raises(ProtocolError, match="began with another role, or for another identity"):
            await enter(OPERATOR, session)


async def test_the_caller_of_requests_is_the_principal(sets: SecuredSets) -> None:
    async with Site.connect(
        sets.cluster.urls("b1"), keys=sets.keys("http-b1"), instance="guest", on_behalf_of=Principal("guest", "nobody")
    ) as site:
        with pytest.raises(PermissionDenied, match="site guest"):
            await Caller(site, "shop", site.brokers).start()
