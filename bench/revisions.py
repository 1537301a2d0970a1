"""`tops bench revisions`: the code here beside an older revision of it, in pairs of runs that alternate.

Each run is a process of its own in a checkout of its revision. Both sides use the same Python packages.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness import say
from bench.machine import describe_machine, package_versions
from bench.results import Result
from bench.statistics import Better, Figure
from tops.model.errors import ConfigError

ROOT = Path(__file__).parent.parent
PUBLISH = Path(__file__).with_name("revision_publish.py")
EVENTS = {"publish": 100_000, "durable": 40_000}
POLICY_FIGURES = "serializable.c64.vs_write_all,p2p.converged.vs_primary"
POLICIES = ("write_all", "serializable", "p2p", "primary")


@dataclass(frozen=True, slots=True)
class Measured:
    """One quantity of one run. Processor time is of all processes, or of the broker where a site publishes."""

    per_s: float
    cpu_us: float | None = None


def run(against: str, pairs: int, workloads: Sequence[str]) -> Result:
    """Compare this checkout with the revision `against` of its git repository."""
    unknown = set(workloads) - set(WORKLOADS)
    if unknown:
        raise ConfigError(f"there is no workload {', '.join(sorted(unknown))}: use {', '.join(WORKLOADS)}")
    now: dict[str, list[Measured]] = {}
    then: dict[str, list[Measured]] = {}
    with _checkout(against) as older:
        sides = [(now, ROOT), (then, older)]
        for number in range(pairs):
            say(f"pair {number + 1} of {pairs}")
            for kept, tree in sides if number % 2 == 0 else sides[::-1]:
                for name in workloads or WORKLOADS:
                    for quantity, measured in WORKLOADS[name](tree).items():
                        kept.setdefault(quantity, []).append(measured)
            for quantity in now:
                say(f"  {quantity}: {now[quantity][-1].per_s / then[quantity][-1].per_s:.2f}")
    return {
        "name": "revisions",
        "machine": describe_machine(),
        "versions": {**package_versions(), "against": against},
        "rows": [],
        "figures": {name: figure for quantity in now for name, figure in _figures(quantity, now, then)},
    }


def _figures(
    quantity: str, now: dict[str, list[Measured]], then: dict[str, list[Measured]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    pairs = list(zip(now[quantity], then[quantity], strict=True))
    rates = [(ours.per_s, theirs.per_s) for ours, theirs in pairs]
    ratios = {"ratios": [round(ours / theirs, 2) for ours, theirs in rates]}
    yield quantity, {**Figure.of_pairs(rates, Better.HIGHER).record(), **ratios}
    spent = [
        (ours.cpu_us, theirs.cpu_us) for ours, theirs in pairs if ours.cpu_us is not None and theirs.cpu_us is not None
    ]
    if spent:
        yield f"{quantity}.cpu_us", dict(Figure.of_pairs(spent, Better.LOWER).record())


@contextmanager
def _checkout(revision: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tops-revision-") as folder:
        tree = Path(folder) / "tree"
        made = subprocess.run(
            ["git", "worktree", "add", "--detach", str(tree), revision], cwd=ROOT, capture_output=True, text=True
        )
        if made.returncode:
            raise ConfigError(f"revision {revision!r} can't be checked out: {made.stderr.strip()}")
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


def _run(tree: Path, *arguments: str) -> Any:
    """The JSON object that a Python process in `tree` prints."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return json.loads(done.stdout)


def _policies(tree: Path) -> dict[str, Measured]:
    with tempfile.TemporaryDirectory(prefix="tops-revision-") as folder:
        record = _run(
            tree, "-m", "tops", "bench", "policies", "--quick",
            "--figures", POLICY_FIGURES, "--format", "json", "--results", folder,
        )  # fmt: skip
    return {
        row["system"]: Measured(row["tps"], 1e6 * sum(row["cpu_cores"].values()) / row["tps"])
        for row in record["rows"]
        if row["system"] in POLICIES
    }


def _core(tree: Path) -> dict[str, Measured]:
    with tempfile.TemporaryDirectory(prefix="tops-revision-") as folder:
        record = _run(tree, "-m", "tops", "bench", "core", "--quick", "--format", "json", "--results", folder)
    return {row["system"]: Measured(row["per_cpu_s"]) for row in record["rows"]}


def _publish(tree: Path) -> dict[str, Measured]:
    found = {}
    for kind, events in EVENTS.items():
        record = _run(tree, "-P", str(PUBLISH), kind, str(events))
        found[kind] = Measured(record["per_s"], record["broker_us"])
    return found


WORKLOADS: dict[str, Callable[[Path], dict[str, Measured]]] = {
    "policies": _policies,
    "core": _core,
    "publish": _publish,
}
