"""Writes that commit at one replica first and are published then: primary-site, and peer-to-peer.

One turn at a time for whoever looks at a row and then changes it: local writes of a peer-to-peer set and entries from
the log take the same lock, so that a decision and what it was based on can't drift apart.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from adapters.changes import InvalidChange, Member, Statement, decode_member, known_by_id, own_key
from adapters.postgres.sql.sqlstates import exclusion
from adapters.resource import Entry, MemberVote, Resource, Why
from adapters.sql import check_statement
from replication.conflicts.clock import HybridClock, wall_ms
from replication.conflicts.folding import Folding
from replication.conflicts.own_statements import check_client, check_logged
from replication.conflicts.peer_apply import PeerApply
from replication.conflicts.peer_writes import NamedWrite, PeerWrites
from replication.conflicts.resolvers import own_function
from replication.conflicts.tables import CLOCKS, Shapes
from replication.conflicts.versions import Ranking
from replication.model.values import pack_rows
from replication.policies import EntryKind, Policy
from replication.replica.apply.apply_errors import ApplyErrors
from replication.replica.apply.checks import AtReplica
from replication.replica.apply.participant import ReplicaParticipant
from replication.replica.apply.publisher import OutboxPublisher
from replication.rpc.calls import Failed, Write, WriteDone
from replication.rpc.rejections import rejection
from tops.client.site import Site
from tops.model.errors import NotReachable, OutcomeUnknown, TopsError
from tops.model.ids import TxId
from tops.protocol.messages import LogEntry

LOGGED_WITHIN_S = 10.0
GROUP_MAX = 128

Check = Callable[[Member], None]  # raises what is wrong with a member


class Waiting(NamedTuple):
    """A write of a peer-to-peer set on its way into the database."""

    write: NamedWrite
    response: asyncio.Future[MemberVote]


class LocalWrites:
    """The writing side of a local-first replica."""

    def __init__(
        self,
        policy: Policy,
        replica: str,
        site: Site,
        resource: Resource,
        publisher: OutboxPublisher,
        errors: ApplyErrors,
        clock: HybridClock | None = None,
    ) -> None:
        config = policy.config
        self._config, self._replica, self._resource, self._errors = config, replica, resource, errors
        self.publisher, self.clock = publisher, clock or HybridClock(wall_ms)
        self._turn = asyncio.Lock()
        self._waiting: list[Waiting] = []
        self._worker: asyncio.Task[None] | None = None
        self._await_log = policy.acknowledges_from_log
        self._peer: PeerWrites | None = None
        self._apply: PeerApply | Folding | None = None
        if policy.entry_kind is EntryKind.VERSIONED:
            ranking, shapes = Ranking(config.resolver, config.site_priority), Shapes(resource)
            own = own_function(config.resolver)
            self._peer = PeerWrites(replica, resource, self.clock, ranking, shapes, folding=own is not None)
            if own is None:
                self._apply = PeerApply(config.name, resource, self.clock, ranking, shapes)
            else:
                self._apply = Folding(config.name, resource, self.clock, ranking, shapes, own)

    @property
    def warning(self) -> str:
        ahead_s = self.clock.skew_ms / 1000
        if ahead_s <= self._config.clock_skew_max_s or self._peer is None:
            return ""
        return f"another site's clock was {ahead_s:.1f} s ahead of this one: last-writer decisions may surprise"

    async def start(self, participant: ReplicaParticipant) -> None:
        self.publisher.reached = lambda: (participant.history, participant.reached)
        if not isinstance(self._apply, Folding):  # that one counts what comes back
            self.publisher.own = participant.own
        if self._apply is None:
            return
        found = (await self._resource.read_own(f"select coalesce(max(clock), 0) as clock from {CLOCKS}")).rows
        self.clock.see(int(found[0]["clock"]))
        self.clock.skew_ms = 0
        participant.translate = self._resolved
        participant.turn = self._turn
        if isinstance(self._apply, PeerApply):
            participant.on_failed_entry = self._apply.unless_looked_at(participant.on_failed_entry)

    async def _resolved(self, entries: Sequence[Entry], _: Mapping[int, LogEntry]) -> list[Entry]:
        assert self._apply is not None
        before = self._apply.conflicts
        resolved = await self._apply.resolved(entries)
        self._errors.conflict_count += self._apply.conflicts - before
        return resolved

    async def write(
        self, asked: Sequence[Write], visitor: AtReplica, *, captured: bool = False
    ) -> Sequence[WriteDone | Failed]:
        """Commit here, with the records that they are to be published; repeated with the same id a write is done once.

        Each by itself: what becomes of one means nothing to the others. `captured`: they are this agent's write sets;
        nobody else gives a transaction an origin.
        """
        if self._await_log and self.publisher.stuck is not None:
            raise NotReachable(self.publisher.stuck.text)  # it would be committed here, and wait for the log in vain
        members = [self._named(one, decode_member(one.member)) for one in asked]
        check = check_logged if captured else check_client
        if visitor.watches:
            for member in members:
                visitor.saw_local(member)
        if self._peer is None:
            votes = await self._commit(members, check)
        else:
            votes = await self._commit_versioned(members, self._peer, check)
        committed = sum(isinstance(vote, MemberVote) and vote.excluded is None for vote in votes)
        if committed:
            self.publisher.wake(committed)
        if self._await_log:
            return await asyncio.gather(*map(self._done_and_logged, members, votes))
        return [self._done(member.tx, vote) for member, vote in zip(members, votes, strict=True)]

    def _named(self, asked: Write, member: Member) -> Member:
        """Under the id that its writer gave it, and known by that unless it has a key."""
        tx = TxId(asked.tx)
        if member.idempotency_key:
            return msgspec.structs.replace(member, tx=tx)
        return known_by_id(member, tx)

    async def _done_and_logged(self, member: Member, vote: MemberVote | TopsError) -> WriteDone | Failed:
        done = self._done(member.tx, vote)
        if isinstance(done, Failed) or done.rejection is not None or done.duplicate:
            return done
        try:
            return msgspec.structs.replace(done, position=await self._logged(member.tx))
        except OutcomeUnknown as error:
            return Failed.because(error)

    def _done(self, tx: str, vote: MemberVote | TopsError) -> WriteDone | Failed:
        if isinstance(vote, InvalidChange):
            return WriteDone(replica=self._replica, tx=tx, rows=(), rejection=rejection(exclusion(vote)))
        if isinstance(vote, TopsError):
            return Failed.because(vote)
        rejected = vote.excluded
        if rejected is not None and rejected.why is Why.DUPLICATE:
            return WriteDone(replica=self._replica, tx=rejected.first_tx or tx, rows=(), duplicate=True)
        if rejected is not None:
            return WriteDone(replica=self._replica, tx=tx, rows=(), rejection=rejection(rejected))
        returned = msgspec.msgpack.encode([pack_rows(rows) for rows in vote.returned]) if vote.returned else b""
        return WriteDone(replica=self._replica, tx=tx, rows=vote.rows, returned=returned)

    async def _commit(self, members: Sequence[Member], check: Check) -> list[MemberVote | TopsError]:
        """At the primary: statements are for its database to refuse, unless they would differ elsewhere."""
        problems = [self._problem(member, check) for member in members]
        fine = [member for member, problem in zip(members, problems, strict=True) if problem is None]
        votes = iter(await self._resource.write_all_local(fine))
        return [problem if problem is not None else next(votes) for problem in problems]

    def _problem(self, member: Member, check: Check) -> TopsError | None:
        try:
            check(member)
            for change in member.changes:
                if isinstance(change, Statement):
                    check_statement(change.sql, any_dialect=True)
        except TopsError as error:
            return error
        return None

    async def _commit_versioned(
        self, members: Sequence[Member], peer: PeerWrites, check: Check
    ) -> list[MemberVote | TopsError]:
        loop = asyncio.get_running_loop()
        responses: list[asyncio.Future[MemberVote]] = []
        for member in members:
            response = loop.create_future()
            responses.append(response)
            try:
                check(member)
                if isinstance(self._apply, Folding) and not member.idempotency_key:
                    # It asks for the log index of a key. Only agents use an id as the key of a write.
                    member = msgspec.structs.replace(member, idempotency_key=own_key(member.tx))
                write = await peer.named(member)
            except TopsError as error:
                response.set_exception(error)
            else:  # no earlier: while it waited, the worker may have taken the list it would have joined
                self._waiting.append(Waiting(write, response))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.ensure_future(self._write_all(peer))
        return [await _told(response) for response in responses]

    async def _write_all(self, peer: PeerWrites) -> None:
        while self._waiting:
            group = self._disjoint()
            async with self._turn:
                try:
                    await self._write_group(peer, group)
                except Exception as error:
                    for waiting in group:
                        if not waiting.response.done():
                            waiting.response.set_exception(error)

    def _disjoint(self) -> list[Waiting]:
        """Writers that come together and touch different rows share a turn: none builds on what another may fail at."""
        group: list[Waiting] = []
        taken: set[tuple[str, str]] = set()
        added: set[tuple[str, str]] = set()  # to such rows others may add as well
        left: list[Waiting] = []
        for waiting in self._waiting:
            adds, row_keys = waiting.write.increments is not None, waiting.write.row_keys
            free = taken.isdisjoint(row_keys) and (adds or added.isdisjoint(row_keys))
            if free and len(group) < GROUP_MAX:
                group.append(waiting)
            else:
                left.append(waiting)
                adds = False  # nobody may pass it
            (added if adds else taken).update(row_keys)
        self._waiting = left
        return group

    async def _write_group(self, peer: PeerWrites, group: list[Waiting]) -> None:
        """Increments first, without a look at their rows; whose row is not there is done with the others."""
        adding = [(one, one.write.increments) for one in group if one.write.increments is not None]
        others = [waiting for waiting in group if waiting.write.increments is None]
        if adding:
            votes = await self._resource.write_all_local([increments for _, increments in adding])
            for (waiting, _), vote in zip(adding, votes, strict=True):
                if vote.excluded is not None and vote.excluded.why is Why.VERSION:
                    others.append(waiting)
                elif not waiting.response.done():
                    waiting.response.set_result(vote)
        if others:
            known = await peer.known(
                {row_key: key for waiting in others for row_key, key in waiting.write.row_keys.items()}
            )
            written = [await peer.versioned(waiting.write.member, known) for waiting in others]
            votes = await self._resource.write_all_local([member for member, _ in written])
            for waiting, (_, went), vote in zip(others, written, votes, strict=True):
                rows = tuple([0 if row_key is None else vote.rows[row_key] for row_key in went]) if vote.rows else ()
                if not waiting.response.done():
                    waiting.response.set_result(msgspec.structs.replace(vote, rows=rows))

    async def _logged(self, tx: str) -> int:
        try:
            return await self.publisher.logged(tx, LOGGED_WITHIN_S)
        except TimeoutError:
            # It is committed at the primary and will be logged; whether the primary survives until then is open.
            raise OutcomeUnknown(tx, "the set's log") from None


async def _told(response: asyncio.Future[MemberVote]) -> MemberVote | TopsError:
    try:
        return await response
    except TopsError as error:
        return error
