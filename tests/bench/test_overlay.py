"""The overlay's benchmark where its peer is not installed."""

import sys

import pytest

from bench.overlay import Sides, nats_server, our_broker

FEW = {"publish": 512, "f256": 512, "f1": 3}


async def test_without_nats_ours_is_measured_and_what_is_missing_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "nats", None)
    missing: dict[str, str] = {}
    sides = Sides()

    async with our_broker() as broker, nats_server({}, missing) as server:
        await sides.pair(broker, server, FEW)

    assert "install" in missing["nats"]
    assert missing["nats"] in capsys.readouterr().err
    assert [row["system"] for row in sides.rows()] == ["tops_publish", "tops_f256", "tops_f1"]
    assert all(row["tps"] > 0 for row in sides.rows())
    assert sides.figures() == {}
