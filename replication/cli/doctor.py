"""`tops doctor`: what would go wrong with a replica set, before it does."""

from pathlib import Path
from typing import Annotated

import typer
import uvloop

from replication.cli.data import ConfigOption, Format, FormatOption, KeysOption, show
from replication.model.config import Cluster
from replication.operations.doctor import examine
from replication.operations.login_grants import grants_text


def doctor(
    name: Annotated[str, typer.Argument(help="The replica set.")],
    config: ConfigOption = Path("tops.toml"),
    keys: KeysOption = None,
    format: FormatOption = Format.TABLE,
    print_grants: Annotated[
        bool, typer.Option("--print-grants", help="Print the SQL that makes the set's logins, and do nothing else.")
    ] = False,
) -> None:
    """Check primary keys, schemas, settings, clocks, versions and privileges; exit 1 if something is wrong."""
    cluster = Cluster.load(config)
    if print_grants:
        for line in grants_text(cluster.replica_set(name)):
            print(line)
        return
    findings = uvloop.run(examine(cluster, cluster.replica_set(name), keys))
    show([{"level": f.level, "replica": f.replica, "finding": f.text, "remedy": f.remedy} for f in findings], format)
    if any(f.level == "error" for f in findings):
        raise typer.Exit(1)
