"""How far behind a replica is, told truthfully: 0 on an idle set, rising while the coordinator can't be reached.

The agent asks the coordinator for the log's end again and again. It was caught up at the last moment at which an
answer named an end that it has reached since; the time since then is its lag. It also notes when the coordinator last
saw the others at the end: of one that can't be asked, that is all that anybody knows.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

import msgspec

from replication.replica.apply.participant import ReplicaParticipant
from tops.client.site import Site
from tops.model.errors import InvalidTransaction, NotReachable
from tops.model.event_types import EventType
from tops.protocol.messages import LogStateReported

ASK_EVERY_S = 0.5
RESPONSE_WITHIN_S = 2.0
# How far beyond the last known end of the log a client's position may lie: what is prepared and not decided, and what
# was committed since.
AHEAD_MAX = 10_000

log = logging.getLogger("tops.replication")


class Lag(msgspec.Struct, frozen=True):
    """`network`: numbers that have not arrived; `apply`: arrived and not applied. `head` None: never heard of."""

    seconds: float
    transactions: int
    network: int
    apply: int
    head: int | None
    linked: bool


class LagTracker:
    """Keeps asking on behalf of one replica."""

    def __init__(
        self,
        site: Site,
        event_type: EventType,
        participant: ReplicaParticipant,
        replicas: Callable[[], frozenset[str]],
    ) -> None:
        """`replicas`: the identities of the set's replicas. Others follow the log as well, and are not told of."""
        self._site, self._event_type, self._participant = site, event_type, participant
        self._replicas = replicas
        self._heads: deque[tuple[float, int]] = deque()  # when which end was asked for, not reached yet
        self._caught_up_at = time.monotonic()
        self.told: LogStateReported | None = None
        self.told_at = 0.0
        self._asking = asyncio.Lock()
        self._asked_at = 0.0
        self._seen: dict[str, float] = {}  # when a replica was last seen present at the log's end, or first heard of

    async def run(self) -> None:
        while True:
            asked_at = time.monotonic()
            await self._request(asked_at)
            await asyncio.sleep(max(0.0, ASK_EVERY_S - (time.monotonic() - asked_at)))

    async def _request(self, asked_at: float) -> None:
        try:
            told = await self._site.get_log_state(self._event_type, timeout_s=RESPONSE_WITHIN_S)
        except NotReachable as error:
            log.debug("no answer on the log's end", extra={"reason": str(error)})
        else:
            self.told, self.told_at = told, asked_at
            self._heads.append((asked_at, told.decided))
            self._settle()
            self._see(told, asked_at)

    async def check_exists(self, position: int) -> None:
        """Raises InvalidTransaction if the log has no such index: nobody should wait for it. While the coordinator does
        not respond, or is itself finding out where its log ends, nobody knows that."""
        if not self._is_beyond(position):
            return
        arrived = time.monotonic()
        async with self._asking:  # one request to the coordinator serves all that came before it was sent
            if self._asked_at < arrived:
                self._asked_at = time.monotonic()
                await self._request(self._asked_at)
        told = self.told
        if self.told_at < arrived or told is None or not told.is_open or told.stale is not None:
            return
        if self._is_beyond(position):
            raise InvalidTransaction(
                f"index {position} is beyond the end of the log, which is at {told.decided}: "
                "the token is not of a write to this replica set"
            )

    def _is_beyond(self, position: int) -> bool:
        head = self.told.decided if self.told is not None else 0
        return position > max(head, self._participant.reached, self._participant.received) + AHEAD_MAX

    def _settle(self) -> None:
        while self._heads and self._heads[0][1] <= self._participant.reached:
            self._caught_up_at = self._heads.popleft()[0]

    def _see(self, told: LogStateReported, at: float) -> None:
        replicas = self._replicas()
        self._seen = {name: at for name, at in self._seen.items() if name in replicas}
        for follower in told.followers:
            if follower.name not in replicas:
                continue
            if follower.present and follower.position >= told.decided:
                self._seen[follower.name] = at
            self._seen.setdefault(follower.name, at)

    def of_others(self) -> dict[str, float]:
        """For how many seconds each replica was not seen at the log's end."""
        now = time.monotonic()
        return {name: round(now - at, 3) for name, at in self._seen.items()}

    def lag(self) -> Lag:
        self._settle()
        now, reached = time.monotonic(), self._participant.reached
        linked = self.told is not None and now - self.told_at < ASK_EVERY_S + RESPONSE_WITHIN_S
        head = self.told.decided if self.told is not None else None
        behind = max(0, (head or 0) - reached)
        arrived = max(0, min(self._participant.received, head or 0) - reached)
        seconds = 0.0 if linked and not self._heads else max(0.0, now - self._caught_up_at)
        return Lag(seconds, behind, behind - arrived, arrived, head, linked)
