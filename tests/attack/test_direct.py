"""Direct connections with keys: the certificates of both ends, rights, and the audit log of the replica."""

import asyncio

import pytest

from replication.client.direct import DirectConnection
from replication.model.values import pack_values
from replication.rpc import calls
from replication.rpc.direct import PATH, READY
from tests.attack.secured_sets import SecuredSets
from tests.integration.replication.test_direct_reads import quick
from tops.model.errors import NotAuthenticated, PermissionDenied
from tops.runtime.links.dialling import client_session, open_socket
from tops.runtime.links.link import receive_bytes
from tops.security import Kind

pytestmark = pytest.mark.asyncio(loop_scope="session")

COUNT = "select count(*) as n from accounts where id < 0"


async def test_a_reader_reads_quickly_over_tls_and_other_requests_are_rejected(sets: SecuredSets) -> None:
    async with sets.connect("reader") as shop:
        connection = await quick(shop, "r1", COUNT)
        found = await shop._caller.request("shop/r1", calls.GetDirectAddress(), 10.0)
        assert found.url.startswith("wss://")
        assert await shop.fetchval(COUNT, replica="r1") == 0

        with pytest.raises(PermissionDenied):
            await shop._caller.request("shop/r1", calls.Pause(), 10.0, connection)
        assert await shop.fetchval(COUNT, replica="r1") == 0
    assert '"who":"reader","act":"Pause rs.shop"' in sets.audit("shop/r1")


async def test_a_certificate_without_a_right_reads_nothing(sets: SecuredSets) -> None:
    async with sets.connect("reader") as reader, sets.site("guest") as guest:
        caller = reader._caller
        found = await caller.request("shop/r1", calls.GetDirectAddress(), 10.0)
        async with client_session() as session, await open_socket(session, found.url, guest.own, 5.0, PATH) as socket:
            await guest.own.introduce(socket, "127.0.0.1", "shop/r1", kind=Kind.REPLICA)
            assert await receive_bytes(socket, 10.0) == READY
            connection = DirectConnection("r1", "shop/r1", socket, caller)
            serving = asyncio.ensure_future(connection.serve())
            with pytest.raises(PermissionDenied):
                await caller.request("shop/r1", calls.Read(sql=COUNT, args=pack_values([])), 10.0, connection)
            serving.cancel()
    assert '"who":"guest' in sets.audit("shop/r1")


async def test_a_client_believes_no_replica_but_the_one_that_it_dials(sets: SecuredSets) -> None:
    async with sets.connect("reader") as shop:
        found = await shop._caller.request("shop/r1", calls.GetDirectAddress(), 10.0)
        own = shop._site.own
        for name in ("shop/r2", "stock/r1"):
            async with client_session() as session, await open_socket(session, found.url, own, 5.0, PATH) as socket:
                with pytest.raises(NotAuthenticated, match="responded where"):
                    await own.introduce(socket, "127.0.0.1", name, kind=Kind.REPLICA)
