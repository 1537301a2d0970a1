"""How a client asks whether its logged writes were refused: few questions, and nobody is forgotten."""

import asyncio
from typing import Any, cast

from replication.conflicts.verdicts import REQUESTS_MAX, VerdictClient
from replication.rpc.calls import Judged, Judgement
from replication.rpc.conversation import Caller
from tops.model.rejections import Rejection, RejectionCode, sentence

TIMEOUT_S = 30.0
ODD = Rejection(RejectionCode.ERROR, "odd")


class Replica:
    """Answers when it is let; refuses writes with odd numbers."""

    def __init__(self) -> None:
        self.asked: list[tuple[Judgement, asyncio.Future[None]]] = []

    async def request(self, to: str, request: Judgement, timeout_s: float) -> Judged:
        let: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.asked.append((request, let))
        await let
        return Judged(rejected={tx: ODD for number, tx in request.asked if number % 2})


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_what_is_logged_together_is_one_question_and_later_writes_do_not_wait_for_its_answer() -> None:
    replica = Replica()
    requester = VerdictClient(cast(Caller, replica), lambda: ["r1"], TIMEOUT_S)
    waiting: list[asyncio.Future[Any]] = []
    for number in range(REQUESTS_MAX + 3):
        waiting += [asyncio.ensure_future(requester.rejection(number, f"{number}.{n}")) for n in range(5)]
        await settle()
    assert [len(request.asked) for request, _ in replica.asked] == [5] * REQUESTS_MAX

    replica.asked[0][1].set_result(None)  # the last of the first ones stay unanswered
    await settle()

    assert len(replica.asked[-1][0].asked) == 15, "those that found no room are asked about together"
    for _, let in replica.asked[1:]:
        let.set_result(None)
    found = await asyncio.wait_for(asyncio.gather(*waiting), TIMEOUT_S)
    assert found == [ODD if number % 2 else None for number in range(REQUESTS_MAX + 3) for _ in range(5)]


async def test_who_comes_as_the_last_answer_arrives_is_asked_about_as_well() -> None:
    replica = Replica()
    requester = VerdictClient(cast(Caller, replica), lambda: ["r1"], TIMEOUT_S)
    found = list[Rejection | None]()

    async def write_and_write_again(number: int) -> None:
        found.append(await requester.rejection(number, "a"))
        found.append(await requester.rejection(number + 1, "b"))

    writers = [asyncio.ensure_future(write_and_write_again(number)) for number in range(0, 2 * REQUESTS_MAX, 2)]
    answered = 0
    while not all(writer.done() for writer in writers):
        await settle()
        assert len(replica.asked) > answered, "a write waits, and nobody asks"
        for _, let in replica.asked[answered:]:
            let.set_result(None)
        answered = len(replica.asked)
        await settle()
    assert sorted(map(sentence, found)) == [""] * REQUESTS_MAX + ["error: odd"] * REQUESTS_MAX
