"""A batch that can't be read is no batch: replicas must not stop in front of it."""

import pytest

from adapters.changes import Member, encode_member
from replication.model.events import batch_body, batch_in
from tops.model.ids import TxId
from tops.protocol.messages import Event
from tops.protocol.set_types import BATCH

GOOD = encode_member(Member(TxId("a.1.1"), ()))


@pytest.mark.parametrize("batch", [None, 1, "x", b"", b"\xc1", batch_body([b"\xc1"])[BATCH], batch_body([b""])[BATCH]])
def test_a_batch_that_cannot_be_read_is_none(batch: object) -> None:
    assert batch_in([Event("rs.shop", {**batch_body([GOOD]), BATCH: batch})]) == []


def test_a_batch_that_can_be_read_has_its_members() -> None:
    assert [member.tx for member in batch_in([Event("rs.shop", batch_body([GOOD]))])] == ["a.1.1"]
