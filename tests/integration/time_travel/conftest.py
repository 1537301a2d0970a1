"""The fixtures of the small clusters."""

from tests.integration.replication.conftest import folder, server

__all__ = ["folder", "server"]
