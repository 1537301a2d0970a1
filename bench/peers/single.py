"""One plain PostgreSQL: what replication costs is measured against it."""

from adapters import EmbeddedPostgres
from bench.peers.postgres import PostgresSystem


class SinglePostgres(PostgresSystem):
    name = "postgres_single"
    description = "one PostgreSQL, no replica"
    promise = "on disk at the only node"

    async def start(self) -> None:
        self.servers["primary"] = await EmbeddedPostgres(settings=self.settings).start()

    async def settle(self) -> None:
        """There is nobody to wait for."""
