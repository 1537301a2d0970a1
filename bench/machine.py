"""What the figures were measured on, and what the machine did meanwhile: processors, load, CPU time by process."""

import os
import platform
import tempfile
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

import psutil

CLIENT = "client"  # the role of our own process
PACKAGES = ("asyncpg", "uvloop", "aiohttp", "msgspec", "psutil", "tops-replication")


def describe_machine() -> dict[str, object]:
    """Enough to judge whether two result files may be compared."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "fdatasync_us": round(fdatasync_us(), 1),
        "load_average": load_average(),
    }


def package_versions() -> dict[str, str]:
    """Python and the packages that a client's speed depends on, where installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def load_average() -> float:
    """Of the last minute, whoever caused it: after a run it holds that run as well."""
    return round(os.getloadavg()[0], 2)


def fdatasync_us(writes: int = 50) -> float:
    """The median time of one 8 kB write and its fdatasync, where temporary files live."""
    block = b"\0" * 8192
    times: list[float] = []
    with tempfile.TemporaryFile() as file:
        for _ in range(writes):
            began = time.perf_counter()
            os.pwrite(file.fileno(), block, 0)
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - began)
    return median(times) * 1e6


class CpuMeter:
    """CPU seconds used by role from construction to `used()`; each role is a process with all its children.

    The processes are looked up once, at the start: a process that comes later is not seen, one that ends is dropped.
    """

    def __init__(self, roles: Mapping[str, int]) -> None:
        self._members = {CLIENT: [psutil.Process()], **{role: _family(pid) for role, pid in roles.items()}}
        self._before = self._read()
        self._machine_before = _machine_cpu_seconds()

    def used(self) -> dict[str, float]:
        return self._used(self._read())

    def used_by_others(self) -> float:
        """CPU seconds of everything else on the machine meanwhile: how far a measurement was disturbed."""
        everybody = _machine_cpu_seconds() - self._machine_before
        return max(everybody - sum(self._used(self._read()).values()), 0.0)

    def _used(self, after: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
        return {
            role: sum(spent - self._before[role][pid] for pid, spent in after[role].items()) for role in self._members
        }

    def _read(self) -> dict[str, dict[int, float]]:
        return {role: _cpu_seconds(members) for role, members in self._members.items()}


def _family(pid: int) -> list[psutil.Process]:
    try:
        head = psutil.Process(pid)
        return [head, *head.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _cpu_seconds(processes: list[psutil.Process]) -> dict[int, float]:
    spent: dict[int, float] = {}
    for process in processes:
        try:
            spent[process.pid] = _process_cpu_seconds(process)
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            continue
    return spent


def _process_cpu_seconds(process: psutil.Process) -> float:
    """To the nanosecond where the scheduler tells: of a hundred server processes that share the work of a few seconds,
    most would not have used up one of the kernel's coarse ticks."""
    threads = Path(f"/proc/{process.pid}/task")
    if not Path("/proc/self/schedstat").exists():
        times = process.cpu_times()
        return times.user + times.system
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads.iterdir()) / 1e9


def _machine_cpu_seconds() -> float:
    times = psutil.cpu_times()
    # Waiting for a disk and time that a hypervisor gave to others are no work of this machine.
    return sum(getattr(times, kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq"))


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
