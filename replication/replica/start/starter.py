"""Drives the start of a set at one replica: fingerprint, exchange, decision, transition, again until it has started."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from adapters.changes import split_table_name
from replication.model.config import ReplicaSetConfig
from replication.replica.start import comparing, fingerprint
from replication.replica.start.decisions import Agree, Differ, Report, Start, State, TakeCopy, Wait, Withdraw, decide
from replication.replica.start.fingerprint import Described, Fingerprint, Progress, TableDetail
from replication.replica.start.record import Record, StartRecord
from replication.rpc.calls import AnyResponse, GetStartState, GetTableFingerprint, StartState, TableFingerprint
from replication.rpc.conversation import Caller
from replication.tables import catalog
from replication.tables.endpoints import ReplicaEndpoint
from replication.tables.schema import quoted
from tops.model.errors import ConfigError, TopsError
from tops.protocol.messages import LogStateReported

ASK_FIRST_S, REQUEST_MAX_S = 0.25, 2.0  # agents come up one after the other: at first nobody is waited for long
ROUND_S = 0.05  # between two rounds while the others keep up
WAIT_S = 0.25  # between two rounds while the others are still at it
EXPECTED_S = 20.0  # until a replica that waits for others warns about it
PAUSE_S = 1.0  # between two rounds while something has to be done by somebody
# While the databases differ they are read again now and then: a DBA who has the agent's login is not noticed.
READ_AGAIN_S, READ_AGAIN_TIMES = 5.0, 5.0  # seconds, or times as long as reading took, whichever is more
_fingerprint = msgspec.msgpack.Decoder(Fingerprint)
_detail = msgspec.msgpack.Decoder(TableDetail)

log = logging.getLogger("tops.replication")


class Copying(Protocol):
    """Taking what this replica begins with from another one (`replication.replica.bootstrap`)."""

    progress: Progress | None
    source: str

    async def may_replace(self) -> bool: ...

    async def is_unfinished(self) -> bool: ...

    async def take_seed(self, *, replaceable: bool) -> None: ...

    async def take_copy(self, wanted: TakeCopy) -> None: ...


class Starter:
    """One replica's way into its set. `problem` and `progress` are what its status shows meanwhile."""

    def __init__(
        self,
        config: ReplicaSetConfig,
        replica: str,
        dsn: str,
        record: StartRecord,
        *,
        get_log_state: Callable[[], Awaitable[LogStateReported]],
        ensure_schema: Callable[[], Awaitable[None]],
        newcomer: Copying,
    ) -> None:
        self._config, self._replica, self._dsn, self.record = config, replica, dsn, record
        self._ask_log, self._ensure_schema, self._newcomer = get_log_state, ensure_schema, newcomer
        self._caller: Caller
        self._state = Record()
        self._explained: tuple[object, str] = (None, "")
        self._request_s = ASK_FIRST_S
        self._read_again_at = self._checked_at = 0.0
        self._warn_at: float | None = None  # when the problem has lasted too long
        self.problem = "it has just begun"
        self.warning = ""
        self.progress = Progress()

    # ---------------------------------------------------------------------------------------------------- responses

    def respond(self, request: GetStartState | GetTableFingerprint) -> AnyResponse:
        if isinstance(request, GetTableFingerprint):
            details = self._state.described.details if self._state.described is not None else {}
            found = details.get(request.table)
            encoded = msgspec.msgpack.encode(found) if found is not None else b""
            return TableFingerprint(replica=self._replica, detail=encoded)
        report = self._state.report
        return StartState(
            replica=self._replica,
            state=report.state.value,
            attempt=report.attempt,
            basis=report.basis,
            fingerprint=msgspec.msgpack.encode(report.fingerprint) if report.fingerprint is not None else b"",
            problem=self.problem,
        )

    @property
    def reason(self) -> str:
        """Why the replica has not started; empty once it has."""
        if self._has_started:
            return ""
        if (copying := self._newcomer.progress) is not None:
            return f"a copy is taken from {self._newcomer.source}: {copying.text('copied') or 'it begins'}"
        text = self.progress.text("compared") if self._state.state is State.NEW else ""
        return f"the data are being compared: {text}" if text else self.problem

    @property
    def attempt(self) -> str:
        """Names the rows that this replica holds until the set starts; empty if they may change."""
        return "" if self._has_started else self._state.attempt

    # --------------------------------------------------------------------------------------------------------- rounds

    async def load(self) -> None:
        """Look up how far the database has come."""
        self._state = await self.record.load()

    async def run(self, caller: Caller) -> None:
        """Returns when the replica has started; what stands in the way is in `problem` and tried again."""
        self._caller = caller
        while not self._has_started:
            try:
                pause_s = await self._round()
            except ConfigError:
                raise
            except TopsError as error:
                self._note(str(error))
                pause_s = PAUSE_S
            if not self._has_started:
                await asyncio.sleep(pause_s)
        self.record.close()

    def close(self) -> None:
        self.record.close()

    @property
    def _has_started(self) -> bool:
        return self._state.state is State.STARTED

    async def _round(self) -> float:
        """One exchange and what follows from it; how long to wait before the next."""
        told = await self._ask_log()
        reports = await self._reports()
        begun = told.decided > 0 or any(report.state is State.STARTED for report in reports.values())
        if self._state.state is State.NEW and not begun:
            if not await self._bring_in(reports):
                return WAIT_S
            await self._describe()
            reports[self._replica] = self._state.report
        elif self._state.state is State.COMPARED and not begun and await self._is_outdated():
            await self._describe()
            return ROUND_S
        listed = [r.name for r in self._config.replica if not (r.dsn or "").startswith("sqlite:")]
        tables = () if self._config.tables == "*" else self._config.tables
        decision = decide(
            self._replica, set(listed), reports, decided=told.decided, log_is_whole=told.oldest <= 1, tables=tables
        )
        return await self._carry_out(decision, reports)

    async def _carry_out(
        self, decision: Wait | Differ | Agree | Withdraw | Start | TakeCopy, reports: dict[str, Report]
    ) -> float:
        match decision:
            case Wait(reason):
                self._note(reason, expected=True)
                return ROUND_S if self._state.state is State.AGREED else WAIT_S
            case Differ(found):
                self._note(await self._reason(found, reports))
                if await self._may_be_seeded(reports):
                    await self._take_seed()
                    return ROUND_S
                if asyncio.get_running_loop().time() > self._read_again_at:
                    await self._describe()
                return PAUSE_S
            case Agree(basis):
                self._checked_at = 0.0
                if await self._is_outdated():
                    await self._describe()
                    return ROUND_S
                self._warn(reports)
                self._state = await self.record.agree(self._state, basis, await self._sql_names())
            case Withdraw():
                self._state = await self.record.withdraw(self._state, await self._sql_names())
            case Start():
                self._state = await self.record.started(self._state)
                log.info("the replica starts with data equal to the others'", extra={"replica": self._replica})
            case TakeCopy():
                await self._newcomer.take_copy(decision)
                self._state = await self.record.load()
        return ROUND_S

    async def _may_be_seeded(self, reports: dict[str, Report]) -> bool:
        """Whether the seed holds something else, and what is here may be replaced by it."""
        seed = reports.get(self._config.seed or "")
        if seed is None or seed.fingerprint in (None, self._state.report.fingerprint):
            return False
        return self._state.seeded or await self._newcomer.may_replace()

    async def _reports(self) -> dict[str, Report]:
        responses = await self._caller.request_all(GetStartState(), self._request_s, len(self._config.replica))
        found = {a.replica: _report(a) for a in responses if isinstance(a, StartState)}
        # Those who are there are not kept waiting for long; those who are not yet are asked again soon.
        self._request_s = (
            ASK_FIRST_S if len(found) == len(self._config.replica) else min(self._request_s * 2, REQUEST_MAX_S)
        )
        listed = set(self._config.names)
        return {name: report for name, report in found.items() if name in listed} | {self._replica: self._state.report}

    # ---------------------------------------------------------------------------------------------------- fingerprint

    async def _bring_in(self, reports: dict[str, Report]) -> bool:
        """The tables that are to come from somewhere; whether they are there."""
        seed = self._config.seed
        if seed in (None, self._replica):
            await self._ensure_schema()
        elif await self._newcomer.is_unfinished() or (not self._state.seeded and await self._newcomer.may_replace()):
            if reports.get(seed or "", Report(State.NEW)).state is State.NEW:
                self._note(f"waiting for {seed}, from which it takes schema and rows", expected=True)
                return False
            await self._take_seed()
        return True

    async def _take_seed(self) -> None:
        await self._newcomer.take_seed(replaceable=self._state.seeded)
        self._state = await self.record.load()

    async def _describe(self) -> None:
        """Take the fingerprint. What was known before is reported meanwhile: nobody starts on it, since the new one is
        another attempt."""
        self.progress = Progress()
        watched = await self.record.watch(await self._sql_names())
        described = await self._taken()
        if await self.record.is_untouched():
            self._state = await self.record.compared(described, seeded=watched.seeded)
        else:
            self._note("a direct write came while the data were compared: it begins again")

    async def _taken(self) -> Described:
        loop, tables = asyncio.get_running_loop(), await self.tables()
        began, checksums = loop.time(), not self._config.trust_equal
        described = await fingerprint.take(self._dsn, self._replica, tables, self.progress, checksums=checksums)
        self._checked_at = loop.time()
        self._read_again_at = loop.time() + max(READ_AGAIN_S, READ_AGAIN_TIMES * (loop.time() - began))
        return described

    async def _is_outdated(self) -> bool:
        """A direct write was noted, or the tables are no longer what they were. Agreeing looks for writes once more."""
        if asyncio.get_running_loop().time() < self._checked_at + PAUSE_S:
            return False
        self._checked_at = asyncio.get_running_loop().time()
        assert self._state.described is not None
        known = self._state.described.fingerprint.tables
        schemas = await fingerprint.schemas(self._dsn, self._replica, await self.tables())
        if schemas != {table: digest.schema for table, digest in known.items()}:
            return True
        return not await self.record.is_untouched()

    async def tables(self) -> Sequence[str]:
        """The set's tables as this database has them; a named one that it lacks is among them."""
        if self._config.tables == "*":
            return await catalog.tables_of(ReplicaEndpoint(self._replica, self._dsn))
        return self._config.tables

    async def _sql_names(self) -> list[str]:
        """The set's tables that exist, as SQL names them."""
        names = []
        for table in await self.tables():
            schema, name = split_table_name(table)
            names.append(f"{quoted(schema or 'public')}.{quoted(name)}")
        return await self.record.existing(names)

    # ------------------------------------------------------------------------------------------------------- reasons

    async def _reason(self, found: Sequence[comparing.Difference], reports: dict[str, Report]) -> str:
        basis = tuple(sorted((name, report.attempt) for name, report in reports.items()))
        if self._explained[0] != basis:
            texts = [comparing.explained(d, await self._details(d.table)) for d in found[: comparing.SHOWN_MAX]]
            texts += [d.text for d in found[comparing.SHOWN_MAX :]]
            self._explained = (basis, comparing.reason(texts, self._config.seed))
        return self._explained[1]

    async def _details(self, table: str) -> dict[str, TableDetail]:
        if not table:
            return {}
        responses = await self._caller.request_all(
            GetTableFingerprint(table=table), REQUEST_MAX_S, len(self._config.replica)
        )
        return {a.replica: _detail.decode(a.detail) for a in responses if isinstance(a, TableFingerprint) and a.detail}

    def _warn(self, reports: dict[str, Report]) -> None:
        found = {name: r.fingerprint for name, r in reports.items() if r.fingerprint is not None}
        self.warning = "; ".join(comparing.warnings(found))

    def _note(self, problem: str, *, expected: bool = False) -> None:
        """Tell what stands in the way. In every start replicas wait for each other: no trouble unless it lasts."""
        now = asyncio.get_running_loop().time()
        if problem != self.problem:
            self.problem, self._warn_at = problem, now + EXPECTED_S if expected else now
            if expected:
                log.info("the replica has not started", extra={"replica": self._replica, "reason": problem})
        if self._warn_at is not None and now >= self._warn_at:
            self._warn_at = None
            log.warning("the replica has not started", extra={"replica": self._replica, "reason": problem})


def _report(told: StartState) -> Report:
    found = _fingerprint.decode(told.fingerprint) if told.fingerprint else None
    return Report(State(told.state), told.attempt, told.basis, found, told.problem)
