"""MariaDB with Galera: three nodes, each with all the data; writes are certified by all before the answer.

Optional: the programs come from the Debian packages mariadb-server and galera-4, the client from asyncmy.
"""

import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from adapters.embedded.free_ports import free_port
from bench.peers.programs import Program, program, run_to_end
from bench.systems import Client, OperationAborted, OperationUnknown, System, SystemUnavailable
from bench.workloads import Add, Append, Dataset, Operation, Read, Totals, Transfer

NODES = ("node1", "node2", "node3")
PROVIDERS = ("/usr/lib/galera/libgalera_smm.so", "/usr/lib64/galera-4/libgalera_smm.so")
CONFLICT_CODES = (1205, 1213)  # lock wait time-out; deadlock, which is also how a failed certification is told
ROWS_PER_INSERT = 2000
SCHEMA = (
    "create table accounts (id int primary key, bal bigint not null, pad text not null)",
    "create table transfers (id bigint primary key, source int not null, target int not null, amount bigint not null)",
    "create table entries (id bigint primary key, payload text not null)",
)
TOTALS = """
select (select coalesce(sum(bal), 0) from accounts), (select count(*) from transfers), (select count(*) from entries),
       concat_ws('/', (select sum(crc32(concat_ws(',', id, bal, pad))) from accounts),
                      (select sum(crc32(concat_ws(',', id, source, target, amount))) from transfers),
                      (select sum(crc32(concat_ws(',', id, payload))) from entries))
"""


class Galera(System):
    name = "galera"
    description = "MariaDB with Galera, 3 nodes, load to one of them; text protocol (its client prepares nothing)"
    promise = "on disk at one node, certified and received in memory by the others, which apply it afterwards"

    def __init__(self) -> None:
        self._directories: dict[str, Path] = {}
        self._nodes: dict[str, Program] = {}
        self._ports: dict[str, int] = {}

    async def start(self) -> None:
        server, install = program("mariadbd", "mariadb-server"), program("mariadb-install-db", "mariadb-server")
        provider = _provider()
        _driver()
        for name in NODES:
            self._directories[name] = Path(tempfile.mkdtemp(prefix=f"tops-galera-{name}-"))
            (self._directories[name] / "data").mkdir()
            _give(self._directories[name])
        first_data = self._directories[NODES[0]] / "data"
        await run_to_end(
            [install, "--no-defaults", f"--datadir={first_data}", "--auth-root-authentication-method=normal",
             "--skip-test-db", *_as_user()]
        )  # fmt: skip
        await self._start_nodes(server, provider)

    async def _start_nodes(self, server: str, provider: str) -> None:
        """The first forms the cluster; the others start empty and get its data as they join."""
        self._ports = {node: free_port() for node in NODES}
        group_ports = {node: free_port() for node in NODES}
        for name in NODES:
            options = _options(self._directories[name], name, self._ports[name], group_ports, provider)
            command = [server, "--no-defaults", *options, *_as_user()]
            if name == NODES[0]:
                command.append("--wsrep-new-cluster")
            self._nodes[name] = Program(command, self._directories[name])
            await self._nodes[name].start(partial(self._joined, name))

    async def load(self, dataset: Dataset) -> None:
        connection = await self._connect(NODES[0])
        try:
            async with connection.cursor() as cursor:
                for statement in ("create database bench", "use bench", *SCHEMA):
                    await cursor.execute(statement)
                rows = list(dataset.accounts())
                for first in range(0, len(rows), ROWS_PER_INSERT):
                    values = ",".join(
                        f"({key},{bal},'{pad}')" for key, bal, pad in rows[first : first + ROWS_PER_INSERT]
                    )
                    await cursor.execute(f"insert into accounts values {values}")
        finally:
            await connection.ensure_closed()
        await self.settle()

    async def client(self) -> Client:
        return GaleraClient(await self._connect(NODES[0], "bench"))

    async def settle(self) -> None:
        """A causal read at each node: it waits for everything that the cluster had committed before it."""
        for name in NODES:
            await self._fetch_row(name, "set session wsrep_sync_wait = 1", "select count(*) from bench.transfers")

    async def totals(self) -> Mapping[str, Totals]:
        found: dict[str, Totals] = {}
        for name in NODES:
            balance, transfers, entries, digest = await self._fetch_row(name, "use bench", TOTALS)
            found[name] = Totals(int(balance), transfers, entries, digest)
        return found

    async def stop(self) -> None:
        for node in reversed(self._nodes.values()):
            await node.stop()
        self._nodes.clear()
        for directory in self._directories.values():
            shutil.rmtree(directory, ignore_errors=True)
        self._directories.clear()

    def processes(self) -> Mapping[str, int]:
        return {name: node.pid for name, node in self._nodes.items()}

    async def fsyncs(self) -> int | None:
        """Of InnoDB's files, its log among them; Galera's own cache is never synced."""
        counts = [await self._fetch_row(name, "show global status like 'innodb_data_fsyncs'") for name in NODES]
        return sum(int(count) for _, count in counts)

    async def versions(self) -> Mapping[str, str]:
        server, provider = await self._fetch_row(
            NODES[0],
            "select version(), (select variable_value from information_schema.global_status"
            " where variable_name = 'wsrep_provider_version')",
        )
        return {"mariadb": server, "galera": provider}

    async def _joined(self, name: str) -> None:
        state = await self._fetch_row(name, "show status like 'wsrep_local_state_comment'")
        size = await self._fetch_row(name, "show status like 'wsrep_cluster_size'")
        if state[1] != "Synced" or int(size[1]) != len(self._nodes):
            raise ConnectionError(f"{name} is {state[1]} in a cluster of {size[1]}")

    async def _fetch_row(self, name: str, *statements: str) -> Any:
        connection = await self._connect(name)
        try:
            async with connection.cursor() as cursor:
                for statement in statements:
                    await cursor.execute(statement)
                return await cursor.fetchone()
        finally:
            await connection.ensure_closed()

    async def _connect(self, name: str, database: str | None = None) -> Any:
        port = self._ports[name]
        return await _driver().connect(host="127.0.0.1", port=port, user="root", db=database, autocommit=True)


class GaleraClient(Client):
    """One connection; the driver has no type hints and no prepared statements."""

    def __init__(self, connection: Any) -> None:
        self._connection, self._cursor = connection, connection.cursor()

    async def execute(self, operation: Operation) -> None:
        driver_error = _driver().errors.MySQLError
        try:
            if isinstance(operation, Transfer):
                await self._connection.begin()
                await self._run(operation)
                await self._connection.commit()
            else:
                await self._run(operation)
        except driver_error as error:
            if not error.args or error.args[0] not in CONFLICT_CODES:
                raise OperationUnknown(str(error)) from error
            with suppress(driver_error):
                await self._connection.rollback()
            raise OperationAborted(str(error)) from error
        except OSError as error:
            raise OperationUnknown(str(error)) from error

    async def _run(self, operation: Operation) -> None:
        execute = self._cursor.execute
        match operation:
            case Add(key, amount):
                await execute("update accounts set bal = bal + %s where id = %s", (amount, key))
            case Transfer(id, source, target, amount):
                for leg in operation.updates():
                    await self._run(leg)
                await execute("insert into transfers values (%s, %s, %s, %s)", (id, source, target, amount))
            case Append(id, payload):
                await execute("insert into entries values (%s, %s)", (id, payload))
            case Read(key):
                await execute("select bal from accounts where id = %s", (key,))
                await self._cursor.fetchone()

    async def close(self) -> None:
        await self._connection.ensure_closed()


def _driver() -> Any:
    try:
        return import_module("asyncmy")
    except ImportError as error:
        raise SystemUnavailable("the MariaDB client is not installed: pip install asyncmy") from error


def _provider() -> str:
    for path in PROVIDERS:
        if Path(path).exists():
            return path
    raise SystemUnavailable("the Galera library is not installed: apt-get install galera-4")


def _options(directory: Path, name: str, port: int, group_ports: Mapping[str, int], provider: str) -> list[str]:
    snapshot_port, increment_port = free_port(), free_port()  # for what a node fetches when it joins
    settings = {
        "datadir": directory / "data",
        "secure-file-priv": directory / "data",
        "socket": directory / "socket",
        "pid-file": directory / "pid",
        "port": port,
        "bind-address": "127.0.0.1",
        "max-connections": 200,
        "binlog-format": "ROW",
        "innodb-autoinc-lock-mode": 2,
        "innodb-flush-log-at-trx-commit": 1,
        "innodb-buffer-pool-size": "512M",
        "innodb-log-file-size": "512M",
        "wsrep-on": "ON",
        "wsrep-provider": provider,
        "wsrep-cluster-name": "bench",
        "wsrep-cluster-address": "gcomm://" + ",".join(f"127.0.0.1:{group}" for group in group_ports.values()),
        "wsrep-node-name": name,
        "wsrep-node-address": "127.0.0.1",
        "wsrep-slave-threads": 4,
        "wsrep-sst-method": "rsync",
        "wsrep-sst-receive-address": f"127.0.0.1:{snapshot_port}",
        "wsrep-provider-options": (
            f"gmcast.listen_addr=tcp://127.0.0.1:{group_ports[name]};ist.recv_addr=tcp://127.0.0.1:{increment_port}"
        ),
    }
    return [f"--{setting}={value}" for setting, value in settings.items()]


def _as_user() -> list[str]:
    return ["--user=mysql"] if os.geteuid() == 0 else []


def _give(directory: Path) -> None:
    """As root, to the unprivileged user who runs the servers."""
    if os.geteuid() == 0:
        for path in (directory, *directory.rglob("*")):
            shutil.chown(path, "mysql", "mysql")
