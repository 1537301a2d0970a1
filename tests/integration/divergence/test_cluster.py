"""The same check on a Spark cluster: a standalone master and two workers from the pyspark wheel."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest

from replication.divergence.read import jvm
from tests.integration.divergence.conftest import Databases
from tests.integration.divergence.test_command_line import addresses, tops
from tests.support.polling import eventually_blocking

SPARK = Path(pyspark.__file__).parent


def daemon(log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "SPARK_HOME": str(SPARK),
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": jvm.SHORT_LIVED,
        "PYSPARK_PYTHON": sys.executable,
    }
    with log.open("wb") as out:
        command = [str(SPARK / "bin" / "spark-class"), *arguments]
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment, cwd=log.parent)


def wait_for(log: Path, pattern: str, times: int = 1) -> str:
    """What a daemon has logged, as soon as it is there so many times."""

    def found() -> list[str]:
        return re.findall(pattern, log.read_text(errors="replace"))

    eventually_blocking(lambda: len(found()) >= times, 90.0, what=f"{pattern} in {log}")
    return str(found()[0])


@pytest.fixture
def master(tmp_path: Path) -> Iterator[str]:
    """The URL of a standalone master that has two workers of one core each."""
    log = tmp_path / "master.log"
    where = ["--host", "127.0.0.1", "--webui-port", "0", "--port", "0"]
    started = [daemon(log, "org.apache.spark.deploy.master.Master", *where)]
    try:
        url = wait_for(log, r"Starting Spark master at (spark://[\d.:]+)")
        for number in (1, 2):
            work = ["--cores", "1", "--memory", "1g", "--work-dir", str(tmp_path / f"work{number}"), url]
            name = "org.apache.spark.deploy.worker.Worker"
            started.append(daemon(tmp_path / f"worker{number}.log", name, *where, *work))
        wait_for(log, r"Registering worker", 2)
        yield url
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(30)


async def test_a_check_on_a_standalone_cluster_finds_the_same(
    databases: Databases, tmp_path: Path, master: str
) -> None:
    # More rows than the driver would read by itself.
    await databases.everywhere(
        "CREATE TABLE t (id bigint PRIMARY KEY, v text)",
        "INSERT INTO t SELECT i, md5(i::text) FROM generate_series(1, 70000) i",
    )
    await databases.on("r3", "UPDATE t SET v = 'x' WHERE id IN (1, 2500, 70000)", "DELETE FROM t WHERE id = 77")

    given = [*addresses(databases), "--master", master, "--method", "canonical", "--format", "json"]
    response = tops("check", *given, "--table", "t", cwd=tmp_path)

    assert response.returncode == 1, response.stderr
    assert json.loads(response.stdout)["tables"][0]["counts"] == {"r3": {"changed": 3, "missing": 1}}
    assert re.search(r"Launched executor|Launching executor", (tmp_path / "master.log").read_text())
