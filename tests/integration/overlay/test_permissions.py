"""What a role may and may not do, through a broker with keys; and who gets in at all."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
import pytest_asyncio

from tests.attack.raw_link import Verdict, raw_link
from tests.integration.overlay.cluster import Recorder, event_type
from tests.integration.overlay.secured import CLUSTER, Secured, issue, secured_broker
from tests.support.polling import eventually
from tops import EventType, Outcome, Scope, TxType
from tops.model.errors import ConfigError, NotAuthenticated, NotReachable, PermissionDenied, ProtocolError, TopsError
from tops.protocol.messages import CensusPolicy, TxSpec
from tops.runtime.links.dialling import client_session, open_socket
from tops.runtime.links.identity import Self
from tops.runtime.links.link import receive_bytes
from tops.security import Authority, Initiator, fresh_nonce, tls_channel, utc_now

ROLES = [
    '[[role]]\nname = "advertiser"\nallow = ["advertise shop.**", "subscribe shop.**"]',
    '[[role]]\nname = "publisher"\nallow = ["advertise shop.**", "publish shop.**", "subscribe shop.**"]',
    '[[role]]\nname = "narrow"\nallow = ["subscribe shop.**", "follow shop.**"]\ndeny = ["subscribe shop.pay.**"]',
]


@pytest_asyncio.fixture
async def secured(tmp_path: Path) -> AsyncIterator[Secured]:
    async with secured_broker(tmp_path, ROLES) as running:
        yield running


def shop_type(name: str = "shop.orders", *, durable: bool = False, parent: str | None = None) -> EventType:
    attributes = {} if parent else {"id": int}
    return EventType(f"{name}", attributes, durable=durable, parent=parent)


async def test_advertise_is_refused_to_a_reader_and_allowed_to_a_writer(secured: Secured) -> None:
    orders = shop_type()
    async with secured.site("reader", "reader") as reader, secured.site("writer") as writer:
        with pytest.raises(PermissionDenied, match="may not advertise"):
            await reader.advertise(orders)

        await writer.advertise(orders)


async def test_a_confirmed_publish_is_refused_without_the_right_and_the_site_goes_on(secured: Secured) -> None:
    log = shop_type("shop.log", durable=True)
    async with secured.site("quiet", "advertiser") as quiet, secured.site("loud", "publisher") as loud:
        await quiet.advertise(log)
        with pytest.raises(PermissionDenied, match="may not publish"):
            await quiet.publish(log, {"id": 1})
        with pytest.raises(PermissionDenied, match="may not publish"):
            await quiet.publish(log, {"id": 2})

        await loud.advertise(log)
        assert await loud.publish(log, {"id": 3}) == 1


async def test_an_ordinary_event_without_the_right_reaches_nobody(secured: Secured) -> None:
    orders = shop_type()
    async with secured.site("quiet", "advertiser") as quiet, secured.site("loud", "publisher") as loud:
        taken = Recorder()
        await loud.subscribe(orders, participant=taken)
        await quiet.advertise(orders)
        await loud.advertise(orders)

        await quiet.publish(orders, {"id": 1})
        await quiet.flush()
        await loud.publish(orders, {"id": 2})

        await eventually(lambda: bool(taken.ordinary))
        assert taken.ids() == [2]
        await eventually(lambda: bool(quiet._node.rejected))
        with pytest.raises(PermissionDenied):
            await quiet.publish(orders, {"id": 3})


async def test_begin_is_refused_without_the_right(secured: Secured) -> None:
    orders = shop_type()
    async with secured.site("publisher", "publisher") as publisher, secured.site("all", "participant") as writer:
        await publisher.advertise(orders)
        await writer.advertise(orders)
        with pytest.raises(PermissionDenied, match="may not begin"):
            await publisher.execute(orders, events=[{"id": 1}])

        await writer.subscribe(orders, participant=Recorder(), scope=Scope.DISTRIBUTED)
        outcome = await writer.execute(orders, events=[{"id": 1}])
        assert outcome.outcome is Outcome.COMMITTED


async def test_a_writer_can_not_register_as_a_distributed_participant_and_is_told_so(secured: Secured) -> None:
    async with secured.site("writer") as writer:
        with pytest.raises(PermissionDenied, match="may not participate"):
            await writer.subscribe(shop_type(), participant=Recorder(), scope=Scope.DISTRIBUTED)


async def test_a_reader_can_not_follow_a_log(secured: Secured) -> None:
    async with secured.site("reader", "reader") as reader:
        with pytest.raises(PermissionDenied, match="may not follow"):
            await reader.subscribe(shop_type("shop.log", durable=True), participant=Recorder(), durable="mine")


async def test_subscribe_is_refused_for_a_denied_type(secured: Secured) -> None:
    pay = shop_type("shop.pay.salaries")
    async with secured.site("narrow", "narrow") as narrow:
        with pytest.raises(PermissionDenied, match="may not subscribe"):
            await narrow.subscribe(pay, participant=Recorder())


@pytest.mark.parametrize("durable", [False, True])
async def test_a_denied_child_is_not_delivered_through_its_parent(secured: Secured, durable: bool) -> None:
    parent = shop_type("shop", durable=durable)
    allowed = EventType("shop.orders", parent="shop", durable=durable)
    denied = EventType("shop.pay.salaries", parent="shop", durable=durable)
    async with secured.site("writer") as writer, secured.site("narrow", "narrow") as narrow:
        writer.define(parent)
        await writer.advertise(allowed)
        await writer.advertise(denied)
        taken = Recorder()
        await narrow.subscribe(parent, participant=taken, durable="narrow" if durable else None)

        await writer.publish(denied, {"id": 1})
        await writer.publish(allowed, {"id": 2})

        await eventually(lambda: bool(taken.ordinary))
        assert taken.ids() == [2]


async def test_resolve_lets_an_operator_ask_what_a_reader_may_not(secured: Secured) -> None:
    orders = shop_type()
    async with secured.site("writer") as writer:
        await writer.advertise(orders)
    async with secured.site("root", "admin") as root, secured.site("reader", "reader") as reader:
        response = await root.get_outcome("writer.1.1", orders)
        assert response.outcome is Outcome.ABORTED
        with pytest.raises(PermissionDenied, match="may not resolve"):
            await reader.get_outcome("writer.1.2", orders)


async def test_only_an_administrator_ends_somebody_elses_private_transaction(secured: Secured) -> None:
    orders = shop_type()
    async with (
        secured.site("writer") as writer,
        secured.site("other", "participant") as other,
        secured.site("root", "admin") as root,
    ):
        for site in (writer, other, root):
            await site.advertise(orders)
        await other.subscribe(orders, participant=Recorder())
        tx = await writer.begin(TxSpec(orders.name, TxType.DISTRIBUTED, census=CensusPolicy(10.0, replies=1)))
        with pytest.raises(PermissionDenied, match="may not"):
            await other.contribute(tx.id, tx.spec).abort("mischief")

        outcome = await root.contribute(tx.id, tx.spec).abort("by hand")
        assert outcome.outcome is Outcome.ABORTED


async def test_refusals_are_audited(secured: Secured) -> None:
    async with secured.site("reader", "reader") as reader:
        with pytest.raises(PermissionDenied):
            await reader.advertise(shop_type())

    audit = (secured.broker.table.data / "audit.log").read_text()
    assert '"who":"reader","act":"advertise shop.orders"' in audit


# ------------------------------------------------------------------------------------------------------ who gets in


async def test_a_link_ends_with_its_certificate(secured: Secured) -> None:
    keys = secured.keys("short", ends=timedelta(seconds=3))
    async with raw_link(secured.broker.url, "b1", keys, "s1") as link:
        secured.broker.reload_keys()  # which it does by itself every few seconds
        assert await link.send() is Verdict.TAKEN

        await asyncio.sleep(4)
        secured.broker.reload_keys()

        assert await link.send() is Verdict.CLOSED
        assert "the certificate is valid from" in link.closed_because


async def test_a_site_goes_on_with_a_renewed_certificate_when_the_old_one_ends(secured: Secured) -> None:
    keys = secured.keys("renewed", ends=timedelta(seconds=3))
    async with secured.site("renewed", keys=keys) as site:
        secured.keys("renewed", renew=True)
        await asyncio.sleep(4)
        secured.broker.reload_keys()

        await site.advertise(shop_type("shop.renewed"))
        assert site._node.link is not None and site._node.link.connected


async def test_an_expired_certificate_is_refused_before_it_is_used(secured: Secured) -> None:
    keys = secured.keys("late", begins=timedelta(days=-2), ends=timedelta(days=-1))

    with pytest.raises(ConfigError, match="valid from"):
        async with secured.site("late", keys=keys):
            pytest.fail("it must not get in")


async def test_a_certificate_of_another_authority_does_not_get_in(secured: Secured, tmp_path: Path) -> None:
    foreign = Authority.init(tmp_path / "foreign", CLUSTER, utc_now(), 30)

    with pytest.raises((NotReachable, NotAuthenticated)):
        async with secured.site("stranger", keys=issue(foreign, "stranger"), timeout_s=3):
            pytest.fail("it must not get in")


async def test_a_site_without_keys_does_not_get_in(secured: Secured) -> None:
    from tops import Site

    with pytest.raises(TopsError):
        async with Site.connect(secured.broker.url.replace("wss", "ws"), name="bare", cluster=CLUSTER, timeout_s=2):
            pytest.fail("it must not get in")


async def test_a_certificate_that_is_revoked_loses_its_live_connection_and_can_t_come_back(secured: Secured) -> None:
    keys = secured.keys("traitor")
    async with secured.site("traitor", keys=keys) as traitor:
        await traitor.advertise(shop_type())
        assert traitor._node.link is not None and traitor._node.link.connected

        secured.authority.revoke("traitor", utc_now())
        secured.broker.connections.revoke()

        await eventually(lambda: traitor._node.link is not None and not traitor._node.link.connected)
        await eventually(lambda: NODE_GONE(secured, "traitor"))
    with pytest.raises((ConfigError, NotReachable, NotAuthenticated)):
        async with secured.site("traitor", keys=keys):
            pytest.fail("it must not get in")


def NODE_GONE(secured: Secured, name: str) -> bool:
    return name not in secured.broker.node.core.edge.sites


async def test_a_recorded_handshake_opens_no_second_connection(secured: Secured) -> None:
    own = Self.with_keys(secured.keys("victim"), 7)
    url = secured.broker.url
    async with client_session() as session:
        async with await open_socket(session, url, own, 5) as socket:
            initiator = Initiator(own.party, tls_channel(socket.get_extra_info("ssl_object")), fresh_nonce())
            hello = initiator.hello()
            await socket.send_bytes(hello)
            proof, _ = initiator.on_welcome(await receive_bytes(socket, 5), utc_now())
            await socket.send_bytes(proof)
            await receive_bytes(socket, 5)  # the broker says which session it has: we are in
        async with await open_socket(session, url, own, 5) as replayed:
            await replayed.send_bytes(hello)
            await receive_bytes(replayed, 5)  # a welcome to somebody else's nonce
            await replayed.send_bytes(proof)
            with pytest.raises(ProtocolError, match="closed"):
                await receive_bytes(replayed, 5)


async def test_a_site_can_t_take_a_brokers_name_nor_a_newer_lifes_place(secured: Secured) -> None:
    url = secured.broker.url
    async with secured.site("twin") as _:
        old = Self.with_keys(secured.broker.table.keys.parent / "twin", 1)  # type: ignore[union-attr]
        async with client_session() as session, await open_socket(session, url, old, 5) as socket:
            await old.introduce(socket, "127.0.0.1")
            with pytest.raises(ProtocolError, match="newer incarnation"):
                await receive_bytes(socket, 5)


async def test_the_whole_conversation_works_over_tls(secured: Secured) -> None:
    orders = event_type("shop.tls")
    async with secured.site("one") as one, secured.site("two", "participant") as two:
        await one.advertise(orders)
        participant = Recorder()
        await two.subscribe(orders, participant=participant)
        await one.publish(orders, {"id": 1})

        async with one.transaction(orders, TxType.DISTRIBUTED, census=CensusPolicy(10.0, replies=1)) as tx:
            await tx.publish(orders, {"id": 2})

        await eventually(lambda: participant.committed == [tx.id])
        await asyncio.wait_for(one.flush(), 10)
