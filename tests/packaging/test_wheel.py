"""What is installed from the wheel: the product without benchmarks and tests, and a clear word on what it lacks."""

import zipfile
from pathlib import Path

import pytest

from adapters import EmbeddedPostgres
from adapters.embedded.free_ports import free_port
from replication.model.config import SUPERUSER_ACCEPTED
from tests.packaging.installed import PACKAGES, ROOT, build_wheel, install, run, running

# Imports every module, and says which could not be: `module missing`.
IMPORT_EVERYTHING = """
import importlib, pkgutil, sys
for name in ("tops", "replication", "adapters"):
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, f"{name}.", onerror=lambda name: None):
        if module.name.rpartition(".")[2] != "__main__":
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                print(module.name, error.name)
"""
ONE_REPLICA = """
[cluster]
name = "shop"
[[broker]]
name = "b1"
listen = "127.0.0.1:{port}"
data = "./data/b1"
[[replica_set]]
name = "shop"
policy = "write-all"
allow_superuser = "{allowed}"
tables = ["accounts"]
schema = "schema.sql"
[[replica_set.replica]]
name = "r1"
broker = "b1"
{dsn}
"""
WRITE_AND_READ = """
import asyncio, sys
from replication import connect

async def main():
    async with connect(sys.argv[1], "shop") as shop:
        async with shop.transaction() as tx:
            await tx.insert("accounts", {"id": 1, "balance": 100})
        print((await shop.fetchrow("select balance from accounts where id = 1", consistency="current"))["balance"])

asyncio.run(main())
"""


def write_config(folder: Path, dsn: str) -> str:
    """A cluster with one broker and one replica; returns the broker's address."""
    port = free_port()
    (folder / "tops.toml").write_text(ONE_REPLICA.format(port=port, dsn=dsn, allowed=SUPERUSER_ACCEPTED))
    (folder / "schema.sql").write_text("create table accounts (id int primary key, balance bigint not null);")
    return f"ws://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(wheel, tmp_path_factory.mktemp("environment") / "venv")


def test_the_wheel_has_every_file_of_the_product_and_nothing_else(wheel: Path) -> None:
    expected = {
        str(file.relative_to(ROOT))
        for package in PACKAGES
        for file in (ROOT / package).rglob("*")
        if file.is_file() and file.suffix != ".pyc"
    }

    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}

    assert packed == expected
    assert {f"{package}/py.typed" for package in PACKAGES} <= packed
    assert {"replication/divergence/report/page.html.j2", "adapters/postgres/proof/functions.txt"} <= packed


def test_the_command_line_lists_its_commands_but_no_benchmark(programs: Path, tmp_path: Path) -> None:
    shown = run(programs / "tops", "--help", cwd=tmp_path)

    assert (shown.returncode, shown.stderr) == (0, "")
    assert all(f"│ {name} " in shown.stdout for name in ("broker", "divergence", "replica", "up", "write"))
    assert "│ bench " not in shown.stdout


def test_benchmarks_are_run_from_a_checkout(programs: Path, tmp_path: Path) -> None:
    ended = run(programs / "tops", "bench", "core", cwd=tmp_path)

    assert ended.returncode == 2
    assert "'bench' is part of the repository, run the command from a checkout" in ended.stderr


def test_only_the_divergence_jobs_need_more_than_the_base(programs: Path, tmp_path: Path) -> None:
    done = run(programs / "python", "-c", IMPORT_EVERYTHING, cwd=tmp_path)

    failed = [line.split() for line in done.stdout.splitlines()]
    assert (done.returncode, done.stderr) == (0, "")
    assert {module for module, _ in failed if not module.startswith("replication.divergence.")} == set()
    assert {missing for _, missing in failed} == {"pyspark", "pyarrow", "adbc_driver_manager"}


def test_a_check_without_its_extra_names_the_extra_and_how_to_get_it(programs: Path, tmp_path: Path) -> None:
    databases = ["--dsn", f"a=sqlite:///{tmp_path}/a.db", "--dsn", f"b=sqlite:///{tmp_path}/b.db"]

    ended = run(programs / "tops", "divergence", "check", *databases, cwd=tmp_path)

    assert ended.returncode == 2
    assert ended.stderr.strip() == (
        "tops: the extra 'divergence' is not installed (missing-extra: there is no module 'pyspark'): "
        "pip install 'tops-replication[divergence]'"
    )


@pytest.mark.parametrize("command", ["demo", "up"])
def test_embedded_servers_without_their_extra_are_named_before_anything_starts(
    programs: Path, tmp_path: Path, command: str
) -> None:
    write_config(tmp_path, dsn="")

    ended = run(programs / "tops", command, cwd=tmp_path)

    assert ended.returncode == 2
    assert "pip install 'tops-replication[embedded]'" in ended.stderr
    assert not (tmp_path / "data").exists()


def test_the_base_runs_a_broker_an_agent_and_a_client(programs: Path, tmp_path: Path) -> None:
    with EmbeddedPostgres() as server:  # an existing server, as far as the installation knows
        url = write_config(tmp_path, f'dsn = "{server.dsn}"')
        with running(programs / "tops", "up", cwd=tmp_path, until="ready: "):
            client = run(programs / "python", "-c", WRITE_AND_READ, url, cwd=tmp_path)

    assert (client.stdout, client.stderr) == ("100\n", "")
