"""Carrying out members inside one database transaction: all in one message, or one by one under savepoints.

The fast path knows what must happen (every row change hits one row) and the server checks it; when anything fails,
the slow path finds out which members are to blame and what the others really did.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import asyncpg

from adapters.changes import Change, Delete, Insert, InvalidChange, Row, Statement, Update
from adapters.postgres.apply import replica_mode
from adapters.postgres.apply.keys import key_texts, new_keys_texts, why_known
from adapters.postgres.apply.progress import Job
from adapters.postgres.apply.reading import BEYOND_PYTHON
from adapters.postgres.apply.replica_mode import Checks
from adapters.postgres.apply.sequences import raise_texts
from adapters.postgres.apply.session import Connection, Session
from adapters.postgres.apply.statements import AS_AGENT, TELL, Statements
from adapters.postgres.sql.sqlstates import exclusion, is_connection_loss, is_schema_change, is_transient
from adapters.postgres.sql.stamps import have_changed
from adapters.postgres.sql.steps import Step, Traits, have_one_shape, layers, plan, shape_of, side_by_side
from adapters.resource import Exclusion, MemberVote

# Checked after every statement, as if each member were alone: of two members one must not make good what the other did.
_CHECK_AT_ONCE = "SET CONSTRAINTS ALL IMMEDIATE"
_CHECK_LATER = "SET CONSTRAINTS ALL DEFERRED"
# What a user's statement is about may differ from call to call as much as its values: the server may plan each.
_PLAN_AS_USUAL = "SET LOCAL plan_cache_mode TO auto"
# A name stands for all constraints of that name in the schema; those that wait by themselves are to go on waiting.
_IMMEDIATE_BY_NATURE = """
select string_agg(format('%I.%I', nspname, conname), ', ') from (
    select n.nspname, c.conname from pg_constraint c join pg_namespace n on n.oid = c.connamespace
     where c.condeferrable and has_schema_privilege(n.oid, 'usage')
     group by 1, 2 having not bool_or(c.condeferred)) as named
"""


async def fast_texts(statements: Statements, replica_set: str, jobs: Sequence[Job]) -> list[str] | None:
    """The members' work as few statements; None if one of them has to run by itself or can't run at all."""
    texts = [_CHECK_AT_ONCE] if jobs else []
    statements.refresh()
    try:
        late_triggers = bool(jobs) and await statements.late_triggers()
        keys = await new_keys_texts(statements, replica_set, jobs)
        if keys is None:
            return None
        texts += keys
        for job in jobs:
            if job.member.origin and await statements.checks_of(job.member) is not None:
                return None  # with triggers switched off, which is for this member alone
        stamps: dict[int, str] = {}
        for step in await _steps(statements, jobs):
            stamps.update(step.traits.stamps)
            first, table = step.changes[0], step.traits.table
            if late_triggers and (step.opaque or table is None or table.referenced_columns):
                return None  # such a trigger must find what its own member left, and nothing later
            if not isinstance(first, Statement):
                texts += [call.text(step, len(step.changes)) for call in await statements.calls_for(step)]
                continue
            user_call = statements.user_call(first)
            if isinstance(user_call, Exclusion) or not user_call.counted:
                return None
            if _PLAN_AS_USUAL not in texts:
                texts.append(_PLAN_AS_USUAL)
            if texts[-1] == AS_AGENT and user_call.as_client is not None:
                texts.pop()  # the next one begins with a client's rights, whatever the last one has made of its own
            texts += user_call.texts(first.args)
        texts += await statements.unchanged_texts(stamps)
    except (InvalidChange, asyncpg.PostgresError) as error:
        if is_connection_loss(error):
            raise
        return None
    return texts + raise_texts([job.member for job in jobs if job.member.sequences])


async def _steps(statements: Statements, jobs: Sequence[Job]) -> list[Step]:
    changes = [change for job in jobs for change in job.member.changes]
    numbers = [job.number for job in jobs for _ in job.member.changes]
    if not changes:
        return []
    sizes = [len(job.member.changes) for job in jobs]
    own = _own_record(changes)
    if own is None:
        return await _steps_of(statements, sizes, numbers, changes)
    sizes = [*sizes[:-1], *([sizes[-1] - 1] if sizes[-1] > 1 else [])]
    before = await _steps_of(statements, sizes, numbers[:-1], changes[:-1])
    return before + await _steps_of(statements, [1], numbers[-1:], [own])


def _own_record(changes: list[Change]) -> Insert | None:
    """What is written down behind the changes that it is about: apart from it they are often of one shape."""
    last = changes[-1]
    if len(changes) == 1 or not isinstance(last, Insert) or isinstance(changes[0], Insert):
        return None
    return last if last.table.startswith("tops.") else None


async def _steps_of(statements: Statements, sizes: list[int], numbers: list[int], changes: list[Change]) -> list[Step]:
    """`sizes` says how many of the changes are each member's."""
    if have_one_shape(changes):
        common = await _traits(statements, changes[0])
        return layers(numbers, common, changes) or plan(zip(numbers, repeat(common), changes))
    steps = await _alike(statements, sizes, numbers, changes)
    if steps is not None:
        return steps
    shapes = list(map(shape_of, changes))
    while unknown := set(shapes) - statements.known.keys():  # one that is looked up may show that others are outdated
        for shape in unknown:
            await statements.traits(changes[shapes.index(shape)], shape)
    return plan(zip(numbers, [statements.known[shape] for shape in shapes], changes, strict=True))


async def _alike(
    statements: Statements, sizes: list[int], numbers: list[int], changes: list[Change]
) -> list[Step] | None:
    """Steps for members that all do the same few things to other rows; None if they don't."""
    size = sizes[0]
    if set(sizes) != {size}:
        return None
    columns = [changes[place::size] for place in range(size)]
    if not all(map(have_one_shape, columns)):
        return None
    groups = []
    for place, column in enumerate(columns):
        traits = await _traits(statements, column[0])
        groups.append((traits, layers(numbers[place::size], traits, column)))
    return side_by_side(groups)


async def _traits(statements: Statements, change: Change) -> Traits:
    shape = shape_of(change)
    return statements.known.get(shape) or await statements.traits(change, shape)


async def send_fast(
    session: Session, connection: Connection, statements: Statements, message: list[str]
) -> tuple[str, list[int]] | None:
    """Send a transaction as one message: its last tag and the rows it told; None if it was undone and its members
    must be looked at one by one. What is nobody's fault is raised."""
    try:
        return await session.send(connection, message)
    except asyncpg.PostgresError as error:
        if is_connection_loss(error) or is_transient(error):
            raise
        if connection.is_in_transaction():
            await connection.execute("ROLLBACK")
        if is_schema_change(error):
            statements.forget()
        return None


def fast_votes(jobs: Sequence[Job], told: list[int]) -> tuple[MemberVote, ...]:
    """What each member did, after a fast path that went through: one row per row change, what was told for SQL."""
    if not told:
        return tuple([MemberVote(job.member.tx, (1,) * len(job.member.changes)) for job in jobs])
    rest = iter(told)
    return tuple(
        MemberVote(
            tx=job.member.tx,
            rows=tuple(next(rest) if isinstance(change, Statement) else 1 for change in job.member.changes),
        )
        for job in jobs
    )


Alone = tuple[str | None, str]  # what gives a statement a client's rights, and the statement


@dataclass(frozen=True, slots=True)
class Written:
    """A member's work as text: per change some statements to send with others, or one that must run by itself."""

    job: Job
    keys: list[str]
    texts: list[list[str] | Alone]
    checks: Checks | None = None  # of a write set that is applied with triggers switched off


class SlowPath:
    """Members one by one inside one transaction; each leaves all of its work or none.

    `write_down` comes before the transaction begins, since a statement that can't even be prepared would end it;
    `is_outdated` comes before it ends.
    """

    def __init__(self, session: Session, connection: Connection, statements: Statements, replica_set: str) -> None:
        self._session, self._connection, self._statements = session, connection, statements
        self._replica_set = replica_set
        self._as_at_first: list[str] = []
        self._stamps: dict[int, str] = {}

    async def write_down(self, jobs: Sequence[Job]) -> list[Written | MemberVote]:
        self._statements.look_again()  # nobody is refused because of what a table used to be
        names = await self._connection.fetchval(_IMMEDIATE_BY_NATURE)
        self._as_at_first = [_CHECK_LATER, *([f"SET CONSTRAINTS {names} IMMEDIATE"] if names else [])]
        return [await self._written(job) for job in jobs]

    async def is_outdated(self) -> bool:
        """Whether a table has changed since the members were written down; asked behind them, while their locks keep
        definitions as they are. If so, the transaction is rolled back, and the members are written down again."""
        if not await have_changed(self._connection, self._stamps):
            return False
        await self._connection.execute("ROLLBACK")
        return True

    async def run(self, written: Written | MemberVote) -> MemberVote:
        if isinstance(written, MemberVote):
            return written
        tx = written.job.member.tx
        known = await why_known(self._connection, self._replica_set, written.job)
        if known is not None:
            return MemberVote(tx=tx, excluded=known)
        try:
            return await self._carry_out(written)
        except (InvalidChange, asyncpg.PostgresError) as error:
            if is_connection_loss(error) or is_transient(error):
                raise
            await self._connection.execute("ROLLBACK TO SAVEPOINT tops_member; RELEASE SAVEPOINT tops_member")
            return MemberVote(tx=tx, excluded=exclusion(error, captured=bool(written.job.member.origin)))

    async def _written(self, job: Job) -> Written | MemberVote:
        texts: list[list[str] | Alone] = []
        try:
            keys = await key_texts(self._statements, self._replica_set, job)
            checks = await self._statements.checks_of(job.member)
            for change in job.member.changes:
                shape = shape_of(change)
                traits = self._statements.known.get(shape) or await self._statements.traits(change, shape)
                self._stamps.update(traits.stamps)
                if isinstance(change, Statement):
                    call = self._statements.user_call(change)
                    if isinstance(call, Exclusion):
                        return MemberVote(tx=job.member.tx, excluded=call)
                    texts.append(call.texts(change.args) if call.counted else (call.as_client, call.text(change.args)))
                else:
                    (step,) = plan([(job.number, traits, change)])
                    calls = await self._statements.calls_for(step)
                    if _must_hit(change):
                        texts.append([call.text(step, 1) for call in calls] + [f"SELECT tops.affected({TELL},1)"])
                    else:
                        texts.append([call.text(step, TELL) for call in calls])
        except (InvalidChange, asyncpg.PostgresError) as error:
            if is_connection_loss(error) or is_transient(error):
                raise
            return MemberVote(tx=job.member.tx, excluded=exclusion(error))
        return Written(job, keys, texts, checks)

    async def _carry_out(self, written: Written) -> MemberVote:
        rows: list[int] = []
        returned: list[tuple[Row, ...]] = []
        pending = [_PLAN_AS_USUAL, "SAVEPOINT tops_member", *written.keys]
        checks = await written.checks.texts() if written.checks is not None else []
        if written.checks is not None:
            pending.append(replica_mode.ON)
        for texts in written.texts:
            if isinstance(texts, list):
                pending += texts
                returned.append(())
                continue
            as_client, text = texts
            pending += [as_client] if as_client is not None else []
            if pending:
                rows += (await self._session.send(self._connection, pending))[1]
            pending = [AS_AGENT] if as_client is not None else []
            statement = await self._connection.prepare(text)
            try:
                records = await statement.fetch()
            except (ValueError, OverflowError) as error:
                if isinstance(error, asyncpg.PostgresError):
                    raise
                raise InvalidChange(f"the statement returns {BEYOND_PYTHON}: {error}") from error
            rows.append(command_count(statement.get_statusmsg() or ""))
            returned.append(tuple(dict(record) for record in records))
        if written.checks is not None:
            pending += [replica_mode.OFF, *checks]
        pending += raise_texts([written.job.member])
        # Deferred constraints speak up here, where the member is known, and wait again for the next one.
        pending += [_CHECK_AT_ONCE, *self._as_at_first, "RELEASE SAVEPOINT tops_member"]
        rows += (await self._session.send(self._connection, pending))[1]
        tx = written.job.member.tx
        return MemberVote(tx=tx, rows=tuple(rows), returned=tuple(returned) if any(returned) else ())


def _must_hit(change: Change) -> bool:
    """Whether the change is for a row that must be there."""
    if isinstance(change, Update) and change.must_exist:
        return True
    return isinstance(change, Update | Delete) and change.expect_row is not None


def command_count(tag: str) -> int:
    """The number at the end of a command tag such as `UPDATE 3`."""
    last = tag.rsplit(" ", 1)[-1]
    return int(last) if last.isdigit() else 0
