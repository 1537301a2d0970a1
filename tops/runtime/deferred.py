"""Names of a package that are imported when they are first used: a command that needs none of them need not wait."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def deferred(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """A `__getattr__` for the package that finds these names in these modules."""

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(places[name]), name)
        setattr(sys.modules[package], name, found)  # the next time it is simply there
        return found

    return find
