"""Joins the results of a table's key ranges into the result of the table."""

from collections import Counter
from collections.abc import Sequence

from replication.divergence.check.second_look import EXAMPLES_PER_KIND
from replication.divergence.results.model import Difference, TableResult


def merged(parts: Sequence[TableResult]) -> list[TableResult]:
    """One result per table, in the order of the first part of each."""
    by_table: dict[str, list[TableResult]] = {}
    for part in parts:
        by_table.setdefault(part.table, []).append(part)
    return [_joined(table) for table in by_table.values()]


def _joined(parts: Sequence[TableResult]) -> TableResult:
    first = parts[0]
    if len(parts) == 1:
        return first
    return TableResult(
        table=first.table,
        key=first.key,
        columns=first.columns,
        rows=dict(_summed([part.rows for part in parts])),
        method=first.method,
        buckets=sum(part.buckets for part in parts),
        bucket_ends=_ends([end for part in parts for end in part.bucket_ends]),
        buckets_differing=[bucket for part in parts for bucket in part.buckets_differing],
        rows_read=sum(part.rows_read for part in parts),
        settled=sum(part.settled for part in parts),
        counts=_summed_twice([part.counts for part in parts]),
        pairs=_summed_twice([part.pairs for part in parts]),
        columns_differing=dict(_summed([part.columns_differing for part in parts])),
        causes=dict(_summed([part.causes for part in parts])),
        bases=dict(_summed([part.bases for part in parts])),
        schema=first.schema,
        examples=_examples(parts),
        seconds=sum(part.seconds for part in parts),
    )


def _ends(ends: Sequence[int]) -> tuple[int, ...]:
    return (min(ends), max(ends)) if ends else ()


def _summed(parts: Sequence[dict[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return total


def _summed_twice(parts: Sequence[dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: dict(_summed([part.get(name, {}) for part in parts])) for name in names}


def _examples(parts: Sequence[TableResult]) -> list[Difference]:
    kept: Counter[tuple[str, str]] = Counter()
    examples = []
    for example in (example for part in parts for example in part.examples):
        kind = (example.replica, example.kind.value)
        if kept[kind] < EXAMPLES_PER_KIND:
            kept[kind] += 1
            examples.append(example)
    return examples
