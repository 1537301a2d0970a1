"""Extensions of other packages to the command line and to brokers: entry points of installed distributions.

This is the only way from `tops` to packages above it. Nothing is imported before it is needed; the texts of `--help`
are read from the commands' sources.
"""

import ast
import re
from collections.abc import Callable, Mapping
from importlib import metadata
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint, PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tops.model.errors import ConfigError, MissingExtra

DISTRIBUTION = "tops-replication"
COMMANDS = "tops.commands"  # a Typer or a function each
# Called with the cluster's file and a broker's name, each has `add_to` and `policy_of`.
BROKER_ROUTES = "tops.broker_routes"
_NEEDED_BY_EXTRA = re.compile(r"""([\w.-]+).*;.*\bextra\s*==\s*['"]([\w.-]+)['"]""")


def commands() -> Mapping[str, EntryPoint]:
    """The subcommands, by name."""
    found = {entry.name: entry for entry in metadata.entry_points(group=COMMANDS)}
    if not found:
        raise ConfigError(
            f"no command is registered: install {DISTRIBUTION} again, its metadata are of another version"
        )
    return found


def broker_routes() -> list[Callable[[Path, str], Any]]:
    """What adds routes to a broker's HTTP side, and knows the policies of replica sets."""
    return [load(entry) for entry in metadata.entry_points(group=BROKER_ROUTES)]


def load(entry: EntryPoint) -> Any:
    """The object of an entry point; ConfigError if its package is not part of this installation."""
    try:
        return entry.load()
    except ModuleNotFoundError as error:
        if error.name is None or not f"{entry.module}.".startswith(f"{error.name}."):
            raise
        package = entry.module.partition(".")[0]
        raise ConfigError(
            f"{entry.name!r} is not installed: the package {package!r} is part of the repository, "
            "run the command from a checkout"
        ) from error


def summary(entry: EntryPoint) -> str | None:
    """The first sentence about a command, from the docstring of its function or else of its module; None: no file.

    A module's docstring begins with the command's name, which is removed: the list of commands shows it already.
    """
    file = _source(entry.module)
    if file is None:
        return None
    module = ast.parse(file.read_text())
    functions = (node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == entry.attr)
    docstring = " ".join((ast.get_docstring(next(functions, module)) or "").split())
    sentence = re.sub(r"^`[^`]*`: ", "", docstring).partition(". ")[0].removesuffix(".")
    return f"{sentence[:1].upper()}{sentence[1:]}."


def _source(module: str) -> Path | None:
    package, *inner = module.split(".")
    spec: ModuleSpec | None = find_spec(package)  # of a package at the top, this imports nothing
    for folder in (spec and spec.submodule_search_locations) or ():
        file = Path(folder, *inner).with_suffix(".py")
        if file.exists():
            return file
    return None


def missing_extra(error: ModuleNotFoundError) -> MissingExtra | None:
    """The extra that installs the module, if there is one."""
    module = (error.name or "").partition(".")[0]
    try:
        requirements = metadata.requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return None
    for requirement in requirements:
        needed = _NEEDED_BY_EXTRA.match(requirement)
        if needed is not None and re.sub(r"[-_.]+", "_", needed[1]).lower() == module:
            return MissingExtra(needed[2], module)
    return None
