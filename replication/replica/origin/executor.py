"""An agent's side of statements that are executed once: requests wait, are executed in chains, and are submitted.

Requests that only insert rows whose values can be computed ahead need no execution. They depend on no row that is here,
so they wait neither for the floor nor for the chain before, and build no chain. If the set rejects the rows of one, it
is executed after all: either PostgreSQL tells what is wrong with it, or it succeeds.

Of the others, one chain at a time: the next begins when the members of the last one are decided and applied here, so
that requests that come together build on each other instead of conflicting. A conflict with another origin leads to
another execution, a bounded number of times.

Identities have their turns: a chain takes the requests of all of them in rotation. A request whose token is not reached
waits beside the queue. After a chain that was slow or came to nothing, its identities are executed request by request
for a while, so that they hold up and fail nobody else.
"""

import asyncio
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass

import msgspec

from adapters.changes import Member, content_digest, decode_member, own_key
from adapters.postgres.origin import Executed, Interrupted, Origin, Rejected
from adapters.resource import Why
from replication.conflicts.own_statements import check_client, check_expects_no_version
from replication.conflicts.read_locks import AccessedRows, Lock, more_locks
from replication.model.values import pack_rows
from replication.replica.apply.participant import ReplicaParticipant
from replication.replica.origin.repeats import Repeats
from replication.replica.origin.submission import Submission, Submitted
from replication.rpc.calls import DatabaseError, Execute, ExecuteDone
from replication.rpc.rejections import ChangeNotProved, SerializationFailure, WriteRejected, error_for
from tops.model.errors import ResultTooLarge
from tops.model.ids import TxId
from tops.model.rejections import Rejection, sentence

CHAIN_MAX = 128
ATTEMPTS_MAX = 8
FLOOR_S = 5.0
PAUSE_S = 0.01
SLOW_S = 1.0  # a chain that takes longer is slow: most take milliseconds
RESOLVE_S = 0.9  # the same for values that are computed ahead
ALONE_S = 60.0  # for so long an identity that was in such a chain is executed request by request
SERIALIZATION_FAILURE = "40001"
CHECK_VIOLATION, NOT_SUPPORTED = "23514", "0A000"
_REJECTED_ROWS = frozenset({Why.CONFLICT.value, Why.CONSTRAINT.value, Why.INVALID.value, Why.ERROR.value})


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request on its way: its member under the key that all attempts share."""

    request: Execute
    who: str  # the identity that is accountable for it
    member: Member
    response: "asyncio.Future[ExecuteDone]"
    attempts: int = 0


class _Queue:
    """Requests to be executed: identities in rotation, the requests of each in order."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[_Waiting]] = {}  # the identity whose turn is next comes first
        self._served: list[str] = []  # the identities of the last chain
        self._alone: dict[str, float] = {}  # identities that are executed request by request, and until when

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def append(self, waiting: _Waiting) -> None:
        self._waiting.setdefault(waiting.who, deque()).append(waiting)

    def put_back(self, chain: Sequence[_Waiting]) -> None:
        """Each goes before the other requests of its identity."""
        for waiting in reversed(chain):
            self._waiting.setdefault(waiting.who, deque()).appendleft(waiting)

    def keep_alone(self, chain: Sequence[_Waiting]) -> None:
        now = time.monotonic()
        self._alone = {who: until for who, until in self._alone.items() if until > now}
        self._alone.update((waiting.who, now + ALONE_S) for waiting in chain)

    def is_alone(self, who: str) -> bool:
        return self._alone.get(who, 0.0) > time.monotonic()

    def take(self) -> list[_Waiting]:
        """The next chain; a request of an identity that is executed alone is one by itself."""
        for who in self._served:  # whoever came while that chain was executed comes first
            if who in self._waiting:
                self._waiting[who] = self._waiting.pop(who)
        chain: list[_Waiting] = []
        while self._waiting and len(chain) < CHAIN_MAX:
            who = next(iter(self._waiting))
            alone = self.is_alone(who)
            if alone and chain:
                break
            of_identity = self._waiting.pop(who)
            chain.append(of_identity.popleft())
            if of_identity:  # at the end of the rotation
                self._waiting[who] = of_identity
            if alone:
                break
        self._served = list(dict.fromkeys(waiting.who for waiting in chain))
        return chain


class OriginExecutor:
    """Executes requests at this replica; `committed` tells what the coordinator has committed, where the set promises
    reads of that, and `places` what a request has read, where the set certifies that."""

    def __init__(
        self,
        replica: str,
        origin: Origin,
        participant: ReplicaParticipant,
        submission: Submission,
        committed: Callable[[], Awaitable[int]] | None,
        row_keys: AccessedRows | None = None,
    ) -> None:
        self._replica, self._origin, self._participant = replica, origin, participant
        self._submission, self._committed, self._row_keys = submission, committed, row_keys
        self._repeats = Repeats(participant.resource, participant.event_type)
        self._arrived: list[_Waiting] = []  # not looked at yet
        self._queue = _Queue()
        self._resolving: asyncio.Task[None] | None = None
        self._worker: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()  # requests that are shipped, or wait for their tokens
        self._reached = 0  # the position of the last write set that was submitted here

    async def execute(self, request: Execute, who: str) -> ExecuteDone:
        """Raises InvalidChange if a client may not ask for this."""
        waiting = _Waiting(request, who, _keyed(request), asyncio.get_running_loop().create_future())
        if self._queue.is_alone(who):
            self._enqueue(waiting)
            return await waiting.response
        self._arrived.append(waiting)
        if self._resolving is None or self._resolving.done():
            self._resolving = asyncio.ensure_future(self._resolve())
        return await waiting.response

    async def close(self) -> None:
        tasks = [task for task in (self._resolving, self._worker, *self._background) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._origin.close()

    async def _resolve(self) -> None:
        while self._arrived:
            batch, self._arrived = self._arrived[:CHAIN_MAX], self._arrived[CHAIN_MAX:]
            began = time.monotonic()
            try:
                outcomes = await self._origin.resolve([waiting.member.changes for waiting in batch], _identity(batch))
                if time.monotonic() - began > RESOLVE_S:
                    self._queue.keep_alone(batch)
            except Exception as error:
                for waiting in batch:
                    _fail(waiting, error)
                continue
            for waiting, outcome in zip(batch, outcomes, strict=True):
                if outcome is None:
                    self._enqueue(waiting)
                else:
                    self._in_background(self._ship(waiting, outcome))

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _ship(self, waiting: _Waiting, outcome: Executed) -> None:
        try:
            submitted = await self._submit(waiting, outcome)
        except Exception as error:
            _fail(waiting, error)
            return
        if _are_rows_rejected(waiting, submitted):
            self._enqueue(waiting)
        else:
            _respond(waiting, self._done(waiting, outcome, submitted, 0))

    def _enqueue(self, waiting: _Waiting) -> None:
        if waiting.request.at_least > self._participant.reached:
            self._in_background(self._enqueue_at_token(waiting))
            return
        self._queue.append(waiting)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.ensure_future(self._work())

    async def _enqueue_at_token(self, waiting: _Waiting) -> None:
        """What its client has seen is not applied here yet; the others need not wait for that."""
        try:
            await self._participant.wait_for(waiting.request.at_least, FLOOR_S)
        except Exception as error:
            _fail(waiting, error)
        else:
            self._enqueue(waiting)

    async def _work(self) -> None:
        while self._queue:
            chain = self._queue.take()
            try:
                chain = await self._certifiable(chain)
                position = await self._floor()
                chain = await self._without_repeats(chain)
                began = time.monotonic()
                requests = [waiting.member.changes for waiting in chain]
                outcomes = await self._origin.execute(requests, _identity(chain)) if requests else []
            except Exception as error:
                self._not_executed(chain, error)
                continue
            if time.monotonic() - began > SLOW_S:
                self._queue.keep_alone(chain[: len(outcomes)])
            self._queue.put_back(chain[len(outcomes) :])
            await self._finish(chain[: len(outcomes)], outcomes, position)

    async def _certifiable(self, chain: list[_Waiting]) -> list[_Waiting]:
        """The requests from the first on whose reads can be certified together. One that reads beside the rows that it
        changes is executed alone: what the others of its chain write would count as written since."""
        if self._row_keys is None:
            return chain
        for row_key, waiting in enumerate(chain):
            changes = waiting.member.changes
            if await self._row_keys.read_to_execute(changes, [1] * len(changes)):
                together = max(row_key, 1)
                self._queue.put_back(chain[together:])
                return chain[:together]
        return chain

    async def _without_repeats(self, chain: Sequence[_Waiting]) -> list[_Waiting]:
        """Those that were not committed before. Executed again, a repeated insert would fail with a duplicate key, as
        if it were nowhere."""
        first = await self._repeats.of([waiting.member for waiting in chain])
        new = []
        for waiting in chain:
            known = first.get(waiting.member.idempotency_key)
            if known is None:
                new.append(waiting)
            else:
                _respond(
                    waiting, ExecuteDone(replica=self._replica, tx=known.tx, duplicate=True, position=known.number)
                )
        return new

    def _not_executed(self, chain: Sequence[_Waiting], error: Exception) -> None:
        """One request may have ended the session for all of the chain: the others succeed when each is alone."""
        if len(chain) > 1 and isinstance(error, Interrupted | ResultTooLarge):
            self._queue.keep_alone(chain)
            self._queue.put_back(chain)
            return
        for waiting in chain:
            _fail(waiting, error)

    async def _floor(self) -> int:
        """Wait until everything that a request may depend on is applied here: what this replica has prepared, and what
        is committed where the set promises that reads see it. What its client has seen is applied already."""
        floor = max(self._participant.in_doubt(), self._reached)
        if self._committed is not None:
            floor = max(floor, await self._committed())
        await self._participant.wait_for(floor, FLOOR_S)
        return self._participant.reached

    async def _finish(self, chain: Sequence[_Waiting], outcomes: Sequence[Executed | Rejected], position: int) -> None:
        """Submit together what was executed together; whoever lost against another origin is executed again."""
        submitted = await asyncio.gather(
            *(self._submit(waiting, outcome, position) for waiting, outcome in zip(chain, outcomes, strict=True)),
            return_exceptions=True,
        )
        again: list[_Waiting] = []
        rejected = [w for w, outcome in zip(chain, outcomes, strict=True) if isinstance(outcome, Rejected)]
        # The first attempt of a rejected one may have been committed while this one was executed.
        new = {*(await self._without_repeats(rejected))} if rejected else set()
        for waiting, outcome, result in zip(chain, outcomes, submitted, strict=True):
            if isinstance(outcome, Rejected) and waiting not in new:
                continue
            if isinstance(result, BaseException):
                _fail(waiting, result)
            elif _is_conflict(waiting, outcome, result):
                waiting.attempts += 1
                if waiting.attempts < ATTEMPTS_MAX:
                    again.append(waiting)
                else:
                    _respond(waiting, self._gave_up(waiting, outcome, result))
            else:
                _respond(waiting, self._done(waiting, outcome, result, position))
        if again:
            self._queue.put_back(again)
            await asyncio.sleep(PAUSE_S * max(waiting.attempts for waiting in again) * random.uniform(0.5, 1.5))

    async def _submit(
        self, waiting: _Waiting, outcome: Executed | Rejected, position: int | None = None
    ) -> Submitted | None:
        """None: there is nothing to submit, and no key that must be remembered. `position`: at which it was executed;
        what is computed ahead reads nothing."""
        if isinstance(outcome, Rejected):
            return None
        request, written = waiting.request, outcome.write_set
        asked = decode_member(request.member)
        drew = bool(written.sequences)  # what was drawn must not be handed out again elsewhere
        if not written.changes and not drew and not request.reads and not asked.idempotency_key:
            return None
        member = msgspec.structs.replace(
            waiting.member, changes=written.changes, sequences=written.sequences, origin=self._replica
        )
        reads = request.reads
        if self._row_keys is not None and position is not None:
            read = await self._row_keys.read_to_execute(waiting.member.changes, outcome.rows)
            reads = more_locks(reads, [Lock(table, key, position) for table, key in read])
        submitted = await self._submission.submit(member, reads)
        self._reached = max(self._reached, submitted.position or 0)
        return submitted

    def _done(
        self, waiting: _Waiting, outcome: Executed | Rejected, submitted: Submitted | None, position: int
    ) -> ExecuteDone:
        tx = waiting.request.tx
        if isinstance(outcome, Rejected):
            return ExecuteDone(replica=self._replica, tx=tx, error=_error(outcome))
        if submitted is None:
            submitted = Submitted(tx, position)
        if submitted.rejection is not None or submitted.duplicate:
            return ExecuteDone(
                replica=self._replica, tx=submitted.tx, duplicate=submitted.duplicate, rejection=submitted.rejection
            )
        returned = msgspec.msgpack.encode([pack_rows(rows) for rows in outcome.returned]) if outcome.returned else b""
        return ExecuteDone(
            replica=self._replica,
            tx=submitted.tx,
            rows=outcome.rows,
            returned=returned,
            notices=outcome.notices,
            position=submitted.position,
            pending=submitted.pending,
        )

    def _gave_up(self, waiting: _Waiting, outcome: Executed | Rejected, submitted: Submitted | None) -> ExecuteDone:
        rejected = submitted.rejection if submitted is not None else None
        last = outcome.message if isinstance(outcome, Rejected) else sentence(rejected)
        if isinstance(outcome, Executed) and (failed := _failed_check(waiting, rejected)):
            return ExecuteDone(replica=self._replica, tx=waiting.request.tx, error=failed)
        message = (
            f"could not serialize access: executed {waiting.attempts} times, each lost against another transaction"
        )
        error = DatabaseError(SERIALIZATION_FAILURE, message, detail=last)
        return ExecuteDone(replica=self._replica, tx=waiting.request.tx, error=error)


def _identity(chain: Sequence[_Waiting]) -> str:
    """Whose requests they are; empty: they are of several identities."""
    identities = {waiting.who for waiting in chain}
    return identities.pop() if len(identities) == 1 else ""


def _keyed(request: Execute) -> Member:
    """The request under its key, which stands for what was asked and not for what came of it."""
    asked = decode_member(request.member)
    check_client(asked)
    check_expects_no_version(asked.changes, "beside what must be executed once: write that in another transaction")
    key = asked.idempotency_key or own_key(request.tx)
    return msgspec.structs.replace(asked, tx=TxId(request.tx), idempotency_key=key, content=content_digest(asked))


def _is_conflict(waiting: _Waiting, outcome: Executed | Rejected, submitted: Submitted | None) -> bool:
    """Whether something came in between: the same may succeed when it is executed again."""
    if isinstance(outcome, Rejected):
        return outcome.transient
    if submitted is None or submitted.rejection is None:
        return False
    error = error_for(waiting.request.tx, submitted.rejection)
    if isinstance(error, SerializationFailure):
        return not waiting.request.reads  # what the client has read stays read
    return isinstance(error, WriteRejected) and error.why == Why.CONFLICT.value


def _are_rows_rejected(waiting: _Waiting, submitted: Submitted | None) -> bool:
    """Whether a replica's database has rejected the rows, for whatever reason."""
    if submitted is None or submitted.rejection is None:
        return False
    error = error_for(waiting.request.tx, submitted.rejection)
    return isinstance(error, ChangeNotProved) or (isinstance(error, WriteRejected) and error.why in _REJECTED_ROWS)


def _failed_check(waiting: _Waiting, rejected: Rejection | None) -> DatabaseError | None:
    """Of a write set whose rows have passed a CHECK at the origin, each time, and never where they were applied."""
    error = error_for(waiting.request.tx, rejected) if rejected is not None else None
    if not isinstance(error, WriteRejected) or error.sqlstate != CHECK_VIOLATION:
        return None
    return DatabaseError(
        NOT_SUPPORTED,
        f"the transaction can't be replicated: its rows satisfy the {error.text} when its statements are executed, and "
        "not when the rows that it leaves are applied; a CHECK must depend on its own row alone: use a foreign key or "
        "a trigger to look at other rows",
    )


def _error(rejected: Rejected) -> DatabaseError:
    return DatabaseError(
        sqlstate=rejected.sqlstate,
        message=rejected.message,
        detail=rejected.detail,
        hint=rejected.hint,
        table=rejected.table,
        constraint=rejected.constraint,
        proof=rejected.proof,
    )


def _respond(waiting: _Waiting, done: ExecuteDone) -> None:
    if not waiting.response.done():
        waiting.response.set_result(done)


def _fail(waiting: _Waiting, error: BaseException) -> None:
    if not waiting.response.done():
        waiting.response.set_exception(error)
