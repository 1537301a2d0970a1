"""From runs to the record of a benchmark: rows, figures, and the JSON file that keeps them."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.harness import Contender, Run
from bench.machine import describe_machine, package_versions
from bench.statistics import Better, Figure

Result = dict[str, Any]  # what `tops bench NAME --format json` prints


def rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row per system, workload and number of clients: medians over the runs.

    Rows of one load stand together, since those are what a reader compares; otherwise in the order of their first run.
    """
    groups: dict[tuple[str, str, int], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.system, run.workload, run.clients), []).append(run)
    workloads = list(dict.fromkeys(run.workload for run in runs))
    ordered = sorted(groups.values(), key=lambda group: (workloads.index(group[0].workload), group[0].clients))
    return [_row(group) for group in ordered]


def figures(
    runs: Sequence[Run], ours: str, theirs: Iterable[str], *, workload: str, better: Better = Better.HIGHER
) -> dict[str, dict[str, Any]]:
    """`OURS.cN.vs_THEIRS` (with `.p50` for latency) for every number of clients that both sides ran."""
    found: dict[str, dict[str, Any]] = {}
    for peer in theirs:
        for clients in sorted({run.clients for run in runs if run.system == ours}):
            sides = [
                [
                    run.tps if better is Better.HIGHER else run.p50_ms
                    for run in runs
                    if (run.system, run.workload, run.clients) == (side, workload, clients)
                ]
                for side in (ours, peer)
            ]
            # Cut short by a time budget, one side may have one run more; that run has no partner.
            pairs = list(zip(*sides, strict=False))
            if pairs:
                name = f"{ours}.c{clients}" + ("" if better is Better.HIGHER else ".p50") + f".vs_{peer}"
                found[name] = {**Figure.of_pairs(pairs, better).record()}
    return found


async def result(
    name: str,
    contenders: Sequence[Contender],
    runs: Sequence[Run],
    *,
    figures: Mapping[str, Mapping[str, Any]] | None = None,
    measures: Mapping[str, Mapping[str, float]] | None = None,
    missing: Mapping[str, str] | None = None,
    left_out: Sequence[str] = (),
) -> Result:
    """The record of a benchmark, before its systems are stopped: their versions are asked for here.

    `measures`: quantities of one system that are no row (see `spread`). `missing`: systems that could not run, with
    the reason. `left_out`: what a quick run had no time for.
    """
    versions = package_versions()
    for contender in contenders:
        versions.update(await contender.system.versions())
    return {
        "name": name,
        "machine": describe_machine(),
        "versions": versions,
        "systems": {
            c.system.name: {"description": c.system.description, "promise": c.system.promise} for c in contenders
        },
        "rows": rows(runs),
        "figures": dict(figures or {}),
        "measures": dict(measures or {}),
        "missing": dict(missing or {}),
        "left_out": list(left_out),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median of some runs with its range."""
    return {"median": _median(values), "low": round(min(values), 3), "high": round(max(values), 3), "runs": len(values)}


def write_json(record: Result, directory: Path) -> Path:
    """Whole or not at all: a benchmark that is interrupted leaves the last good file."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{record['name']}.json"
    unfinished = path.with_suffix(".json.tmp")
    unfinished.write_text(json.dumps(record, indent=2) + "\n")
    os.replace(unfinished, path)
    return path


def _row(group: Sequence[Run]) -> dict[str, Any]:
    first = group[0]
    return {
        "system": first.system,
        "workload": first.workload,
        "clients": first.clients,
        "tps": _median((run.tps for run in group), 1),
        "tps_low": round(min(run.tps for run in group), 1),
        "tps_high": round(max(run.tps for run in group), 1),
        "p50_ms": _median(run.p50_ms for run in group),
        "p95_ms": _median(run.p95_ms for run in group),
        "p99_ms": _median(run.p99_ms for run in group),
        "runs": len(group),
        "committed": sum(run.committed for run in group),
        "aborted": sum(run.aborted for run in group),
        "errors": sum(run.errors for run in group),
        "applied_tps": _median((run.applied_tps for run in group), 1),
        "settle_s": _median(run.settle_s for run in group),
        "cpu_cores": _medians([run.cpu_cores for run in group], 2),
        "others_cores": _median((run.others_cores for run in group), 2),
        "fsyncs_per_tx": _median_of_known(run.fsyncs_per_tx for run in group),
        "messages_per_tx": _median_of_known(run.messages_per_tx for run in group),
        "bytes_per_tx": _median_of_known(run.bytes_per_tx for run in group),
        "phases": _medians([run.phases for run in group if run.phases], 7),  # not every run has clocks
        "load_average": max(run.load_average for run in group),
    }


def _median(values: Iterable[float], digits: int = 3) -> float:
    return round(median(values), digits)


def _median_of_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return _median(known) if known else None


def _medians(records: Sequence[Mapping[str, float]], digits: int) -> dict[str, float]:
    names = dict.fromkeys(name for record in records for name in record)
    return {name: _median((record.get(name, 0.0) for record in records), digits) for name in names}
