"""A run's folder: what was found so far, so that a check can be stopped and resumed, and its results at the end.

    <out>/<run>/state.json           units that are done; gone when the run is
    <out>/<run>/part-….parquet       their differences
    <out>/<run>/check.json           the result, written last and at once
    <out>/<run>/differences.parquet  every difference
    <out>/history/<run>.parquet      one line per table and replica, for trends

Every file appears whole or not at all. A lock keeps two checks out of one folder.
"""

import fcntl
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from replication.divergence.results.model import CheckResult, Difference, Limit, Suspect, TableResult
from replication.tables.buckets import KeyRange
from replication.tables.errors import AlreadyRunning
from tops.model.errors import ConfigError

DIFFERENCES = pa.schema(
    [
        ("table", pa.string()),
        ("key", pa.list_(pa.string())),
        ("bucket", pa.int64()),
        ("replica", pa.string()),
        ("kind", pa.string()),
        ("columns", pa.list_(pa.string())),
        ("expected", pa.map_(pa.string(), pa.string())),
        ("actual", pa.map_(pa.string(), pa.string())),
        ("reference", pa.list_(pa.string())),
        ("basis", pa.string()),
        ("looks", pa.int32()),
        ("steady", pa.bool_()),
        ("cause", pa.string()),
        ("cause_tx", pa.string()),
        ("cause_site", pa.string()),
        ("cause_number", pa.int64()),
        ("cause_at", pa.timestamp("us", "UTC")),
        ("logged_tx", pa.string()),
        ("logged_number", pa.int64()),
        ("logged_known", pa.bool_()),
    ]
)
_SPOOL = pa.schema([("suspect", pa.binary())])


class Unit(msgspec.Struct):
    """A part of the work that is done: one table, or one key range of one."""

    name: str
    result: TableResult
    limits: list[Limit]


class RunState(msgspec.Struct):
    """What a resumed run does not do again."""

    run: str
    set_name: str
    replicas: list[str]
    started_at: str
    resumed: int = 0
    shards: dict[str, list[KeyRange]] = msgspec.field(default_factory=dict)  # by table: how the first run cut its keys
    units: list[Unit] = msgspec.field(default_factory=list)


class RunFolder:
    """One run's files."""

    def __init__(self, out: Path, run: str) -> None:
        self.out, self.run = out, run
        self.path = out / run

    @contextmanager
    def locked(self) -> Iterator[None]:
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise AlreadyRunning(str(self.path)) from None
            yield

    def load_state(self) -> RunState:
        try:
            return msgspec.json.decode((self.path / "state.json").read_bytes(), type=RunState)
        except FileNotFoundError:
            raise ConfigError(f"{self.path}: no check to resume there; it finished, or never started") from None

    def save_state(self, state: RunState) -> None:
        write_whole(self.path / "state.json", msgspec.json.encode(state))

    def part(self, unit: str) -> Path:
        readable = "".join(c if c.isalnum() else "_" for c in unit)[:100]
        return self.path / f"part-{readable}-{zlib.crc32(unit.encode()):08x}.parquet"  # a.b and a_b are two

    def finish(self, result: CheckResult, parts: Sequence[Path], history: pa.Table) -> None:
        """Results first, then the end of the state: a crash in between only repeats this."""
        with writer(self.path / "differences.parquet", DIFFERENCES) as out:
            for part in parts:
                for batch in pq.ParquetFile(part).iter_batches():
                    out.write_batch(batch)
        write_parquet(self.out / "history" / f"{self.run}.parquet", history)
        write_whole(self.path / "check.json", msgspec.json.format(msgspec.json.encode(result)))
        for part in parts:
            part.unlink()
        (self.path / "state.json").unlink(missing_ok=True)
        (self.path / "lock").unlink(missing_ok=True)


def load_result(path: Path) -> CheckResult:
    """The result of a finished run; an unfinished one has none."""
    file = path / "check.json" if path.is_dir() else path
    if not file.exists():
        unfinished = (path / "state.json").exists()
        hint = "the check was stopped: resume it first" if unfinished else "run a check first"
        raise ConfigError(f"{path}: no result there; {hint}")
    return msgspec.json.decode(file.read_bytes(), type=CheckResult)


def read_differences(path: Path) -> Iterator[Difference]:
    """Every difference of a finished run, a batch at a time."""
    for batch in pq.ParquetFile(path / "differences.parquet").iter_batches(batch_size=1_000):
        for row in batch.to_pylist():
            yield _difference(row)


def write_whole(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(path)


def write_parquet(path: Path, table: pa.Table) -> None:
    with writer(path, table.schema) as out:
        out.write_table(table)


@contextmanager
def writer(path: Path, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
    """A Parquet file that takes its name only when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with pq.ParquetWriter(temporary, schema) as out:
            yield out
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def difference_batch(found: Sequence[Difference]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([_record(difference) for difference in found], DIFFERENCES)


def _record(difference: Difference) -> dict[str, Any]:
    cause, logged = difference.cause, difference.logged
    return {
        **{name: getattr(difference, name) for name in ("table", "bucket", "replica", "looks", "steady")},
        "key": list(difference.key),
        "kind": difference.kind.value,
        "columns": list(difference.columns),
        "expected": None if difference.expected is None else list(difference.expected.items()),
        "actual": None if difference.actual is None else list(difference.actual.items()),
        "reference": list(difference.reference),
        "basis": difference.basis.value,
        "cause": cause.summary if cause else None,
        "cause_tx": cause.tx if cause else None,
        "cause_site": cause.site if cause else None,
        "cause_number": cause.number if cause else None,
        "cause_at": cause.committed_at if cause else None,
        "logged_tx": logged.tx if logged else None,
        "logged_number": logged.number if logged else None,
        "logged_known": logged.known if logged else None,
    }


def _difference(row: dict[str, Any]) -> Difference:
    plain = {
        **{name: row[name] for name in ("table", "key", "bucket", "replica", "kind", "columns", "looks", "steady")},
        "expected": None if row["expected"] is None else dict(row["expected"]),
        "actual": None if row["actual"] is None else dict(row["actual"]),
        "reference": row["reference"],
        "basis": row["basis"],
        "cause": None
        if row["cause"] is None
        else {
            "summary": row["cause"],
            "tx": row["cause_tx"],
            "site": row["cause_site"],
            "number": row["cause_number"],
            "committed_at": row["cause_at"],
        },
        "logged": None
        if row["logged_tx"] is None
        else {"tx": row["logged_tx"], "number": row["logged_number"], "known": row["logged_known"]},
    }
    return msgspec.convert(plain, Difference)


class Spool:
    """Suspects on disk between two looks, so that a hundred thousand of them need no memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.count = 0
        self.buckets: set[int] = set()

    def fill(self, suspects: Iterator[Suspect]) -> None:
        with writer(self._path, _SPOOL) as out:
            for batch in chunks(suspects, 1_000):
                self.count += len(batch)
                self.buckets.update(suspect.bucket for suspect in batch)
                encoded = [msgspec.msgpack.encode(suspect) for suspect in batch]
                out.write_batch(pa.record_batch([pa.array(encoded, pa.binary())], _SPOOL))

    def batches(self) -> Iterator[list[Suspect]]:
        for batch in pq.ParquetFile(self._path).iter_batches(batch_size=1_000):
            yield [msgspec.msgpack.decode(raw, type=Suspect) for raw in batch.column(0).to_pylist()]

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


T = TypeVar("T")


def chunks(items: Iterator[T], size: int) -> Iterator[list[T]]:
    while batch := list(islice(items, size)):
        yield batch
