"""Patterns on the names of event types: a small grammar of our own, matched in linear time.

A name is segments joined by dots, `shop.orders.eu`. In a pattern

    *    stands for any characters of one segment, also none:  shop.*  shop.ord*  *.orders.*
    **   as the last segment stands for the rest, also none:   shop.**  matches shop and all below it;  ** is all

Everything else stands for itself. There is no escape: no rule can match a name with an asterisk or with an invisible
character, so no identity has a right to it.
"""

from dataclasses import dataclass, field

from tops.model.errors import ConfigError

NAME_MAX = 255
EVERYTHING = "**"


def is_type_name(name: str) -> bool:
    """Whether rules can match `name`; no identity has a right to an event type of another name."""
    return 0 < len(name) <= NAME_MAX and name.isprintable() and "*" not in name


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern that has been read once and matches many names."""

    text: str
    _segments: tuple[tuple[str, ...], ...] = field(init=False, repr=False, compare=False)
    _open_ended: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        segments = self.text.split(".")
        open_ended = segments[-1] == "**"
        if open_ended:
            segments.pop()
        # With the asterisks replaced it must be a name: that accepts exactly the patterns that can match one.
        if any("**" in segment for segment in segments) or not is_type_name(self.text.replace("*", "x")):
            raise ConfigError(
                f"pattern {self.text[:200]!r} is not usable: segments joined by dots, `*` within a segment, "
                f"`**` only as the last one, at most {NAME_MAX} characters"
            )
        object.__setattr__(self, "_segments", tuple(tuple(segment.split("*")) for segment in segments))
        object.__setattr__(self, "_open_ended", open_ended)

    def matches(self, name: str) -> bool:
        segments = name.split(".")
        if len(segments) != len(self._segments) and not (self._open_ended and len(segments) > len(self._segments)):
            return False
        return all(_segment_matches(pieces, segment) for pieces, segment in zip(self._segments, segments, strict=False))


def _segment_matches(pieces: tuple[str, ...], segment: str) -> bool:
    """`pieces` are what stands between the asterisks: the first and last at the ends, the others in order."""
    if len(pieces) == 1:
        return segment == pieces[0]
    first, *middle, last = pieces
    if len(segment) < len(first) + len(last) or not (segment.startswith(first) and segment.endswith(last)):
        return False
    position, end = len(first), len(segment) - len(last)
    for piece in middle:
        # The leftmost match leaves the most characters for the rest, so no backtracking is needed.
        found = segment.find(piece, position, end)
        if found < 0:
            return False
        position = found + len(piece)
    return True
