"""Logs: text on a terminal, JSON elsewhere, ISO times in UTC."""

import io
import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from tops.runtime.logs import configure_logging


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def logged(stream: io.StringIO) -> str:
    configure_logging("info", stream)
    logging.getLogger("tops.test").info("linked", extra={"node": "b1", "reason": "it was away"})
    return stream.getvalue()


def test_elsewhere_than_on_a_terminal_a_line_is_json_with_an_iso_time() -> None:
    line = json.loads(logged(io.StringIO()))

    at = datetime.fromisoformat(line.pop("at"))
    assert at.tzinfo is not None and abs((datetime.now(UTC) - at).total_seconds()) < 60
    assert line == {"level": "info", "logger": "tops.test", "text": "linked", "node": "b1", "reason": "it was away"}


def test_on_a_terminal_a_line_is_text() -> None:
    at, _, rest = logged(Terminal()).partition(" ")

    assert at.endswith("Z") and datetime.fromisoformat(at)
    assert rest == "INFO     linked node=b1 reason='it was away'\n"


def failed(stream: io.StringIO) -> str:
    configure_logging("info", stream)
    try:
        raise ValueError("no such thing")
    except ValueError:
        logging.getLogger("tops.test").exception("it failed")
    return stream.getvalue()


def test_on_a_terminal_a_traceback_follows_its_line() -> None:
    first, *rest = failed(Terminal()).splitlines()

    assert first.endswith("ERROR    it failed")
    assert rest[-1] == "ValueError: no such thing"


def test_in_json_a_traceback_is_a_field() -> None:
    line = json.loads(failed(io.StringIO()))

    assert line["text"] == "it failed" and line["error"].endswith("ValueError: no such thing")


def test_secrets_are_hidden_on_a_terminal_too() -> None:
    stream = Terminal()
    configure_logging("info", stream)

    logging.getLogger("tops.test").info("connected", extra={"dsn": "postgresql://shop:hunter2@db/shop"})

    assert "hunter2" not in stream.getvalue()
