import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from tops.model.errors import AuditBroken, ConfigError
from tops.security import AuditLog, register_secret, verify_audit
from tops.security.audit import GENESIS, TEXT_MAX


def write(path: Path, count: int) -> None:
    with AuditLog(path, 0.0) as log:
        for n in range(count):
            log.administered(float(n), who="admin", act=f"act {n}")


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_a_log_verifies_and_goes_on_after_it_was_closed(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    write(path, 3)
    write(path, 2)

    found = verify_audit(path)

    assert (found.records, found.torn_bytes) == (5, 0)
    assert [line["number"] for line in lines(path)] == [1, 2, 3, 4, 5]
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_empty_log_has_the_first_hash_as_its_head(tmp_path: Path) -> None:
    AuditLog(tmp_path / "audit.log", 0.0).close()

    assert verify_audit(tmp_path / "audit.log").head == GENESIS


@pytest.mark.parametrize("byte", range(5, 900, 41))
def test_a_flipped_bit_anywhere_but_in_the_last_line_is_found(tmp_path: Path, byte: int) -> None:
    path = tmp_path / "audit.log"
    write(path, 6)
    content = bytearray(path.read_bytes())
    assert byte < content.rindex(b"\n", 0, -1)
    content[byte] ^= 1
    path.write_bytes(content)

    with pytest.raises(AuditBroken, match="line"):
        verify_audit(path)


@pytest.mark.parametrize("removed", [0, 1, 2])
def test_a_removed_line_is_found(tmp_path: Path, removed: int) -> None:
    path = tmp_path / "audit.log"
    write(path, 4)
    kept = path.read_bytes().splitlines(keepends=True)
    del kept[removed]
    path.write_bytes(b"".join(kept))

    with pytest.raises(AuditBroken, match=f"line {removed + 1}"):
        verify_audit(path)


def test_a_cut_or_changed_end_is_found_with_a_head_that_was_noted(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    write(path, 4)
    head = verify_audit(path).head
    whole = path.read_bytes()
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))

    assert verify_audit(path).records == 3
    with pytest.raises(AuditBroken, match="cut off"):
        verify_audit(path, head)
    path.write_bytes(whole.replace(b"act 3", b"act 9"))
    with pytest.raises(AuditBroken, match="cut off"):
        verify_audit(path, head)


def test_a_noted_head_is_still_found_after_more_was_written(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    write(path, 2)
    head = verify_audit(path).head
    write(path, 2)

    assert verify_audit(path, head).records == 4


def test_every_torn_end_is_cut_off_recorded_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    write(path, 2)
    whole = path.read_bytes()
    second = len(whole.splitlines(keepends=True)[0])

    for length in range(second + 1, len(whole)):
        path.write_bytes(whole[:length])
        with AuditLog(path, 7.0) as log:
            log.administered(8.0, who="admin", act="after the crash")

        assert verify_audit(path).records == 3
        assert [line["kind"] for line in lines(path)] == ["administered", "recovered", "administered"]


def append_until_killed(path: Path, pipe_end: int) -> None:
    with AuditLog(path, 0.0) as log:
        for n in range(10**9):
            log.denied(float(n * 60), who="mallory", act=f"publish type{n}")
            if n == 50:
                os.write(pipe_end, b"x")


def test_the_chain_verifies_after_the_writer_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    reader, writer = os.pipe()
    process = multiprocessing.get_context("fork").Process(target=append_until_killed, args=(path, writer))
    process.start()
    assert os.read(reader, 1) == b"x"

    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    os.close(reader)
    os.close(writer)

    assert verify_audit(path).records > 50
    write(path, 1)
    assert verify_audit(path).torn_bytes == 0


def test_a_broken_log_is_not_written_to(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    write(path, 3)
    broken = path.read_bytes().replace(b"act 1", b"act 7")
    path.write_bytes(broken)

    with pytest.raises(AuditBroken):
        AuditLog(path, 0.0)

    assert path.read_bytes() == broken


def test_two_writers_of_one_log_are_refused(tmp_path: Path) -> None:
    with AuditLog(tmp_path / "audit.log", 0.0), pytest.raises(ConfigError, match="another process"):
        AuditLog(tmp_path / "audit.log", 0.0)


def test_a_flood_of_denials_is_counted_rather_than_written(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    with AuditLog(path, 0.0, denials_per_minute=10) as log:
        for _ in range(1000):
            log.denied(1.0, who="mallory", act="publish payroll")
        log.denied(1.0, who="alice", act="publish payroll")
        for _ in range(5):
            log.denied(1.0, who="mallory", act="publish payroll")

    written = lines(path)

    assert [line["who"] for line in written] == ["mallory"] * 10 + ["alice", ""]
    assert len(written) - 1 + sum(int(str(line["left_out"])) for line in written) == 1006


def test_hostile_text_stays_in_its_field_and_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    hostile = 'x"}\n{"number":2}\n\ud800' + "y" * 10_000
    with AuditLog(path, 0.0) as log:
        log.denied(0.0, who=hostile, act=hostile, detail=hostile)

    assert verify_audit(path).records == 1
    assert len(str(lines(path)[0]["who"])) <= TEXT_MAX + 5


def test_no_secret_reaches_the_file(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    register_secret("canary-registered-81f3")
    with AuditLog(path, 0.0) as log:
        log.denied(0.0, who="s1", act="connect", detail="dsn postgresql://u:canary-dsn@h/db")
        log.administered(
            0.0, who="s1", act="apply password=canary-word", detail="x" * 478 + " postgresql://u:canary-cut@h"
        )
        log.denied(0.0, who="canary-registered-81f3", act="-----BEGIN PRIVATE KEY-----canary-pem")

    assert "canary" not in path.read_text()
