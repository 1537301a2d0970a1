"""What happened in a run, line by line; equal seeds give equal traces, which a hash makes cheap to compare."""

import hashlib

import msgspec

Fact = tuple[float, str, str, str]  # time, node, text, and the receiver of a message


class Trace:
    """Facts of a run; they become lines and a hash only when these are requested."""

    def __init__(self, keep: bool) -> None:
        self.keep = keep
        self._facts: list[Fact] = []
        self._details: list[object] = []

    def add(self, now: float, node: str, what: str, detail: object = None, to: str = "") -> None:
        """`detail` is for readers only: it costs time to print, and sets inside it have no order of their own."""
        self._facts.append((now, node, what, to))
        if self.keep:
            self._details.append(detail)

    @property
    def lines(self) -> list[str]:
        """The facts as readable lines; empty unless the trace is kept."""
        return [_line(fact, detail) for fact, detail in zip(self._facts, self._details, strict=False)]

    def digest(self) -> str:
        return hashlib.sha256(msgspec.msgpack.encode(self._facts)).hexdigest()


def _line(fact: Fact, detail: object) -> str:
    now, node, what, to = fact
    words = f"-> {to}: {what}" if to else what
    line = f"{now:10.4f}  {node:<10}  {words}"
    return line if detail is None else f"{line} {detail}"
