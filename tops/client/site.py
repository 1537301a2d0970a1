"""The client library: a site publishes, subscribes and takes part in transactions through a broker.

    async with Site.connect("ws://127.0.0.1:7420", name="billing") as site:
        await site.advertise(orders)
        await site.publish(orders, {"id": 7, "total": 12})

The protocol is `tops.core.client.site`; the connection, its failover and the calls to participants are `tops.runtime`.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from msgspec.structs import replace

from tops.client.collector import Collector
from tops.client.logs import end_log, get_log_state, read_log, recover_log
from tops.client.outgoing import Body, TypeOrName, checked_size, events_of, name_of
from tops.client.routing import Routing, RoutingTransaction, TreeSubscription
from tops.client.subscriptions import Enlisted, Subscription, remembered, standing_scope
from tops.client.transactions import Transaction
from tops.core.client.site import default_local_outcome
from tops.core.participant.participation import SiteOptions, Wish
from tops.core.routing_tx.plan import StaticPlan
from tops.http.client import get_json
from tops.model.constraints import AnyConstraint
from tops.model.errors import ConfigError, InvalidEventType, NotAdvertised, NotReachable, TopsError
from tops.model.event_types import EventType
from tops.model.filters import Filter
from tops.model.ids import NodeId, TxId
from tops.model.routing import TREE, RouteKind, TxKind
from tops.model.transactions import Access, LocalOutcome, Scope, ScopeLimit, TxType
from tops.protocol.effects import Effect
from tops.protocol.messages import (
    CensusPolicy,
    Definitions,
    GetOutcome,
    LogEntry,
    LogRecovered,
    LogStateReported,
    Principal,
    TxOutcome,
    TxSpec,
)
from tops.runtime.links.identity import Self as Identity
from tops.runtime.links.link import QUEUE_BYTES_MAX
from tops.runtime.participant_driver import ParticipantDriver
from tops.runtime.participants import BatchParticipant, Participant
from tops.runtime.site_journal import SiteJournal, new_incarnation
from tops.runtime.site_node import Ended, SiteNode
from tops.security import check_connect, kind_of_name

log = logging.getLogger("tops.site")
DRAIN_S = 2.0
ROUTE_S = 5.0
OWN_PREFIX = "own/"  # distinguishes the names of enlisted resources from those of subscriptions
SITE_ROLE = "writer"  # only stated: without keys the broker assigns the role


class Site:
    """One connected site; `Site.connect` makes it."""

    def __init__(self, node: SiteNode, journal: SiteJournal | None) -> None:
        self._node, self._journal = node, journal
        self._types: dict[str, EventType] = {}
        self._subscriptions = 0
        self._routing = Routing(node)

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        url: str | Sequence[str],
        *,
        name: str | None = None,
        instance: str = "",
        on_behalf_of: Principal | None = None,
        keys: Path | None = None,
        cluster: str | None = None,
        data: Path | None = None,
        insecure: str | None = None,
        timeout_s: float = 10.0,
        heartbeat_s: float = 5.0,
        options: SiteOptions | None = None,
        on_ended: Ended | None = None,
    ) -> AsyncIterator["Site"]:
        """Connect to one of the brokers at `url`; a broken connection is made again, to the same broker or another.

        `keys` is the folder that `tops keys issue` wrote; its certificate has the site's name, and a given `name` must
        be equal. Without keys and name the site gets a random name. Processes that share a name, or keys, each need an
        `instance` of their own: of two sessions with the same instance, the newer one ends the other. A service that
        acts for other identities has a session for each, `on_behalf_of` it. `data` is a directory for prepared work
        that must survive a crash of this process. Raises NotReachable, NotAuthenticated or ConfigError, and then
        nothing is left open.
        """
        urls = [url] if isinstance(url, str) else list(url)
        if not urls:
            raise ConfigError("no broker's address was given")
        for each in urls:
            if urlsplit(each).scheme not in ("ws", "wss"):
                raise ConfigError(f"{each!r} is no broker's address: write ws://HOST:PORT, or wss:// with keys")
            if each.startswith("wss:") and keys is None:
                raise ConfigError(f"{each}: this cluster needs keys: pass the folder that `tops keys issue` wrote")
            check_connect(urlsplit(each).hostname or "", tls=each.startswith("wss:"), plain_words=insecure)
        journal = SiteJournal.open(data) if data is not None else None
        node: SiteNode | None = None
        try:
            incarnation = await journal.begin_incarnation() if journal is not None else new_incarnation()
            if keys is not None:
                own = Identity.with_keys(keys, incarnation, insecure, instance)
            else:
                cluster = cluster or await _cluster_at(urls, timeout_s)
                name = name or f"site-{secrets.token_hex(6)}"
                kind = kind_of_name(name)
                own = Identity.without_keys(cluster, kind, name, incarnation, SITE_ROLE, insecure, instance=instance)
            if name not in (None, own.party.identity.name):
                raise ConfigError(f"{keys}: these are the keys of {own.party.identity}, not of site {name!r}")
            own = own.acting_for(on_behalf_of)
            node = SiteNode(own.node, own, urls, options or SiteOptions(), heartbeat_s)
            node.on_ended = on_ended
            await node.connect(timeout_s)
            yield cls(node, journal)
            await node.drain(DRAIN_S)
        finally:
            if node is not None:
                await node.close()
            if journal is not None:
                await journal.close()

    @property
    def name(self) -> str:
        """The name of this session in the overlay: its identity, with a colon and the instance if it has one."""
        return self._node.name

    @property
    def identity(self) -> str:
        return self._node.own.party.identity.name

    @property
    def own(self) -> Identity:
        """This site's part in handshakes, for connections besides the one to its broker."""
        return self._node.own

    @property
    def heartbeat_s(self) -> float:
        return self._node.heartbeat_s

    @property
    def broker(self) -> str:
        """The broker to which this site is connected, or was last."""
        return self._node.broker

    @property
    def brokers(self) -> tuple[str, ...]:
        """The names of the cluster's brokers."""
        return self._node.core.brokers

    def reload_keys(self) -> None:
        """Use renewed keys for new connections now; otherwise they are read every few seconds."""
        self._node.own.reload()

    @property
    def incarnation(self) -> int:
        return self._node.core.incarnation

    # --------------------------------------------------------------------------------------------- types and events

    def define(self, *event_types: EventType) -> None:
        """Define types at this site, so that their children can be advertised or subscribed to."""
        for event_type in event_types:
            self._types[event_type.name] = event_type

    async def advertise(
        self,
        event_type: EventType,
        *,
        plans: tuple[TxSpec, ...] | None = None,
        members: frozenset[str] | None = None,
        where: Filter | None = None,
    ) -> None:
        """Advertise a type before publishing; returns when its rendezvous has accepted it.

        Of a type that is routed along the tree, `where` says which events: subscriptions find their way by it.

        A replica declares with its set's log the transactions (`plans`) that the log accepts from other sites, and the
        identities of the set's replicas (`members`)."""
        definitions = self._definitions(event_type)
        self._node.check_rejected("advertise", event_type.name)
        await self._node.request(
            lambda request: self._node.core.advertise(request, definitions, plans, members), f"type {event_type.name}"
        )
        if event_type.routing == TREE:
            self._routing.add(RouteKind.ADVERTISEMENT, event_type, where)

    async def unadvertise(self, event_type: TypeOrName) -> None:
        """This site is not going to publish the type any more: to publish it raises NotAdvertised."""
        name = name_of(event_type)
        self._node.core.advertised.pop(name, None)
        self._routing.unadvertise(name)

    async def publish(self, event_type: TypeOrName, body: dict[str, Any]) -> int | None:
        """Publish an ordinary event. For a durable type this returns the event's index when the event is on disk."""
        node, name = self._node, name_of(event_type)
        link = node.link
        if link is not None and link.queued_bytes > QUEUE_BYTES_MAX:
            await link.wait_writable()
        if node.rejected:
            node.check_rejected("publish", name)
        core = node.core
        if name not in core.advertised:
            raise NotAdvertised(name)
        whole = core.types.whole(name)
        whole.check(body)
        if whole.routing == TREE:
            self._routing.publish(name, body)
            return None
        if whole.durable:
            return await node.publish_confirmed(name, dict(body))
        node.publish_soon(name, body, 0)
        return None

    async def flush(self) -> None:
        """Returns when everything published so far has arrived at the broker."""
        self._node.act([])
        if self._node.link is not None:
            await self._node.link.flushed()

    def know_type(self, family: str) -> None:
        """Make the name of a type without a parent known: requests about its transactions need no definition."""
        if family not in self._node.core.types:
            self._node.core.types.define(EventType(family))

    def _know(self, event_type: EventType) -> None:
        if event_type.name not in self._node.core.types:
            self._node.core.types.define_all(self._definitions(event_type))

    def _definitions(self, event_type: EventType) -> Definitions:
        self._types[event_type.name] = event_type
        chain = [event_type]
        while (parent := chain[0].parent) is not None:
            if parent not in self._types:
                raise InvalidEventType(f"event type {chain[0].name!r}: call define() with its parent {parent!r} first")
            if any(known.name == parent for known in chain):
                raise InvalidEventType(f"event type {parent!r} is its own ancestor")
            chain.insert(0, self._types[parent])
        return tuple(chain)

    # ------------------------------------------------------------------------------------------------ subscriptions

    async def subscribe(
        self,
        event_type: EventType,
        where: Filter | None = None,
        *,
        participant: Participant | None = None,
        durable: str | None = None,
        scope: Scope | None = None,
        start: str = "now",
        position: int | None = None,
    ) -> Subscription:
        """Receive events of the type, and of its children, that match.

        Without a participant, iterate over the subscription. `durable` names a subscription that survives
        disconnects and restarts, on a durable type; a new one starts `"now"`, at the `"oldest"` retained entry, or at a
        number. `scope` is a standing registration for every census; without it the participant's `on_join` is called,
        if it overrides it. If the site has a data directory, the participant's prepared work survives a crash.
        """
        node = self._node
        node.check_rejected("subscribe", event_type.name)
        if event_type.routing == TREE:
            raise ConfigError(f"event type {event_type.name!r} is routed along the tree: use subscribe_tree()")
        self._subscriptions += 1
        number = self._subscriptions
        taker = participant or Collector()
        key = durable or event_type.name
        journal = None if isinstance(taker, BatchParticipant) else self._journal
        driver = ParticipantDriver(taker, node.call_done, key, journal)
        replica, prepared_work, kept = await remembered(taker, driver)
        wish = Wish(
            definitions=self._definitions(event_type),
            filter=where if where is not None else Filter(),
            scope=standing_scope(taker, scope, replica),
            durable=durable,
            start=start,
            replica=replica,
            position=position,
            compensatable=taker.compensatable,
        )
        node.drivers[number] = driver

        def make(request: int) -> list[Effect]:
            effects = node.core.subscribe(request, number, wish)
            if (prepared_work or kept) and number in node.core.participation.subscriptions:
                effects += node.core.recover(number, prepared_work, kept)
            return effects

        try:
            await node.request(make, f"subscription {number}")
            await self._routed(number)
        except BaseException:
            driver.close()
            node.drivers.pop(number, None)
            node.act(node.core.unsubscribe(number))
            raise
        return Subscription(node, number, taker)

    async def _routed(self, number: int) -> None:
        """Wait until events reach the subscription, but not for an unreachable rendezvous: they do when it is back."""
        try:
            async with asyncio.timeout(ROUTE_S):
                await self._node.request(
                    lambda request: self._node.core.confirm_route(request, number), f"subscription {number}"
                )
        except TimeoutError:
            log.warning("the rendezvous does not respond; the subscription waits for it", extra={"node": self.name})

    # ------------------------------------------------------------------------------------- routing along the tree

    async def subscribe_tree(
        self, event_type: EventType, where: Filter | None = None, *, participant: Participant | None = None
    ) -> TreeSubscription:
        """Receive events of a type that is routed along the tree, from the moment at which brokers know of it.

        The participant's `on_tcm` acts on tcms of routing transactions that match."""
        self._node.check_rejected("subscribe", event_type.name)
        self._know(event_type)
        return self._routing.subscribe(event_type, where, participant)

    @asynccontextmanager
    async def routing_transaction(
        self, *, isolated: bool = True, timeout_s: float = 10.0, attempt: int = 0
    ) -> AsyncIterator[RoutingTransaction]:
        """A transaction over subscriptions, advertisements and publications of several clients; it commits on leaving
        and aborts on an exception. TransactionConflict: run it again, with `attempt` counting the conflicts in a row.

        Not isolated, others see its routing changes before it commits."""
        tx = await self._routing.begin(TxKind.ISOLATED if isolated else TxKind.DYNAMIC, timeout_s, attempt)
        try:
            yield tx
        except BaseException as error:
            with suppress(TopsError):
                await tx.end(f"{type(error).__name__}: {error}")
            raise
        await tx.end()

    async def execute_plan(self, plan: StaticPlan, *, timeout_s: float = 10.0) -> TxId:
        """Run a static transaction, whose operations are all known beforehand; returns its id when it has committed."""
        core, steps = self._node.core, plan.steps()
        tx: TxId = await self._node.request(
            lambda request: core.routed(core.tree.transactions.execute(request, steps, timeout_s))
        )
        return tx

    def accept_plans(self, participant: Participant) -> None:
        """Take part in static plans of other sites. `participant` gets the events of the subscriptions that they make
        here, and is told of each by `on_planned`."""
        self._routing.accept_plans(participant)

    # ------------------------------------------------------------------------------------------------ transactions

    @asynccontextmanager
    async def transaction(
        self,
        event_type: TypeOrName,
        tx_type: TxType,
        *,
        access: Access = Access.PRIVATE,
        limit: ScopeLimit = ScopeLimit.NONE,
        constraints: Sequence[AnyConstraint] = (),
        attributes: Body | None = None,
        local_outcome: LocalOutcome | None = None,
        census: CensusPolicy | None = CensusPolicy(),  # noqa: B008 - immutable
        vote_timeout_s: float = 5.0,
        decide_within_s: float = 60.0,
        own: Enlisted | None = None,
    ) -> AsyncIterator[Transaction]:
        """A transaction that commits on leaving and aborts on an exception; `TransactionAborted` if it can't commit."""
        spec = self._spec(
            event_type,
            tx_type,
            access,
            limit,
            constraints,
            attributes,
            local_outcome,
            census,
            vote_timeout_s,
            decide_within_s,
        )
        tx = await self.begin(spec, own)
        try:
            yield tx
        except BaseException as error:
            if tx.outcome is None:
                await tx.abort(f"{type(error).__name__}: {error}")
            raise
        if tx.outcome is None:
            await tx.commit()

    async def begin(self, spec: TxSpec, own: Enlisted | None = None) -> Transaction:
        """Open a transaction; returns when it accepts events. The caller commits or aborts.

        `own`: resources of this site that must commit with it; for private distributed transactions.
        """
        self._node.check_rejected("begin", spec.event_type)
        number = own.number if own is not None else None
        tx: TxId = await self._node.request(lambda request: self._node.core.begin(request, spec, number))
        return Transaction(self._node, tx, spec)

    async def enlist(self, participant: Participant, *, name: str) -> Enlisted:
        """Enlist resources of this site in transactions that it begins with `own=`.

        The participant gets every event that this site publishes in such a transaction, and its callbacks are those
        of any participant except `on_join`; no constraint counts it. Its prepared work survives a crash if the site has
        a data directory, under `name`. The site needs the right to subscribe to the transactions' types.
        """
        node = self._node
        self._subscriptions += 1
        number = self._subscriptions
        driver = ParticipantDriver(participant, node.call_done, f"{OWN_PREFIX}{name}", self._journal)
        prepared_work, kept = driver.prepared_work()
        node.drivers[number] = driver
        node.act(node.core.enlist(number, prepared_work, kept, participant.compensatable))
        return Enlisted(node, number, participant)

    async def execute(
        self,
        event_type: TypeOrName,
        tx_type: TxType = TxType.DISTRIBUTED,
        *,
        events: Sequence[Body | tuple[TypeOrName, Body]],
        limit: ScopeLimit = ScopeLimit.NONE,
        constraints: Sequence[AnyConstraint] = (),
        attributes: Body | None = None,
        local_outcome: LocalOutcome | None = None,
        census: CensusPolicy | None = None,
        vote_timeout_s: float = 5.0,
        decide_within_s: float = 60.0,
        operator: bool = False,
    ) -> TxOutcome:
        """Begin, all events and commit in one message. Raises TransactionAborted, or OutcomeUnknown after long.

        With `census` None only standing registrations count, and transactions that are ready together are prepared
        together. `operator`: not bound by the plans of a replica set's log; needs the right to operate.
        """
        spec = self._spec(
            event_type,
            tx_type,
            Access.PRIVATE,
            limit,
            constraints,
            attributes,
            local_outcome,
            census,
            vote_timeout_s,
            decide_within_s,
        )
        return await self.run(replace(spec, operator=True) if operator else spec, events)

    async def run(self, spec: TxSpec, events: Sequence[Body | tuple[TypeOrName, Body]]) -> TxOutcome:
        """The same as `execute`, for callers that run many transactions with one specification."""
        self._node.check_rejected("begin", spec.event_type)
        if self._node.is_full:
            await self._node.wait_writable()
        if spec.tx_type is TxType.LOCAL and not self._is_durable(spec.event_type):
            # Subscribers at the same broker may get its events early; entries of a log pass the rendezvous first.
            tx = await self.begin(spec)
            for event in events_of(spec.event_type, events):
                await tx.publish(event.type, event.body)
            return await tx.commit()
        made = events_of(spec.event_type, events)
        return await self._node.execute(spec, made, checked_size(made))

    async def get_outcome(self, tx: str, event_type: TypeOrName, tx_type: TxType = TxType.DISTRIBUTED) -> TxOutcome:
        """The outcome of a transaction, also one of an earlier incarnation of this site.

        A transaction that its coordinator does not know is rejected permanently, and therefore aborted.
        """
        if isinstance(event_type, EventType):
            self._know(event_type)
        query = GetOutcome(tx=TxId(tx), tx_type=tx_type, event_type=name_of(event_type))
        outcome: TxOutcome = await self._node.request(
            lambda request: self._node.core.get_outcome(request, query), f"tx {tx}"
        )
        return outcome

    async def get_log_state(self, event_type: EventType, *, timeout_s: float = 5.0) -> LogStateReported:
        """How far the log of a durable type is decided, and its followers, as its coordinator knows at this moment.

        Raises NotReachable if the coordinator does not respond in time.
        """
        self._know(event_type)
        return await get_log_state(self._node, event_type.name, timeout_s)

    async def recover_log(
        self,
        event_type: EventType,
        replicas: Sequence[str],
        needed: int,
        *,
        accept_loss: bool = False,
        timeout_s: float = 10.0,
    ) -> LogRecovered:
        """Continue a log whose journal is stale in a new history, behind the most advanced of these replicas."""
        self._know(event_type)
        return await recover_log(self._node, event_type.name, tuple(replicas), needed, accept_loss, timeout_s)

    def read_log(
        self, event_type: EventType, first: int, last: int, *, timeout_s: float = 10.0
    ) -> AsyncIterator[LogEntry]:
        """The entries of a durable type's log from one number to another, from its coordinator.

        For lookups: nothing is acknowledged, and nothing is retained for the reader. No-op entries are skipped. Raises
        NotReachable if `first` is truncated, or the coordinator does not respond in time.
        """
        self._know(event_type)
        return read_log(self._node, event_type.name, first, last, timeout_s)

    async def end_durable(self, event_type: EventType, name: str, *, timeout_s: float = 10.0) -> None:
        """End any durable subscription permanently, by its name in `get_log_state`; needs the right to operate.

        For one whose owner does not come back; `Subscription.unsubscribe` ends the site's own."""
        self._know(event_type)
        await end_log(self._node, event_type.name, name, timeout_s, operator=True)

    def contribute(self, tx: str, spec: TxSpec) -> Transaction:
        """Publish in a public transaction of another site; call `done()` after the last event."""
        self._node.core.contribute(TxId(tx), spec)
        return Transaction(self._node, TxId(tx), spec)

    def _is_durable(self, name: str) -> bool:
        types = self._node.core.types
        return name in types and types.whole(name).durable

    def _spec(
        self,
        event_type: TypeOrName,
        tx_type: TxType,
        access: Access,
        limit: ScopeLimit,
        constraints: Sequence[AnyConstraint],
        attributes: Body | None,
        local_outcome: LocalOutcome | None,
        census: CensusPolicy | None,
        vote_timeout_s: float,
        decide_within_s: float,
    ) -> TxSpec:
        name = name_of(event_type)
        if local_outcome is None:
            local_outcome = default_local_outcome(self._is_durable(name), tx_type)
        return TxSpec(
            event_type=name,
            tx_type=tx_type,
            access=access,
            limit=limit,
            constraints=tuple(constraints),
            attributes=dict(attributes or {}),
            local_outcome=local_outcome,
            census=census,
            vote_timeout_s=vote_timeout_s,
            decide_within_s=decide_within_s,
        )


async def _cluster_at(urls: Sequence[str], timeout_s: float) -> str:
    """The name of the cluster behind these addresses; requested only without keys, which contain it."""
    problem = ""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session:
        for url in urls:
            try:
                _, topology = await get_json(session, url, "/v1/topology")
                return NodeId(topology["cluster"])
            except (NotReachable, KeyError, TypeError) as error:
                problem = str(error)
    raise NotReachable(f"no broker responds at {', '.join(urls)}: {problem}")
