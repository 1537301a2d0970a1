import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.cli import BENCHMARKS
from bench.results import Result
from bench.systems import BenchmarkFailed
from tops.cli.main import app

RECORD: Result = {
    "name": "example",
    "machine": {"cores": 2, "fdatasync_us": 100.0, "load_average": 0.0},
    "versions": {},
    "rows": [{"system": "example", "clients": 1, "tps": 10.0, "p50_ms": 1.0, "p95_ms": 2.0}],
    "figures": {},
}


def install(monkeypatch: pytest.MonkeyPatch, name: str, run: object) -> None:
    """A benchmark module of that name, as a later version of the project would bring it."""
    module = types.ModuleType(f"bench.{name}")
    module.__spec__ = __import__("importlib.machinery").machinery.ModuleSpec(f"bench.{name}", None)
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, f"bench.{name}", module)


def test_the_command_line_loads_no_benchmark_before_one_is_asked_for() -> None:
    program = "import sys, tops.cli.main; print([name for name in sys.modules if name.split('.')[0] == 'bench'])"

    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout

    assert loaded.strip() == "[]"


def test_the_package_itself_runs_as_the_command_does() -> None:
    shown = subprocess.run([sys.executable, "-m", "bench", "--help"], capture_output=True, text=True, check=True).stdout

    assert all(f"│ {name} " in shown for name in BENCHMARKS)


def test_an_unknown_benchmark_is_refused() -> None:
    assert CliRunner().invoke(app, ["bench", "no-such-thing"]).exit_code == 2


def test_a_benchmark_that_this_version_lacks_is_refused_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.command.find_spec", lambda name: None)

    ended = CliRunner().invoke(app, ["bench", "ordering"])

    assert ended.exit_code == 2
    assert "there is no benchmark 'ordering'" in ended.output


def test_json_goes_to_standard_output_alone_and_the_files_are_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, "ordering", lambda quick: {**RECORD, "quick": quick})

    ended = CliRunner().invoke(app, ["bench", "ordering", "--quick", "--format", "json", "--results", str(tmp_path)])

    assert ended.exit_code == 0
    assert json.loads(ended.stdout) == {**RECORD, "quick": True}
    assert json.loads((tmp_path / "example.json").read_text())["quick"] is True
    assert "example.html" in ended.stderr
    assert (tmp_path / "example.html").exists()


def test_a_benchmark_without_phases_refuses_a_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, "ordering", lambda quick: RECORD)

    ended = CliRunner().invoke(app, ["bench", "ordering", "--profile", "--results", str(tmp_path)])

    assert ended.exit_code == 2
    assert "without --profile" in ended.output
    assert list(tmp_path.iterdir()) == []


def test_wrong_data_ends_with_code_1_and_leaves_no_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(quick: bool) -> Result:
        raise BenchmarkFailed("node2 has balance = 3")

    install(monkeypatch, "ordering", run)

    ended = CliRunner().invoke(app, ["bench", "ordering", "--results", str(tmp_path)])

    assert ended.exit_code == 1
    assert "node2 has balance = 3" in ended.output
    assert list(tmp_path.iterdir()) == []
