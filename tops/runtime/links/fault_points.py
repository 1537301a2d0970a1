"""Points at which a test freezes this process, so that it can be killed at an exact step; absent in every other run.

With `TOPS_FAULT_POINTS=DIRECTORY` in the environment, a file `arm` there names a kind of message and a count:
`EpochDecided 2`. The process renames the file to `reached` and stops itself (SIGSTOP) right before it sends the second
frame with such a message. The test that armed the point kills the process or continues it.
"""

import os
import signal
from pathlib import Path

VARIABLE = "TOPS_FAULT_POINTS"


class FaultPoint:
    """The armed point of this process, if there is one."""

    def __init__(self, directory: Path) -> None:
        self._armed, self._reached = directory / "arm", directory / "reached"
        self._wanted, self._seen = "", 0

    def leaving(self, frame: bytes) -> None:
        """A frame is about to be written to a connection."""
        try:
            wanted = self._armed.read_text()
        except FileNotFoundError:
            return
        if wanted != self._wanted:
            self._wanted, self._seen = wanted, 0
        kind, _, count = wanted.partition(" ")
        if kind.encode() not in frame:
            return
        self._seen += 1
        if self._seen == int(count):
            self._wanted = ""
            self._armed.rename(self._reached)
            os.kill(os.getpid(), signal.SIGSTOP)


def fault_point() -> FaultPoint | None:
    """The fault point that the environment names; None outside of tests."""
    directory = os.environ.get(VARIABLE)
    return None if directory is None else FaultPoint(Path(directory))
