"""How long an agent's own writes take and how they end, for operators: those that commit at this replica first, and
those that are executed here once."""

import time
from collections.abc import Awaitable, Iterable, Sequence
from typing import Final, TypeVar

from replication.rpc.calls import AnyResponse, ExecuteDone, Failed, WriteDone
from tops.model.errors import Retry, TopsError, code_of
from tops.model.transactions import Outcome
from tops.runtime.histogram import Histogram

T = TypeVar("T")
DATABASE: Final = "database"  # the code where the database itself has rejected the transaction


class WriteMeter:
    """Latency and ends of the writes that one agent carries out."""

    def __init__(self) -> None:
        self.latency = Histogram()
        self.ended: dict[tuple[str, str], int] = {}  # outcome, code of the rejection or error

    async def one(self, work: Awaitable[AnyResponse]) -> AnyResponse:
        """Measure a write."""
        (response,) = await self.all(_as_sequence(work), 1)
        return response

    async def all(self, work: Awaitable[Sequence[AnyResponse]], count: int) -> Sequence[AnyResponse]:
        """Measure `count` writes that are carried out together."""
        began = time.monotonic()
        try:
            responses = await work
        except TopsError as error:
            self._note([_end_of(error.retry.value, code_of(error))] * count, began)
            raise
        self._note(map(_end, responses), began)
        return responses

    def _note(self, ends: Iterable[tuple[str, str]], began: float) -> None:
        duration_s = time.monotonic() - began
        for end in ends:
            self.latency.observe(duration_s)
            self.ended[end] = self.ended.get(end, 0) + 1


async def _as_sequence(work: Awaitable[T]) -> Sequence[T]:
    return [await work]


def _end(response: AnyResponse) -> tuple[str, str]:
    match response:
        case Failed(code=code, retry=retry):
            return _end_of(retry, code)
        case ExecuteDone(error=error) if error is not None:
            return Outcome.ABORTED.value, DATABASE
        case ExecuteDone(rejection=rejection) | WriteDone(rejection=rejection) if rejection is not None:
            return Outcome.ABORTED.value, rejection.code.value
        case _:
            return Outcome.COMMITTED.value, ""


def _end_of(retry: str, code: str) -> tuple[str, str]:
    unknown = retry == Retry.ASK_FIRST.value
    return (Outcome.UNKNOWN if unknown else Outcome.ABORTED).value, code
