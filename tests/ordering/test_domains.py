"""Domains in `tops.toml` and between brokers: what contradicts itself is rejected with file, line and reason."""

from pathlib import Path

import pytest

from tops.model.errors import ConfigError
from tops.model.ids import NodeId
from tops.model.ordering import Order, OrderingDomain, Placement, Unreliable, difference
from tops.runtime.config import parse_config

BROKERS = """[cluster]
name = "test"
[[broker]]
name = "b1"
listen = "127.0.0.1:7000"
data = "d1"
[[broker]]
name = "b2"
listen = "127.0.0.1:7001"
data = "d2"
"""


def domains(text: str) -> tuple[OrderingDomain, ...]:
    return parse_config(BROKERS + text, Path("tops.toml")).topology().domains


def test_a_domain_has_the_defaults_that_the_documentation_names() -> None:
    (domain,) = domains('[[ordering]]\nname = "shop"\ntypes = ["orders", "stock"]\n')

    assert domain == OrderingDomain(
        "shop", ("orders", "stock"), Order.TOTAL, False, Placement.TOGETHER, Unreliable(1000, 2.0)
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            '[[ordering]]\nname = "a"\ntypes = ["x"]\n[[ordering]]\nname = "b"\ntypes = ["y", "x"]\n',
            r"line 16: ordering\[2\]\.types: type 'x' is in the ordering domains 'a' and 'b'",
        ),
        ('[[ordering]]\nname = "a"\ntypes = ["x", "x"]\n', "lists 'x' twice"),
        ('[[ordering]]\nname = "a"\ntypes = []\n', "ordering\\[1\\].types"),
        ('[[ordering]]\nname = "a"\ntypes = ["rs.shop"]\n', "a type of a replica set"),
        ('[[ordering]]\nname = "a"\ntypes = ["x"]\norder = "causal"\n', "needs `durable = true`"),
        ('[[ordering]]\nname = "a"\ntypes = ["x"]\norder = "fifo"\n', "ordering\\[1\\].order"),
        (
            '[[ordering]]\nname = "a"\ntypes = ["x"]\ndurable = true\nunreliable = { buffer = 1 }\n',
            "its events are never lost, so remove `unreliable`",
        ),
        ('[[ordering]]\nname = "a"\ntypes = ["x"]\nrank = 1\n', "is not a known key"),
    ],
)
def test_a_domain_that_can_not_be_is_rejected(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        domains(text)


def test_types_of_a_domain_meet_at_one_broker_unless_they_are_spread() -> None:
    names = [f"t{number}" for number in range(20)]
    listed = ", ".join(f'"{name}"' for name in names)
    text = f'{BROKERS}[[ordering]]\nname = "shop"\ntypes = [{listed}]\n'
    together = parse_config(text, Path("tops.toml")).topology()
    spread = parse_config(f'{text}placement = "spread"\n', Path("tops.toml")).topology()

    assert {together.rendezvous(name) for name in names} == {together.rendezvous("shop")}
    assert {spread.rendezvous(name) for name in names} == {NodeId("b1"), NodeId("b2")}


def test_lists_may_differ_by_types_at_the_end_and_in_no_other_way() -> None:
    domain = OrderingDomain("d", ("x", "y"))

    assert difference([domain], [domain]) is None
    assert difference([domain], [OrderingDomain("d", ("x", "y", "z"))]) is None
    assert difference([domain], []) is None
    assert "only ever appended" in str(difference([domain], [OrderingDomain("d", ("y", "x"))]))
    assert "must be the same" in str(difference([domain], [OrderingDomain("d", ("x", "y"), durable=True)]))


def test_a_type_that_is_appended_changes_the_rank_of_no_other() -> None:
    placed = {"x": NodeId("b2"), "y": NodeId("b1"), "z": NodeId("b2"), "new": NodeId("b3")}
    before = OrderingDomain("d", ("x", "y", "z")).layout(placed.__getitem__)
    after = OrderingDomain("d", ("x", "y", "z", "new")).layout(placed.__getitem__)

    assert after.stages[: len(before.stages)] == before.stages == (NodeId("b2"), NodeId("b1"))
    assert after.stage_of[:3] == before.stage_of
