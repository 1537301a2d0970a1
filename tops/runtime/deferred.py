"""Names of a package that are imported at their first use, so that commands that do not use them start fast."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def deferred(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """A `__getattr__` for the package that finds these names in these modules."""

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(modules[name]), name)
        setattr(sys.modules[package], name, found)  # found without this function the next time
        return found

    return find
