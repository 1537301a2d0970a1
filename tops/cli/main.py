"""The entry of the `tops` command: thin, one module per group of subcommands."""

import typer

from tops.cli import bench, broker, keys

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
app.add_typer(broker.app, name="broker")
app.add_typer(keys.app, name="keys")


@app.callback()
def tops() -> None:
    """Database replication middleware built on transactional publish/subscribe."""


app.add_typer(bench.app, name="bench")


def main() -> None:
    """Run the command line; refusals of the `TopsError` family become one line and exit code 2."""
    app()
