"""A replica's part in the set's transactions: epochs to its database, the log for what it missed.

The database is the memory. What the machine says is carried out through the `Resource`; how far that got is told to
whoever waits for a position. A change that can't be applied does what the set says: stop with a stated reason, skip
the transaction, or set it aside.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from adapters.changes import Barrier, InvalidChange, Member, NotDeterministic
from adapters.resource import Applied, Attempt, Entry, EntryFailed, Epoch, Exclusion, MemberVote, Resource, Why
from replication.conflicts.tables import rejection_record
from replication.conflicts.verdicts import Verdicts
from replication.model.events import at_ms, batch_in, logged_members, member_of
from replication.model.values import pack_rows
from replication.replica.apply.pace import GATHER_S, Pace
from replication.rpc.control import Visitor, has_control, repair_of
from replication.rpc.rejections import rejection
from tops.model.errors import NotReachable, OutcomeUnknown, ResourceError, ResourceRejected, StaleAttempt
from tops.model.ids import TxId
from tops.model.log_points import NO_DIGEST, NO_DIGESTS, Digests, LogPoint
from tops.model.rejections import Rejection, RejectionCode
from tops.model.transactions import Scope, TxType
from tops.protocol.effects import BatchPrepared, Memo
from tops.protocol.messages import EpochId, EpochMember, LogEntry
from tops.protocol.set_types import BATCH
from tops.runtime.participants import BatchParticipant

RETRY_FIRST_S, RETRY_MAX_S = 0.05, 2.0
RECENT_S = 5.0
LEAVE_S = 5.0  # how long a replica that stops waits for the end of what it has promised
FailedEntry = Callable[[Entry, EntryFailed], Awaitable[Entry | None]]
Translate = Callable[[Sequence[Entry], Mapping[int, LogEntry]], Awaitable[list[Entry]]]

log = logging.getLogger("tops.replication")


class Recent:
    """What went wrong last, for a while: only another try, which may never come, would show that it works again."""

    def __init__(self) -> None:
        self._text, self._at = "", 0.0

    def note(self, text: str) -> None:
        self._text, self._at = text, time.monotonic()

    @property
    def text(self) -> str:
        return self._text if time.monotonic() - self._at < RECENT_S else ""


class ReplicaParticipant(BatchParticipant):
    """Drives one resource. `scope` tells whether the replica votes or only follows."""

    def __init__(self, resource: Resource, event_type: str, site: str, scope: Scope) -> None:
        super().__init__()
        self.scope = scope
        self.resource, self.event_type, self.site = resource, event_type, site
        self.reached = 0  # the position in the database
        self.history = ""  # of the log that it is a position in
        self.received = 0  # what of the log was handed to us
        self.applied_at = time.monotonic()
        self.prepared: set[int] = set()  # promised numbers
        self.stopped = ""  # why nothing is applied any more
        self.other_history = ""  # how the database differs from the coordinator's log
        self.last_error = ""  # why the last try to apply came to nothing; it is tried again
        self.unable = Recent()  # to vote, or to write
        self.resumed = asyncio.Event()
        self.resumed.set()
        self.leaving = False
        self.on_failed_entry: FailedEntry | None = None
        # What becomes of entries here, if not what they say: of the first, and as many more as can be judged with it.
        self.translate: Translate | None = None
        self.turn = asyncio.Lock()  # whoever looks at a row and then changes it
        self.verdicts = Verdicts(resource)
        # Why a member that came from a client must not be carried out; None where only replicas write the log.
        self.reserved: Callable[[Member], str | None] | None = None
        self.visitor: Visitor | None = None  # a check's, if one may come
        self._barriers: dict[int, list[str]] = {}  # barriers that somebody waits for, by prepared number
        self._moved: set[asyncio.Future[None]] = set()  # who waits for another position
        self.pace = Pace(GATHER_S if scope is Scope.LOCAL else 0.0)
        self._log = ("", NO_DIGESTS)  # the history and the digests of what is being applied
        self.own: set[bytes] = set()  # batches committed here before they were logged: not to be done again

    # ------------------------------------------------------------------------------------------------- positions

    async def point(self) -> LogPoint:
        point = await self.resource.point()
        self.reached = self.received = point.index
        self.history = point.history
        self.verdicts.begin(self.reached)
        return point

    async def prepared_work(self) -> Sequence[Memo]:
        memos = []
        for doubt in await self.resource.recover():
            voter, _, digest = doubt.attempt.note.partition(".")
            attempt = doubt.attempt
            epoch = EpochId(self.event_type, attempt.number, attempt.attempt, attempt.coordinator, attempt.incarnation)
            memos.append(Memo(epoch, digest, voter, ()))
            self.prepared.add(attempt.number)
        return memos

    def in_doubt(self) -> int:
        """The highest number that is promised here: another replica may already show it to its readers."""
        return max(self.prepared, default=0)

    async def wait_for(self, position: int, timeout_s: float) -> None:
        """Return when everything up to `position` is applied here; NotReachable after the bound."""
        if position > self.reached:
            self.pace.hurry()
        try:
            async with asyncio.timeout(timeout_s):
                while self.reached < position:
                    await self._move()
        except TimeoutError:
            raise NotReachable(
                f"replica {self.site} is at position {self.reached} and did not reach {position} "
                f"within {timeout_s:g} s{f': {self.stopped}' if self.stopped else ''}"
            ) from None

    async def _move(self) -> None:
        moved = asyncio.get_running_loop().create_future()
        self._moved.add(moved)
        try:
            await moved
        finally:
            self._moved.discard(moved)

    def _reach(self, position: int) -> None:
        self.reached = max(self.reached, position)
        self.received = max(self.received, position)
        self.applied_at = time.monotonic()
        self._tell_moved()

    def _tell_moved(self) -> None:
        for moved in self._moved:
            if not moved.done():
                moved.set_result(None)

    # ----------------------------------------------------------------------------------------------------- epochs

    async def prepare_batch(self, memo: Memo, members: tuple[EpochMember, ...], before: LogPoint) -> BatchPrepared:
        events = [event for member in members for event in member.events or ()]
        logged = [member_of(m.tx, m.events or ()) for m in members]
        if self.leaving and memo.epoch.number not in self.prepared:  # a new attempt at what is promised may end it
            await asyncio.Future()  # a vote that nobody gets: we are as good as gone
        if not self.resumed.is_set():
            paused = Rejection(RejectionCode.PAUSED, f"replica {self.site} is paused: {self.stopped}")
            return BatchPrepared({m.tx: paused for m in members})
        self.prepared.add(memo.epoch.number)
        batch = tuple(logged)
        if has_control(logged) or self._is_watched():
            batch = tuple([self._own(member, memo.epoch.number) for member in logged])
            if waited := self._waited_for(logged):
                self._barriers[memo.epoch.number] = waited
        rejected = self._rejected(batch)
        if rejected:
            batch = tuple([member for member in batch if member.tx not in rejected])
        try:
            epoch = Epoch(_attempt(memo), batch, memo.digest, at_ms(events), before)
            prepared = await self.resource.prepare(epoch)
        except (ResourceRejected, NotReachable, OutcomeUnknown, StaleAttempt) as error:
            if not isinstance(error, StaleAttempt):  # that one is only late
                self.unable.note(f"a vote failed: {error}")
            unavailable = Rejection(RejectionCode.UNAVAILABLE, str(error))
            return BatchPrepared({m.tx: unavailable for m in members})
        votes: Sequence[MemberVote] = prepared.votes
        if rejected:
            carried_out = iter(votes)
            votes = [rejected[m.tx] if m.tx in rejected else next(carried_out) for m in logged]
        excluded = {vote.tx: rejection(vote.excluded) for vote in votes if vote.excluded is not None}
        # Repairs differ from replica to replica, as they should: nobody compares what they did.
        repairs = {member.tx for member in logged if member.control is not None and repair_of(member) is not None}
        rows = tuple([() if vote.tx in repairs else vote.rows for vote in votes])
        if not [vote for vote in votes if vote.returned and vote.tx not in repairs]:
            return BatchPrepared(excluded, rows, log_digest=prepared.log_digest)
        results = tuple(
            msgspec.msgpack.encode([pack_rows(rows) for rows in vote.returned])
            if vote.returned and vote.tx not in repairs
            else b""
            for vote in votes
        )
        return BatchPrepared(excluded, rows, results, prepared.log_digest)

    def _rejected(self, members: Sequence[Member]) -> dict[TxId, MemberVote]:
        """Votes against members that ask for what only agents write."""
        if self.reserved is None:
            return {}
        found = {}
        for member in members:
            # Whether its writer may send a control transaction was checked by its broker.
            problem = self.reserved(member) if member.control is None else None
            if problem is not None:
                found[member.tx] = MemberVote(member.tx, excluded=Exclusion(Why.INVALID, "", problem))
        return found

    async def finish_batch(self, memo: Memo, committed: bool) -> LogPoint | None:
        attempt, point = _attempt(memo), None
        if committed:
            point = await self.resource.commit(attempt)
        else:
            await self.resource.rollback(attempt)
        waited = self._barriers.pop(attempt.number, [])
        if committed:
            if waited:
                await self._at_barriers(waited)
            self._reach(attempt.number)
        # Last: whoever asks where we are must hear of the number, as promised or as reached, at every moment.
        self.prepared.discard(attempt.number)
        if self.leaving:
            self._tell_moved()
        return point

    async def leave(self) -> None:
        """Promise nothing more, and wait a moment for the end of what is promised: its locks would stay in the
        database until this replica is started again."""
        self.leaving = True
        try:
            async with asyncio.timeout(LEAVE_S):
                while self.prepared:
                    await self._move()
        except TimeoutError:
            log.warning(
                "stopped with open promises; they end when the replica is started again",
                extra={"replica": self.site, "epochs": sorted(self.prepared)},
            )

    def disown(self) -> None:
        """Another agent has the database, and with it what was promised here."""
        self.prepared.clear()
        self._tell_moved()

    # -------------------------------------------------------------------------------------------------------- the log

    def on_history(self, problem: str) -> None:
        self.other_history = problem

    async def apply_entries(self, entries: tuple[LogEntry, ...], upto: int, history: str, digests: Digests) -> LogPoint:
        """Each entry once and in order; numbers that hold nothing for us only move the position."""
        self._log, self.history = (history, digests), history
        self.received = max(self.received, upto)
        await self.pace.gathered(self.applied_at)  # what comes meanwhile is applied with the next entries
        known = {entry.number: entry for entry in entries}
        work = [self._entry(number, known.get(number)) for number in range(self.reached + 1, upto + 1)]
        pause_s = RETRY_FIRST_S
        while work:
            await self.resumed.wait()
            part, waited = self._to_barrier(work)
            try:
                done = await self._apply(part, known)
            except (ResourceRejected, NotReachable, OutcomeUnknown) as error:
                # Passing trouble: locks, time, a server that restarts. What was done nevertheless is skipped then.
                self.last_error = str(error)
                log.warning("apply is tried again", extra={"replica": self.site, "reason": self.last_error})
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, RETRY_MAX_S)
                continue
            if self.last_error:
                log.info("apply goes on", extra={"replica": self.site, "former_problem": self.last_error})
                self.last_error = ""
            if waited and done.position >= part[-1].number:
                await self._at_barriers(waited)
            self._reach(done.position)
            work = [entry for entry in work if entry.number > done.position]
            if done.failed is not None and work:
                replaced = await self._failed(work[0], done.failed)
                if replaced is not None:
                    work[0] = replaced
        return LogPoint(history, self.reached, digests.at(self.reached) or NO_DIGEST)

    def _entry(self, number: int, logged: LogEntry | None) -> Entry:
        entry = self._own_left_out(number, logged)
        rejected = self._rejected(entry.members)
        if not rejected:
            return entry
        members = tuple(
            [self._rejection_record(number, rejected[m.tx]) if m.tx in rejected else m for m in entry.members]
        )
        return Entry(number, members, entry.at_ms)

    def _rejection_record(self, number: int, vote: MemberVote) -> Member:
        assert vote.excluded is not None
        return rejection_record(number, vote.tx, "apply_error", rejection(vote.excluded), "skip")

    def _own_left_out(self, number: int, logged: LogEntry | None) -> Entry:
        if logged is None or not self.own:
            return entry_of(number, logged)
        batches = {event.body.get(BATCH) for one in logged.transactions for event in one.events}
        mine = self.own & batches
        if not mine:
            return entry_of(number, logged)
        # Passed over only once: what is logged again after a lost answer is found by its idempotency keys.
        self.own -= mine
        others = tuple(
            one for one in logged.transactions if mine.isdisjoint(event.body.get(BATCH) for event in one.events)
        )
        left = entry_of(number, msgspec.structs.replace(logged, transactions=others))
        return Entry(number, left.members, at_ms([event for one in logged.transactions for event in one.events]))

    async def _apply(self, work: Sequence[Entry], logged: dict[int, LogEntry]) -> Applied:
        if self.translate is None:
            done = await self._record([self._own_entry(entry) for entry in work])
            self.verdicts.note([entry for entry in work if entry.number <= done.position])
            return done
        done, left = Applied(self.reached), list(work)
        while left and done.failed is None:
            async with self.turn:
                some = await self._understood(left, logged)
                if isinstance(some, EntryFailed):
                    return Applied(done.position, some)
                done = await self._record(some)
            self.verdicts.note([entry for entry in some if entry.number <= done.position])
            left = left[len(some) :]
        return done

    async def _record(self, entries: Sequence[Entry]) -> Applied:
        history, digests = self._log
        return await self.resource.apply(entries, history=history, digests=digests)

    async def _understood(self, entries: list[Entry], logged: dict[int, LogEntry]) -> list[Entry] | EntryFailed:
        """As `_translated`, or which transaction of the first entry can't be: one that a replica of another version, or
        a hostile one, has published."""
        try:
            return await self._translated(entries, logged)
        except (InvalidChange, ResourceError) as error:
            if not _is_content(error):
                raise
            if len(entries) > 1:
                return await self._understood(entries[:1], logged)
            return await self._culprit(entries[0], logged, error)

    async def _culprit(self, entry: Entry, logged: dict[int, LogEntry], error: Exception) -> EntryFailed:
        """The first transaction with which the entry can't be translated; the same one at every replica."""
        assert self.translate is not None
        members = [member for member in entry.members if repair_of(member) is None]
        for count, member in enumerate(members, 1):
            try:
                await self.translate([Entry(entry.number, tuple(members[:count]), entry.at_ms)], logged)
            except (InvalidChange, ResourceError) as problem:
                if not _is_content(problem):
                    raise
                proof = problem.reason if isinstance(problem, NotDeterministic) else ""
                return EntryFailed(entry.number, member.tx, Exclusion(Why.INVALID, "", str(problem), proof=proof))
        raise error

    async def _translated(self, entries: list[Entry], logged: dict[int, LogEntry]) -> list[Entry]:
        """Some of the entries, from the first on. Repairs are rows as they shall be: nothing is left to resolve."""
        assert self.translate is not None
        plain = list(itertools.takewhile(_repairs_nothing, entries))
        if plain:
            translated = await self.translate(plain, logged)
            for entry in plain[: len(translated)]:
                self._own_entry(entry)
            return translated
        first = self._own_entry(entries[0])
        repairs = tuple(member for member in first.members if repair_of(member) is not None)
        others = tuple(member for member in first.members if repair_of(member) is None)
        (rest,) = await self.translate([Entry(first.number, others, first.at_ms)], logged)
        return [Entry(rest.number, rest.members + repairs, rest.at_ms)]

    # ------------------------------------------------------------------------------------------ barriers and repairs

    def _own_entry(self, entry: Entry) -> Entry:
        if not has_control(entry.members) and not self._is_watched():
            return entry
        own = tuple([self._own(member, entry.number) for member in entry.members])
        return entry if own == entry.members else Entry(entry.number, own, entry.at_ms)

    def _is_watched(self) -> bool:
        return self.visitor is not None and self.visitor.watches

    def _own(self, member: Member, number: int) -> Member:
        """A transaction as it is carried out here: a repair is for one replica, and only while it is right."""
        repair = repair_of(member)
        if repair is None:
            if self.visitor is not None:
                self.visitor.saw(member, number)
            return member
        if repair.site != self.site or self.visitor is None:
            return msgspec.structs.replace(member, changes=())
        return self.visitor.permitted(member, repair)

    def _waited_for(self, members: Sequence[Member]) -> list[str]:
        visitor = self.visitor
        if visitor is None:
            return []
        barriers = [member.control.ident for member in members if isinstance(member.control, Barrier)]
        return [barrier for barrier in barriers if visitor.expects(barrier)]

    def _to_barrier(self, work: list[Entry]) -> tuple[list[Entry], list[str]]:
        """What can be applied at once: nothing that lies beyond a barrier that somebody waits for."""
        for row_key, entry in enumerate(work):
            if waited := self._waited_for(entry.members):
                return work[: row_key + 1], waited
        return work, []

    async def _at_barriers(self, barriers: Sequence[str]) -> None:
        for barrier in barriers:
            if self.visitor is not None:
                await self.visitor.reached(barrier)

    async def _failed(self, entry: Entry, failed: EntryFailed) -> Entry | None:
        if self.on_failed_entry is None:
            return None
        return await self.on_failed_entry(entry, failed)

    def stop(self, reason: str) -> None:
        """Apply nothing more until `resume`."""
        self.stopped = reason
        self.resumed.clear()
        log.error("replication stopped", extra={"replica": self.site, "reason": reason})

    def resume(self) -> None:
        self.stopped = ""
        self.resumed.set()


def _is_content(error: Exception) -> bool:
    """Whether an error is about what a transaction says, and not about the database at this moment."""
    return isinstance(error, InvalidChange) or type(error) is ResourceError


def _repairs_nothing(entry: Entry) -> bool:
    return not any(map(repair_of, entry.members))


def _attempt(memo: Memo) -> Attempt:
    epoch = memo.epoch
    return Attempt(
        number=epoch.number,
        incarnation=epoch.incarnation,
        attempt=epoch.attempt,
        coordinator=epoch.coordinator,
        note=f"{memo.voter}.{memo.digest}",
    )


def entry_of(number: int, entry: LogEntry | None) -> Entry:
    """What the log holds under a number, as the adapter takes it."""
    if entry is None:
        return Entry(number, ())
    members: list[Member] = []
    for logged in entry.transactions:
        if batch := batch_in(logged.events):
            members += batch
            continue
        if logged.tx_type is TxType.LOCAL:
            members += logged_members(TxId(logged.tx), logged.events)
        else:
            members.append(member_of(TxId(logged.tx), logged.events))
    events = [event for logged in entry.transactions for event in logged.events]
    return Entry(number, tuple(members), at_ms(events))
