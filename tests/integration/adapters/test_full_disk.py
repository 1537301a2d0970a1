"""A database on a small file system that fills up: a clear NO, nothing left behind, and life goes on with space."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from adapters import EmbeddedPostgres, PostgresAdapter, SqliteAdapter
from adapters.changes import Insert
from adapters.resource import Position
from tests.contract.harness import SqliteDatabase, attempt, entry, epoch, member
from tops.model.errors import OutcomeUnknown, ResourceRejected

SMALL_WAL = {"max_wal_size": "32MB", "min_wal_size": "32MB", "shared_buffers": "16MB", "wal_recycle": "off"}


@pytest.fixture
def small_disk(open_dir: Path) -> Iterator[Path]:
    path = open_dir / "disk"
    path.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160m,mode=755", "tmpfs", path]).returncode
    ):
        pytest.skip("mounting a small file system needs root")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


@contextlib.contextmanager
def ballast(disk: Path, leave: int) -> Iterator[None]:
    """Fill the disk but for `leave` bytes."""
    space = os.statvfs(disk)
    with (disk / "ballast").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, space.f_bavail * space.f_frsize - leave))
    try:
        yield
    finally:
        (disk / "ballast").unlink(missing_ok=True)


def big(rows: range) -> list[Insert]:
    return [Insert("t", {"id": n, "v": os.urandom(50_000).hex()}) for n in rows]


async def test_a_full_disk_is_a_no_from_postgresql(small_disk: Path) -> None:
    async with EmbeddedPostgres(small_disk / "data", settings=SMALL_WAL) as server:
        connection = await asyncpg.connect(server.dsn)
        await connection.execute("create table t (id int primary key, v text)")
        await connection.execute("alter table t alter v set storage external")
        await connection.close()
        logins = await server.provision("s", "*")
        async with PostgresAdapter(logins, cluster="c", replica_set="s") as adapter:
            await adapter.apply([entry(1, member("t1", Insert("t", {"id": 0, "v": "x"})))])
            members = [member(f"t{n}", change) for n, change in enumerate(big(range(1, 400)))]
            with ballast(small_disk, leave=2_000_000), pytest.raises((ResourceRejected, OutcomeUnknown)) as rejected:
                await adapter.prepare(epoch(2, *members))
            await server.start()  # PostgreSQL gives up itself when it was its journal that found no room

            assert await adapter.recover() == []
            assert await adapter.applied() == Position(1)
            assert (await adapter.read("select count(*) as n from t")).rows == [{"n": 1}]
            if isinstance(rejected.value, ResourceRejected):
                assert "No space left" in str(rejected.value)
            await adapter.prepare(epoch(2, member("t2", Insert("t", {"id": 1, "v": "y"}))))
            await adapter.commit(attempt(2))
            assert await adapter.applied() == Position(2)


async def test_a_full_disk_is_a_no_from_sqlite(small_disk: Path) -> None:
    await SqliteDatabase(small_disk / "s.db").sql("create table t (id integer primary key, v text)")
    async with SqliteAdapter(small_disk / "s.db", cluster="c", replica_set="s") as adapter:
        with ballast(small_disk, leave=1_000_000), pytest.raises(ResourceRejected, match="full"):
            await adapter.prepare(epoch(1, *(member(f"t{n}", change) for n, change in enumerate(big(range(1, 100))))))

        assert await adapter.recover() == []
        assert (await adapter.read("select count(*) as n from t")).rows == [{"n": 0}]
        await adapter.prepare(epoch(1, member("t2", Insert("t", {"id": 1, "v": "y"}))))
        await adapter.commit(attempt(1))
        assert await adapter.applied() == Position(1)
