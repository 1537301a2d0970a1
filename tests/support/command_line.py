"""The command line as users run it: in a process of its own, from this checkout."""

import asyncio
import os
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from pathlib import Path

from replication.model.config import Cluster

ROOT = Path(__file__).parents[2]
TOPS = (sys.executable, "-m", "tops")


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a process needs to find this checkout and its packages."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *(p for p in sys.path if p)]), **(more or {})}


async def tops(
    *arguments: str, cwd: Path | None = None, environ: Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    """Run a command to its end: exit code, output, errors."""
    process = await started(*arguments, cwd=cwd, environ=environ)
    out, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), errors.decode()


async def tops_of(cluster: Cluster, *arguments: str) -> tuple[int, str, str]:
    """Run a command with a cluster's file to its end."""
    return await tops(*arguments, "-c", str(cluster.path))


async def started(*arguments: str, cwd: Path | None = None, environ: Mapping[str, str] | None = None) -> Process:
    """Start a command; whoever starts it ends it."""
    return await asyncio.create_subprocess_exec(
        *TOPS, *arguments, cwd=cwd, stdout=PIPE, stderr=PIPE, env=environment(environ)
    )


def tops_blocking(
    *arguments: str, cwd: Path, timeout_s: float = 240.0, environ: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end where there is no event loop."""
    command = [*TOPS, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, timeout=timeout_s, env=environment(environ), check=False
    )


async def says(process: Process, text: str, timeout_s: float = 120.0) -> None:
    """Wait for a line on standard error that has this text."""
    assert process.stderr is not None
    said = []
    async with asyncio.timeout(timeout_s):
        while line := (await process.stderr.readline()).decode():
            said.append(line)
            if text in line:
                return
    raise AssertionError(f"{text!r} was not said, but: {''.join(said)}")
