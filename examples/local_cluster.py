"""What the examples share: a cluster of their own, on real PostgreSQL servers from a wheel, gone when they end."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from adapters.embedded.free_ports import free_port
from replication.model.config import Cluster
from replication.operations.demo import quiet
from replication.replica.agent import Agent
from tops.server.broker import Broker


@asynccontextmanager
async def local_cluster(name: str, settings: str, schema: str, replicas: int = 3) -> AsyncIterator[Cluster]:
    """A broker and one replica set with embedded PostgreSQL; `settings` are the set's lines of tops.toml."""
    quiet()
    folder = Path(tempfile.mkdtemp(prefix=f"tops-{name}-"))
    folder.chmod(0o755)
    lines = [f'[cluster]\nname = "{name}"\n[[broker]]\nname = "b1"\nlisten = "127.0.0.1:{free_port()}"\ndata = "./b1"']
    lines.append(f'[[replica_set]]\nname = "{name}"\nschema = "schema.sql"\n{settings}')
    lines += [f'[[replica_set.replica]]\nname = "r{n}"\nbroker = "b1"' for n in range(1, replicas + 1)]
    (folder / "schema.sql").write_text(schema)
    (folder / "tops.toml").write_text("\n".join(lines))
    cluster = Cluster.load(folder / "tops.toml")
    try:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(Broker.run(cluster.config, "b1"))
            names = cluster.replica_set(name).names
            await asyncio.gather(*(stack.enter_async_context(Agent.run(cluster, name, r)) for r in names))
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)
