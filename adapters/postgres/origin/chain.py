"""An origin at work: requests are executed one after the other in one transaction, which is rolled back.

    BEGIN                                     counters
    SAVEPOINT, statements, constraints        for each request; a failed one goes back to its savepoint
    captured keys, new images                 of all requests that went through
    completeness                              of all together; if something is missing, each is executed alone; if a
                                              table is not the one that images were read of, all is executed again
    sequences                                 if others' values were drawn, what was executed is executed again
    old images                                by the agent's session: what is committed of the rows that we have locked
    ROLLBACK

A request finds what those before it did: what it changes is compared with what they have left. Images are read once, at
the end, as long as no two requests touch the same row; where they do, the chain is executed again and images are read
behind every request, and so are those of the next chains.
"""

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import asyncpg

from adapters.changes import Change, InvalidChange, NotDeterministic, Row, Statement
from adapters.postgres.apply.orphans import Orphans
from adapters.postgres.apply.session import Connection, Options, connect
from adapters.postgres.origin import capture
from adapters.postgres.origin.claims import broken_claim
from adapters.postgres.origin.completeness import Changed, changed_rows, last_values, touched
from adapters.postgres.origin.giving_way import Yielded, giving_way
from adapters.postgres.origin.images import Image, Key, images_of, one_spelling
from adapters.postgres.origin.outcomes import Captured, Executed, Interrupted, Rejected
from adapters.postgres.origin.resolve import Request, Resolver
from adapters.postgres.origin.session import CLEAN, ForbiddenByRule, OriginSession
from adapters.postgres.origin.slots import Slots
from adapters.postgres.origin.write_set import Images, State, changes_between
from adapters.postgres.sql.catalog import Table, find_table
from adapters.postgres.sql.sqlstates import is_connection_loss, is_schema_change, is_transient, sqlstate
from tops.model.errors import ConfigError

TOGETHER_S = 1.0  # a message of many requests that takes longer is cancelled: each gets its own time then
CHAIN_S = 0.2  # after so long no further request is begun: the locks of the chain must not keep apply waiting
MESSAGE_MAX = 64
CAREFUL_CHAINS = 20
LEARN_AGAIN_S = 5.0  # what a stamp does not tell, such as constraints that may wait, is looked up again
LEARN_MAX = 5  # definitions that change again and again: the request is tried again later
# Nothing but our own notes is visible: everybody else's are rolled back or not committed yet.
_CAPTURED = "select id, relation, old_key, new_key from tops.captured where id > $1 order by id"
_IMMEDIATE_BY_NATURE = """
select count(*) > 0 as any, string_agg(format('%I.%I', schema, name), ', ') filter (where immediate) as names from (
    select n.nspname as schema, c.conname as name, not bool_or(c.condeferred) as immediate
      from pg_catalog.pg_constraint c join pg_catalog.pg_namespace n on n.oid = c.connamespace
     where c.condeferrable and has_schema_privilege(n.oid, 'usage') group by 1, 2) as named
"""
_SO_FAR = "SELECT tops.captured_so_far()"
_NOT_REPLICABLE = "0A000"
_CANCELED = "57014"
_TOO_SLOW = "Do it in smaller transactions, or give the replica set a longer execute_timeout_s."
_TOO_MANY_VALUES = "the transaction draws more values of a sequence than a replica may draw at once: insert fewer rows"

TableOf = Callable[[str], Awaitable[Table]]
Outcome = Executed | Rejected


class _TableChanged(Exception):
    """A table is not what it was when it was looked up."""


@dataclass(slots=True)
class _Done:
    """A request that went through, as far as it is known before the old images are."""

    rows: tuple[int, ...]
    returned: tuple[tuple[Row, ...], ...]
    notices: tuple[str, ...]
    last_key: int  # the id of the last key that was noted for it
    after: dict[str, Images] = field(default_factory=dict)


class Origin:
    """Executes transactions in one database; `start` comes first, and one `execute` at a time."""

    def __init__(
        self,
        write_dsn: str,
        agent_dsn: str,
        where: str,
        tables: Sequence[str],
        options: Options,
        slots: Slots | None = None,
    ) -> None:
        """`slots`: other replicas commit what they execute without asking this one, so sequences are shared out."""
        self._write_dsn, self._agent_dsn, self._where, self._options = write_dsn, agent_dsn, where, options
        self._names, self._slots = tuple(tables), slots
        self._orphans = Orphans(agent_dsn, where, options)
        self._resolver = Resolver(write_dsn, where, options, self._orphans, may_draw=slots is None)
        self._agent: Connection | None = None
        self._session: OriginSession | None = None
        self._tables: dict[str, Table] = {}
        self._settle: str | None = None  # what ends a member, by the constraints that the database has
        self._learned_at = 0.0
        self._careful = 0  # for so many chains, images are read behind every request
        self.unfit: dict[str, capture.Unfit] = {}  # tables whose changes can't be captured

    async def start(self) -> None:
        """Put the triggers in place; ConfigError if the database can't tell an origin's session from the agent's."""
        agent = await self._agent_connection()
        probe = await connect(self._write_dsn, self._where, "tops-origin", self._options)
        try:
            write = await probe.fetchval("select session_user::text")
        finally:
            await probe.close()
        own = await agent.fetchval("select session_user::text")
        if own == write:
            raise ConfigError(
                f"{self._where}: the agent and clients' statements have the same login {own!r}, so that captured rows "
                "can't be told from applied ones: give the replica a login of its own for writes"
            )
        self.unfit = await capture.install(agent, self._names, own, write)
        if self._slots is not None:
            await self._slots.load(agent)

    async def close(self) -> None:
        self._drop("")
        await self._resolver.close()
        self._orphans.close()
        if self._agent is not None:
            self._agent.terminate()
            self._agent = None

    async def resolve(self, requests: Sequence[Request], who: str = "") -> list[Executed | None]:
        """What requests do that only insert rows whose values can be computed ahead; None: it must be executed.

        One at a time, beside `execute`. That nothing is in the rows' way shows when they are applied."""
        fit = [name for name in self._names if name not in self.unfit]
        return await self._resolver.resolve(requests, fit, who)

    async def execute(self, requests: Sequence[Request], who: str = "") -> list[Outcome]:
        """What the first requests did, in order; one at least. Nothing of it stays in the database. `who`: the identity
        whose requests they are; empty: they are of several.

        Raises Interrupted or NotReachable if the database is not there, QueriesLeft if too many earlier executions of
        the identity do not end."""
        self._orphans.check(who)
        try:
            for _ in range(LEARN_MAX):
                with suppress(_TableChanged):
                    return await self._outcomes(requests)
                self._drop(who)
                self._learn_again()
            raise Interrupted(self._where, "definitions of tables change while the transaction is executed")
        except BaseException as error:
            self._drop(who)
            if is_connection_loss(error) or isinstance(error, asyncpg.exceptions.InvalidCachedStatementError):
                raise Interrupted(self._where, f"the session of the origin ended: {error}") from error
            raise

    async def _outcomes(self, requests: Sequence[Request]) -> list[Outcome]:
        outcomes = await self._executed(requests)
        if outcomes is None:  # something was not captured: whose fault it was shows when each is alone
            outcomes = await self._executed(requests[:1], alone=True)
        if outcomes is None:  # it drew sequences' values of other replicas; now they stand at this one's own
            outcomes = await self._executed(requests[:1], alone=True)
        return outcomes or [Rejected(_NOT_REPLICABLE, _TOO_MANY_VALUES)]

    async def _executed(self, requests: Sequence[Request], *, alone: bool = False) -> list[Outcome] | None:
        agent, session = await self._sessions()
        connection = session.connection
        for request in requests:
            if len(request) == 1 and isinstance(request[0], Statement):
                await session.learn(request[0])
        began = time.monotonic()
        await connection.execute("BEGIN;SAVEPOINT tops_member")
        if self._settle is None:
            self._settle = await _settle_sql(connection)
        chain = _Chain(session, self._table, self._settle, self._options.statement_timeout_s)
        before = await changed_rows(connection)
        outcomes: list[_Done | Rejected] = []
        careful = self._careful > 0
        async with giving_way(agent, session.pid) as chain.yielded:
            if not careful and not alone:
                outcomes += await chain.together(requests)
            for request in requests[len(outcomes) :]:
                if outcomes and time.monotonic() - began > CHAIN_S:
                    break
                outcomes.append(await chain.member(request))
                if careful:
                    await chain.look_at(outcomes[-1:])
        if not careful and not await chain.look_at(outcomes):
            await session.roll_back()
            self._careful = CAREFUL_CHAINS
            return await self._executed(requests, alone=alone)
        self._careful = max(0, self._careful - 1)
        done = await self._complete(agent, connection, before, outcomes, alone=alone)
        await session.roll_back()
        return done

    async def _complete(
        self,
        agent: Connection,
        connection: Connection,
        before: Changed,
        outcomes: list[_Done | Rejected],
        *,
        alone: bool,
    ) -> list[Outcome] | None:
        members = [outcome for outcome in outcomes if isinstance(outcome, _Done)]
        names = {name: self._tables[name].oid for member in members for name in member.after}
        unfit = dict(self.unfit.values())
        found = await touched(connection, agent, before, names, capture.TRIGGER, unfit)
        if found.problem:
            if not alone:
                return None
            return [Rejected(_NOT_REPLICABLE, f"the transaction can't be replicated: {found.problem}")]
        if any(self._tables[name].stamp != found.stamps.get(oid) for name, oid in names.items()):
            raise _TableChanged
        sequences = await last_values(agent, found.sequences)
        if self._slots is not None:
            try:
                if not await self._slots.are_own(agent, sequences):
                    return None
            except InvalidChange as error:
                return [Rejected(_NOT_REPLICABLE, str(error))] if alone else None
            sequences = ()  # nobody else draws from this replica's blocks
        state = State()
        for name in names:
            keys = {key: None for member in members for key in member.after.get(name, ())}
            state.of(name).update(await images_of(agent, self._tables[name], keys))
            for member in members:
                written = {key: image for key, image in member.after.get(name, {}).items() if image is not None}
                if problem := await broken_claim(agent, self._tables[name], state.of(name), written):
                    return [Rejected(_NOT_REPLICABLE, problem)] if alone else None
        return [
            outcome
            if isinstance(outcome, Rejected)
            else Executed(
                outcome.rows,
                outcome.returned,
                outcome.notices,
                Captured(changes_between(self._tables, state, outcome.after), sequences),
            )
            for outcome in outcomes
        ]

    async def _table(self, name: str) -> Table:
        table = self._tables.get(name)
        if table is None:
            assert self._session is not None
            table = self._tables[name] = await find_table(self._session.connection, name)
        return table

    async def _sessions(self) -> tuple[Connection, OriginSession]:
        agent = await self._agent_connection()
        if time.monotonic() - self._learned_at > LEARN_AGAIN_S:
            self._learn_again()
        if self._session is None or self._session.connection.is_closed():
            self._session = await OriginSession.open(self._write_dsn, self._where, self._options, agent)
        return agent, self._session

    async def _agent_connection(self) -> Connection:
        if self._agent is None or self._agent.is_closed():
            self._agent = await connect(self._agent_dsn, self._where, "tops-origin-images", self._options)
        return self._agent

    def _learn_again(self) -> None:
        if self._session is not None:
            self._session.forget()
        self._tables.clear()
        self._settle = None
        self._learned_at = time.monotonic()

    def _drop(self, who: str) -> None:
        """The session's transaction ends with it, as soon as its backend does."""
        if self._session is not None:
            self._session.connection.terminate()
            self._orphans.watch(self._session.pid, who)
            self._session = None


class _Chain:
    """The members of one transaction, in order."""

    def __init__(self, session: OriginSession, table: TableOf, settle: str, member_s: float) -> None:
        """`member_s`: how long a member may take, all its statements together."""
        self._session, self._table, self._settle, self._member_s = session, table, settle, member_s
        self._spellings: dict[str, dict[Key, Key]] = {}
        self.yielded = Yielded()

    async def member(self, request: Request) -> _Done | Rejected:
        self.yielded.deadline = time.monotonic() + self._member_s
        try:
            return await self._member(request)
        finally:
            self.yielded.deadline = math.inf

    async def _member(self, request: Request) -> _Done | Rejected:
        session = self._session
        session.notices.clear()
        rows: list[int] = []
        returned: list[tuple[Row, ...]] = []
        try:
            if (text := self._text(request)) is not None:
                (told,) = await session.send([text, self._settle])
                return _Done((told.rows,), (), told.notices, told.last_key)
            for change in request:
                count, records = await self._carry_out(change)
                rows.append(count)
                returned.append(records)
            notices = tuple(session.notices)
            await session.connection.execute(self._settle)
        except InvalidChange as error:
            await self._undo()
            proof = error.reason if isinstance(error, NotDeterministic) else ""
            return Rejected(_NOT_REPLICABLE, str(error), proof=proof)
        except asyncpg.PostgresError as error:
            if is_connection_loss(error) or isinstance(error, asyncpg.exceptions.InvalidCachedStatementError):
                raise
            yielded, cancelled = self.yielded, sqlstate(error) == _CANCELED
            late, meant_another = yielded.is_late, cancelled and yielded.cancelled_late
            yielded.deadline, yielded.cancelled_late = math.inf, False
            await self._undo()
            if cancelled and late and not yielded.happened:
                return Rejected(_CANCELED, f"the transaction took longer than {self._member_s:g} s", hint=_TOO_SLOW)
            return Rejected.by(error, transient=yielded.happened or meant_another or _is_transient(error))
        returned_rows = tuple(returned) if any(returned) else ()
        return _Done(tuple(rows), returned_rows, notices, session.captured_so_far)

    async def together(self, requests: Sequence[Request]) -> list[_Done | Rejected]:
        """The first requests in one message, as many as tell no more than a count; none if one of them fails: which
        one it is shows when each is a message of its own."""
        texts: list[str] = []
        try:
            for request in requests[:MESSAGE_MAX]:
                text = self._text(request)
                if text is None:
                    break
                texts += [text, self._settle]
            self.yielded.deadline = time.monotonic() + min(TOGETHER_S, self._member_s)
            told = await self._session.send(texts) if len(texts) > 2 else []
        except InvalidChange:
            return []
        except asyncpg.PostgresError as error:
            if is_connection_loss(error):
                raise
            self.yielded.deadline = math.inf
            await self._session.connection.execute(f"ROLLBACK;BEGIN;{CLEAN};SAVEPOINT tops_member")
            return []
        finally:
            self.yielded.deadline = math.inf
        return [_Done((one.rows,), (), one.notices, one.last_key) for one in told]

    def _text(self, request: Request) -> str | None:
        """The request as part of a message, if it is one statement that tells no more than a count."""
        only = request[0] if len(request) == 1 else None
        return self._session.text(only) if isinstance(only, Statement) else None

    async def _carry_out(self, change: Change) -> tuple[int, tuple[Row, ...]]:
        if isinstance(change, Statement):
            return await self._session.run(change)
        table = await self._table(change.table)
        try:
            return await self._session.change(change, table), ()
        except ForbiddenByRule:
            raise  # by the rules of now: nothing more can be asked in this transaction
        except InvalidChange as error:
            if table.stamp != (await find_table(self._session.connection, change.table)).stamp:
                raise _TableChanged from error
            raise

    async def _undo(self) -> None:
        await self._session.connection.execute(f"ROLLBACK TO SAVEPOINT tops_member;{CLEAN}")

    async def look_at(self, outcomes: Sequence[_Done | Rejected]) -> bool:
        """Read the rows that these members have touched, as the last of them has left them; False if that is not what
        each of them has left: a row was touched by more than one."""
        members = [outcome for outcome in outcomes if isinstance(outcome, _Done)]
        touched_by: dict[tuple[str, Key], int] = {}
        place = 0
        captured = await self._session.connection.fetch(_CAPTURED, self._session.last_captured)
        spelled = await self._spelled(captured)
        for row in captured:
            self._session.last_captured = row["id"]
            while row["id"] > members[place].last_key:
                place += 1
            for noted in (row["old_key"], row["new_key"]):
                if noted is None:
                    continue
                key = spelled[row["relation"]][tuple(noted)]
                if touched_by.setdefault((row["relation"], key), place) != place:
                    return False
                _touch(members[place].after, row["relation"], key)
        for name in {name for name, _ in touched_by}:
            keys = [key for relation, key in touched_by if relation == name]
            for key, image in (await self._images(name, keys)).items():
                members[touched_by[name, key]].after[name][key] = image
        return True

    async def _spelled(self, captured: Sequence[asyncpg.Record]) -> dict[str, dict[Key, Key]]:
        """By table, what each noted key is called in this chain: the first of its spellings."""
        noted: dict[str, dict[Key, None]] = {}
        for row in captured:
            keys = noted.setdefault(row["relation"], {})
            keys.update((tuple(key), None) for key in (row["old_key"], row["new_key"]) if key is not None)
        for name, keys in noted.items():
            known, table = self._spellings.setdefault(name, {}), await self._table(name)
            if table.key_has_one_text:
                known.update(zip(keys, keys, strict=True))
                continue
            asked = list(dict.fromkeys([*known.values(), *(key for key in keys if key not in known)]))
            try:
                first = await one_spelling(self._session.connection, table, asked)
            except asyncpg.PostgresError as error:
                if is_schema_change(error):
                    raise _TableChanged from error
                raise
            known.update(zip(asked, first, strict=True))
        return self._spellings

    async def _images(self, name: str, keys: list[Key]) -> dict[Key, Image]:
        try:
            return await images_of(self._session.connection, await self._table(name), keys)
        except asyncpg.PostgresError as error:
            if is_schema_change(error):  # a column was dropped or renamed, or its type has changed
                raise _TableChanged from error
            raise


def _touch(after: dict[str, Images], table: str, key: Key) -> None:
    """The row, and its table, come behind what was touched before: a CHECK may have looked at that."""
    images = after.pop(table, {})
    images.pop(key, None)
    images[key] = None
    after[table] = images


async def _settle_sql(connection: Connection) -> str:
    """What ends a member: constraints that wait are checked, settings are as at first, and the next one begins.

    Images are read behind it, so that no setting that the member's SQL has changed can change their text."""
    row = await connection.fetchrow(_IMMEDIATE_BY_NATURE)
    texts = []
    if row is not None and row["any"]:
        texts = ["SET CONSTRAINTS ALL IMMEDIATE", "SET CONSTRAINTS ALL DEFERRED"]
        texts += [f"SET CONSTRAINTS {row['names']} IMMEDIATE"] if row["names"] else []
    return ";".join([*texts, "RELEASE SAVEPOINT tops_member", CLEAN, _SO_FAR, "SAVEPOINT tops_member"])


def _is_transient(error: asyncpg.PostgresError) -> bool:
    """Locks, deadlocks, shutdowns: not the fault of the statement. A statement that takes too long stays too long."""
    return is_transient(error) and sqlstate(error) != _CANCELED
