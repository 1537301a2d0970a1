"""The entry of the `tops` command: thin, one module per group of subcommands, each loaded when it is called."""

import importlib
import sys
from importlib import metadata
from typing import Annotated

import typer

from tops.cli.lazy import lazily
from tops.model.errors import NotReachable, TopsError

COMMANDS = {
    "bench": ("tops.cli.bench:app", "Measure TOPS and its peers; both sides alternate in one run."),
    "broker": ("tops.cli.broker:app", "One broker of a cluster, in the foreground."),
    "console-url": ("tops.cli.console_url:console_url", "A one-time address for a browser, where there are no keys."),
    "keys": ("tops.cli.keys:app", "The cluster's authority, and the certificates of its nodes."),
    "sim": ("tops.cli.sim:app", "Whole clusters of the real machines, simulated, with faults."),
    "tx": ("tops.cli.tx:app", "Transactions that brokers coordinate, those in doubt first."),
    # By name: nothing else in this package knows of replication.
    **importlib.import_module("replication.cli").COMMANDS,
}

app = typer.Typer(cls=lazily(COMMANDS), no_args_is_help=True, pretty_exceptions_enable=False)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(metadata.version("tops-replication"))
        raise typer.Exit


@app.callback()
def tops(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Database replication middleware built on transactional publish/subscribe."""


def main() -> None:
    """Run the command line; a refusal of the `TopsError` family is one line and exit code 2, 3 if nobody answers."""
    try:
        app()
    except TopsError as error:
        print(f"tops: {error}", file=sys.stderr)
        sys.exit(3 if isinstance(error, NotReachable) else 2)
