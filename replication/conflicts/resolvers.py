"""Resolvers of the user's own, by name."""

import importlib
from collections.abc import Callable

from adapters.changes import Row
from tops.model.errors import ConfigError

OwnFunction = Callable[[str, Row, Row, Row, str, str], Row]
"""`resolve(table, key, kept, came, kept_site, came_site)` returns the row's columns.

It must be pure, and give the same row whichever of the two versions was there first."""


def own_function(resolver: str) -> OwnFunction | None:
    """The function behind `module:function`; None for the resolvers that are built in."""
    if ":" not in resolver:
        return None
    module, _, name = resolver.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"resolver {resolver!r} can't be loaded: {error}") from None
    if not callable(found):
        raise ConfigError(f"resolver {resolver!r} is no function")
    function: OwnFunction = found
    return function
