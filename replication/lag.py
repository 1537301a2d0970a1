"""How far behind a replica is, told truthfully: 0 on an idle set, rising while the coordinator can't be reached.

The agent asks the coordinator for the log's end again and again. It was caught up at the last moment at which an
answer named an end that it has reached since; the time since then is its lag. It also notes when the coordinator last
saw the others at the end: of one that can't be asked, that is all that anybody knows.
"""

import asyncio
import logging
import time
from collections import deque

import msgspec

from replication.participant import ReplicaParticipant
from tops.errors import NotReachable
from tops.event_types import EventType
from tops.messages import LogTold
from tops.site import Site

ASK_EVERY_S = 0.5
ANSWER_WITHIN_S = 2.0

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

    def __init__(self, site: Site, event_type: EventType, participant: ReplicaParticipant) -> None:
        self._site, self._event_type, self._participant = site, event_type, participant
        self._heads: deque[tuple[float, int]] = deque()  # when which end was asked for, not reached yet
        self._caught_up_at = time.monotonic()
        self.told: LogTold | None = None
        self.told_at = 0.0
        self._seen: dict[str, float] = {}  # when a site was last seen present at the log's end, or first heard of

    async def run(self) -> None:
        while True:
            asked_at = time.monotonic()
            try:
                told = await self._site.ask_log(self._event_type, timeout_s=ANSWER_WITHIN_S)
            except NotReachable as error:
                log.debug("no answer on the log's end", extra={"reason": str(error)})
            else:
                self.told, self.told_at = told, asked_at
                self._heads.append((asked_at, told.decided))
                self._settle()
                self._see(told, asked_at)
            await asyncio.sleep(max(0.0, ASK_EVERY_S - (time.monotonic() - asked_at)))

    def _settle(self) -> None:
        while self._heads and self._heads[0][1] <= self._participant.reached:
            self._caught_up_at = self._heads.popleft()[0]

    def _see(self, told: LogTold, at: float) -> None:
        for follower in told.followers:
            if follower.present and follower.position >= told.decided:
                self._seen[follower.name] = at
            self._seen.setdefault(follower.name, at)

    def of_others(self) -> dict[str, float]:
        """For how many seconds no site was seen, by its name, at the log's end."""
        now = time.monotonic()
        return {name: round(now - at, 3) for name, at in self._seen.items()}

    def lag(self) -> Lag:
        self._settle()
        now, reached = time.monotonic(), self._participant.reached
        linked = self.told is not None and now - self.told_at < ASK_EVERY_S + ANSWER_WITHIN_S
        head = self.told.decided if self.told is not None else None
        behind = max(0, (head or 0) - reached)
        arrived = max(0, min(self._participant.received, head or 0) - reached)
        seconds = 0.0 if linked and not self._heads else max(0.0, now - self._caught_up_at)
        return Lag(seconds, behind, behind - arrived, arrived, head, linked)
