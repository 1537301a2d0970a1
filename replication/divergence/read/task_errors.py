"""How an error of a Spark task gets back to the check: Spark passes on its text alone, so the text is encoded data."""

import base64
import re

import msgspec

from replication.tables.catalog import LostConnection
from replication.tables.errors import CheckRejected, SnapshotLost
from tops.model.errors import NotReachable, TopsError

_MARKED = re.compile(r"<tops-failure:([A-Za-z0-9+/=]+)>")
_KINDS: dict[str, type[NotReachable | SnapshotLost | CheckRejected]] = {
    "not-reachable": NotReachable,
    "snapshot-lost": SnapshotLost,
    "check-rejected": CheckRejected,
}
_LOST = "lost-connection"


class _Failure(msgspec.Struct, frozen=True, array_like=True):
    code: str
    text: str
    replica: str = ""


class TaskFailed(Exception):
    """Raised in a task in the place of an error that the check is to know; its text says which one, for programs."""

    def __init__(self, failure: _Failure) -> None:
        encoded = base64.b64encode(msgspec.msgpack.encode(failure)).decode()
        super().__init__(f"<tops-failure:{encoded}>")


def task_failed(error: TopsError) -> Exception:
    """What a task raises for an error: one that `failure_in` recognises, or the error itself."""
    if isinstance(error, LostConnection):
        return TaskFailed(_Failure(_LOST, error.detail, error.replica))
    for code, kind in _KINDS.items():
        if type(error) is kind:
            return TaskFailed(_Failure(code, str(error)))
    return error


def failure_in(spark_text: str) -> TopsError | None:
    """The error that a task has raised, from the text that Spark gives; None if it was none of ours."""
    found = _MARKED.search(spark_text)
    if found is None:
        return None
    failure = msgspec.msgpack.decode(base64.b64decode(found[1]), type=_Failure)
    if failure.code == _LOST:
        return LostConnection(failure.replica, ConnectionError(failure.text))
    return _KINDS[failure.code](failure.text)
