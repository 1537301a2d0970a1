"""A client that has taken out of its library what would stop it: what holds it now are the replicas."""

import pytest


def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, in this test, the client library sends whatever it is given."""
    for module, check in (("writes", "check_statement"), ("reads", "check_query")):
        monkeypatch.setattr(f"replication.client.{module}.{check}", lambda *_, **__: None)


def trusting_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, in this test, agents take whatever they are given for SQL to be run."""
    for module, check in (
        ("postgres.apply.reading", "check_query"),
        ("postgres.apply.statements", "check_statement"),
        ("postgres.origin.session", "check_statement"),
    ):
        monkeypatch.setattr(f"adapters.{module}.{check}", lambda *_, **__: None)
