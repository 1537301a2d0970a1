"""The entry of the `tops` command: thin, one module per group of subcommands."""

import importlib
import sys

import typer

from tops.cli import bench, broker, keys, sim, tx
from tops.errors import NotReachable, TopsError

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
app.add_typer(bench.app, name="bench")
app.add_typer(broker.app, name="broker")
app.add_typer(keys.app, name="keys")
app.add_typer(sim.app, name="sim")
app.add_typer(tx.app, name="tx")


@app.callback()
def tops() -> None:
    """Database replication middleware built on transactional publish/subscribe."""


def main() -> None:
    """Run the command line; a refusal of the `TopsError` family is one line and exit code 2, 3 if nobody answers."""
    # By name: nothing else in this package knows of replication.
    importlib.import_module("replication.cli").register(app)
    try:
        app()
    except TopsError as error:
        print(f"tops: {error}", file=sys.stderr)
        sys.exit(3 if isinstance(error, NotReachable) else 2)
