"""The Spark session of a check: on `local[*]`, or on any cluster by its master URL, with the same code."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from pyspark.sql import SparkSession

from replication.divergence.errors import JavaMissing
from tops.errors import NotReachable

JAVA_MIN = 17
_ROOT = Path(__file__).resolve().parents[2]

_LOCAL = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.catalogImplementation": "in-memory",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "4",
    "spark.log.level": "ERROR",
    "spark.driver.memory": "1g",
    # A check is short: compiling little and collecting simply starts sooner than it loses later.
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xshare:auto",
}


def require_java() -> None:
    """Say in one line what is missing, before Spark says it in forty."""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=str(Path(home) / "bin")) if home else shutil.which("java")
    if java is None:
        raise JavaMissing(f"JAVA_HOME ({home}) has no bin/java" if home else "there is no java on the PATH")
    answer = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr  # noqa: S603
    version = re.search(r'version "(\d+)', answer)
    if version is None or int(version[1]) < JAVA_MIN:
        raise JavaMissing(f"{java} says {answer.strip().splitlines()[0] if answer.strip() else 'nothing'}")


def start(master: str = "local[*]", settings: dict[str, str] | None = None) -> SparkSession:
    """A session with the data source `replica` registered; an existing one of this process is used again."""
    require_java()
    # Workers need this package: on other machines it must be installed, on this one its folder is enough.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
    os.environ["PYTHONPATH"] = path
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1") if master.startswith("local") else None
    builder = SparkSession.builder.master(master).appName("tops divergence")
    for name, value in {**_LOCAL, "spark.executorEnv.PYTHONPATH": path, **(settings or {})}.items():
        builder = builder.config(name, value)
    try:
        spark = builder.getOrCreate()
    except Exception as error:  # Spark's own failures to start share no better class
        raise NotReachable(f"Spark did not start on {master}: {str(error).splitlines()[0]}") from error
    register(spark)
    return spark


def register(spark: SparkSession) -> None:
    """Make `spark.read.format("replica")` work in a session of the user's own."""
    from replication.divergence.source import ReplicaSource

    spark.dataSource.register(ReplicaSource)
