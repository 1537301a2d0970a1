"""What happened in a run, line by line; equal seeds give equal traces, which a hash makes cheap to compare."""

import hashlib


class Trace:
    """Lines of a run. Only the hash is kept unless somebody is going to read them."""

    def __init__(self, keep: bool) -> None:
        self.keep = keep
        self.lines: list[str] = []
        self._hash = hashlib.sha256()

    def add(self, now: float, node: str, what: str, detail: object = None) -> None:
        """`detail` is for readers only: it costs time to print, and sets inside it have no order of their own."""
        line = f"{now:10.4f}  {node:<10}  {what}"
        self._hash.update(line.encode())
        if self.keep:
            self.lines.append(line if detail is None else f"{line} {detail}")

    def digest(self) -> str:
        return self._hash.hexdigest()
