"""Texts of dates and times that mean the same wherever and whenever they are read."""

import re

_WORD = re.compile(r"[^\W\d_]+")
# Whatever else has letters may be a clock ('now', 'today'), or a time zone, whose rules are data of the server's.
_FIXED_WORDS = frozenset({"t", "z", "bc", "ad", "am", "pm", "infinity", "epoch", "null", "empty"})
_CLOCKS = frozenset({"now", "today", "tomorrow", "yesterday"})
_PLAIN_LITERAL = re.compile(rb"'([^'\\]*)'(?!(?:\s|--[^\n]*\n)*')")


def is_fixed_time(text: str) -> bool:
    """Whether a text, read under pinned settings as a date or time, a range or an array of them, needs no clock and no
    time zone data: digits and marks, and a few words that are the same for ever."""
    return all(word in _FIXED_WORDS for word in _WORD.findall(text.lower()))


def names_a_clock(text: str) -> bool:
    """Whether one of the words in a text may be a clock's, in a row whose other fields hold words as well."""
    return any(word in _CLOCKS for word in _WORD.findall(text.lower()))


def literal_at(sql: bytes, location: int) -> str | None:
    """The plain string literal at that byte of a statement; None if there is something else, or more of it follows."""
    found = _PLAIN_LITERAL.match(sql, location) if location >= 0 else None
    return found[1].decode(errors="replace") if found is not None else None
