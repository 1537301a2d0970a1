import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image
from rich.console import Console

from bench.harness import Run
from bench.machine import describe_machine, package_versions
from bench.report.page import write_page
from bench.report.plots import draw
from bench.report.table import render
from bench.results import Result, figures, rows, spread, write_json
from bench.statistics import Better


def run(system: str, tps: float, clients: int = 16, p50_ms: float = 2.0) -> Run:
    return Run(
        system=system, workload="W", clients=clients, tps=tps, p50_ms=p50_ms, p95_ms=2 * p50_ms, p99_ms=3 * p50_ms,
        committed=int(tps * 2), aborted=1, errors=0, settle_s=0.01, applied_tps=tps * 0.9,
        cpu_cores={"client": 0.4, "node1": 0.8}, others_cores=0.1, fsyncs_per_tx=None,
        messages_per_tx=2.5, bytes_per_tx=700.0,
        phases={"database": 0.001, "disk": 0.0005}, load_average=0.5,
    )  # fmt: skip


RUNS = [
    run("write_all", 9000.0, p50_ms=1.0),
    run("hand_2pc", 1000.0, p50_ms=15.0),
    run("write_all", 11000.0, p50_ms=3.0),
    run("hand_2pc", 2000.0, p50_ms=9.0),
]


@pytest.fixture
def record() -> Result:
    return {
        "name": "policies",
        "machine": describe_machine(),
        "versions": package_versions(),
        "systems": {"write_all": {"description": "three <replicas>", "promise": "on disk at all"}},
        "rows": rows(RUNS),
        "figures": figures(RUNS, "write_all", ["hand_2pc"], workload="W"),
        "measures": {"logical.drain_tps": spread([100.0, 300.0, 200.0])},
        "missing": {"galera": "mariadbd is not installed"},
        "left_out": ["3 of 5 rounds"],
    }


def text(record: Result, width: int) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(record, console))
    return console.export_text()


def test_a_row_is_the_median_of_its_runs_with_their_range() -> None:
    row = rows(RUNS)[0]

    assert (row["system"], row["clients"], row["runs"]) == ("write_all", 16, 2)
    assert (row["tps_low"], row["tps"], row["tps_high"]) == (9000.0, 10000.0, 11000.0)
    assert row["aborted"] == 2


def test_rows_of_one_load_stand_together() -> None:
    runs = [run(system, 1000.0, clients) for system in ("write_all", "quorum") for clients in (64, 1)]

    assert [(row["clients"], row["system"]) for row in rows(runs)] == [
        (1, "write_all"),
        (1, "quorum"),
        (64, "write_all"),
        (64, "quorum"),
    ]


def test_phases_are_those_of_the_runs_that_had_clocks() -> None:
    without = replace(RUNS[0], phases={})

    assert rows([without, RUNS[2]])[0]["phases"] == {"database": 0.001, "disk": 0.0005}


def test_figures_pair_the_runs_of_a_round() -> None:
    throughput = figures(RUNS, "write_all", ["hand_2pc"], workload="W")
    latency = figures(RUNS, "write_all", ["hand_2pc"], workload="W", better=Better.LOWER)

    assert throughput["write_all.c16.vs_hand_2pc"] == {
        "ratio": 7.25, "ours": 10000.0, "theirs": 1500.0, "runs": 2, "low": 5.5, "high": 9.0,
    }  # fmt: skip
    assert latency["write_all.c16.p50.vs_hand_2pc"]["high"] == 15.0


def test_a_run_without_partner_is_in_no_figure() -> None:
    found = figures([*RUNS, run("write_all", 1.0)], "write_all", ["hand_2pc"], workload="W")

    assert found["write_all.c16.vs_hand_2pc"]["runs"] == 2


def test_the_record_survives_the_way_through_its_file(record: Result, tmp_path: Path) -> None:
    path = write_json(record, tmp_path / "results")

    assert path.name == "policies.json"
    assert json.loads(path.read_text()) == record
    assert list(path.parent.iterdir()) == [path]


def test_the_table_tells_rates_ratios_and_what_was_left_out(record: Result) -> None:
    shown = text(record, 200)

    for expected in ("write_all", "10,000", "9,000", "7.25", "galera", "3 of 5 rounds", "200 (100–300)"):
        assert expected in shown


def test_a_narrow_terminal_gets_fewer_columns_but_whole_numbers(record: Result) -> None:
    shown = text(record, 80)

    assert "10,000" in shown
    assert "applied/s" not in shown
    assert "…" not in shown


def test_every_picture_exists_as_png_and_svg(record: Result, tmp_path: Path) -> None:
    written = draw(record, tmp_path)

    kinds = ("throughput", "latency", "figures", "phases")
    assert {path.name for path in written} == {f"policies-{kind}.{s}" for kind in kinds for s in ("png", "svg")}
    for path in written:
        if path.suffix == ".png":
            with Image.open(path) as image:
                assert len(image.getcolors(image.width * image.height) or []) > 3
        else:
            assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_a_record_without_latencies_or_figures_still_gives_a_table_and_pictures(record: Result, tmp_path: Path) -> None:
    bare = {**record, "rows": [{"system": "matcher", "tps": 5.0}], "figures": {}}

    assert "matcher" in text(bare, 100)
    assert [path.name for path in draw(bare, tmp_path)] == ["policies-throughput.png", "policies-throughput.svg"]


def test_the_page_needs_nothing_but_itself(record: Result, tmp_path: Path) -> None:
    page = write_page(record, draw(record, tmp_path), tmp_path).read_text()

    assert page.count("<img ") == 4
    assert all(source.startswith("data:") for source in re.findall(r'src="([^"]*)"', page))
    assert not re.search(r"<(script|link)\b", page)
    assert page.index("alternating pairs") < page.index("<h2>Figures") < page.index("Throughput:")
    assert "three &lt;replicas&gt;" in page
    assert "mariadbd is not installed" in page


def test_a_record_with_rows_that_have_no_latency_is_drawn_all_the_same(record: Result, tmp_path: Path) -> None:
    record["rows"].append({"system": "bulk apply", "clients": 1, "tps": 60000.0, "p50_ms": None, "p95_ms": None})

    assert {path.stem for path in draw(record, tmp_path)} >= {"policies-throughput", "policies-latency"}


def test_a_figure_that_is_not_reached_says_by_how_much_and_where_the_time_goes(record: Result, tmp_path: Path) -> None:
    name = "write_all.c16.vs_hand_2pc"
    compared = {"systems": ["write_all", "hand_2pc"], "clients": 16, **record["figures"][name]}
    short = {**record, "figures": {name: {**compared, "least": 10}}}
    reached = {**record, "figures": {name: {**compared, "least": 7}}}

    expected = f"{name} is 7.25 and must be 10: 28% short. write_all spends 0.120 ms of processor time per operation"
    assert expected in " ".join(text(short, 200).split())
    assert expected in write_page(short, [], tmp_path).read_text()
    assert "database 1.000, disk 0.500" in text(short, 1000)
    assert "short" not in text(reached, 200)
