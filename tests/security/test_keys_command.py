import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tops.cli.main import app
from tops.security import Credentials, Identity, Kind, Trust


def tops(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["keys", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert tops("init", "--dir", tmp_path / "keys", "--cluster", "shop").exit_code == 0
    return tmp_path / "keys"


def listed(folder: Path) -> dict[str, str]:
    shown = json.loads(tops("show", "--dir", folder, "--format", "json").output)
    assert shown["cluster"] == "shop"
    return {one["name"]: one["status"] for one in shown["certificates"]}


def test_issue_show_and_revoke_work_together(folder: Path) -> None:
    assert tops("issue", "b1", "--kind", "broker", "--host", "127.0.0.1", "--dir", folder).exit_code == 0
    assert tops("issue", "billing", "--role", "reader", "--valid-days", "30", "--dir", folder).exit_code == 0
    assert listed(folder) == {"b1": "valid", "billing": "valid"}

    assert tops("revoke", "billing", "--dir", folder).exit_code == 0

    assert listed(folder) == {"b1": "valid", "billing": "revoked"}
    loaded = Credentials.load(folder / "nodes" / "billing")
    assert loaded.identity == Identity("shop", Kind.SITE, "billing", "reader")
    assert len(Trust.load(folder / "nodes" / "b1").revocations.serials) == 1


def test_the_table_shows_every_certificate_with_its_whole_serial_number(folder: Path) -> None:
    tops("issue", "billing", "--dir", folder)
    serial = json.loads(tops("show", "--dir", folder, "--format", "json").output)["certificates"][0]["serial"]

    shown = tops("show", "--dir", folder)

    assert shown.exit_code == 0
    assert "billing" in shown.output
    last_column = [line.rstrip("│ ").rpartition("│")[2].strip() for line in shown.output.splitlines() if "│" in line]
    assert "".join(last_column) == serial


@pytest.mark.parametrize(
    "arguments",
    [
        ["init", "--cluster", "shop"],
        ["issue", "a/../b"],
        ["issue", "b1", "--kind", "broker"],
        ["issue", "s1", "--role", "broker"],
        ["issue", "s1", "--kind", "printer"],
        ["issue", "s1", "--valid-days", "0"],
        ["issue", "b1", "--kind", "broker", "--host", "not a host"],
        ["revoke", "nobody"],
    ],
)
def test_a_refusal_exits_2_and_changes_nothing(folder: Path, arguments: list[str]) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    rejected = tops(*arguments, "--dir", folder)

    assert rejected.exit_code == 2
    assert rejected.stderr.strip()
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_folder_without_an_authority_is_refused(tmp_path: Path) -> None:
    for arguments in (["show"], ["issue", "s1"], ["revoke", "s1"]):
        rejected = tops(*arguments, "--dir", tmp_path / "none")
        assert (rejected.exit_code, "ca.crt" in rejected.stderr) == (2, True)


def test_an_audit_log_is_verified_and_a_tampered_one_answers_no(folder: Path) -> None:
    tops("issue", "s1", "--dir", folder)
    whole = tops("audit-verify", folder / "audit.log", "--format", "json")
    assert (whole.exit_code, json.loads(whole.output)["records"]) == (0, 2)
    audit = folder / "audit.log"
    audit.write_bytes(audit.read_bytes().replace(b"init", b"INIT"))

    broken = tops("audit-verify", audit)

    assert (broken.exit_code, "line 2" in broken.stderr) == (1, True)
    assert tops("audit-verify", folder / "nothing").exit_code == 2


def test_no_command_prints_a_private_key(folder: Path) -> None:
    output = "".join(
        result.output + result.stderr
        for result in (
            tops("issue", "s1", "--dir", folder),
            tops("issue", "s1", "--dir", folder),
            tops("show", "--dir", folder),
            tops("show", "--dir", folder, "--format", "json"),
            tops("revoke", "s1", "--dir", folder),
        )
    )
    secrets = [
        line for path in folder.rglob("*.key") for line in path.read_text().splitlines() if "PRIVATE" not in line
    ]

    assert len(secrets) >= 2
    assert "PRIVATE" not in output
    assert not any(secret in output for secret in secrets)
