"""The Spark session of a check: on `local[*]`, or on any cluster by its master URL, with the same code."""

import os
import sys
from pathlib import Path
from weakref import WeakSet

from pyspark.sql import SparkSession

from replication.divergence.read import jvm
from tops.model.errors import NotReachable

_registered: WeakSet[SparkSession] = WeakSet()
_ROOT = Path(__file__).resolve().parents[3]

_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.catalogImplementation": "in-memory",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.caseSensitive": "true",  # "v" and "V" are two columns in PostgreSQL
    "spark.sql.shuffle.partitions": "4",
    "spark.log.level": "ERROR",
    "spark.driver.memory": "1g",
}


def start(master: str = "local[*]", settings: dict[str, str] | None = None) -> SparkSession:
    """A session for the jobs of a check; an existing one of this process is used again."""
    version = jvm.require_java()
    # Workers need this package: on other machines it must be installed, on this one its folder is enough.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
    os.environ["PYTHONPATH"] = path
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.master(master).appName("tops divergence")
    own = {
        "spark.executorEnv.PYTHONPATH": path,
        "spark.driver.extraJavaOptions": jvm.options(version),
        "spark.executor.extraJavaOptions": jvm.SHORT_LIVED,
    }
    for name, value in {**_SETTINGS, **own, **(settings or {})}.items():
        builder = builder.config(name, value)
    try:
        spark = builder.getOrCreate()
    except Exception as error:  # Spark's own failures to start share no better class
        reason = str(getattr(error, "java_exception", error)).splitlines()[0]
        raise NotReachable(f"Spark did not start on {master}: {reason}") from error
    return spark


def register(spark: SparkSession) -> None:
    """Make `spark.read.format("replica")` work in this session; it starts a Python worker, so once, when it is used."""
    from replication.divergence.read.source import ReplicaSource

    if spark not in _registered:
        spark.dataSource.register(ReplicaSource)
        _registered.add(spark)
