import random
from collections import Counter
from itertools import islice

import pytest

from bench.workloads import (
    Add,
    Append,
    AppendOnly,
    BankTransfer,
    Dataset,
    Operation,
    Read,
    SingleRowUpdate,
    Transfer,
    Workload,
    Ycsb,
    ZipfKeys,
)

DATASET = Dataset(rows=50)


def drawn(workload: Workload, number: int, seed: int = 1) -> list[Operation]:
    return list(islice(workload.operations(random.Random(seed)), number))


def test_the_dataset_has_every_key_once_and_rows_of_the_promised_width() -> None:
    accounts = list(Dataset(rows=3, pad_bytes=80).accounts())

    assert [key for key, _, _ in accounts] == [1, 2, 3]
    assert all(balance == 0 and len(pad) == 80 for _, balance, pad in accounts)


def test_the_same_seed_gives_the_same_updates() -> None:
    assert drawn(SingleRowUpdate(DATASET), 100) == drawn(SingleRowUpdate(DATASET), 100)


def test_updates_reach_every_row_and_no_other() -> None:
    keys = {operation.key for operation in drawn(SingleRowUpdate(DATASET), 2000) if isinstance(operation, Add)}

    assert keys == set(range(1, 51))


def test_a_transfer_takes_locks_in_the_order_of_keys_and_loses_no_money() -> None:
    for operation in drawn(BankTransfer(DATASET), 500):
        assert isinstance(operation, Transfer)
        first, second = operation.updates()

        assert first.key < second.key
        assert {first.key, second.key} == {operation.source, operation.target}
        assert first.amount + second.amount == 0
        assert next(leg.amount for leg in (first, second) if leg.key == operation.target) == operation.amount


@pytest.mark.parametrize("workload", [BankTransfer(DATASET), AppendOnly()])
def test_two_clients_never_insert_the_same_id(workload: Workload) -> None:
    one, two = workload.operations(random.Random(1)), workload.operations(random.Random(2))

    inserts = [operation for _ in range(200) for operation in (next(one), next(two))]

    ids = [operation.id for operation in inserts if isinstance(operation, Transfer | Append)]
    assert len(ids) == len(set(ids)) == 400


@pytest.mark.parametrize(("mix", "low", "high"), [("A", 0.45, 0.55), ("B", 0.93, 0.97), ("C", 1.0, 1.0)])
def test_a_ycsb_mix_reads_its_share(mix: str, low: float, high: float) -> None:
    operations = drawn(Ycsb(mix, DATASET), 5000)

    reads = sum(isinstance(operation, Read) for operation in operations) / len(operations)

    assert low <= reads <= high


def test_the_most_popular_zipf_key_is_about_twice_as_popular_as_the_next() -> None:
    keys, source = ZipfKeys(1000), random.Random(7)

    popularity = Counter(keys.draw(source) for _ in range(50_000)).most_common()

    assert all(1 <= key <= 1000 for key, _ in popularity)
    assert 1.6 < popularity[0][1] / popularity[1][1] < 2.4


def test_popular_zipf_keys_are_not_neighbours() -> None:
    keys, source = ZipfKeys(1000), random.Random(7)

    popular = [key for key, _ in Counter(keys.draw(source) for _ in range(50_000)).most_common(5)]

    assert min(abs(one - two) for one in popular for two in popular if one != two) > 1
