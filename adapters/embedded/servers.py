"""Real PostgreSQL 16 servers from a wheel: the default database of a replica, and what tests and benchmarks run on.

Owns a server's directory, port, settings and life. A server never outlives the program that started it: a small shell
holds the read end of a pipe whose write end only this program has, and stops the server when the pipe closes, which
the kernel does even on `kill -9`. What is stored in the server is its users' business.
"""

import asyncio
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Literal, Self
from urllib.parse import quote

import psutil

from adapters.embedded import programs
from adapters.embedded.free_ports import free_port
from adapters.postgres.access.grants import TEMP_FILE_LIMIT, Tables, provision
from adapters.postgres.sql.logins import Logins, Roles, with_login
from tops.model.errors import ConfigError, NotReachable

DEFAULT_SETTINGS: Mapping[str, str] = {
    "max_prepared_transactions": "64",
    "wal_level": "logical",
    "max_connections": "100",
    "max_wal_size": "4GB",
    "log_checkpoints": "off",
}
_HBA = """\
local all         all                 scram-sha-256
local replication all                 scram-sha-256
host  all         all 127.0.0.1/32    scram-sha-256
host  replication all 127.0.0.1/32    scram-sha-256
"""
# $1: how to stop the server, $2: the temporary directory to remove then; the rest: the server's command line. A line on
# the pipe says that the owner has ended the server itself; the end of the pipe says that the owner is gone.
_SUPERVISOR = """\
order=$1; place=$2; shift 2
"$@" </dev/null & server=$!
echo $server
exec >/dev/null
if read -r released; then wait $server; exit; fi
kill -"$order" $server; wait $server; rm -rf "$place"
"""
_TIMEOUT_S = 60.0
_POLL_S = 0.01
_ORPHAN_S = 1.0  # until a server whose program was killed is told to stop
_PORT_LINE = 3  # of a running server's postmaster.pid
_SOCKET_NAME_MAX = 103  # the least that systems allow, in bytes

Crash = Literal["kill", "immediate"]


class DirectoryInUse(ConfigError):
    """Another server runs on the data, and does not stop."""


class EmbeddedPostgres:
    """One PostgreSQL server of our own: `await start()`, use `dsn`, `await stop()`; or `async with`, or `with`.

    With `data_dir` the data is kept and found again at the next start; without, it is temporary and removed at the
    end. As root, the server runs as an unprivileged user, to whom the directory is given. With `standby_of` the
    server starts as a streaming standby of that one, known to it as `standby_name`.
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str] | None = None,
        *,
        port: int | None = None,
        settings: Mapping[str, str | int] | None = None,
        standby_of: "EmbeddedPostgres | None" = None,
        standby_name: str = "standby",
    ) -> None:
        self.settings: dict[str, str] = {**DEFAULT_SETTINGS, **{k: str(v) for k, v in (settings or {}).items()}}
        self._kept_dir = Path(data_dir).absolute() if data_dir is not None else None
        self._port = port
        self._primary, self._standby_name = standby_of, standby_name
        self._run_dir: Path | None = None  # the socket, and the data if temporary
        self._password = ""
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._pid = 0

    @classmethod
    async def start_many(
        cls,
        count: int,
        *,
        settings: Mapping[str, str | int] | None = None,
        parent_dir: str | os.PathLike[str] | None = None,
    ) -> "list[EmbeddedPostgres]":
        """`count` servers started side by side; with `parent_dir` their data is kept in its folders pg1, pg2, …"""
        names = [f"pg{number}" for number in range(1, count + 1)]
        servers = [cls(Path(parent_dir) / name if parent_dir else None, settings=settings) for name in names]
        results = await asyncio.gather(*(server.start() for server in servers), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                await asyncio.gather(*(server.stop() for server in servers))
                raise result
        return servers

    async def start(self) -> Self:
        """Return when the server accepts connections; a crashed one recovers and is back on the same port."""
        return await asyncio.to_thread(self.__enter__)

    async def stop(self) -> None:
        """An orderly stop; temporary data is removed. Stopping a stopped server does nothing."""
        await asyncio.to_thread(self._stop)

    async def crash(self, how: Crash = "kill") -> None:
        """Take the server down as a fault would: `kill -9` of all its processes, or an immediate stop; data stays."""
        await asyncio.to_thread(self._crash, how)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def __enter__(self) -> Self:
        if self.running:
            return self
        self._release()  # one that died by itself: its number is taken, which the next one minds, until it is reaped
        try:
            self._make_data()
            self._refuse_a_directory_in_use()  # before anything in it is changed
            self._port = self._port or free_port()
            self._write_settings()
            self._launch()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    @property
    def dsn(self) -> str:
        """The superuser's address of the database `postgres`, over loopback TCP."""
        return self.dsn_for("postgres")

    def dsn_for(self, database: str, *, user: str = "postgres", password: str | None = None) -> str:
        return f"postgresql://{user}:{password or self._password}@127.0.0.1:{self.port}/{database}"

    @property
    def socket_dsn(self) -> str:
        """As `dsn`, over the server's Unix socket, where the temporary directory's name allows for one."""
        if not self._has_socket:
            return self.dsn
        return f"postgresql://postgres:{self._password}@/postgres?host={quote(str(self._run_dir))}&port={self.port}"

    @property
    def _has_socket(self) -> bool:
        name = f"{self._run_dir}/.s.PGSQL.{self.port}.lock"
        return len(os.fsencode(name)) <= _SOCKET_NAME_MAX and "," not in name  # in an address, it would part two hosts

    @property
    def port(self) -> int:
        if self._port is None:
            raise ConfigError("this embedded PostgreSQL has no port yet: start() it first")
        return self._port

    @property
    def password(self) -> str:
        """The superuser's; made with the data directory."""
        return self._password

    async def provision(self, replica_set: str, tables: Tables, temp_file_limit: str = TEMP_FILE_LIMIT) -> Logins:
        """The logins of a set in the database `postgres`; those of kept data are found again at the next start."""
        passwords = await asyncio.to_thread(self._passwords)
        return await provision(self.dsn, replica_set, tables, passwords=passwords, temp_file_limit=temp_file_limit)

    def _passwords(self) -> tuple[str, ...]:
        """Of a set's logins; beside the data, where no SQL reaches, for whoever runs us alone."""
        if self._kept_dir is None:
            return ()
        file = logins_file(self._kept_dir)
        if not file.exists():
            file.touch(mode=0o600)
            file.write_text("\n".join(secrets.token_urlsafe(18) for _ in range(4)))
        return tuple(file.read_text().split())

    @property
    def data_dir(self) -> Path:
        if self._kept_dir is not None:
            return self._kept_dir
        if self._run_dir is None:
            raise ConfigError("this embedded PostgreSQL has no directory yet: start() it first")
        return self._run_dir / "data"

    @property
    def pid(self) -> int:
        """The postmaster's process id; 0 when the server does not run."""
        return self._pid

    @property
    def running(self) -> bool:
        return self._pid != 0 and _alive(self._pid)

    @property
    def log(self) -> str:
        """What the server has written to its log."""
        return (self.data_dir / "server.log").read_text(errors="replace")

    @staticmethod
    def binary(name: str) -> Path:
        """The path of one of PostgreSQL's programs: `psql`, `pg_basebackup`, `pgbench`, …"""
        return programs.binary(name)

    def _make_data(self) -> None:
        if self._run_dir is None:
            self._run_dir = Path(tempfile.mkdtemp(prefix="tops-pg-"))
            programs.give(self._run_dir)
        if not (self.data_dir / "PG_VERSION").exists():
            if self._primary is not None:
                self._copy_from(self._primary)
            elif self._kept_dir is not None:
                # A server that stays gets a system identifier of its own: no other server's standby can follow it.
                programs.own_directory(self.data_dir)
                programs.initdb(self.data_dir)
            else:
                programs.run("/bin/cp", "-a", str(programs.template()), str(self.data_dir))
        self._password = (self.data_dir / programs.PASSWORD_FILE).read_text()

    def _copy_from(self, primary: "EmbeddedPostgres") -> None:
        programs.own_directory(self.data_dir)
        origin = f"host=127.0.0.1 port={primary.port} user=postgres password={primary.password}"
        where = ["-d", f"{origin} application_name={self._standby_name}", "-D", str(self.data_dir)]
        programs.run(programs.binary("pg_basebackup"), *where, "-R", "-X", "stream", "-c", "fast", "--no-sync")

    def _write_settings(self) -> None:
        in_a_list = str(self._run_dir).replace('"', '""')
        settings = {
            **self.settings,
            "port": str(self.port),
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": f'"{in_a_list}"' if self._has_socket else "",
        }
        lines = (f"{name} = '{value.replace(chr(39), chr(39) * 2)}'\n" for name, value in settings.items())
        programs.write(self.data_dir / "tops.conf", "".join(lines))
        programs.write(self.data_dir / "pg_hba.conf", _HBA)

    def _launch(self) -> None:
        server = [str(programs.binary("postgres")), "-D", str(self.data_dir)]
        user = programs.run_as()
        log_file = self.data_dir / "server.log"
        log_file.touch()
        programs.give(log_file)
        with log_file.open("ab") as log:
            self._supervisor = subprocess.Popen(  # noqa: S603
                [
                    "/bin/sh",
                    "-c",
                    _SUPERVISOR,
                    "tops-embedded-postgres",
                    self._stop_order.name[3:],
                    str(self._run_dir),
                    *server,
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd="/",
                user=user.pw_uid if user else None,
                group=user.pw_gid if user else None,
                extra_groups=[] if user else None,
                start_new_session=True,  # Ctrl-C is for us; we end the server in our own order
            )
        assert self._supervisor.stdout is not None
        self._pid = int(self._supervisor.stdout.readline())
        self._wait_until_ready()

    def _refuse_a_directory_in_use(self) -> None:
        """Wait for a server that is on its way out, as after its program was killed; refuse one that stays."""
        lock = self.data_dir / "postmaster.pid"
        began = time.monotonic()
        with suppress(FileNotFoundError, ValueError, psutil.Error):
            while True:
                pid, *_, status = lock.read_text().split("\n")[:8]
                if not psutil.Process(int(pid)).name().startswith("postgres") or not _alive(int(pid)):
                    break
                timeout_s = _TIMEOUT_S if status.strip() == "stopping" else _ORPHAN_S
                if time.monotonic() - began > timeout_s:
                    raise DirectoryInUse(f"{self.data_dir} is in use by the PostgreSQL server with process id {pid}")
                time.sleep(_POLL_S)
        # Left by a crash; the number may by now be that of any process, which would keep the server from starting.
        lock.unlink(missing_ok=True)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while _alive(self._pid) and time.monotonic() < deadline:
            with suppress(FileNotFoundError, IndexError):
                lines = (self.data_dir / "postmaster.pid").read_text().split("\n")
                if lines[0] == str(self._pid) and lines[7].strip() in ("ready", "standby"):
                    return
            time.sleep(_POLL_S)
        raise NotReachable(f"the PostgreSQL server in {self.data_dir} did not start; its log ends:\n{self.log[-2000:]}")

    def _stop(self) -> None:
        if self.running:
            self._end(self._stop_order)
        self._release()
        if self._run_dir is not None:
            shutil.rmtree(self._run_dir, ignore_errors=True)
            self._run_dir = None

    @property
    def _stop_order(self) -> signal.Signals:
        """Temporary data is thrown away: an orderly shutdown would only write it out once more."""
        return signal.SIGINT if self._kept_dir is not None else signal.SIGQUIT

    def _crash(self, how: Crash) -> None:
        self._end(signal.SIGKILL if how == "kill" else signal.SIGQUIT)
        self._release()

    def _end(self, order: signal.Signals) -> None:
        with suppress(psutil.NoSuchProcess):
            postmaster = psutil.Process(self._pid)
            backends = postmaster.children(recursive=True)
            postmaster.send_signal(order)
            for backend in backends if order is signal.SIGKILL else ():
                with suppress(psutil.NoSuchProcess):
                    backend.kill()
            deadline = time.monotonic() + _TIMEOUT_S
            # All of them: a new server refuses to start while one old process still holds the shared memory.
            while any(_alive(process.pid) for process in (postmaster, *backends)):
                if time.monotonic() > deadline:
                    raise NotReachable(f"the PostgreSQL server in {self.data_dir} (process {self._pid}) does not stop")
                time.sleep(_POLL_S)

    def _release(self) -> None:
        """Let the supervisor go: the server has ended by our own hand."""
        self._pid = 0
        if self._supervisor is not None:
            self._supervisor.communicate(b"released\n", timeout=_TIMEOUT_S)
            self._supervisor = None


def logins_file(data_dir: Path) -> Path:
    return data_dir.with_name(f"{data_dir.name}.logins")


def kept_logins(data_dir: Path, replica_set: str) -> Logins | None:
    """The logins of a set in an embedded server that another process of this machine runs; None if it does not run."""
    try:
        passwords = logins_file(data_dir).read_text().split()
        port = (data_dir / "postmaster.pid").read_text().splitlines()[_PORT_LINE]
    except (OSError, IndexError):
        return None
    roles = Roles.named_for("postgres", replica_set)
    users = (roles.agent, roles.read, roles.write, roles.check)
    place = f"postgresql://127.0.0.1:{port}/postgres"
    return Logins(*(with_login(place, user, password) for user, password in zip(users, passwords, strict=True)))


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
