"""Sites with valid certificates that speak for others: each attempt is rejected, audited, and disturbs nobody."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from replication.model.events import now_ms
from tests.integration.overlay.secured import Secured, secured_broker
from tests.support.hostile import Hostile
from tests.support.polling import eventually
from tops import Site
from tops.model.constraints import AtLeast, OnlyFrom
from tops.model.errors import ConfigError, ProtocolError
from tops.model.event_types import EventType
from tops.model.filters import Filter
from tops.model.ids import TxId
from tops.model.log_points import BEGINNING, Digests, LogPoint, chained
from tops.model.transactions import LocalOutcome, Outcome, Scope, ScopeLimit, TxType
from tops.protocol.effects import BatchPrepared, Memo
from tops.protocol.messages import (
    AbortTx,
    AddressedMessage,
    AppliedIndexReported,
    CensusReplied,
    CommitTx,
    DecisionRelayed,
    EndLog,
    Envelope,
    EpochFinished,
    EpochId,
    EpochMember,
    EpochVoted,
    Event,
    EventConfirmed,
    FollowLog,
    GetOutcome,
    HistoryDiffers,
    LogEntry,
    Origin,
    ParticipantAborted,
    ParticipantLost,
    PrepareEpoch,
    Published,
    PublisherLost,
    QueryPeers,
    RecoverLog,
    RunOneShot,
    StandingRegistered,
    StandingWithdrawn,
    SubscriptionChanged,
    TxSpec,
    TypeAdvertised,
)
from tops.protocol.messages import Address as Where
from tops.protocol.set_types import set_definition
from tops.runtime.participants import BatchParticipant
from tops.runtime.site_journal import INCARNATIONS_PER_S, new_incarnation

LOG = set_definition("rs.shop")
REPLICAS = frozenset({"shop/r1", "shop/r2"})
EPOCH = EpochId("rs.shop", 1, 1, "b1", 1)  # type: ignore[arg-type]

PLAN = TxSpec(
    LOG.name,
    TxType.DISTRIBUTED,
    limit=ScopeLimit.LOCAL,
    constraints=(AtLeast(2, REPLICAS), OnlyFrom(REPLICAS)),
    local_outcome=LocalOutcome.FOLLOWS,
    census=None,
)


class Replica(BatchParticipant):
    """Keeps what it has applied in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.applied: list[int] = []
        self.reached = BEGINNING
        self._prepared: dict[EpochId, tuple[tuple[EpochMember, ...], LogPoint]] = {}

    async def point(self) -> LogPoint:
        return self.reached

    async def prepare_batch(self, memo: Memo, members: tuple[EpochMember, ...], before: LogPoint) -> BatchPrepared:
        number = memo.epoch.number
        digest = chained(before.history, before.digest, number, [member.tx for member in members])
        self._prepared[memo.epoch] = (members, LogPoint(before.history, number, digest))
        return BatchPrepared({}, tuple((1,) for _ in members), log_digest=digest)

    async def finish_batch(self, memo: Memo, committed: bool) -> LogPoint | None:
        members, point = self._prepared.pop(memo.epoch, ((), self.reached))
        if not committed:
            return None
        self.applied += [int(event.body["write"]) for member in members for event in member.events or ()]
        self.reached = point
        return point

    async def apply_entries(self, entries: Sequence[LogEntry], upto: int, history: str, digests: Digests) -> LogPoint:
        for entry in entries:
            events = [e for tx in entry.transactions for e in tx.events]
            self.applied += [int(e.body["write"]) for e in [*events, *([entry.event] if entry.event else [])]]
        self.reached = LogPoint(history, upto, digests.at(upto) or "")
        return self.reached


class Slow(Replica):
    """Votes when it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = asyncio.Event()

    async def prepare_batch(self, memo: Memo, members: tuple[EpochMember, ...], before: LogPoint) -> BatchPrepared:
        await self.let_go.wait()
        return await super().prepare_batch(memo, members, before)


class Shop:
    """A set of two replicas, and a client that writes to both."""

    def __init__(self, client: Site, replicas: list[Replica]) -> None:
        self.client, self.replicas = client, replicas
        self.written = 0

    async def write(self) -> None:
        self.written += 1
        done = await asyncio.wait_for(
            self.client.run(PLAN, [{"at": now_ms(), "write": b"%d" % self.written, "reads": b""}]),
            10,
        )
        assert done.outcome is Outcome.COMMITTED

    async def is_whole(self) -> None:
        """Writes go on, and every replica has every write once, in order."""
        await self.write()
        everything = list(range(1, self.written + 1))
        await eventually(lambda: all(replica.applied == everything for replica in self.replicas))


@asynccontextmanager
async def shop_at(secured: Secured, slow: Slow | None = None, first: Replica | None = None) -> AsyncIterator[Shop]:
    if slow is not None:
        slow.let_go.set()
    replicas = [first or Replica(), slow or Replica()]
    async with secured.site("shop/r1") as one, secured.site("shop/r2") as two, secured.site("client") as client:
        for site, replica in ((one, replicas[0]), (two, replicas[1])):
            await site.advertise(LOG, plans=(PLAN,))
            await site.subscribe(LOG, participant=replica, durable=site.identity)
        await client.advertise(LOG)
        shop = Shop(client, replicas)
        await shop.write()
        yield shop


def registration(event_type: str = "rs.shop") -> StandingRegistered:
    return StandingRegistered(
        voter="forged",
        event_type=event_type,
        filter=Filter.everything(),
        scope=Scope.DISTRIBUTED,
        secret=b"s" * 32,
        position=1,
        subscription=1,
    )


WRITE = {"at": now_ms(), "write": b"666", "reads": b""}


def one_shot(tx: str) -> RunOneShot:
    spec = TxSpec(
        "rs.shop", TxType.DISTRIBUTED, limit=ScopeLimit.LOCAL, local_outcome=LocalOutcome.FOLLOWS, census=None
    )
    return RunOneShot(tx=TxId(tx), spec=spec, events=(Event("rs.shop", WRITE),))


FORGERIES: dict[str, AddressedMessage] = {
    "register": registration(),
    "withdraw": StandingWithdrawn(voter="forged", event_type="rs.shop"),
    "vote": EpochVoted(epoch=EPOCH, digest="d", voter="forged", excluded={}),
    "finish": EpochFinished(epoch=EPOCH, voter="forged", note=True),
    "reply to a census": CensusReplied(tx=TxId("client.1.1"), pseudonym="p", event_type="rs.shop"),  # type: ignore[arg-type]
    "give up": ParticipantAborted(tx=TxId("client.1.1"), voter="forged", reason="no", event_type="rs.shop"),
    "tell how far": AppliedIndexReported(
        event_type="rs.shop", incarnation=1, point=LogPoint("h", 99, "e" * 32), decided=99, transactions=()
    ),
    "hold another history": HistoryDiffers(name="shop/r1", event_type="rs.shop", point=LogPoint("h", 1, "e" * 32)),
    "begin a new history": RecoverLog(
        request=1, event_type="rs.shop", replicas=("shop/r1",), needed=0, accept_loss=True
    ),
    "ask peers": QueryPeers(epoch=EPOCH, digest="d", voter="forged"),
    "end a replica's feed": EndLog(request=1, event_type="rs.shop", name="shop/r1", operator=True),
    "abort as operator": AbortTx(
        tx=TxId("client.1.1"), tx_type=TxType.DISTRIBUTED, event_type="rs.shop", reason="no", operator=True
    ),
    "commit another's": CommitTx(
        tx=TxId("client.1.1"), tx_type=TxType.DISTRIBUTED, event_type="rs.shop", last_sequence=0
    ),
    "refuse another's future": GetOutcome(tx=TxId("client.1.99"), tx_type=TxType.DISTRIBUTED, event_type="rs.shop"),
}


@pytest.mark.parametrize("role", ["reader", "writer", "participant"])
async def test_who_is_no_replica_of_a_set_can_do_nothing_that_its_replicas_do(secured: Secured, role: str) -> None:
    async with shop_at(secured) as shop, Hostile.connect(secured.broker.url, secured.keys("mallory", role)) as mallory:
        for number, message in enumerate(FORGERIES.values(), start=1):
            await mallory.send_messages(message)
            await eventually(lambda number=number: len(mallory.rejected) == number)

        await shop.is_whole()
        assert mallory.received_of(PrepareEpoch) == []
        assert shop.client._node.core.transactions == {}
    assert '"who":"mallory"' in (secured.broker.table.data / "audit.log").read_text()


async def test_a_replica_of_another_set_is_an_outsider_too(secured: Secured) -> None:
    async with shop_at(secured) as shop, Hostile.connect(secured.broker.url, secured.keys("other/r1")) as mallory:
        await mallory.send_messages(registration(), EpochVoted(epoch=EPOCH, digest="d", voter="forged", excluded={}))

        await eventually(lambda: len(mallory.rejected) == 2)
        await shop.is_whole()


async def test_votes_and_finishes_for_another_replica_are_counted_and_audited(secured: Secured) -> None:
    """Under the name of another replica, by one that is certified and not asked."""
    slow = Slow()
    async with (
        shop_at(secured, slow) as shop,
        Hostile.connect(secured.broker.url, secured.keys("shop/r9")) as mallory,
    ):
        slow.let_go.clear()
        writing = asyncio.ensure_future(shop.write())
        in_flight = secured.broker.node.core.rendezvous.epochs["rs.shop"].in_flight
        await eventually(lambda: bool(in_flight))
        (epoch,) = in_flight.values()
        names = [member.voter for member in epoch.voters.values()]
        await mallory.send_messages(
            *(EpochVoted(epoch=epoch.id, digest=epoch.digest, voter=name, excluded={}) for name in names),
            *(EpochFinished(epoch=epoch.id, voter=name, note=False) for name in names),
        )
        await eventually(lambda: len(mallory.rejected) == 4)
        assert not writing.done()
        slow.let_go.set()
        await writing

        assert {(r.verb, r.code) for r in mallory.rejected} == {("participate", "not-yours")}
        assert secured.broker.node.counters["sender_mismatches"] == 4
        await shop.is_whole()
    assert '"who":"shop/r9","act":"participate rs.shop"' in (secured.broker.table.data / "audit.log").read_text()


async def test_a_replica_outside_the_list_does_not_change_what_clients_may_do(secured: Secured) -> None:
    async with shop_at(secured) as shop, Hostile.connect(secured.broker.url, secured.keys("shop/r9")) as mallory:
        await mallory.send_messages(TypeAdvertised(definitions=(LOG,), plans=()))

        await eventually(lambda: [r.verb for r in mallory.rejected] == ["originate"])
        await shop.is_whole()


async def test_an_administrators_registration_makes_no_write_fail(secured: Secured) -> None:
    async with shop_at(secured) as shop, Hostile.connect(secured.broker.url, secured.keys("root", "admin")) as root:
        await root.send_messages(registration())

        await eventually(lambda: bool(root.rejected))
        assert [r.verb for r in root.rejected] == ["participate"]
        await shop.is_whole()


@pytest.mark.parametrize(
    "message",
    [
        ParticipantLost(address=Where("b1", "victim", 1)),  # type: ignore[arg-type]
        PublisherLost(site="client", incarnation=1),  # type: ignore[arg-type]
        PrepareEpoch(epoch=EPOCH, digest="d", voter="v", members=()),
    ],
)
async def test_what_only_brokers_say_ends_the_connection_and_changes_nothing(
    secured: Secured, message: AddressedMessage
) -> None:
    async with shop_at(secured) as shop, Hostile.connect(secured.broker.url, secured.keys("root", "admin")) as root:
        await root.send_messages(message)

        await eventually(lambda: bool(root.closed))
        await shop.is_whole()


async def test_a_writer_publishes_no_single_events_into_a_sets_log(secured: Secured) -> None:
    async with shop_at(secured) as shop, Hostile.connect(secured.broker.url, secured.keys("mallory")) as mallory:
        await mallory.spread(
            Published(event=Event("rs.shop", WRITE), origin=Origin("rs.shop", 1)),
            "rs.shop",
        )

        await eventually(lambda: [r.verb for r in mallory.rejected] == ["originate"])
        await shop.is_whole()


async def test_nobody_uses_up_the_numbers_of_another_publisher(secured: Secured) -> None:
    log = EventType("orders", {"n": int}, durable=True)
    async with (
        secured.site("victim") as victim,
        Hostile.connect(secured.broker.url, secured.keys("mallory")) as mallory,
    ):
        await victim.advertise(log)
        assert await victim.publish(log, {"n": 1}) == 1
        stolen = Origin("orders", 2, "victim", victim.incarnation + 1)
        await mallory.spread(Published(event=Event("orders", {"n": 666}), origin=stolen), "orders")

        assert await victim.publish(log, {"n": 2}) == 2
        assert [e.event.body["n"] async for e in victim.read_log(log, 1, 2) if e.event is not None] == [1, 2]


async def test_nobody_begins_a_transaction_under_anothers_id(secured: Secured) -> None:
    async with shop_at(secured) as shop, Hostile.connect(secured.broker.url, secured.keys("mallory")) as mallory:
        await mallory.send_messages(one_shot(f"client.{shop.client.incarnation}.2"))

        await eventually(lambda: [r.verb for r in mallory.rejected] == ["begin"])
        await shop.is_whole()


async def test_a_decision_that_an_outsider_passes_on_does_not_count(secured: Secured) -> None:
    async with (
        shop_at(secured) as shop,
        Hostile.connect(secured.broker.url, secured.keys("mallory", "admin")) as mallory,
    ):
        handles = {name: site.address for name, site in secured.broker.node.core.edge.sites.items()}
        forged = DecisionRelayed(epoch=EPOCH, digest="d", committing=frozenset())
        await mallory.send(Envelope(to=handles["shop/r1"], body=forged))  # type: ignore[index]
        await shop.is_whole()


async def test_a_durable_subscription_is_its_owners_alone(secured: Secured) -> None:
    log = EventType("orders", {"n": int}, durable=True)
    async with (
        secured.site("victim") as victim,
        Hostile.connect(secured.broker.url, secured.keys("mallory")) as mallory,
    ):
        await victim.advertise(log)
        subscription = await victim.subscribe(log, durable="audit")
        await mallory.send_messages(
            FollowLog(name="audit", definitions=(log,), filter=Filter(), position=0, start="now", credit=9, voter=None),
            EndLog(request=1, event_type="orders", name="audit"),
        )
        await victim.publish(log, {"n": 1})

        received = await asyncio.wait_for(anext(aiter(subscription)), 10)

    assert received.body == {"n": 1}


async def test_two_processes_with_one_certificate_live_beside_each_other(secured: Secured) -> None:
    keys, orders = secured.keys("app"), EventType("orders", {"n": int})
    url = secured.broker.url
    async with Site.connect(url, keys=keys, instance="one") as one, Site.connect(url, keys=keys, instance="two") as two:
        await one.advertise(orders)
        subscription = await two.subscribe(orders)
        await one.publish(orders, {"n": 1})

        received = await asyncio.wait_for(anext(aiter(subscription)), 10)

        assert received.body == {"n": 1}
        assert received.sender is None
        assert (one.name, two.name, one.identity) == ("app:one", "app:two", "app")


async def test_subscribers_learn_the_sender_of_types_that_disclose_it(secured: Secured) -> None:
    told = EventType("told", {"n": int}, discloses_sender=True)
    async with secured.site("publisher") as publisher, secured.site("subscriber", "reader") as subscriber:
        await publisher.advertise(told)
        subscription = await subscriber.subscribe(told)
        await publisher.publish(told, {"n": 1})

        received = await asyncio.wait_for(anext(aiter(subscription)), 10)

    assert received.sender is not None
    assert (received.sender.identity, received.sender.role) == ("publisher", "writer")


async def test_a_stolen_key_can_not_lock_its_owner_out_by_an_incarnation_ahead_of_the_clock(secured: Secured) -> None:
    keys = secured.keys("victim")
    ahead = new_incarnation() + 3600 * INCARNATIONS_PER_S

    with pytest.raises(ProtocolError, match="ahead of the clock"):
        async with Hostile.connect(secured.broker.url, keys, incarnation=ahead):
            pytest.fail("it must not get in")
    async with secured.site("victim", keys=keys):
        pass


async def test_a_stolen_key_locks_its_owner_out_no_longer_than_clocks_may_differ(tmp_path: Path) -> None:
    """The thief takes the newest incarnation that it gets, and uses it in a log, where it is remembered for good."""
    log = EventType("orders", {"n": int}, durable=True)
    async with secured_broker(tmp_path, limits="clock_ahead_s = 2") as secured:
        keys, newest = secured.keys("victim"), new_incarnation() + 2 * INCARNATIONS_PER_S
        async with Hostile.connect(secured.broker.url, keys, incarnation=newest) as thief:
            await thief.send_messages(TypeAdvertised(definitions=(log,)))
            await thief.spread(Published(event=Event("orders", {"n": 666}), origin=Origin("orders", 1)), "orders")
            await eventually(lambda: bool(thief.received_of(EventConfirmed)))
            with pytest.raises(ProtocolError, match="a newer incarnation"):
                async with Hostile.connect(secured.broker.url, keys):
                    pytest.fail("it must not get in")

        await eventually(lambda: new_incarnation() > newest)
        async with secured.site("victim", keys=keys) as victim:
            await victim.advertise(log)
            assert await asyncio.wait_for(victim.publish(log, {"n": 1}), 10) == 2


async def test_quotas_hold_one_identity_and_nobody_else(secured: Secured) -> None:
    orders = EventType("orders", {"n": int})

    def subscription(number: int) -> SubscriptionChanged:
        return SubscriptionChanged(
            subscription=number, definitions=(orders,), filter=Filter(), scope=None, durable=False
        )

    async with Hostile.connect(secured.broker.url, secured.keys("greedy", "reader")) as greedy:
        await greedy.send(*map(subscription, range(60)))
        await eventually(lambda: len(greedy.rejected) == 10)

        assert {r.code for r in greedy.rejected} == {"quota"}
        assert secured.broker.node.counters["over_quota"] == 10
        async with secured.site("modest", "reader") as modest:
            await modest.subscribe(orders)


def wide(number: int) -> Filter:
    """A filter of some 20 KB."""
    return Filter.where("x", "in", [f"{number} {value} " + "y" * 100 for value in range(90)])


async def test_filters_count_by_their_bytes_and_make_room_when_they_end(secured: Secured) -> None:
    orders = EventType("orders", {"x": str})

    def subscription(number: int, interest: Filter | None) -> SubscriptionChanged:
        return SubscriptionChanged(
            subscription=number, definitions=(orders,), filter=interest, scope=None, durable=False
        )

    keys = secured.keys("greedy", "reader")
    async with Hostile.connect(secured.broker.url, keys) as greedy:
        await greedy.send(*(subscription(n, wide(n)) for n in range(5)))
        await eventually(lambda: len(greedy.rejected) == 2)
        assert {(r.code, "bytes" in r.text) for r in greedy.rejected} == {("quota", True)}
        assert secured.broker.node.counters["over_quota"] == 2

        await greedy.send(subscription(0, None), subscription(7, wide(7)), subscription(1, wide(8)))  # in their places
        await greedy.send(subscription(9, wide(9)))
        await eventually(lambda: len(greedy.rejected) == 3)
        async with secured.site("modest", "reader") as modest:
            await modest.subscribe(orders, where=wide(1))
    await eventually(lambda: "greedy" not in secured.broker.node.core.edge.sites)
    async with Hostile.connect(secured.broker.url, keys) as again:
        await again.send(*(subscription(n, wide(n)) for n in range(4)))
        await eventually(lambda: len(again.rejected) == 1)


async def test_filters_of_followers_and_registrations_count_by_their_bytes(secured: Secured) -> None:
    log = EventType("log", {"x": str}, durable=True)

    def wanted(number: int) -> FollowLog:
        name = f"f{number}"
        return FollowLog(
            name=name, definitions=(log,), filter=wide(number), position=None, start="now", credit=1, voter=None
        )

    def registered(number: int) -> StandingRegistered:
        return replace(
            registration("orders"), voter=f"v{number}", filter=wide(number), position=None, subscription=number
        )

    async with Hostile.connect(secured.broker.url, secured.keys("greedy", "admin")) as greedy:
        await greedy.send_messages(
            *(TypeAdvertised(definitions=(known,)) for known in (log, EventType("orders", {"x": str})))
        )
        await greedy.send_messages(*map(wanted, range(4)), *map(registered, range(4)))

        await eventually(lambda: len(greedy.rejected) == 2)
        assert {(r.verb, r.code) for r in greedy.rejected} == {("follow", "quota"), ("participate", "quota")}
        await greedy.send_messages(wanted(0), registered(0))  # renewed, as they were
        await greedy.send_messages(wanted(9))
        await eventually(lambda: len(greedy.rejected) == 3)


async def test_a_response_type_is_received_only_by_whom_it_is_addressed_to(secured: Secured) -> None:
    responses = EventType("rs.shop.response0", {"to": str}, discloses_sender=True)
    changed = SubscriptionChanged(subscription=1, definitions=(responses,), filter=Filter(), scope=None, durable=False)
    async with Hostile.connect(secured.broker.url, secured.keys("mallory")) as mallory:
        await mallory.send(changed)

        await eventually(lambda: bool(mallory.rejected))


async def test_a_certificate_of_one_site_does_not_open_the_link_of_another(secured: Secured) -> None:
    with pytest.raises(ConfigError, match="keys of"):
        async with Site.connect(secured.broker.url, name="victim", keys=secured.keys("mallory")):
            pytest.fail("it must not get in")
