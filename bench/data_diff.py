"""data-diff, the open-source table comparer, in a virtual environment of its own, run through its Python API."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

# Its command-line and dbt parts are left out: dbt-core need not install for two tables to be compared.
_NEEDS = (
    "attrs",
    "click",
    "dsnparse<0.2",
    "keyring",
    "mashumaro[msgpack]>=2.9,<3.11",
    "packaging",
    "psycopg2-binary",
    "pydantic",
    "requests",
    "rich",
    "runtype",
    "tabulate",
    "toml",
    "typing_extensions",
    "urllib3",
)
_PROGRAM = """
import json, sys, time
from data_diff import connect_to_table, diff_tables
first, second, table, key, columns, factor, threads = sys.argv[1:]
began = time.perf_counter()
sides = [
    connect_to_table(dsn, table, key_columns=key, extra_columns=tuple(columns.split(",")), thread_count=int(threads))
    for dsn in (first, second)
]
keys = {row[0] for _, row in diff_tables(*sides, bisection_factor=int(factor))}
print(json.dumps({"seconds": time.perf_counter() - began, "keys": len(keys)}))
"""
BISECTION_FACTOR = 1024  # its fastest setting on these tables
THREADS = 4


def install() -> Path:
    """The Python of data-diff's environment; made on first use, in the user's cache."""
    home = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "tops" / "data-diff"
    python = home / "bin" / "python"
    ready = home / "ready"
    if not ready.exists():
        venv.create(home, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--no-deps", "data-diff"], check=True, stdout=sys.stderr)
        subprocess.run([*pip, *_NEEDS], check=True, stdout=sys.stderr)
        ready.touch()
    return python


def version(python: Path) -> str:
    program = "from importlib.metadata import version; print(version('data-diff'))"
    return subprocess.run([python, "-c", program], check=True, capture_output=True, text=True).stdout.strip()


def compare(python: Path, dsns: tuple[str, str], table: str, key: str, columns: str) -> dict[str, Any]:
    """Seconds and differing keys of one comparison; the start of Python is not counted."""
    arguments = [*dsns, table, key, columns, str(BISECTION_FACTOR), str(THREADS)]
    done = subprocess.run([python, "-c", _PROGRAM, *arguments], check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found
