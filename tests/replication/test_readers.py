"""Which replica a read falls to when the first ones can't respond."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from adapters.changes import Row
from replication.client.reads import Reader, ReadResult
from replication.model.values import pack_rows
from replication.policies import policy_of
from replication.rpc.calls import Failed, ReadDone, ReplicaFailed
from replication.rpc.rejections import NotStarted
from tests.replication.test_config import load
from tops.model.errors import NotReachable, Retry, code_of

ROWS: list[Row] = [{"id": 1}]
JOINING = Failed(code=code_of(NotStarted), text="replica r1 has not started: a copy arrives", retry=Retry.SAFE.value)


class Caller:
    """Gives each replica's response, or raises it."""

    def __init__(self, responses: dict[str, Any]) -> None:
        self.responses = responses

    async def request(self, to: str, request: object, timeout_s: float, over: object = None) -> ReadDone:
        response = self.responses[to.rpartition("/")[2]]
        if isinstance(response, Exception):
            raise response
        return cast(ReadDone, response)


async def read(folder: Path, responses: dict[str, Any]) -> ReadResult:
    config = load(folder, 'policy = "quorum"\nwrite_quorum = 2').replica_set("shop")
    site = SimpleNamespace(broker="b1")
    reader = Reader(cast(Any, site), config, policy_of(config), cast(Any, Caller(responses)), "r1")
    return await reader.read("select id from t", (), "any", "", None, None, None)


async def test_a_read_goes_past_a_replica_that_is_joining(tmp_path: Path) -> None:
    joining = ReplicaFailed("r1", JOINING)
    done = ReadDone(replica="r2", rows=pack_rows(ROWS), position=7)

    found = await read(tmp_path, {"r1": joining, "r2": done, "r3": done})

    assert (found.rows, found.replica, found.position) == (ROWS, "r2", 7)


async def test_a_set_that_has_not_started_is_told_by_its_code(tmp_path: Path) -> None:
    with pytest.raises(ReplicaFailed, match="has not started") as failed:
        await read(tmp_path, {name: ReplicaFailed(name, JOINING) for name in ("r1", "r2", "r3")})

    assert failed.value.code == "not-started"


async def test_replicas_that_can_not_for_different_reasons_are_all_named(tmp_path: Path) -> None:
    unreachable = NotReachable("no response within 4 s")

    with pytest.raises(NotReachable, match=r"has not started.*no response within 4 s"):
        await read(tmp_path, {"r1": ReplicaFailed("r1", JOINING), "r2": unreachable, "r3": unreachable})
