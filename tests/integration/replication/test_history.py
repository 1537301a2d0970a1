"""The checker finds what it must find, and nothing in a history that is serial."""

from tests.integration.replication.history import Tx, anomalies


def test_a_serial_history_has_no_anomalies() -> None:
    history = [
        Tx("a", True, reads=[(1, ())], writes={1: ("x",)}),
        Tx("b", True, reads=[(1, ("x",))], writes={1: ("x", "y")}),
        Tx("c", True, reads=[(1, ("x", "y")), (2, ())]),
    ]

    assert anomalies(history) == []


def test_write_skew_is_a_cycle_of_two_anti_dependencies() -> None:
    history = [
        Tx("a", True, reads=[(1, ()), (2, ())], writes={1: ("x",)}),
        Tx("b", True, reads=[(1, ()), (2, ())], writes={2: ("y",)}),
    ]

    assert [found[:3] for found in anomalies(history)] == ["G2:"]


def test_a_lost_update_is_found() -> None:
    history = [
        Tx("a", True, reads=[(1, ())], writes={1: ("x",)}),
        Tx("b", True, reads=[(1, ())], writes={1: ("y",)}),
    ]

    assert any("lost update" in found for found in anomalies(history))


def test_a_read_that_sees_half_a_transaction_is_found() -> None:
    history = [
        Tx("a", True, reads=[(1, ()), (2, ())], writes={1: ("x",), 2: ("y",)}),
        Tx("b", True, reads=[(1, ("x",)), (2, ())]),
    ]

    assert [found.partition(":")[0] for found in anomalies(history)] == ["G-single"]


def test_circular_information_flow_is_found() -> None:
    history = [
        Tx("a", True, reads=[(2, ("y",))], writes={1: ("x",)}),
        Tx("b", True, reads=[(1, ("x",))], writes={2: ("y",)}),
    ]

    assert [found.partition(":")[0] for found in anomalies(history)] == ["G1c"]


def test_writes_in_opposite_orders_are_found() -> None:
    history = [
        Tx("a", True, writes={1: ("x",), 2: ("y", "v")}),
        Tx("b", True, writes={2: ("y",), 1: ("x", "w")}),
    ]

    assert [found.partition(":")[0] for found in anomalies(history)] == ["G0"]


def test_a_read_of_an_aborted_write_is_found() -> None:
    history = [Tx("a", False, writes={1: ("x",)}), Tx("b", True, reads=[(1, ("x",))])]

    assert anomalies(history)[0].startswith("G1a")


def test_a_read_of_an_overwritten_write_is_found() -> None:
    history = [
        Tx("a", True, writes={1: ("x", "y")}, middle=[("x",)]),
        Tx("b", True, reads=[(1, ("x",))]),
    ]

    assert any(found.startswith("G1b") for found in anomalies(history))
