"""Subcommands that are loaded when they are called: nobody waits for what another command needs."""

import importlib
from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

# Name -> where it is (`module:object`, a Typer or a function), and what `--help` says of it.
Places = Mapping[str, tuple[str, str]]


def lazily(places: Places) -> type[TyperGroup]:
    """A group of these subcommands, to be given to Typer as its `cls`."""

    class Lazy(TyperGroup):
        def __init__(self, **attributes: Any) -> None:
            listed = {name: TyperCommand(name, help=text) for name, (_, text) in places.items()}
            super().__init__(**{**attributes, "commands": listed})

        def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
            name, command, rest = super().resolve_command(ctx, args)
            return name, loaded(name, places[name][0]) if name else command, rest

    return Lazy


def loaded(name: str, place: str) -> Any:
    """The command itself."""
    module, _, attribute = place.partition(":")
    found = getattr(importlib.import_module(module), attribute)
    holder = typer.Typer(pretty_exceptions_enable=False)
    if isinstance(found, typer.Typer):
        holder.add_typer(found, name=name)
    else:
        holder.command(name)(found)
    holder.callback()(lambda: None)
    return typer.main.get_group(holder).commands[name]
