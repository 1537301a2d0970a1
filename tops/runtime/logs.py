"""Structured logs: one JSON object per line, with the node's name and, where there is one, the transaction's id."""

import logging
import sys
from typing import Any, TextIO

import msgspec

from tops.security import RedactingFilter

_STANDARD = frozenset(logging.LogRecord("", 0, "", 0, "", (), None).__dict__) | {"message", "asctime", "taskName"}
_encoder = msgspec.json.Encoder(enc_hook=str)


class JsonFormatter(logging.Formatter):
    """Formats a log record with everything that was passed as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "at": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "text": record.getMessage(),
        }
        fields.update({k: v for k, v in record.__dict__.items() if k not in _STANDARD})
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return _encoder.encode(fields).decode()


def configure_logging(level: str = "INFO", stream: TextIO | None = None) -> None:
    """Send the logs of this process to `stream`, standard error by default, with secrets hidden."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    handler.addFilter(RedactingFilter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
