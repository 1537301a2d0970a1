"""The port between the harness and whatever is measured: a TOPS policy, a peer, anything that takes operations.

A system under test is started, loaded, driven by clients, left to settle, looked at and stopped, in that order. It
may be driven many times between load and stop.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from bench.workloads import Dataset, Operation, Totals
from tops.model.errors import Retry, TopsError

# Where the time of one transaction can go, in the order in which a transaction meets them.
PHASES = ("site", "broker", "coordinator", "executor", "database", "disk")


class BenchmarkFailed(TopsError):
    """A benchmark ended without figures that anyone may use: its data is wrong, or its system broke down."""


class SystemUnavailable(TopsError):
    """A system can't run here (a package is missing, a server refuses to start); the message says what to do."""


class OperationAborted(TopsError):
    """The system refused the operation cleanly; nothing of it happened."""

    retry = Retry.SAFE


class OperationUnknown(TopsError):
    """The operation failed in a way that leaves open whether it happened."""

    retry = Retry.ASK_FIRST


class Traffic(NamedTuple):
    """What a system's nodes have said to each other and to the clients so far."""

    messages: int
    bytes: int


class Client(Protocol):
    """One connection's worth of work; the harness calls it from one coroutine, one operation at a time."""

    async def execute(self, operation: Operation) -> None:
        """Return once the system has said "committed", in the sense of its `promise`.

        Raises `OperationAborted` or `OperationUnknown`; any other exception ends the benchmark.
        """

    async def close(self) -> None: ...


class System(Protocol):
    """What is measured. Derive from it: the optional methods have an honest default."""

    name: str  # short, stable, used in rows and figures: "streaming_remote_apply"
    description: str  # what is running, in one line
    promise: str  # what a client may rely on when it has been told "committed"

    async def start(self) -> None:
        """Bring everything up, empty; leave nothing behind when it fails. `SystemUnavailable`: it can't run here."""

    async def load(self, dataset: Dataset) -> None:
        """Create the tables and fill `accounts`, on every node."""

    async def client(self) -> Client: ...

    async def settle(self) -> None:
        """Return once every node has applied everything that was committed; the harness takes the time."""

    async def totals(self) -> Mapping[str, Totals]:
        """What each node holds now, read from that node itself."""
        ...

    async def stop(self) -> None:
        """End every process and remove every file; harmless when called twice."""

    def processes(self) -> Mapping[str, int]:
        """Process ids by role; children count with their parent."""
        return {}

    async def fsyncs(self) -> int | None:
        """How often all nodes together have synced a log to disk so far; None when that can't be learned."""
        return None

    async def traffic(self) -> Traffic | None:
        """Messages and bytes so far; None when that can't be learned. Asked while the clients are connected."""
        return None

    def phases(self, operations: int) -> Mapping[str, float]:
        """Seconds per operation spent in each phase (see `PHASES`), since the last call; there were so many, reads
        among them. 0: what was before is to be forgotten."""
        return {}

    async def versions(self) -> Mapping[str, str]:
        """What is running, by name."""
        return {}
