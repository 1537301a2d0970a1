"""The `tops` commands of the replication layer: thin, one module per group."""

import typer

from replication.cli import data, demo, doctor, replica, rs, up
from replication.divergence.cli import app as divergence


def register(app: typer.Typer) -> None:
    """Add the commands of this layer to the command line."""
    app.add_typer(divergence, name="divergence")
    app.add_typer(replica.app, name="replica")
    app.add_typer(rs.app, name="rs")
    app.command("up")(up.up)
    app.command("write")(data.write)
    app.command("read")(data.read)
    app.command("doctor")(doctor.doctor)
    app.command("demo")(demo.demo)
