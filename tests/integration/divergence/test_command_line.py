"""`tops divergence` as a DBA runs it: exit codes, output, files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.integration.divergence.conftest import Databases
from tests.support.command_line import tops_blocking

NOWHERE = "postgresql://postgres@127.0.0.1:1/postgres"
ROOT = Path(__file__).resolve().parents[3]


def tops(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return tops_blocking("divergence", *arguments, cwd=cwd, environ={"COLUMNS": "200", **environment})


def addresses(databases: Databases) -> list[str]:
    return [part for e in databases.endpoints for part in ("--dsn", f"{e.name}={e.dsn}")]


def finished(out: Path) -> list[Path]:
    return list(out.glob("*/check.json"))


async def test_check_report_repair_check(databases: Databases, tmp_path: Path) -> None:
    await databases.everywhere(
        "CREATE TABLE accounts (id bigint PRIMARY KEY, owner text, balance numeric)",
        "INSERT INTO accounts SELECT i, 'owner ' || i, i FROM generate_series(1, 3000) i",
    )
    await databases.on(
        "r2", "UPDATE accounts SET balance = -balance WHERE id = 42", "DELETE FROM accounts WHERE id = 43"
    )
    given = addresses(databases)

    checked = tops("check", "shop", *given, "--table", "accounts", "--format", "json", "--settle", "0", cwd=tmp_path)
    assert checked.returncode == 1, checked.stderr
    document = json.loads(checked.stdout)
    assert (document["verdict"], document["differences"]) == ("DIFFERENT", 2)

    reported = tops("report", "shop", "--to", "report", cwd=tmp_path)
    assert reported.returncode == 0, reported.stderr
    page = (tmp_path / "report" / "report.html").read_text()
    assert "DIFFERENT" in page
    assert "src=" not in page
    assert "<script" not in page
    assert json.loads((tmp_path / "report" / "report.json").read_text())["verdict"] == "DIFFERENT"
    assert pq.read_table(tmp_path / "report" / "differences.parquet").num_rows == 2

    planned = tops("repair", "shop", *given, cwd=tmp_path)
    assert planned.returncode == 0, planned.stderr
    assert "nothing was written" in planned.stderr
    assert (await databases.fetch("r2", "SELECT balance FROM accounts WHERE id = 42"))[0]["balance"] == -42

    executed = tops("repair", "shop", *given, "--execute", "--format", "json", cwd=tmp_path)
    assert executed.returncode == 0, executed.stderr + executed.stdout
    document = json.loads(executed.stdout)
    assert (document["repaired"]["written"], document["check"]["verdict"]) == (2, "EQUAL")
    assert (await databases.fetch("r2", "SELECT balance FROM accounts WHERE id = 42"))[0]["balance"] == 42


@pytest.mark.long
async def test_trends_of_the_checks_so_far(databases: Databases, tmp_path: Path) -> None:
    await databases.everywhere("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    await databases.on("r2", "DELETE FROM t")
    await databases.compare("t")

    shown = tops("trends", "--out", str(databases.out), cwd=tmp_path)

    assert shown.returncode == 0, shown.stderr
    assert "time to converge" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["check", "shop"], 2, "tops.toml: no such file"),
        (["check", "--dsn", "r1"], 2, "write it as name="),
        (
            ["check", "--dsn", "r1=postgresql://127.0.0.1:1/x", "--dsn", "r2=postgresql://127.0.0.1:1/y"],
            3,
            "fewer than two",
        ),
        (["check", "--dsn", "r1=mysql://h/x", "--dsn", "r2=mysql://h/y"], 2, "no known database"),
        (["report", "--run", "none"], 2, "no result there"),
        (["report"], 2, "no finished check there"),
    ],
)
def test_wrong_use_is_one_line_and_an_exit_code(tmp_path: Path, arguments: list[str], code: int, message: str) -> None:
    response = tops(*arguments, cwd=tmp_path)

    assert response.returncode == code
    assert message in response.stderr
    assert "Traceback" not in response.stderr


async def test_without_java_the_command_says_what_to_install(databases: Databases, tmp_path: Path) -> None:
    response = tops("check", *addresses(databases), "--out", str(databases.out), cwd=tmp_path, JAVA_HOME=str(tmp_path))

    assert response.returncode == 2
    assert "apt-get install openjdk-17-jre-headless" in response.stderr
    assert finished(databases.out) == []


@pytest.mark.long
async def test_a_stopped_server_is_exit_code_three(databases: Databases, tmp_path: Path) -> None:
    await databases.everywhere("CREATE TABLE t (id int PRIMARY KEY)")
    given = [*addresses(databases)[:4], "--dsn", "r4=postgresql://postgres@127.0.0.1:1/postgres"]

    response = tops("check", *given, cwd=tmp_path)

    assert response.returncode == 3
    assert response.stdout.startswith("PARTIAL")
    assert "EQUAL" not in response.stdout


def test_help_does_not_load_spark(tmp_path: Path) -> None:
    program = "import sys, replication.cli.divergence; print('pyspark' in sys.modules, 'pyarrow' in sys.modules)"
    response = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )

    assert response.stdout.split() == ["False", "False"]
