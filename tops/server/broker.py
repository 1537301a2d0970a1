"""The broker process: opens the journal, recovers the machine, listens, dials, and stops in order.

No message is sent before the new incarnation is on disk. When the journal fails, or contains something that was not
written, the broker stops: `wait` raises.
"""

import asyncio
import logging
import os
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from time import monotonic, time

from aiohttp import web

from tops.core.broker.broker import BrokerCore
from tops.core.commit.epoch import EpochOptions
from tops.core.coordinator.open_transactions import Quotas
from tops.core.coordinator.rendezvous import RendezvousOptions
from tops.http.authentication import ByCertificate, BySecret
from tops.http.gate import Authenticate, Gate
from tops.http.names import Names
from tops.http.rights import Handler, Routes
from tops.journal import JournalOptions
from tops.model.constraints import Predicate
from tops.model.errors import ConfigError, JournalClosed, TopsError
from tops.model.ids import NodeId
from tops.protocol.messages import PROTOCOL
from tops.protocol.records import Started
from tops.runtime.broker_node import BrokerNode
from tops.runtime.config import BrokerTable, Config
from tops.runtime.links.identity import RELOAD_S, Self
from tops.runtime.record_store import RecordStore
from tops.runtime.site_journal import new_incarnation
from tops.security import AuditLog, ConnectionBudget, Kind, check_private_folder, make_secret, split_address
from tops.server.app import BrokerPages
from tops.server.connections import Connections, connection_budget
from tops.server.listener import BoundedSite, admit_identified
from tops.server.log_age import LogAges
from tops.server.metrics import NodeCollector, PolicyOf
from tops.server.retention import Retainer

WATCH_S = 0.05
PREALLOCATE_BYTES = 2**20  # by which the journal's files are extended
SEGMENTS_KEPT = 16  # the number of segments of a journal of the configured size; they are truncated one by one

log = logging.getLogger("tops.broker")

Extend = Callable[[Routes, Gate], None]


class Broker:
    """One broker of a cluster: `async with Broker.run(config, "b1") as broker: await broker.wait()`."""

    def __init__(
        self,
        config: Config,
        name: str,
        *,
        predicates: Mapping[str, Predicate] | None = None,
        extend: Extend | None = None,
        policy_of: PolicyOf | None = None,
    ) -> None:
        """`extend` adds routes of other layers to the broker's HTTP side, each with the right that it needs;
        `policy_of` is a label of the metrics of replica sets."""
        self.config, self.table = config, config.broker_named(name)
        self._predicates, self._extend = predicates, extend
        self._policy_of = policy_of or (lambda _: "")
        self._tasks: list[asyncio.Task[None]] = []
        self._runners: list[web.AppRunner] = []
        self._open = AsyncExitStack()  # closes what was opened so far, the last one first
        self._failed: asyncio.Future[None] | None = None
        self._keys_problem = ""  # why the files of its keys can't be used
        self.ready = False
        self.node: BrokerNode
        self.connections: Connections
        self.routes: Routes
        self.retainer: Retainer
        self.ages: LogAges

    @classmethod
    @asynccontextmanager
    async def run(
        cls,
        config: Config,
        name: str,
        *,
        predicates: Mapping[str, Predicate] | None = None,
        extend: Extend | None = None,
        policy_of: PolicyOf | None = None,
    ) -> AsyncIterator["Broker"]:
        """A started broker, stopped on leaving."""
        broker = cls(config, name, predicates=predicates, extend=extend, policy_of=policy_of)
        await broker.start()
        try:
            yield broker
        finally:
            await broker.stop()

    @property
    def name(self) -> str:
        return self.table.name

    @property
    def url(self) -> str:
        return self.table.url

    async def start(self) -> None:
        """Recover and begin to serve; raises TopsError, with nothing left open, if that fails."""
        self._failed = asyncio.get_running_loop().create_future()
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        table, config = self.table, self.config
        check_private_folder(table.data / "journal")
        store = RecordStore.open(table.data / "journal", _journal_options(table))
        self._open.push_async_callback(self._close_store, store)
        audit = AuditLog(table.data / "audit.log", time())
        self._open.callback(audit.close)
        self._report_recovery(store)
        types = store.scan()
        # Not only from the journal: a journal that was restored from a backup lacks the last ones.
        incarnation = max(store.incarnation + 1, new_incarnation())
        topology = config.topology()
        own = self._identity(incarnation)
        core = BrokerCore(
            NodeId(table.name),
            incarnation,
            topology,
            os.urandom,
            self._predicates,
            _options(table),
            own.decision_signer(),
            own.decision_checker(),
        )
        addresses = {NodeId(b.name): b.url for b in config.broker}
        self.node = BrokerNode(core, store, table.limits, audit, config.cluster.name, addresses)
        self._open.callback(self.node.stop)
        store.append(Started(incarnation=incarnation, protocol=PROTOCOL))
        await store.journal.sync()
        for record in (*types, *store.replay()):
            core.recover(record)
        self.retainer = Retainer(self.node, table.retention)
        self.retainer.recovered()
        self.ages = LogAges(core.rendezvous.logs)
        self.node.act(core.recovered(asyncio.get_running_loop().time()))
        self.connections = Connections(self.node, own, config.permissions())
        # Connections end before the servers that accepted them, which would wait for them otherwise.
        self._open.push_async_callback(self._close_servers)
        self._open.push_async_callback(self.connections.close, f"broker {table.name} stops")
        await self._listen(own)
        self.connections.dial(addresses)
        self._tasks = [asyncio.ensure_future(step) for step in (self._watch(), self._follow_keys(), self._journal())]
        self._open.push_async_callback(self._cancel_tasks)
        self.ready = True
        log.info("serving", extra={"node": table.name, "listen": table.listen, "incarnation": incarnation})

    def _identity(self, incarnation: int) -> Self:
        table, cluster = self.table, self.config.cluster
        if table.keys is None:
            secret = make_secret(table.addresses)
            return Self.without_keys(
                cluster.name, Kind.BROKER, table.name, incarnation, cluster.site_role, cluster.insecure, secret
            )
        own = Self.with_keys(table.keys, incarnation, cluster.insecure)
        if own.party.identity.name != table.name or own.party.identity.cluster != cluster.name:
            raise ConfigError(f"{table.keys}: these are the keys of {own.party.identity}, not of broker {table.name!r}")
        return own

    async def _listen(self, own: Self) -> None:
        table, permissions = self.table, self.connections.permissions
        collector = NodeCollector(self.node, self.connections, self.retainer, self.ages, self._policy_of)
        pages = BrokerPages(self.node, self.connections, self.retainer, collector, lambda: self.ready)
        authenticate, login = self._authentication(own)
        names = Names(table.addresses, hosts=table.hosts, origins=table.origins)
        gate = Gate(names, permissions, authenticate, self.connections.rejected)
        self.routes = pages.routes(gate, login)
        if self._extend is not None:
            self._extend(self.routes, gate)
        self.routes.app.middlewares.append(admit_identified(self.connections.rejected))
        tls = own.server_tls(self._tls_rejected)
        await self._serve(self.routes, table.listen, self.connections.budget, tls)
        if table.health_listen is not None:
            names = Names([table.health_listen], hosts=table.hosts)
            gate = Gate(names, permissions, (), self.connections.rejected)
            # A budget of its own: unauthenticated clients there must not lock links out.
            await self._serve(pages.health_routes(gate), table.health_listen, connection_budget(table.limits), None)

    def _tls_rejected(self, reason: str) -> None:
        self.connections.rejected("a stranger", "TLS", reason)

    def _authentication(self, own: Self) -> tuple[list[Authenticate], Handler | None]:
        if own.trust is not None:
            return [ByCertificate(own.trust)], None
        assert own.party.secret is not None, "a broker without keys makes its secret before it listens"
        by_secret = BySecret.of(own.party.secret, self.config.cluster.name, self.config.cluster.site_role)
        return [by_secret], by_secret.login

    async def _serve(self, routes: Routes, listen: str, budget: ConnectionBudget, tls: ssl.SSLContext | None) -> None:
        runner = web.AppRunner(routes.app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        self._runners.append(runner)
        await runner.setup()
        try:
            await BoundedSite(runner, split_address(listen), budget, self.connections.rejected, tls).start()
        except OSError as error:
            raise ConfigError(f"broker {self.table.name!r} can't listen on {listen}: {error}") from None

    def _report_recovery(self, store: RecordStore) -> None:
        found = store.journal.recovery
        fields = {"node": self.table.name, "records": found.records, "bytes": found.bytes}
        if found.torn_bytes:
            log.warning(
                "the journal ended in a write that a crash interrupted; it was never acknowledged and is cut off",
                extra={**fields, "torn_bytes": found.torn_bytes, "file": found.torn_file, "at": found.torn_offset},
            )
        else:
            log.info("journal opened", extra=fields)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            self.node.watch()
            self.ages.look(monotonic())
            await self.retainer.step()

    async def _follow_keys(self) -> None:
        while True:
            await asyncio.sleep(RELOAD_S)
            self.reload_keys()

    def reload_keys(self) -> None:
        """Read renewed keys and revocations now; a problem is an alarm, once, and the old ones stay in use."""
        problem, self._keys_problem = self._keys_problem, ""
        try:
            self.connections.revoke()
        except TopsError as error:
            self._keys_problem = str(error)
            if problem != self._keys_problem:
                self.node.alarm("keys", self._keys_problem)

    async def _journal(self) -> None:
        try:
            failure = await self.node.store.journal.failed()
        except JournalClosed:
            return
        log.critical(str(failure), extra={"node": self.table.name})
        if self._failed is not None and not self._failed.done():
            self._failed.set_exception(failure)

    async def wait(self) -> None:
        """Serve until the broker fails; raises the cause."""
        assert self._failed is not None, "the broker was not started"
        await self._failed

    async def stop(self) -> None:
        """Close connections, then the journal. What was acknowledged is on disk already."""
        self.ready = False
        await self._open.aclose()
        if self._failed is not None and self._failed.done() and not self._failed.cancelled():
            self._failed.exception()  # retrieved here, or asyncio would report it as never retrieved

    async def _cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _close_servers(self) -> None:
        for runner in self._runners:
            await runner.cleanup()

    async def _close_store(self, store: RecordStore) -> None:
        try:
            await store.close()
        except TopsError as error:
            log.error("the journal was not closed in order", extra={"node": self.table.name, "reason": str(error)})


def _options(table: BrokerTable) -> RendezvousOptions:
    limits = table.limits
    return RendezvousOptions(
        epochs=EpochOptions(sync_window_s=limits.vote_s, finish_window_s=limits.finish_s),
        quotas=Quotas(
            subscriptions=limits.subscriptions_max,
            filter_bytes=limits.filter_bytes_max,
            types=limits.types_max,
            type_bytes=limits.type_bytes_max,
            followers=limits.followers_max,
            transactions=limits.transactions_max,
            participants=limits.participants_max,
        ),
    )


def _journal_options(table: BrokerTable) -> JournalOptions:
    segment_bytes = max(2**20, min(64 * 2**20, table.retention.size // SEGMENTS_KEPT))
    return JournalOptions(segment_bytes=segment_bytes, preallocate_bytes=PREALLOCATE_BYTES)
