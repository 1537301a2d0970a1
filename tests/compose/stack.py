"""The stack of `compose/` without containers: its own configuration and programs, with addresses of this machine."""

import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import asyncpg

from adapters import EmbeddedPostgres
from adapters.embedded.free_ports import free_port
from replication.model.config import Cluster
from replication.operations.processes import Processes, wait_ready

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "compose"
BROKERS, REPLICAS = ("b1", "b2", "b3"), ("r1", "r2", "r3")


@dataclass
class LocalStack:
    """Brokers and agents as processes, as the file of the stack has them."""

    folder: Path
    cluster: Cluster
    processes: Processes
    servers: Sequence[EmbeddedPostgres]

    @property
    def keys(self) -> Path:
        return self.folder / "keys"

    def password_of(self, replica: str) -> str:
        """Of the administrator of its database server."""
        return (self.folder / "administrators" / replica / "password").read_text()

    def program(self, name: str, *arguments: str) -> "subprocess.Popen[str]":
        """One of the stack's own programs, as its containers run it."""
        command = [sys.executable, "-m", f"compose.{name}", *arguments, "--config", str(self.cluster.path)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PGPASSFILE": str(self.keys / "check" / "pgpass")}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def ended(self, name: str, *arguments: str) -> str:
        """What a program prints that ends by itself."""
        process = self.program(name, *arguments)
        out, err = process.communicate()
        assert process.returncode == 0, err
        return out

    def first_start(self, step: str) -> None:
        folders = {"authority": "authority", "keys": "keys", "administrators": "administrators"}
        options = [part for name, place in folders.items() for part in (f"--{name}", str(self.folder / place))]
        self.ended("first_start", step, *options, "--schema", str(COMPOSE / "schema.sql"))


def own_address() -> str:
    """An address of this machine for this process, where there are many: nobody else takes the port of a part of the
    stack while that is down."""
    pid = os.getpid()
    return f"127.{1 + pid // 250 % 250}.{1 + pid % 250}.1" if sys.platform == "linux" else "127.0.0.1"


def local_file(folder: Path, ports: Iterable[int]) -> Path:
    """The stack's own file, with addresses and folders of this machine in it; `ports` are those of the servers."""
    text = (COMPOSE / "tops.toml").read_text()
    for number, port in enumerate(ports, start=1):
        text = text.replace(f"@pg{number}:5432/", f"@127.0.0.1:{port}/")
    for place in sorted(set(re.findall(r'"([br]\d:\d+)"', text))):
        text = text.replace(f'"{place}"', f'"{own_address()}:{free_port()}"')
    text = text.replace('"/keys/', f'"{folder}/keys/').replace('"/var/lib/tops/', f'"{folder}/data/')
    path = folder / "tops.toml"
    path.write_text(text)
    return path


def new_stack(folder: Path, servers: Sequence[EmbeddedPostgres]) -> LocalStack:
    """Nothing runs yet, and there are no keys."""
    cluster = Cluster.load(local_file(folder, [server.port for server in servers] or [free_port() for _ in REPLICAS]))
    passwords = folder / "pgpass"  # of all agents: here they are processes with one environment
    return LocalStack(
        folder, cluster, Processes(cluster, folder / "logs", environment={"PGPASSFILE": str(passwords)}), servers
    )


@asynccontextmanager
async def local_stack(folder: Path) -> AsyncIterator[LocalStack]:
    """Everything runs and is in sync, after the two steps of a first start."""
    servers = await EmbeddedPostgres.start_many(len(REPLICAS))
    try:
        stack = new_stack(folder, servers)
        stack.first_start("keys")
        for name, server in zip(REPLICAS, servers, strict=True):
            await _as_a_container(server, stack.password_of(name))
            _append(folder / "pgpass", (stack.keys / name / "pgpass").read_text())
        stack.first_start("databases")
        try:
            await stack.processes.start_all()
            await wait_ready(stack.cluster, ["shop"], stack.processes, timeout_s=120.0, keys=stack.keys / "operator")
            yield stack
        finally:
            await stack.processes.stop_all()
    finally:
        for server in servers:
            await server.stop()


def _append(file: Path, text: str) -> None:
    file.touch(mode=0o600)
    with file.open("a") as out:
        out.write(text)


async def _as_a_container(server: EmbeddedPostgres, password: str) -> None:
    """What the official image does at its first start."""
    connection = await asyncpg.connect(server.dsn)
    try:
        await connection.execute("create database shop")
        await connection.execute(f"alter role postgres password '{password}'")
    finally:
        await connection.close()
