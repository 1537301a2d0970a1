"""Writes that commit at one replica first and are published then: primary-site, and peer-to-peer.

One turn at a time for whoever looks at a row and then changes it: local writes of a peer-to-peer set and entries from
the log take the same lock, so that a decision and what it was based on can't drift apart.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence

import msgspec

from replication.apply_errors import ApplyErrors
from replication.calls import WriteDone
from replication.config import ReplicaSetConfig
from replication.conflicts.clock import HybridClock, wall_ms
from replication.conflicts.folding import Folding
from replication.conflicts.peer_apply import PeerApply
from replication.conflicts.peer_writes import PeerWrites
from replication.conflicts.resolvers import own_function
from replication.conflicts.tables import CLOCKS, Shapes
from replication.conflicts.versions import Ranking
from replication.participant import ReplicaParticipant
from replication.publisher import OutboxPublisher
from replication.refusals import describe
from replication.values import pack_rows
from tops.changes import Member, Row, check_statement, decode_member
from tops.errors import MemberRefused, OutcomeUnknown
from tops.ids import TxId
from tops.messages import LogEntry
from tops.ports import Entry, Exclusion, MemberVote, Resource, Why
from tops.site import Site

_ALREADY = re.compile(r"committed already by transaction (\S+)")
LOGGED_WITHIN_S = 10.0
GROUP_MAX = 128
Waiting = tuple[Member, dict[tuple[str, str], Row], asyncio.Future[MemberVote]]


class LocalWrites:
    """The writing side of a local-first replica."""

    def __init__(
        self,
        config: ReplicaSetConfig,
        replica: str,
        site: Site,
        resource: Resource,
        publisher: OutboxPublisher,
        errors: ApplyErrors,
        clock: HybridClock | None = None,
    ) -> None:
        self._config, self._replica, self._resource, self._errors = config, replica, resource, errors
        self.publisher, self.clock = publisher, clock or HybridClock(wall_ms)
        self._turn = asyncio.Lock()
        self._waiting: list[Waiting] = []
        self._worker: asyncio.Task[None] | None = None
        self._peer: PeerWrites | None = None
        self._apply: PeerApply | Folding | None = None
        if config.policy == "peer-to-peer":
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
        if not isinstance(self._apply, Folding):  # that one counts what comes back
            self.publisher.own = participant.own
        if self._apply is None:
            return
        found = (await self._resource.read(f"select coalesce(max(clock), 0) as clock from {CLOCKS}")).rows
        self.clock.see(int(found[0]["clock"]))
        self.clock.skew_ms = 0
        participant.translate = self._resolved
        participant.turn = self._turn

    async def _resolved(self, entries: Sequence[Entry], _: Mapping[int, LogEntry]) -> list[Entry]:
        assert self._apply is not None
        before = self._apply.conflicts
        resolved = await self._apply.resolved(entries)
        self._errors.conflict_count += self._apply.conflicts - before
        return resolved

    async def write(self, tx: str, encoded: bytes) -> WriteDone:
        """Commit here, with the record that it is to be published; repeated with the same id it is done once."""
        member = msgspec.structs.replace(decode_member(encoded), tx=TxId(tx))
        if not member.idempotency_key:
            member = msgspec.structs.replace(member, idempotency_key=f"tx:{tx}")
        try:
            vote, returned = await self._commit(member), b""
        except MemberRefused as refused:
            already = _ALREADY.search(refused.reason)
            if already is None:
                return WriteDone(replica=self._replica, tx=tx, rows=(), refused=_described(refused))
            return WriteDone(replica=self._replica, tx=already[1], rows=(), duplicate=True)
        if vote.returned:
            returned = msgspec.msgpack.encode([pack_rows(rows) for rows in vote.returned])
        self.publisher.wake()
        position = await self._logged(tx) if self._config.ack == "logged" and self._peer is None else None
        rows = vote.rows if self._peer is None else vote.rows[::2]
        return WriteDone(replica=self._replica, tx=tx, rows=rows, returned=returned, position=position)

    async def _commit(self, member: Member) -> MemberVote:
        if self._peer is None:
            for change in member.changes:
                if sql := getattr(change, "sql", None):
                    check_statement(sql, allow_volatile=self._config.allow_volatile)
            return await self._resource.write_local(member)
        answer: asyncio.Future[MemberVote] = asyncio.get_running_loop().create_future()
        places = await self._peer.places(member)
        self._waiting.append((member, places, answer))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.ensure_future(self._write_all(self._peer))
        return await answer

    async def _write_all(self, peer: PeerWrites) -> None:
        while self._waiting:
            group = self._disjoint()
            async with self._turn:
                try:
                    await self._write_group(peer, group)
                except Exception as error:
                    for _, _, answer in group:
                        if not answer.done():
                            answer.set_exception(error)

    def _disjoint(self) -> list[Waiting]:
        """Writers that come together and touch different rows share a turn: none builds on what another may fail at."""
        group: list[Waiting] = []
        taken: set[tuple[str, str]] = set()
        left: list[Waiting] = []
        for waiting in self._waiting:
            if taken.isdisjoint(waiting[1]) and len(group) < GROUP_MAX:
                group.append(waiting)
            else:
                left.append(waiting)
            taken.update(waiting[1])
        self._waiting = left
        return group

    async def _write_group(self, peer: PeerWrites, group: list[Waiting]) -> None:
        known = await peer.known({place: key for _, places, _ in group for place, key in places.items()})
        members = [await peer.versioned(member, known) for member, _, _ in group]
        votes = await asyncio.gather(*(self._resource.write_local(m) for m in members), return_exceptions=True)
        for (_, _, answer), vote in zip(group, votes, strict=True):
            if answer.done():
                continue
            if isinstance(vote, BaseException):
                answer.set_exception(vote)
            else:
                answer.set_result(vote)

    async def _logged(self, tx: str) -> int:
        try:
            return await self.publisher.logged(tx, LOGGED_WITHIN_S)
        except TimeoutError:
            # It is committed at the primary and will be logged; whether the primary survives until then is open.
            raise OutcomeUnknown(tx, "the set's log") from None


def _described(refused: MemberRefused) -> str:
    why = Why.CONSTRAINT if refused.sqlstate.startswith("23") else Why.ERROR
    if "in use with other content" in refused.reason:
        why = Why.KEY_REUSED
    return describe(Exclusion(why, refused.sqlstate, refused.reason))
