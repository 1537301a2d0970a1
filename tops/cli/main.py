"""The `tops` command: subcommands are entry points of installed packages, each loaded when it is called."""

import sys
from importlib import metadata
from typing import Annotated, NoReturn

import typer

from tops.cli.lazy import lazily
from tops.cli.plugins import DISTRIBUTION, commands, missing_extra
from tops.model.errors import NotReachable, TopsError

COMMANDS = commands()

app = typer.Typer(cls=lazily(COMMANDS), no_args_is_help=True, pretty_exceptions_enable=False)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(metadata.version(DISTRIBUTION))
        raise typer.Exit


@app.callback()
def tops(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Database replication middleware built on transactional publish/subscribe."""


def main() -> None:
    """Run the command line; a `TopsError` is one line and exit code 2, or 3 if a node is not reachable."""
    try:
        app()
    except TopsError as error:
        _end(error)
    except ModuleNotFoundError as error:
        missing = missing_extra(error)
        if missing is None:
            raise
        _end(missing)


def _end(error: TopsError) -> NoReturn:
    print(f"tops: {error}", file=sys.stderr)
    sys.exit(3 if isinstance(error, NotReachable) else 2)
