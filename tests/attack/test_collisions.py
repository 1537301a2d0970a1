"""Numbers that are chosen so that their hashes collide: they cost a broker or an agent no more than others."""

import random
from collections.abc import Callable, Sequence
from time import process_time

import msgspec
import pytest

from adapters.changes import Change, Insert, Member, decode_member
from adapters.postgres.sql.catalog import Table
from adapters.postgres.sql.literals import SqlType
from adapters.postgres.sql.steps import layers, shape_of, traits_of
from replication.model.values import unpack_values
from tests.attack.collisions import colliding, encoded_map
from tests.attack.raw_link import Verdict, raw_link
from tests.integration.overlay.secured import Secured
from tests.support.brokers import denied
from tops.core.broker.filter_index import FilterIndex
from tops.model.filters import Filter
from tops.model.ids import NodeId, TxId
from tops.model.map_keys import HARMLESS_ENTRIES, check_map_keys
from tops.protocol.messages import Dissemination, Event, Origin, Published

BITS = 14
NUMBER = SqlType("integer", "N", is_integer=True, base="int4")
TABLE = Table(
    oid=1,
    sql_name="acc",
    key=("id",),
    columns={"id": NUMBER},
    fixed_columns=frozenset(),
    unique_columns=frozenset(),
    referring_columns=frozenset(),
    referenced_columns=frozenset(),
    refers_to_itself=False,
    is_cascaded_to=False,
    has_side_effects=False,
    stamp="",
)
TIMES = 6  # as long as other numbers, at most; numbers that collide take more than thirty times as long


def seconds(work: Callable[[Sequence[int]], object], numbers: Sequence[int]) -> float:
    """The processor time of the work, the least of three times: what else the process did is not its work."""
    spent = []
    for _ in range(3):
        began = process_time()
        work(numbers)
        spent.append(process_time() - began)
    return min(spent)


def others(numbers: Sequence[int]) -> list[int]:
    drawn = random.Random(2)
    return sorted(drawn.sample(range(2**40), len(numbers)))


def test_these_numbers_do_collide() -> None:
    numbers = colliding(BITS + 1)

    assert seconds(dict.fromkeys, numbers) > 10 * seconds(dict.fromkeys, others(numbers))


def test_the_points_of_a_filter_are_no_harder_to_file_for_being_chosen() -> None:
    def filed(numbers: Sequence[int]) -> None:
        FilterIndex[str]().add("s", wanted[tuple(numbers)])

    chosen = colliding(BITS, apart=True)
    wanted = {tuple(numbers): Filter.where("n", "in", numbers) for numbers in (chosen, others(chosen))}

    assert seconds(filed, chosen) < TIMES * seconds(filed, others(chosen)) + 0.05


def test_the_keys_of_rows_are_no_harder_to_tell_apart_for_being_chosen() -> None:

    def planned(numbers: Sequence[int]) -> None:
        changes: list[Change] = [Insert("acc", {"id": n}) for n in numbers]
        traits = traits_of(changes[0], shape_of(changes[0]), TABLE, {})
        assert layers(list(numbers), traits, changes) is not None

    chosen = colliding(BITS + 1)
    assert seconds(planned, chosen) < TIMES * seconds(planned, others(chosen)) + 0.05


async def test_an_event_with_numbers_as_keys_is_not_decoded_whoever_sends_it(secured: Secured) -> None:
    body = {"x": msgspec.Raw(encoded_map(colliding(BITS)))}
    event = Dissemination(
        rendezvous=NodeId("b1"),
        upward=True,
        early=False,
        publication=Published(event=Event("news", body), origin=Origin("news", 1)),
    )
    async with raw_link(secured.broker.url, "b1", secured.keys("eve", "reader"), "one") as eve:
        verdict = await eve.send(event)

        assert verdict is Verdict.CLOSED
        assert "keys that are not texts" in eve.closed_because
    assert any("keys that are not texts" in record["detail"] for record in denied(secured.broker))


@pytest.mark.parametrize("decode", [decode_member, unpack_values])
def test_agents_do_not_decode_them_either(decode: Callable[[bytes], object]) -> None:
    numbers = msgspec.Raw(encoded_map(colliding(BITS)))
    member = Member(TxId("t"), (Insert("acc", {"note": numbers}),))
    encoded = msgspec.msgpack.encode(member if decode is decode_member else [numbers])

    with pytest.raises(ValueError, match="keys that are not texts"):
        decode(encoded)


@pytest.mark.parametrize("text_first", [False, True])
@pytest.mark.parametrize("depth", [0, 3])
def test_a_large_map_needs_texts_as_keys_wherever_it_is(text_first: bool, depth: int) -> None:
    first: dict[object, object] = {"first": 1} if text_first else {}
    large: object = first | dict.fromkeys(range(HARMLESS_ENTRIES + 1), "v" * 40)
    for _ in range(depth):
        large = {"inner": [b"\xde\xdf" * 100, large, 1.5], 7: "x" * 300}

    with pytest.raises(ValueError, match="keys that are not texts"):
        check_map_keys(msgspec.msgpack.encode([large, None]))


def test_what_applications_send_passes() -> None:
    texts = {f"key {n}": {n: [n, -n, n / 7, None, b"\xdf" * 50]} for n in range(3_000)}

    check_map_keys(msgspec.msgpack.encode([texts, "\u00de" * 20_000, dict.fromkeys(range(HARMLESS_ENTRIES))]))
