"""A command loads what it needs, and nothing that only others need: every started process waits for its imports."""

import subprocess
import sys
from importlib import metadata

import pytest
from typer.testing import CliRunner

from tops.cli.main import COMMANDS, app

# What only reports, checks, benchmarks and tests need.
HEAVY = {"matplotlib", "pyspark", "pyarrow", "pandas", "jinja2", "hypothesis", "bench", "tests"}
PROGRAM = """
import sys
from tops.cli.main import main
try:
    main()
except SystemExit:
    pass
print(*{name.split(".")[0] for name in sys.modules}, file=sys.stderr)
"""


def loaded_by(*arguments: str) -> set[str]:
    run = [sys.executable, "-c", PROGRAM, *arguments]
    return set(subprocess.run(run, capture_output=True, text=True, check=True).stderr.split())


def test_the_version_is_the_package_s() -> None:
    shown = CliRunner().invoke(app, ["--version"])
    assert (shown.exit_code, shown.output) == (0, f"{metadata.version('tops-replication')}\n")


def test_help_lists_every_command_and_loads_none() -> None:
    assert loaded_by("--help").isdisjoint({*HEAVY, "aiohttp", "asyncpg", "cryptography", "pydantic", "uvloop"})
    listed = CliRunner().invoke(app, ["--help"]).output
    assert all(f"│ {name} " in listed for name in COMMANDS)


@pytest.mark.parametrize("command", ["up", "broker run", "replica run", "rs status", "write", "read"])
def test_what_runs_a_cluster_loads_nothing_that_only_checks_and_benchmarks_need(command: str) -> None:
    assert loaded_by(*command.split(), "--help").isdisjoint(HEAVY)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_is_listed_is_there(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"])

    assert (shown.exit_code, f"{command} [OPTIONS]" in shown.output) == (0, True), shown.output


def test_a_command_that_is_not_there_is_refused_with_one_that_may_be_meant() -> None:
    refused = CliRunner().invoke(app, ["rss"])

    assert (refused.exit_code, "'rs'" in refused.output) == (2, True), refused.output
