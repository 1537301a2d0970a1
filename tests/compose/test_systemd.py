"""The systemd units run commands that exist, as an unprivileged user."""

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.compose.stack import COMPOSE
from tops.cli.main import COMMANDS

UNITS = sorted((COMPOSE / "systemd").iterdir())
SERVICES = [unit for unit in UNITS if unit.suffix == ".service"]


def settings(unit: Path) -> dict[str, list[str]]:
    """What a unit sets, by key; a key may be there more than once."""
    found: dict[str, list[str]] = {}
    for line in unit.read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def test_there_is_a_unit_for_each_kind_of_process() -> None:
    assert [unit.name for unit in UNITS] == [
        "tops-broker@.service",
        "tops-divergence@.service",
        "tops-divergence@.timer",
        "tops-replica@.service",
    ]


@pytest.mark.parametrize("unit", SERVICES, ids=lambda unit: unit.name)
def test_a_service_runs_a_command_that_exists_as_an_unprivileged_user(unit: Path) -> None:
    found = settings(unit)
    (command,) = (shlex.split(line) for line in found["ExecStart"])
    name = unit.name.removeprefix("tops-").partition("@")[0]

    assert found["User"] == ["tops"]
    assert found["NoNewPrivileges"] == ["yes"] and found["ProtectSystem"] == ["strict"]
    assert command[0] == "/opt/tops/bin/tops" and command[1] == name and name in COMMANDS


@pytest.mark.parametrize("name", ["tops-broker@.service", "tops-replica@.service"])
def test_a_process_is_started_again_unless_its_configuration_was_rejected(name: str) -> None:
    found = settings(COMPOSE / "systemd" / name)

    assert (found["Restart"], found["RestartPreventExitStatus"]) == (["always"], ["2"])
    assert found["ExecReload"] == ["/bin/kill -HUP $MAINPID"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_accepts_a_unit(unit: Path, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    for other in UNITS:
        text = other.read_text().replace("/opt/tops/bin/tops", "/bin/true")  # the program is not there
        (tmp_path / other.name.replace("@.", "@x.")).write_text(text)

    done = subprocess.run(
        [analyze, "verify", "--man=no", str(tmp_path / unit.name.replace("@.", "@x."))], capture_output=True, text=True
    )

    complaints = [line for line in done.stderr.splitlines() if line.startswith(str(tmp_path)) or unit.stem in line]
    assert (done.returncode, complaints) == (0, []), done.stderr
