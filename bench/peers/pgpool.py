"""pgpool-II's native replication: a proxy that sends every write to three PostgreSQL servers.

Optional: the program comes from the Debian package pgpool2.
"""

import secrets
import shutil
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from adapters import EmbeddedPostgres
from adapters.embedded.free_ports import free_port
from bench.peers.postgres import PostgresClient, PostgresSystem, execute, fetch_text, load_accounts
from bench.peers.programs import Program, program, run_to_end
from bench.systems import Client
from bench.workloads import Dataset

NODES = ("node1", "node2", "node3")
USER = "bench"
CHILDREN = 80  # each serves one client


class Pgpool(PostgresSystem):
    name = "pgpool"
    description = "pgpool-II native replication over 3 PostgreSQL"
    promise = "on disk at all three, one after the other; a crash in between leaves them different (no atomic commit)"

    def __init__(self) -> None:
        super().__init__()
        self._password = secrets.token_hex(16)
        self._directory: Path | None = None
        self._proxy: Program | None = None
        self._port = 0

    async def start(self) -> None:
        binary = program("pgpool", "pgpool2")
        servers = await EmbeddedPostgres.start_many(len(NODES), settings=self.settings)
        self.servers.update(zip(NODES, servers, strict=True))
        for server in servers:
            # The proxy logs in to all servers with one password.
            await execute(server.dsn, f"create role {USER} superuser login password '{self._password}'")
        self._directory = Path(tempfile.mkdtemp(prefix="tops-pgpool-"))
        self._port, control_port = free_port(), free_port()
        files = self._write_files(self._directory, control_port)
        self._proxy = Program([binary, "-n", "-D", *files], self._directory)
        await self._proxy.start(partial(fetch_text, self._dsn, "select 1"))

    async def load(self, dataset: Dataset) -> None:
        """At each server by itself: what the proxy does with a bulk load is not what is measured."""
        for server in self.servers.values():
            await load_accounts(server.dsn, dataset)

    async def client(self) -> Client:
        return await PostgresClient.connect(self._dsn)

    async def settle(self) -> None:
        """The proxy answers after all three."""

    async def stop(self) -> None:
        if self._proxy is not None:
            await self._proxy.stop()
            self._proxy = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None
        await super().stop()

    def processes(self) -> Mapping[str, int]:
        return {**super().processes(), "proxy": self._proxy.pid if self._proxy else 0}

    async def versions(self) -> Mapping[str, str]:
        said = await run_to_end([program("pgpool", "pgpool2"), "--version"])
        return {**await super().versions(), "pgpool": said.strip().removeprefix("pgpool-II version ")}

    @property
    def _dsn(self) -> str:
        return f"postgresql://{USER}:{self._password}@127.0.0.1:{self._port}/postgres"

    def _write_files(self, directory: Path, control_port: int) -> list[str]:
        """The proxy's configuration; returns the arguments that name it."""
        settings: dict[str, object] = {
            "backend_clustering_mode": "native_replication",
            "listen_addresses": "127.0.0.1",
            "port": self._port,
            "socket_dir": directory,
            "pcp_listen_addresses": "127.0.0.1",
            "pcp_port": control_port,
            "pcp_socket_dir": directory,
            "pid_file_name": directory / "pid",
            "logdir": directory,
            "num_init_children": CHILDREN,
            "max_pool": 1,
            "enable_pool_hba": "on",
            "pool_passwd": directory / "passwords",
            "load_balance_mode": "off",
            "health_check_period": 0,
            "failover_on_backend_error": "off",
        }
        for number, server in enumerate(self.servers.values()):
            settings[f"backend_hostname{number}"] = "127.0.0.1"
            settings[f"backend_port{number}"] = server.port
            settings[f"backend_weight{number}"] = 1
        files = {
            "pgpool.conf": "".join(f"{name} = '{value}'\n" for name, value in settings.items()),
            "hba.conf": "host all all 127.0.0.1/32 scram-sha-256\n",
            "pcp.conf": "",
            "passwords": f"{USER}:TEXT{self._password}\n",
        }
        for name, content in files.items():
            path = directory / name
            path.touch(mode=0o600)
            path.write_text(content)
        return [
            "-f",
            str(directory / "pgpool.conf"),
            "-a",
            str(directory / "hba.conf"),
            "-F",
            str(directory / "pcp.conf"),
        ]
