"""Figures that are not reached: by how much, and what the time of one operation went into on either side."""

from collections.abc import Iterator, Mapping
from typing import Any

from bench.results import Result


def shortfalls(record: Result) -> Iterator[str]:
    """One paragraph per figure below what it must reach; none where all are reached."""
    for name, figure in record["figures"].items():
        least = figure.get("least")
        if least is None or figure["ratio"] >= least:
            continue
        parts = [f"{name} is {figure['ratio']:.2f} and must be {least:g}: {1 - figure['ratio'] / least:.0%} short"]
        parts += [_spent(row) for row in _sides(record, figure)]
        yield ". ".join(parts) + "."


def _sides(record: Result, figure: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The rows of the systems that the figure compares, ours first."""
    for system in figure.get("systems", ()):
        for row in record["rows"]:
            if (row["system"], row.get("workload"), row.get("clients")) == (system, "W", figure["clients"]):
                yield row


def _spent(row: Mapping[str, Any]) -> str:
    """Processor time by process, and the clocks' phases where the runs had them."""
    processor = {role: 1e3 * cores / row["tps"] for role, cores in row["cpu_cores"].items()}
    told = f"{row['system']} spends {sum(processor.values()):.3f} ms of processor time per operation"
    told += f" ({_list(processor)})"
    if not row.get("phases"):
        return told
    return f"{told}; of its latency, in ms: {_list({phase: 1e3 * s for phase, s in row['phases'].items()})}"


def _list(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:.3f}" for name, amount in amounts.items())
