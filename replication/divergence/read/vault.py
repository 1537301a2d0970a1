"""Addresses with passwords, kept out of what Spark shows: plans, event logs, the pages of its console.

What goes into a plan is a reference; whoever reads a replica resolves it, on the machine where that happens. The
addresses lie in a file for us alone, which Spark copies to executors on other machines.
"""

import atexit
import secrets
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tops.model.errors import NotReachable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from replication.divergence.read.rows import RowsRequest

_SCHEME = "secret:"


class Vault:
    """The addresses that one process has handed to Spark; they are gone when it ends."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._files: dict[str, Path] = {}  # by address; one for each: what Spark has copied it does not copy again

    def hidden(self, spark: "SparkSession", request: "RowsRequest") -> "RowsRequest":
        """The same request, with a reference in place of a server's address."""
        dsn = request.handle.dsn
        if not dsn.startswith("postgres"):
            return request
        file = self._files.get(dsn)
        if file is None:
            file = self._files[dsn] = self._written(dsn)
            if not str(spark.sparkContext.master).startswith("local"):
                spark.sparkContext.addFile(str(file))
        return replace(request, handle=replace(request.handle, dsn=f"{_SCHEME}{file}"))

    def _written(self, dsn: str) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="tops-check-"))  # for its owner alone
            atexit.register(shutil.rmtree, self._folder, ignore_errors=True)
        file = self._folder / secrets.token_hex(8)
        file.touch(mode=0o600)
        file.write_text(dsn)
        return file


vault = Vault()


def resolved(dsn: str) -> str:
    """The address behind a reference; any other is returned as it is."""
    if not dsn.startswith(_SCHEME):
        return dsn
    from pyspark import SparkFiles  # only where Spark works are there references

    path = Path(dsn.removeprefix(_SCHEME))
    for row_key in (path, Path(SparkFiles.get(path.name))):
        if row_key.exists():
            return row_key.read_text()
    raise NotReachable(f"the address of a replica is not on this machine: {path.name}; start the check again")
