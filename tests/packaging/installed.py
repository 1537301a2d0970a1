"""The product as its users install it: a wheel built from a copy of the tree, in a virtual environment that has the
packages of its base requirements and no others."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from itertools import takewhile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PACKAGES = ("tops", "replication", "adapters")
OTHERS = ("bench", "compose", "tests", "examples")  # copied too: they must be left out by the build, not by us
FILES = ("pyproject.toml", "README.md", "LICENSE")
SETUPTOOLS_MIN = Version("77")


def build_wheel(folder: Path) -> Path:
    """The wheel that pip makes of this tree. It is built in a copy: builds leave files behind."""
    tree = folder / "tree"
    for name in (*PACKAGES, *OTHERS):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, tree / name)
    # Without isolation nothing is downloaded, where the tools for a build are there.
    new_enough = Version(metadata.version("setuptools")) >= SETUPTOOLS_MIN
    _pip("wheel", "--no-deps", *(["--no-build-isolation"] if new_enough else []), "-w", str(folder), str(tree))
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """A fresh environment with the wheel and its base requirements; returns its folder of programs."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    _pip("--python", str(folder / "bin" / "python"), "install", "--no-deps", str(wheel))
    (site_packages,) = folder.glob("lib/*/site-packages")
    (ours,) = (d for d in metadata.distributions(path=[str(site_packages)]) if d.name == "tops-replication")
    for distribution in _closure(ours.requires or ()):
        for name in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            (site_packages / name).symlink_to(Path(str(distribution.locate_file(name))))
    return folder / "bin"


def _closure(requirements: Iterable[str]) -> Iterator[metadata.Distribution]:
    """The distributions, from this test's own environment, that these requirements bring without any extra of ours."""
    seen: set[str] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop()
        extras = requirement.extras or {""}
        name = canonicalize_name(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if name not in seen:
            seen.add(name)
            distribution = metadata.distribution(name)
            yield distribution
            needed = map(Requirement, distribution.requires or ())
            waiting += [r for r in needed if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in extras)]


def run(program: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """One of the environment's programs, to its end."""
    return subprocess.run(
        [str(program), *arguments], cwd=cwd, env=_environment(cwd), capture_output=True, text=True, check=False
    )


@contextmanager
def running(program: Path, *arguments: str, cwd: Path, until: str) -> Iterator[None]:
    """One of the environment's programs, from the line on standard error that has `until`."""
    process = subprocess.Popen(
        [str(program), *arguments], cwd=cwd, env=_environment(cwd), stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        said = list(takewhile(lambda line: until not in line, process.stderr))
        assert process.poll() is None, "".join(said)
        yield
    finally:
        process.terminate()
        process.communicate()


def _environment(home: Path) -> dict[str, str]:
    """Nothing in it leads to the checkout."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**kept, "COLUMNS": "100", "XDG_STATE_HOME": str(home / "state")}


def _pip(*arguments: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
