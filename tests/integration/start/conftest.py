"""The server and the folders of the replication tests."""

from tests.integration.replication.conftest import folder, server

__all__ = ["folder", "server"]
