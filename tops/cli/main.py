"""The entry of the `tops` command: thin, one module per group of subcommands."""

import typer

from replication.divergence.cli import app as divergence

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
app.add_typer(divergence, name="divergence")


@app.callback()
def tops() -> None:
    """Database replication middleware built on transactional publish/subscribe."""


def main() -> None:
    """Run the command line; refusals of the `TopsError` family become one line and exit code 2."""
    app()
