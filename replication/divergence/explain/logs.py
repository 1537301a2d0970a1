"""Transaction logs that are not behind a broker: an export of log records as Parquet."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from replication.divergence.results.folder import write_parquet
from replication.tables.endpoints import Key, LogRecord, Values
from tops.model.errors import ConfigError

if TYPE_CHECKING:
    from replication.tables.schema import CommonTable

_VALUES = pa.map_(pa.string(), pa.string())
SCHEMA = pa.schema(
    [
        ("number", pa.int64()),
        ("tx", pa.string()),
        ("site", pa.string()),
        ("committed_at", pa.timestamp("us", "UTC")),
        ("table", pa.string()),
        ("key", pa.list_(pa.string())),
        ("old", _VALUES),
        ("new", _VALUES),
        ("statement", pa.string()),
    ]
)


def write_log(path: Path, records: Sequence[LogRecord]) -> None:
    """Export records for `ParquetLog`; values are canonical text. Whoever watches the folder sees the file whole."""
    rows = [
        {
            "number": r.number,
            "tx": r.tx,
            "site": r.site,
            "committed_at": r.committed_at,
            "table": r.table,
            "key": list(r.key),
            "old": None if r.old is None else list(r.old.items()),
            "new": None if r.new is None else list(r.new.items()),
            "statement": r.statement,
        }
        for r in records
    ]
    write_parquet(path, pa.Table.from_pylist(rows, SCHEMA))


class ParquetLog:
    """Records from a Parquet file or folder; only what is asked for is read into memory."""

    def __init__(self, path: str) -> None:
        if not Path(path).exists():
            raise ConfigError(f"{path}: no such file or folder of log records")
        self._records = ds.dataset(path, schema=SCHEMA, format="parquet")

    async def records_of(
        self, table: "CommonTable", keys: Collection[Key], upto: int | None
    ) -> Mapping[Key, Sequence[LogRecord]]:
        wanted = set(keys)
        condition = (pc.field("table") == table.label) & pc.list_element(pc.field("key"), 0).isin(
            sorted({key[0] for key in wanted})
        )
        found: dict[Key, list[LogRecord]] = {}
        for record in self._read(condition):
            if record.key in wanted and (upto is None or record.number <= upto):
                found.setdefault(record.key, []).append(record)
        return {key: sorted(records, key=lambda record: record.number) for key, records in found.items()}

    async def inserted(self, table: "CommonTable", upto: int | None) -> Collection[Key]:
        return ()  # an export may begin and end anywhere: a row that it inserted need not be there

    def _read(self, condition: Any) -> Iterator[LogRecord]:
        for batch in self._records.to_batches(filter=condition):
            for row in batch.to_pylist():
                yield LogRecord(
                    row["number"],
                    row["tx"],
                    row["site"],
                    row["committed_at"],
                    row["table"],
                    tuple(row["key"]),
                    _values(row["old"]),
                    _values(row["new"]),
                    row["statement"] or "",
                )


def _values(pairs: Sequence[tuple[str, str | None]] | None) -> Values | None:
    return None if pairs is None else dict(pairs)
