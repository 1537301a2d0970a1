"""A replica's agent: one process, or one part of `tops up`, in front of one database.

It waits until the set can start (`replication.replica.start`), joins the set's log, responds to requests (reads,
positions, status), commits local-first writes where the policy asks for it, and says why when it can't go on.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, assert_never
from urllib.parse import urlsplit

from adapters import PostgresAdapter
from adapters.changes import Statement
from adapters.postgres.apply.session import Options
from adapters.postgres.copy.scripts import user_tables
from adapters.postgres.origin import Origin, Slots
from adapters.postgres.sql.logins import user_of
from adapters.resource import Resource
from replication.conflicts.own_statements import reserved
from replication.conflicts.tables import KEYS
from replication.model.config import HIDDEN, Cluster, ReplicaSetConfig
from replication.model.events import log_type
from replication.model.values import pack_result, pack_rows, unpack_values
from replication.policies import EntryKind, Route, client_plans, policy_of
from replication.replica import bootstrap
from replication.replica.apply.agreement import Agreement
from replication.replica.apply.apply_errors import ApplyErrors
from replication.replica.apply.certification import Certifier
from replication.replica.apply.checks import AtReplica
from replication.replica.apply.local_writes import LocalWrites
from replication.replica.apply.participant import ReplicaParticipant
from replication.replica.apply.publisher import OutboxPublisher
from replication.replica.copies import Copies
from replication.replica.databases import ReplicaDatabase, with_retries
from replication.replica.differences import Differences
from replication.replica.direct.listener import DirectListener
from replication.replica.direct.quick_desk import QuickDesk
from replication.replica.lag import LagTracker
from replication.replica.materialized import MaterializedViews
from replication.replica.origin.executor import OriginExecutor
from replication.replica.origin.submission import AtCoordinator, AtThisReplica, Submission
from replication.replica.pruning import Flushed, Pruning
from replication.replica.start import holder
from replication.replica.start.drift import SchemaDrift
from replication.replica.start.guarding import Guarding
from replication.replica.start.policy_change import crossing
from replication.replica.start.record import StartRecord
from replication.replica.start.starter import Starter
from replication.replica.write_meter import WriteMeter
from replication.rpc import calls
from replication.rpc.calls import AnyRequest, AnyResponse
from replication.rpc.conversation import Caller, Responder
from replication.rpc.rejections import NotStarted
from replication.rpc.rights import RequestGuard
from tops.client.site import Site
from tops.client.subscriptions import Subscription
from tops.core.participant.participation import SiteOptions
from tops.model.errors import AgentReplaced, ConfigError, InvalidTransaction, NotReachable, TopsError, code_of
from tops.model.transactions import Scope, TxType

KEY_HELD = f"select from {KEYS} where replica_set = $1 and key = $2"
LOOK_S = 1.0  # between two looks whether the database is there, and still ours
SILENT_S = 5.0  # until a database that gives no answer is said to give none
ORIGIN_LOCK_S = 1.0  # a vote takes longer: an execution that waits for a lock gives way to apply
OTHER_HISTORY, UNPUBLISHABLE = "other-history", "unpublishable"  # codes of a replica that stopped
Operation = calls.Pause | calls.Resume | calls.RetryErrors | calls.Reload | calls.Quarantine
SITE_OPTIONS = SiteOptions(renew_s=0.5, retry_s=0.5, give_up_s=10.0)

log = logging.getLogger("tops.replication")


class Failure:
    """Why an agent stopped serving: a code, and what the error says."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        if isinstance(error, TopsError):
            self.code, self._text = code_of(error), str(error)
        else:
            self.code, self._text = calls.INTERNAL_ERROR, f"{type(error).__name__}: {error}"

    def __str__(self) -> str:
        return f"serves no longer ({self.code}): {self._text}"


class Agent:
    """One replica at work; `Agent.run` makes it."""

    def __init__(
        self,
        cluster: Cluster,
        config: ReplicaSetConfig,
        replica: str,
        *,
        take_over: bool = False,
        overwrite: bool = False,
    ) -> None:
        self.take_over, self.overwrite = take_over, overwrite
        self.cluster, self.config, self.replica = cluster, config, config.replica_named(replica)
        self.name = config.site_of(replica)
        self.policy = policy_of(config)
        self.log_type = log_type(config.name)
        data = cluster.data_of(config, self.replica)
        self.database = ReplicaDatabase(cluster.config.cluster.name, config, self.replica, data)
        self.site: Site
        self.resource: Resource
        self.participant: ReplicaParticipant
        self.lag: LagTracker
        self.errors: ApplyErrors
        self.differences: Differences
        self.visitor: AtReplica
        self.writes: LocalWrites | None = None
        self.certifier: Certifier | None = None
        self._views: MaterializedViews | None = None
        self.flushed: Flushed | None = None
        self.pruning: Pruning | None = None
        self.executor: OriginExecutor | None = None
        self._no_origin = ""
        self.guard = RequestGuard(
            cluster.config.cluster.name, config.name, cluster.config.permissions(), data / "audit.log", config.sites()
        )
        self.direct: DirectListener | None = None
        self.copies = Copies(self)
        self.starter: Starter | None = None
        self.guarding: Guarding | None = None
        self.drift: SchemaDrift | None = None
        self.meter = WriteMeter()
        self._joined = asyncio.Event()
        self._database_error = ""
        self._tasks: list[asyncio.Task[Any]] = []
        self.failure: Failure | None = None  # why it serves no longer
        self._failed = asyncio.Event()
        self._closing = False

    @classmethod
    @asynccontextmanager
    async def run(cls, cluster: Cluster, set_name: str, replica: str, **options: bool) -> AsyncIterator["Agent"]:
        """As `open`, and it has joined its set. A set starts when all its replicas are there: run them side by side."""
        async with cls.open(cluster, set_name, replica, **options) as agent:
            await agent.wait_joined()
            yield agent

    @classmethod
    @asynccontextmanager
    async def open(
        cls, cluster: Cluster, set_name: str, replica: str, *, take_over: bool = False, overwrite: bool = False
    ) -> AsyncIterator["Agent"]:
        """An agent that answers, and joins its set as soon as that has started; stopped on leaving. Raises TopsError,
        with nothing left open, when it can't start.

        `take_over`: another agent that serves this replica is replaced. `overwrite`: a copy may replace rows that are
        no copy of this set.
        """
        config = cluster.replica_set(set_name)
        agent = cls(cluster, config, replica, take_over=take_over, overwrite=overwrite)
        async with AsyncExitStack() as stack:
            await agent._start(stack)
            yield agent

    async def wait(self) -> None:
        """Serve until something that can't be fixed here ends it; raises what that was."""
        await self._failed.wait()
        if self.failure is not None:
            raise self.failure.error

    async def wait_joined(self) -> None:
        """Returns when the replica takes part in its set; raises what keeps it from that for good."""
        awaited = [asyncio.ensure_future(event.wait()) for event in (self._joined, self._failed)]
        try:
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in awaited:
                task.cancel()
        if not self._joined.is_set():
            await self.wait()

    @property
    def not_started(self) -> str:
        """Why the replica takes no part in its set; empty once it does."""
        if self._joined.is_set():
            return ""
        if self.failure is not None:
            return str(self.failure)
        reason = self.starter.reason if self.starter is not None else ""
        return self._database_error or reason or "it is about to join the set's log"

    async def _start(self, stack: AsyncExitStack) -> None:
        stack.push_async_callback(self.database.stop)
        await self.database.start()
        stack.callback(self._cancel)
        if self.replica.dsn is None:
            self._spawn(self.database.watch())  # from now on: what follows waits for a server that died
        await with_retries(self.database.set_up, self.name)
        self.resource = self.database.resource()
        self._views = MaterializedViews(self.resource) if not self.database.is_sqlite else None
        if self.resource.compensatable and self.policy.scope_of(self.replica.name) is Scope.DISTRIBUTED:
            raise ConfigError(
                f"replica {self.replica.name!r}: this database commits early and can't vote; let it follow"
            )
        if not self.database.is_sqlite and not self.take_over:
            await with_retries(self._check_free, self.name)
        await with_retries(self.resource.start, self.name)
        stack.push_async_callback(self.resource.close)
        if not self.database.is_sqlite:
            await holder.register(self.database.dsn, self.config.name)
        brokers = self.cluster.config
        self.site = await stack.enter_async_context(
            Site.connect(
                self.cluster.urls(self.replica.broker),
                name=self.name,
                cluster=brokers.cluster.name,
                keys=self.cluster.keys_of(self.replica),
                insecure=brokers.cluster.insecure,
                options=SITE_OPTIONS,
                timeout_s=60.0,
            )
        )
        scope = self.policy.scope_of(self.replica.name)
        self.participant = ReplicaParticipant(self.resource, self.log_type.name, self.name, scope)
        if not self.policy.local_first:  # else replicas publish, and versions travel with the rows
            self.participant.reserved = reserved
        self.visitor = self.participant.visitor = AtReplica(self.replica.name, self.resource)
        stack.push_async_callback(self.visitor.close)
        self.errors = ApplyErrors(self.policy, self.replica.name, self.participant)
        await with_retries(self.errors.start, self.name)
        self.differences = Differences(self.config.name, self.database.dsn, self.resource)
        await with_retries(self.differences.start, self.name)
        await self._declare()
        if not self.database.is_sqlite:
            self.starter = await self._starter()
            stack.callback(self.starter.close)
            self.guarding = self._guarding()
            stack.push_async_callback(self.guarding.close)
            self.drift = SchemaDrift(self.replica.name, self.config.names, self.database.dsn, self.starter.tables)
        stack.push_async_callback(self.copies.close)
        stack.callback(self.guard.close)
        answerer = Responder(
            self.site, self.config.name, self.site.brokers, self._ready, self._answer, self._write, self.guard
        )
        stack.push_async_callback(answerer.close)
        await answerer.start()
        await self._listen_for_reads(stack, answerer)
        self._spawn(self._watch_database())
        serving = self._spawn(self._serve())
        stack.push_async_callback(_ended, serving)
        stack.callback(self._close)

    async def _listen_for_reads(self, stack: AsyncExitStack, answerer: Responder) -> None:
        """Serve direct connections of clients."""
        broker = self.cluster.config.broker_named(self.replica.broker)
        cluster = self.cluster.config.cluster
        secret_of = urlsplit(broker.url).netloc
        desk = None
        if isinstance(self.resource, PostgresAdapter) and self._views is not None:
            desk = QuickDesk(
                f"replica {self.name}",
                self.resource.quick,
                self.guard,
                self.participant,
                self._ready,
                self._check_current,
                self._views,
            )
            stack.callback(desk.close)
        self.direct = DirectListener(
            self.name,
            lambda: self.site.own.accepting(cluster.site_role, secret_of),
            lambda: self.guard.permissions,
            broker.limits,
            answerer.receive,
            desk,
        )
        await stack.enter_async_context(self.direct.serving(self.replica.read_listen, cluster.insecure))

    async def _declare(self) -> None:
        """What the log takes from clients, and which replicas the set has, as the file says it."""
        plans = client_plans(self.log_type, policy_of(self.config))  # the file may have been read again
        await self.site.advertise(self.log_type, plans=plans, members=self.config.sites())

    async def _check_free(self) -> None:
        await holder.check_free(self.database.dsn, self.config.name, self.replica.name)

    async def _starter(self) -> Starter:
        config, dsn = self.config, self.database.dsn
        schema = self.cluster.schema_of(config)
        starter = Starter(
            config,
            self.replica.name,
            dsn,
            StartRecord(self.database.admin_dsn, config.name, user_of(self.database.logins.agent)),
            get_log_state=lambda: self.site.get_log_state(self.log_type, timeout_s=10.0),
            ensure_schema=lambda: self.database.ensure_schema(schema),
            newcomer=bootstrap.Newcomer(self, overwrite=self.overwrite),
        )
        await starter.load()
        return starter

    def _guarding(self) -> Guarding:
        database = self.database
        login = user_of(database.logins.agent)
        return Guarding(self.config, self.replica.name, database.dsn, database.admin_dsn, login)

    async def _serve(self) -> None:
        """Start, join, and take part until cancelled."""
        async with AsyncExitStack() as stack:
            caller = Caller(self.site, self.config.name, self.site.brokers)
            await caller.start()
            if self.starter is not None and self.starter.reason:
                await self.starter.run(caller)
            if self.policy.route is Route.COORDINATOR and self.policy.plan().tx_type is TxType.LOCAL:
                agreement = Agreement(self.config, self.replica.name, self.participant)
                self.errors.agreement = agreement
                self._spawn(agreement.run(caller))
            await self._join(stack, caller)
            self._joined.set()
            await asyncio.Event().wait()

    async def _join(self, stack: AsyncExitStack, caller: Caller) -> None:
        config = self.config
        stack.callback(self._cancel)
        if self.policy.local_first:
            awaited, plan = self.policy.acknowledges_from_log, self.policy.plan()
            publisher = OutboxPublisher(self.site, self.log_type, self.resource, plan, awaited=awaited)
            self.writes = LocalWrites(self.policy, self.replica.name, self.site, self.resource, publisher, self.errors)
            await self.writes.start(self.participant)
            self._spawn(publisher.run())
        if self.policy.entry_kind is EntryKind.CERTIFIED:
            self.certifier = Certifier(self.resource, config.name)
            await self.certifier.start()
            self.participant.translate = self.certifier.certified
        await self._open_origin()
        if self.executor is not None:
            stack.push_async_callback(self.executor.close)
        if self.starter is not None and (reason := await self._crossing(self.starter)):
            self.participant.stop(reason)
        subscription = await self.site.subscribe(self.log_type, participant=self.participant, durable=self.name)
        stack.push_async_callback(self._unsubscribe, subscription)
        stack.push_async_callback(self.participant.leave)
        self.lag = LagTracker(self.site, self.log_type, self.participant, lambda: self.config.sites())
        self._spawn(self.lag.run())
        if self.guarding is not None:
            await self.guarding.look()
            self._spawn(self.guarding.run())
        if self.drift is not None:
            self._spawn(self.drift.run(caller))
        if not self.database.is_sqlite:
            self.flushed = Flushed(self.resource, config.name, self.participant)
            self.pruning = Pruning(
                self.policy,
                self.replica.name,
                self.site,
                self.log_type,
                self.database.dsn,
                self.resource,
            )
            self._spawn(self.pruning.run())
        log.info("replica serves", extra={"replica": self.name, "position": self.participant.reached})

    async def _unsubscribe(self, subscription: Subscription) -> None:
        """An agent that failed answers for a while, and must not be counted as a member meanwhile."""
        if not self._closing:
            with suppress(TopsError):
                await subscription.unsubscribe()

    async def _crossing(self, starter: Starter) -> str:
        """Why this replica can't follow the log under the policy that the set has now; empty if it can."""
        kind = self.policy.entry_kind.value
        before = await starter.record.policy_kind()
        decided = 0
        if before not in ("", kind):
            decided = (await self.site.get_log_state(self.log_type, timeout_s=30.0)).decided
        reason = crossing(before, self.policy, (await self.resource.applied()).prefix, decided)
        if not reason and before != kind:
            await starter.record.follow(kind)
        starter.close()
        return reason

    async def _watch_database(self) -> None:
        """Notes what is wrong with the database. Ends with AgentReplaced when another agent has taken it: there is
        nothing left to do here."""
        while True:
            await asyncio.sleep(LOOK_S)
            looking = asyncio.ensure_future(self._look_at_database())
            done, _ = await asyncio.wait({looking}, timeout=SILENT_S)
            if not done:
                self._note_database(f"its database has not answered for {SILENT_S:g} s")
            try:
                await looking
                self._note_database("")
            except AgentReplaced:
                self.participant.disown()
                raise
            except TopsError as error:
                self._note_database(str(error))

    def _note_database(self, problem: str) -> None:
        before, self._database_error = self._database_error, problem
        if problem and not before:
            log.warning("the database can't be used", extra={"replica": self.name, "reason": problem})
        elif before and not problem:
            log.info("the database responds again", extra={"replica": self.name, "former_problem": before})

    async def _look_at_database(self) -> None:
        await self.resource.applied()
        if self.flushed is not None and self.writes is not None:
            await self.flushed.look()

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        task.add_done_callback(self._task_ended)
        self._tasks.append(task)
        return task

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        """One part of the work failed: the replica leaves its set, and its status says why."""
        error = None if task.cancelled() else task.exception()
        if error is None or self.failure is not None or self._closing:
            return
        self.failure = Failure(error)
        log.error(
            "replica stopped serving",
            extra={"replica": self.name, "code": self.failure.code, "reason": str(error)},
            exc_info=None if isinstance(error, TopsError) else error,
        )
        self._failed.set()
        self._cancel()

    def _close(self) -> None:
        self._closing = True

    def _cancel(self) -> None:
        """The task that calls this while it ends goes on to its end."""
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()

    # --------------------------------------------------------------------------------------------------- questions

    async def _ready(self, request: AnyRequest) -> None:
        """Returns when this replica has reached the position that the request asks for."""
        match request:
            case calls.Read(at_least=position, wait_s=wait_s, max_lag_s=max_lag_s, settled=settled):
                self._check_current()
                if max_lag_s is not None and not max_lag_s >= 0:  # nor is it NaN
                    raise InvalidTransaction(f"a read can't accept a lag of {max_lag_s} s: give max_lag_s from 0 on")
                if max_lag_s is not None and (lag := self.lag.lag()).seconds > max_lag_s:
                    raise NotReachable(
                        f"replica {self.replica.name} is {lag.seconds:.1f} s behind, more than {max_lag_s:g}"
                    )
                position = max(position, self.participant.in_doubt()) if settled else position
            case calls.Judgement(asked=asked, wait_s=wait_s):
                self._check_current()
                self.participant.pace.hurry()  # also if it is applied: this is where its writers ask
                position = max((number for number, _ in asked), default=0)
            case calls.LockedRead(at_least=position, wait_s=wait_s) | calls.Held(at_least=position, wait_s=wait_s):
                self._check_current()
            case _:
                return
        if not 0 <= wait_s < math.inf:  # nor is it NaN
            raise InvalidTransaction(f"a request can't wait {wait_s} s for a position")
        await self.lag.check_exists(position)
        await self.participant.wait_for(position, min(wait_s, self.config.wait_max_s))

    async def _answer(self, request: AnyRequest, who: str) -> AnyResponse:
        match request:
            case calls.Describe():
                public = self.config.model_dump_json(by_alias=True, exclude=HIDDEN)
                return calls.Described(replica=self.replica.name, config=public.encode(), not_started=self.not_started)
            case calls.GetDirectAddress():
                url = self.direct.url if self.direct is not None else ""
                secret_of = urlsplit(self.cluster.config.broker_named(self.replica.broker).url).netloc
                return calls.DirectAddress(replica=self.replica.name, url=url, secret_of=secret_of)
            case calls.Status():
                return calls.StatusReported(replica=self.replica.name, fields=await self.status())
            case calls.GetStartState() | calls.GetTableFingerprint():
                if self.starter is None:
                    raise ConfigError(f"replica {self.replica.name} is an SQLite file, which is not compared")
                return self.starter.respond(request)
            case calls.GetSchemaDigests():
                if self.drift is None:
                    raise ConfigError(f"replica {self.replica.name} is an SQLite file, which is not compared")
                return await self.drift.respond()
            case calls.OpenCopy() | calls.GetCopyChunk() | calls.CloseCopy() | calls.GetSchema():
                if self.config.seed != self.replica.name:
                    self._check_joined()
                return await self.copies.respond(request)
        self._check_joined()
        match request:
            case calls.Where():
                self._check_current()
                return calls.Located(
                    replica=self.replica.name,
                    position=self.participant.reached,
                    prepared=tuple(sorted(self.participant.prepared)),
                )
            case calls.Read():
                return await self._read(request, who)
            case calls.LockedRead(sql=sql, args=args):
                if self.certifier is None:
                    raise ConfigError(f"replica set {self.config.name!r} is not serializable")
                if self._views is not None:
                    await self._views.check_not_read(sql)
                return await self.certifier.read(self.replica.name, sql, unpack_values(args), who)
            case calls.Judgement(asked=asked):
                return calls.Judged(rejected=await self.participant.verdicts.of(asked))
            case calls.Held(key=key):
                held = await self.resource.read_own(KEY_HELD, (self.config.name, key))
                return calls.HeldReported(held=bool(held.rows))
            case calls.Conflicts(limit=limit):
                return calls.RowsReturned(replica=self.replica.name, rows=pack_rows(await self.errors.conflicts(limit)))
            case calls.CheckDone(tables=tables, found=found):
                await self.differences.note(tables, found)
                return calls.OperationDone(text=self.replica.name)
            case calls.Pause() | calls.Resume() | calls.RetryErrors() | calls.Reload() | calls.Quarantine():
                return calls.OperationDone(text=await self._operate(request))
            case calls.Execute():
                self._check_current()
                executor = self._executor()
                await self.lag.check_exists(request.at_least)
                return await self.meter.one(executor.execute(request, who))
            case calls.Write():
                (response,) = await self._write([request])
                return response
            case _:
                return await self.visitor.response(request)

    def _check_joined(self) -> None:
        if self.failure is not None:
            raise NotReachable(f"replica {self.replica.name} {self.failure}")
        if not self._joined.is_set():
            raise NotStarted(f"replica {self.replica.name} has not started: {self.not_started}")

    def _check_current(self) -> None:
        """Raises NotReachable while the rows here are of another history than those of the set."""
        self._check_joined()
        if self.participant.other_history:
            raise NotReachable(f"replica {self.replica.name} takes no part: {self.participant.other_history}")

    def _executor(self) -> OriginExecutor:
        if self.executor is None:
            raise ConfigError(f"replica {self.replica.name!r} can't execute statements: {self._no_origin}")
        return self.executor

    async def _open_origin(self) -> None:
        """Be an origin: statements that can't be shipped are executed here once, with the rights of the write login."""
        if self.database.is_sqlite:
            self._no_origin = "its database is SQLite, which takes row changes only"
            return
        config, policy = self.config, self.policy
        tables = await self._tables()
        slots = Slots(config.names.index(self.replica.name)) if policy.route is Route.REPLICA else None
        logins, where = self.database.logins, f"replica {self.name}"
        options = Options(
            lock_timeout_s=ORIGIN_LOCK_S, statement_timeout_s=config.execute_timeout_s, connect_timeout_s=10.0
        )
        origin = Origin(logins.write, self.database.dsn, where, tables, options, slots)
        try:
            await origin.start()
        except TopsError as error:
            self._no_origin = str(error)
            log.warning("this replica executes no statements", extra={"replica": self.name, "reason": str(error)})
            return
        submission: Submission
        if self.writes is not None:
            submission = AtThisReplica(self.replica.name, self.writes, self.visitor)
        else:
            submission = AtCoordinator(self.site, self.log_type, policy, self.participant)
        committed = self._committed if "current" in policy.consistencies() else None
        row_keys = self.certifier.row_keys if self.certifier is not None else None
        self.executor = OriginExecutor(self.replica.name, origin, self.participant, submission, committed, row_keys)

    async def _committed(self) -> int:
        return (await self.site.get_log_state(self.log_type)).decided

    async def _write(self, asked: Sequence[calls.Write]) -> Sequence[AnyResponse]:
        self._check_current()
        if self.writes is None:
            raise ConfigError(f"replica set {self.config.name!r} takes writes at its coordinator")
        if self.policy.acknowledges_from_log and self.lag.told is not None and self.lag.told.stale is not None:
            raise NotReachable(str(self.lag.told.stale))  # it would be committed here, and wait for the log in vain
        try:
            responses = await self.meter.all(self.writes.write(asked, self.visitor), len(asked))
        except TopsError as error:
            self.participant.unable.note(f"a write failed: {error}")
            raise
        for response in responses:
            if isinstance(response, calls.Failed):
                self.participant.unable.note(f"a write failed: {response.text}")
        return responses

    async def _read(self, read: calls.Read, who: str) -> calls.ReadDone:
        if self._views is not None and not read.chosen:
            await self._views.check_not_read(read.sql)
        done = await self.resource.read(read.sql, unpack_values(read.args), with_position=True, who=who)
        position = done.position.prefix if done.position is not None else 0
        rows = await pack_result(f"replica {self.replica.name}", done.rows)
        return calls.ReadDone(replica=self.replica.name, rows=rows, position=position)

    async def _operate(self, request: Operation) -> str:
        match request:
            case calls.Pause(reason=reason):
                self.participant.stop(reason or "paused by an operator")
                return f"{self.replica.name} is paused at position {self.participant.reached}"
            case calls.Resume():
                self.participant.resume()
                return f"{self.replica.name} goes on from position {self.participant.reached}"
            case calls.RetryErrors():
                return await self.errors.retry(self.resource)
            case calls.Reload():
                cluster = Cluster.load(self.cluster.path)
                self.config = cluster.replica_set(self.config.name)
                self.guard.permissions, self.guard.members = cluster.config.permissions(), self.config.sites()
                await self._declare()
                return f"{self.replica.name} has read {self.cluster.path.name} again"
            case calls.Quarantine():
                return await self._quarantine()
        assert_never(request)

    async def _quarantine(self) -> str:
        publisher = self.writes.publisher if self.writes is not None else None
        if publisher is None or publisher.stuck is None:
            return f"{self.replica.name}: nothing is too large to be published"
        stuck, tables = publisher.stuck, set[str]()
        for member in stuck.entry.members:
            for change in member.changes:
                tables |= set(await self._tables()) if isinstance(change, Statement) else {change.table}
        reason = "a transaction of this replica was quarantined before it was published"
        found = {table: reason for table in sorted(tables) if not table.startswith("tops.")}
        await self.differences.quarantine(stuck.entry.id, found)
        publisher.unstick()
        return (
            f"{self.replica.name}: {stuck.text}; it is in tops.quarantined now, and what is behind it is published; "
            "the other replicas lack its rows: `tops divergence check`, then `tops divergence repair`"
        )

    async def _tables(self) -> list[str]:
        return await user_tables(self.database.dsn) if self.config.tables == "*" else self.config.tables

    async def status(self) -> dict[str, Any]:
        """What an operator must know about this replica."""
        if not self._joined.is_set():
            return not_started_status(self)
        lag, participant = self.lag.lag(), self.participant
        told, last_error = self.lag.told, self._last_error()
        code, stopped = self._stopped()
        # What the coordinator said a while ago is not true for whoever can't hear it take that back.
        in_sync = (
            lag.linked
            and told is not None
            and told.is_open
            and (self.name in told.in_sync if participant.scope is Scope.DISTRIBUTED else lag.transactions == 0)
        )
        return {
            "replica": self.replica.name,
            "site": self.name,
            "broker": self.site.broker,
            "votes": participant.scope is Scope.DISTRIBUTED,
            "position": participant.reached,
            "head": lag.head,
            "in_sync": bool(in_sync) and not stopped and not last_error and not self._differs,
            "lag_s": round(lag.seconds, 3),
            "lag_transactions": lag.transactions,
            "lag_network": lag.network,
            "lag_apply": lag.apply,
            "linked": lag.linked,
            "not_started": "",
            "others_lag_s": self.lag.of_others(),
            "history": told.history if told is not None else "",
            "stopped": stopped,
            "failure_code": code,
            "last_error": last_error,
            "prepared": len(participant.prepared),
            "conflicts": self.errors.conflict_count,
            "quarantined": self.errors.quarantined_count,
            "divergent": self.errors.divergent,
            "unpublished": self.writes.publisher.unpublished if self.writes is not None else 0,
            "unpublished_s": round(self.writes.publisher.unpublished_s, 3) if self.writes is not None else 0.0,
            "flushed": self.flushed.position if self.flushed is not None else 0,
            "direct_writes": self.guarding.writes if self.guarding is not None else 0,
            "schema_drift": self.drift.warning if self.drift is not None else "",
            "differences": self.differences.text,
            "warning": self._warning(),
        }

    def _stopped(self) -> tuple[str, str]:
        """Why this replica does not go on until somebody does something about it: a code, if there is one, and what
        to do."""
        if self.failure is not None:
            return self.failure.code, str(self.failure)
        if self.participant.stopped:
            return "", self.participant.stopped
        if self.participant.other_history:
            return OTHER_HISTORY, self.participant.other_history
        if self.writes is not None and self.writes.publisher.stuck is not None:
            name = self.replica.name
            cure = f"`tops rs quarantine {self.config.name} --replica {name}` takes it out of the outbox"
            text = f"{self.writes.publisher.stuck.text}; what is committed here after it waits; {cure}"
            return UNPUBLISHABLE, text
        return "", ""

    @property
    def _differs(self) -> bool:
        """Whether this database is known to hold something else than the others do."""
        outlier = self.drift is not None and self.drift.is_outlier
        return self.errors.divergent or bool(self.differences.known) or outlier

    def _warning(self) -> str:
        told = [
            self.writes.warning if self.writes is not None else "",
            self.guarding.warning if self.guarding is not None else "",
            self.starter.warning if self.starter is not None else "",
            self.drift.warning if self.drift is not None else "",
        ]
        return "; ".join(filter(None, told))

    def _last_error(self) -> str:
        """What does not go on although nobody stopped it, and is tried again."""
        publishing = self.writes.publisher.problem if self.writes is not None else ""
        participant = self.participant
        stale = str(self.lag.told.stale) if self.lag.told is not None and self.lag.told.stale is not None else ""
        return (
            stale
            or participant.last_error
            or self._database_error
            or self._log_truncated()
            or publishing
            or participant.unable.text
        )

    def _log_truncated(self) -> str:
        """Whether what this replica lacks is no longer in the log: its database is an old copy, or the log lost it."""
        told, reached = self.lag.told, self.participant.reached
        if told is None or told.oldest <= reached + 1:
            return ""
        return (
            f"the log is kept from {told.oldest} on and this replica is at {reached}: "
            "stop it, empty its database and start it again, then it gets a copy of another one"
        )

    async def healthy(self) -> bool:
        """Replication goes on."""
        return not complaint(await self.status())


def not_started_status(agent: Agent) -> dict[str, Any]:
    """The same fields for a replica that takes no part yet."""
    numbers = dict.fromkeys(
        ("position", "lag_s", "lag_transactions", "lag_network", "lag_apply", "prepared", "conflicts", "quarantined",
         "unpublished", "unpublished_s", "flushed", "direct_writes"), 0,
    )  # fmt: skip
    return {
        **numbers,
        "replica": agent.replica.name,
        "site": agent.name,
        "broker": agent.site.broker,
        "votes": agent.participant.scope is Scope.DISTRIBUTED,
        "head": None,
        "in_sync": False,
        "linked": True,
        "not_started": agent.not_started,
        "others_lag_s": {},
        "stopped": "",
        "failure_code": agent.failure.code if agent.failure is not None else "",
        "last_error": "",
        "divergent": False,
        "schema_drift": "",
        "differences": agent.differences.text,
        "warning": "",
    }


async def _ended(task: asyncio.Task[Any]) -> None:
    """Cancel it, and wait for what it does at its end."""
    task.cancel()
    with suppress(asyncio.CancelledError, Exception):
        await task


def complaint(status: Mapping[str, Any]) -> str:
    """Why a replica's replication does not go on; empty if it does."""
    unlinked = "" if status["linked"] else "the set's coordinator does not answer"
    not_started = f"not started: {status['not_started']}" if status["not_started"] else ""
    return str(not_started or status["stopped"] or status["last_error"] or unlinked)
