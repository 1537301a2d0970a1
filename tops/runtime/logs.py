"""Structured logs, with the node's name and, where there is one, the transaction's id.

On a terminal a line is text for people; elsewhere it is one JSON object, for programs. Times are ISO 8601, in UTC.
"""

import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec

from tops.security import RedactingFilter

_STANDARD = frozenset(logging.LogRecord("", 0, "", 0, "", (), None).__dict__) | {"message", "asctime", "taskName"}
_encoder = msgspec.json.Encoder(enc_hook=str)


class _Formatter(logging.Formatter):
    def error_of(self, record: logging.LogRecord) -> str:
        """The traceback; one that the redaction has formatted is printed as it is."""
        return record.exc_text or (self.formatException(record.exc_info) if record.exc_info else "")


class JsonFormatter(_Formatter):
    """Formats a log record with everything that was passed as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "at": _time_of(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "text": record.getMessage(),
        }
        fields.update(_extra(record))
        if error := self.error_of(record):
            fields["error"] = error
        return _encoder.encode(fields).decode()


class TextFormatter(_Formatter):
    """The same as a line for people; a traceback follows it."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={_shown(value)}" for name, value in _extra(record).items())
        line = f"{_time_of(record)} {record.levelname:<8} {record.getMessage()}{fields}"
        error = self.error_of(record)
        return f"{line}\n{error}" if error else line


def _time_of(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in record.__dict__.items() if name not in _STANDARD}


def _shown(value: object) -> str:
    text = str(value)
    return repr(text) if not text or any(c.isspace() for c in text) else text


def configure_logging(level: str = "INFO", stream: TextIO | None = None) -> None:
    """Send the logs of this process to `stream`, standard error by default, with secrets hidden."""
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(TextFormatter() if stream.isatty() else JsonFormatter())
    handler.addFilter(RedactingFilter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
