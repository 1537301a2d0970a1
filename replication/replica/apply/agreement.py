"""Policies that log first rely on one thing: what one replica rejects at a log index, every replica rejects there.

A cause that only one database has (a constraint that looks at the clock, a privilege, a row that was changed past the
set) breaks it. So a replica that has rejected a transaction asks the others what became of it there, and stops, with
the reason in its status, if one of them has applied it.
"""

import asyncio
import logging
from collections import deque
from contextlib import suppress

from replication.model.config import ReplicaSetConfig
from replication.replica.apply.participant import ReplicaParticipant
from replication.rpc.calls import Judgement, ReplicaFailed
from replication.rpc.conversation import Caller
from tops.model.errors import NotReachable, OutcomeUnknown

REQUESTED_MAX = 200
WAIT_S = 10.0  # for another replica to get as far
AGAIN_S = 2.0  # until a replica that did not respond is asked again
TRIES_MAX = 300

log = logging.getLogger("tops.replication")


class Agreement:
    """Compares what one replica has rejected with the others' verdicts."""

    def __init__(self, config: ReplicaSetConfig, replica: str, participant: ReplicaParticipant) -> None:
        self._config, self._replica, self._participant = config, replica, participant
        self._rejected: deque[tuple[int, str, str]] = deque(maxlen=10_000)  # log index, transaction, reason
        self._came = asyncio.Event()
        self._comparing = False

    async def is_idle(self) -> bool:
        """Whether everything that was rejected here has been compared."""
        return not self._rejected and not self._comparing

    def rejected(self, number: int, tx: str, reason: str) -> None:
        """This replica has rejected a transaction that its database could not carry out."""
        self._rejected.append((number, tx, reason))
        self._came.set()

    async def run(self, caller: Caller) -> None:
        while True:
            await self._came.wait()
            self._came.clear()
            while self._rejected:
                self._comparing = True
                some = [self._rejected.popleft() for _ in range(min(REQUESTED_MAX, len(self._rejected)))]
                await self._compare(caller, some)
                self._comparing = False

    async def _compare(self, caller: Caller, rejected: list[tuple[int, str, str]]) -> None:
        request = Judgement(asked=tuple((number, tx) for number, tx, _ in rejected), wait_s=WAIT_S)
        left = [name for name in self._config.names if name != self._replica]
        for _ in range(TRIES_MAX):
            for name in list(left):
                with suppress(NotReachable, OutcomeUnknown, ReplicaFailed):
                    judged = await caller.request(self._config.site_of(name), request, 2 * WAIT_S)
                    left.remove(name)
                    applied = [one for one in rejected if one[1] not in judged.rejected]
                    if applied:
                        self._stop(name, *applied[0])
                        return
            if not left:
                return
            await asyncio.sleep(AGAIN_S)
        log.warning("rejections could not be compared", extra={"replica": self._replica, "with": left})

    def _stop(self, other: str, number: int, tx: str, reason: str) -> None:
        self._participant.stop(
            f"log index {number}: transaction {tx} was rejected here ({reason}) and applied at {other}, so the "
            "databases differ: remove the cause, repair with `tops divergence repair`, then `tops rs resume`"
        )
