"""Subcommands that are loaded when they are called, so that no command waits for the imports of another."""

from collections.abc import Mapping
from importlib.metadata import EntryPoint
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from tops.cli.plugins import load, summary


def lazily(entries: Mapping[str, EntryPoint]) -> type[TyperGroup]:
    """A group of these subcommands, each a Typer or a function, to be passed to Typer as its `cls`."""

    class Lazy(TyperGroup):
        def __init__(self, **attributes: Any) -> None:
            listed = {name: TyperCommand(name) for name in sorted(entries)}
            super().__init__(**{**attributes, "commands": listed})

        def format_help(self, ctx: Any, formatter: Any) -> None:
            for name, command in self.commands.items():
                command.help = summary(entries[name])
                command.hidden = command.help is None  # not part of this installation
            super().format_help(ctx, formatter)

        def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
            name, command, rest = super().resolve_command(ctx, args)
            return name, _loaded(name, entries[name]) if name else command, rest

    return Lazy


def _loaded(name: str, entry: EntryPoint) -> Any:
    """The command itself."""
    found = load(entry)
    holder = typer.Typer(pretty_exceptions_enable=False)
    if isinstance(found, typer.Typer):
        holder.add_typer(found, name=name)
    else:
        holder.command(name)(found)
    holder.callback()(lambda: None)
    return typer.main.get_group(holder).commands[name]
