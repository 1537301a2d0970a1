"""Writes the report of a run: HTML, JSON and Parquet, all of them or none."""

import shutil
import tempfile
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from replication.divergence.report.html import render
from replication.divergence.results.folder import load_result
from replication.divergence.results.history import HISTORY
from replication.divergence.results.model import CheckResult


def document(result: CheckResult) -> bytes:
    """The result as JSON, with the verdict spelled out."""
    plain = msgspec.to_builtins(result)
    derived = {"verdict": result.verdict.value, "headline": result.headline, "differences": result.differences}
    return msgspec.json.format(msgspec.json.encode({**derived, **plain}))


def write_report(run: Path, target: Path) -> list[Path]:
    """`report.html`, `report.json` and `differences.parquet` of a finished run."""
    result = load_result(run)
    page = render(result, history_of(run.parent, result.set_name))
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target, prefix=".report-") as staging:
        made = {
            "report.html": page.encode(),
            "report.json": document(result),
        }
        for name, content in made.items():
            (Path(staging) / name).write_bytes(content)
        if run.resolve() != target.resolve():
            shutil.copyfile(run / "differences.parquet", Path(staging) / "differences.parquet")
        for file in Path(staging).iterdir():
            file.replace(target / file.name)
    return [target / name for name in ("report.html", "report.json", "differences.parquet")]


def history_of(out: Path, set_name: str) -> pa.Table | None:
    folder = out / "history"
    if not folder.is_dir():
        return None
    found: pa.Table = ds.dataset(folder, schema=HISTORY, format="parquet").to_table(
        filter=pc.field("set_name") == set_name
    )
    return found
