"""`tops write` and `tops read`: one write, one read, from the command line."""

import json
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop
from rich.console import Console
from rich.table import Table

from replication.client.reads import Consistency
from replication.client.replica_set import ReplicaSet, connect, connect_by_file
from replication.client.writes import WriteResult
from replication.model.config import Cluster
from replication.rpc.rejections import ChangeNotProved, WriteRejected
from tops.model.errors import OutcomeUnknown

ConfigOption = Annotated[Path, typer.Option("-c", "--config", help="The cluster's file.")]
UrlOption = Annotated[str | None, typer.Option("--url", help="A broker's address, instead of the file.")]
KeysOption = Annotated[
    Path | None, typer.Option("--keys", envvar="TOPS_KEYS", help="The folder of your keys, where the cluster has keys.")
]


class Format(Enum):
    TABLE = "table"
    JSON = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="How to print.")]


def opened(name: str, config: Path, url: str | None, keys: Path | None) -> AbstractAsyncContextManager[ReplicaSet]:
    """The set, through the broker at `url`, or through any that the file names."""
    if url is not None:
        return connect(url, name, keys=keys)
    cluster = Cluster.load(config)
    cluster.replica_set(name)  # a name that the file does not have is refused before anybody is asked
    return connect_by_file(cluster, name, keys=keys)


def argument(text: str) -> Any:
    """A number, true, false or null as JSON has them; anything else is text."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return text if isinstance(value, dict | list) else value


def write(
    name: Annotated[str, typer.Argument(help="The replica set.")],
    sql: Annotated[str, typer.Option("--sql", help="One statement, with $1, $2, … for the arguments.")],
    arg: Annotated[list[str] | None, typer.Option("--arg", help="An argument; as many as the statement has.")] = None,
    key: Annotated[str, typer.Option("--key", help="An idempotency key: writing twice does it once.")] = "",
    config: ConfigOption = Path("tops.toml"),
    url: UrlOption = None,
    keys: KeysOption = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Write one statement as one transaction; exit 1 if it was refused, 2 if it can't be replicated at all."""

    async def run() -> WriteResult:
        async with opened(name, config, url, keys) as replica_set:
            return await replica_set.execute(sql, *map(argument, arg or []), idempotency_key=key)

    try:
        done = uvloop.run(run())
    except WriteRejected as rejected:
        typer.echo(f"refused: {rejected}", err=True)
        raise typer.Exit(2 if isinstance(rejected, ChangeNotProved) else 1) from None
    except OutcomeUnknown as unknown:
        again = "; or write it again with the same --key" if key else ""
        typer.echo(f"unknown: {unknown}\ntops rs outcome {name} {unknown.tx} tells it{again}", err=True)
        raise typer.Exit(3) from None
    result = {
        "tx": done.tx,
        "token": done.token,
        "rows": sum(done.rows),
        "duplicate": done.duplicate,
        "pending": ", ".join(done.pending),
    }
    returned = [row for rows in done.returned for row in rows]
    if format is Format.JSON:
        show([{**result, "returned": returned}], format)
        return
    show([result], format)
    if returned:
        show(returned, format)


def read(
    name: Annotated[str, typer.Argument(help="The replica set.")],
    sql: Annotated[str, typer.Option("--sql", help="One query, with $1, $2, … for the arguments.")],
    arg: Annotated[list[str] | None, typer.Option("--arg", help="An argument; as many as the query has.")] = None,
    consistency: Annotated[str, typer.Option("--consistency", help="any, primary, quorum or current.")] = "any",
    after: Annotated[str, typer.Option("--after", help="A write's token that the read must see.")] = "",
    max_lag: Annotated[float | None, typer.Option("--max-lag", min=0, help="How old data may be, in seconds.")] = None,
    replica: Annotated[str | None, typer.Option("--replica", help="Read at this replica.")] = None,
    config: ConfigOption = Path("tops.toml"),
    url: UrlOption = None,
    keys: KeysOption = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Read one query from a replica that has come far enough."""

    async def run() -> list[dict[str, Any]]:
        async with opened(name, config, url, keys) as replica_set:
            chosen: Consistency = consistency  # type: ignore[assignment]
            return await replica_set.fetch(
                sql, *map(argument, arg or []), consistency=chosen, after=after, max_lag=max_lag, replica=replica
            )

    show(uvloop.run(run()), format)


def show(rows: list[dict[str, Any]], format: Format, heads: Mapping[str, str] | None = None) -> None:
    """Rows as a table for people, with these heads for columns that have long names, or as JSON for programs."""
    if format is Format.JSON:
        typer.echo(json.dumps(rows, default=_text))
        return
    if not rows:
        typer.echo("no rows")
        return
    table = Table(*[(heads or {}).get(name, str(name)) for name in rows[0]])
    for row in rows:
        table.add_row(*["" if value is None else _text(value) for value in row.values()])
    Console().print(table)


def _text(value: Any) -> str:
    """A number in full: 50000, not 5E+4."""
    return f"{value:f}" if isinstance(value, Decimal) else str(value)
