"""Keeps secrets out of logs: whatever looks like a secret is replaced before a record reaches any handler's output.

Two kinds are found: forms of text that contain a secret (URLs with a password, `password=…`, bearer tokens, PEM private
keys), and the exact values that the configuration registered when it read them. Every step is linear in the text.
"""

import logging
import re
from urllib.parse import quote, unquote

HIDDEN = "[hidden]"
REGISTERED_MIN = 4  # shorter values occur in ordinary words, where hiding them would reveal them

_WORDS = r"(?:password|passwd|passphrase|pwd|secret|token|api[_-]?key|private[_-]?key|authorization|credential)"
_ASSIGNED = re.compile(
    rf"({_WORDS}[\w-]{{0,32}}\\?[\"']?\s{{0,8}}(?:=>|=|:)\s{{0,8}})"
    r"(\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|(?:(?:bearer|basic)\s{1,8})?[^\s,;&)}\]]+)",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b((?:bearer|basic)\s{1,8})([A-Za-z0-9._~+/=-]{8,})", re.IGNORECASE)
_ASSIGNMENT_HINT = re.compile(_WORDS, re.IGNORECASE)
_PEM_BEGIN = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY-----")
_PEM_END = re.compile(r"-----END [A-Z0-9 ]{0,40}PRIVATE KEY-----")
_WHITESPACE = re.compile(r"(\s+)")

_registered: set[str] = set()


def register_secret(secret: str) -> None:
    """Hide this exact value wherever it occurs, as it is and in URL encoding."""
    for spelling in {secret, quote(secret, safe=""), unquote(secret)}:
        if len(spelling) >= REGISTERED_MIN:
            _registered.add(spelling)


def redact(text: str) -> str:
    """`text` without its secrets; in case of doubt text is hidden."""
    # Registered secrets come last: one of them may be a word such as "password", by which other secrets are found.
    words = {secret for secret in _registered if _ASSIGNMENT_HINT.fullmatch(secret)}
    text = _without_private_keys(_without(_registered - words, text))
    if "://" in text:
        text = "".join(_without_url_password(word) for word in _WHITESPACE.split(text))
    if _ASSIGNMENT_HINT.search(text):
        text = _ASSIGNED.sub(rf"\1{HIDDEN}", text)
    return _without(words, _BEARER.sub(rf"\1{HIDDEN}", text))


def _without(secrets: set[str], text: str) -> str:
    # The longest first: one secret may be the beginning of another.
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def _without_private_keys(text: str) -> str:
    kept, position = [], 0
    while (begin := _PEM_BEGIN.search(text, position)) is not None:
        end = _PEM_END.search(text, begin.end())
        kept += [text[position : begin.start()], HIDDEN]
        # Without an end marker the key may extend to the last character.
        position = len(text) if end is None else end.end()
    return "".join([*kept, text[position:]])


def _without_url_password(word: str) -> str:
    scheme_end = word.find("://")
    # The last "@": an unescaped password may contain one, and so may a list of several addresses.
    at = word.rfind("@")
    if scheme_end < 0 or at < 0:
        return word
    colon = word.find(":", scheme_end + 3, at)
    return word if colon < 0 else f"{word[: colon + 1]}{HIDDEN}{word[at:]}"


class RedactingFilter(logging.Filter):
    """Attach to handlers, not to loggers: a logger's filter does not see the records of its children."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            message = record.getMessage()
        except (TypeError, ValueError):
            # `logging` would print the arguments in its error about the format.
            message = f"a log message that does not fit its arguments: {record.msg!r}"
        record.msg, record.args = redact(message), None
        if record.exc_info:
            record.exc_text = redact(record.exc_text or _FORMATTER.formatException(record.exc_info))
            # Formatters print exc_text unchanged; with exc_info, some would format the error again, unredacted.
            record.exc_info = None
        if record.stack_info:
            record.stack_info = redact(record.stack_info)
        for name, value in record.__dict__.items():
            if name not in _STANDARD and isinstance(value, str):
                record.__dict__[name] = HIDDEN if _ASSIGNMENT_HINT.search(name) else redact(value)
        return True


_FORMATTER = logging.Formatter()
_STANDARD = frozenset(logging.LogRecord("", 0, "", 0, "", None, None).__dict__) | {"message", "asctime"}


def install_redaction(logger: logging.Logger | None = None) -> None:
    """Add the filter to every handler of `logger` (the root logger by default); a repeated call changes nothing."""
    for handler in (logger or logging.getLogger()).handlers:
        if not any(isinstance(present, RedactingFilter) for present in handler.filters):
            handler.addFilter(RedactingFilter())
