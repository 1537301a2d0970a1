"""`tops bench revisions` on a repository of three commits whose speed is written in a file."""

import json
import subprocess
from pathlib import Path

import pytest

from bench import revisions
from bench.revisions import Measured
from tops.model.errors import ConfigError


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Revision `older` does 200 per second at 5 µs; the checkout does 150 at 10 µs."""
    root = tmp_path / "repository"
    root.mkdir()
    for speed, tag in (({"per_s": 200.0, "cpu_us": 5.0}, "older"), ({"per_s": 150.0, "cpu_us": 10.0}, "newer")):
        (root / "speed.json").write_text(json.dumps(speed))
        for command in (["init", "-q"], ["add", "."], ["commit", "-qm", tag], ["tag", tag]):
            identity = ["-c", "user.name=bench", "-c", "user.email=bench@localhost"]
            subprocess.run(["git", *identity, *command], cwd=root, check=True)
    monkeypatch.setattr(revisions, "ROOT", root)

    def stated(tree: Path) -> dict[str, Measured]:
        return {"stated": Measured(**json.loads((tree / "speed.json").read_text()))}

    monkeypatch.setattr(revisions, "WORKLOADS", {"stated": stated})
    return root


def test_each_figure_is_this_checkout_over_the_older_revision(repository: Path) -> None:
    record = revisions.run("older", pairs=3, workloads=())

    assert record["figures"]["stated"]["ratios"] == [0.75, 0.75, 0.75]
    assert record["figures"]["stated"]["ratio"] == 0.75
    assert record["figures"]["stated.cpu_us"]["ratio"] == 0.5, "twice the processor time is half as good"


def test_the_checkout_of_the_older_revision_is_removed_afterwards(repository: Path) -> None:
    revisions.run("older", pairs=1, workloads=())

    left = subprocess.run(["git", "worktree", "list"], cwd=repository, capture_output=True, text=True, check=True)
    assert len(left.stdout.splitlines()) == 1


def test_a_revision_that_does_not_exist_is_rejected(repository: Path) -> None:
    with pytest.raises(ConfigError, match="revision 'no-such-tag' can't be checked out"):
        revisions.run("no-such-tag", pairs=1, workloads=())


def test_an_unknown_workload_is_rejected_with_those_that_exist(repository: Path) -> None:
    with pytest.raises(ConfigError, match="no workload other: use stated"):
        revisions.run("older", pairs=1, workloads=["other"])


def test_the_processes_of_a_checkout_run_its_own_code(tmp_path: Path) -> None:
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "__init__.py").write_text("WHERE = 'the older revision'\n")
    (tmp_path / "show.py").write_text("import bench, json; print(json.dumps(bench.WHERE))\n")

    assert revisions._run(tmp_path, "-P", str(tmp_path / "show.py")) == "the older revision"
