"""`tops keys`: the cluster's authority, and the certificates of its nodes. Private keys are never printed."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from tops.model.errors import AuditBroken, ConfigError, TopsError
from tops.security.audit import verify
from tops.security.authority import Authority, Issued
from tops.security.certificates import CLOCK_SKEW
from tops.security.identity import Identity, Kind, replica_name, role_of_kind
from tops.security.trust import utc_now

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)


class Format(Enum):
    TABLE = "table"
    JSON = "json"


Folder = Annotated[Path, typer.Option("--dir", help="The authority's folder.")]
OutputFormat = Annotated[Format, typer.Option("--format", help="How to print.")]
Days = Annotated[int, typer.Option("--valid-days", min=1, max=36500, help="Days for which it is valid.")]


@app.command()
def init(
    cluster: Annotated[str, typer.Option("--cluster", help="The cluster's name, as in [cluster] of tops.toml.")],
    folder: Folder = Path("keys"),
    valid_days: Days = 3650,
) -> None:
    """Make a certificate authority for a cluster."""
    with _rejections():
        Authority.init(folder, cluster, utc_now(), valid_days)
    typer.echo(f"authority of {cluster} in {folder}; keep {folder / 'ca.key'} safe and off the nodes")


@app.command()
def issue(
    name: Annotated[str | None, typer.Argument(help="A site's or broker's name, as in tops.toml.")] = None,
    kind: Annotated[Kind, typer.Option("--kind", help="Kind of the node.")] = Kind.SITE,
    replica_set: Annotated[str | None, typer.Option("--set", help="The replica set of a replica.")] = None,
    replica: Annotated[str | None, typer.Option("--replica", help="A replica's name in its set.")] = None,
    role: Annotated[
        str | None, typer.Option("--role", help="A site's role; brokers and replicas have their own.")
    ] = None,
    host: Annotated[
        list[str] | None, typer.Option("--host", help="An address that clients use for this broker; repeatable.")
    ] = None,
    valid_days: Days = 365,
    renew: Annotated[bool, typer.Option("--renew", help="Also if the name has a valid certificate.")] = False,
    folder: Folder = Path("keys"),
) -> None:
    """Certify one node and write the folder to copy to it."""
    with _rejections():
        authority, now = Authority(folder), utc_now()
        canonical = _canonical(kind, name, replica_set, replica)
        identity = Identity(authority.cluster, kind, canonical, role or role_of_kind(kind, "writer"))
        ends = now + timedelta(days=valid_days)
        bundle = authority.issue(identity, host or [], now - CLOCK_SKEW, ends, now=now, renew=renew)
    typer.echo(f"{identity}: copy {bundle} to its machine")


def _canonical(kind: Kind, name: str | None, replica_set: str | None, replica: str | None) -> str:
    """The name in the certificate: SET/REPLICA for a replica, the name alone for others."""
    if kind is Kind.REPLICA:
        if name is not None or replica_set is None or replica is None:
            raise ConfigError("a replica is named by --set SET --replica REPLICA")
        return replica_name(replica_set, replica)
    if name is None or replica_set is not None or replica is not None:
        raise ConfigError(f"a {kind.value} is named by NAME; --set and --replica go with --kind replica")
    return name


@app.command()
def revoke(
    name_or_serial: Annotated[str, typer.Argument(metavar="NAME|SET/REPLICA|SERIAL")],
    folder: Folder = Path("keys"),
) -> None:
    """End all certificates of a name, or one by its serial number."""
    with _rejections():
        revoked = Authority(folder).revoke(name_or_serial, utc_now())
    for issued in revoked:
        typer.echo(f"revoked {issued.name} {issued.serial}")
    typer.echo(f"copy {folder / 'crl.pem'} to every node that does not share this folder")


@app.command()
def show(folder: Folder = Path("keys"), output: OutputFormat = Format.TABLE) -> None:
    """List the issued certificates and their states."""
    with _rejections():
        authority = Authority(folder)
        issued = authority.issued(utc_now())
    if output is Format.JSON:
        ends = authority.certificate.not_valid_after_utc.isoformat()
        listing = {"cluster": authority.cluster, "not_after": ends, "certificates": msgspec.to_builtins(issued)}
        typer.echo(json.dumps(listing))
    else:
        Console().print(_table(authority.cluster, issued))


@app.command("audit-verify")
def audit_verify(
    file: Annotated[Path, typer.Argument(help="An audit log: of the authority or of a broker.")],
    head: Annotated[str | None, typer.Option("--head", help="A hash noted earlier that must be in it.")] = None,
    output: OutputFormat = Format.TABLE,
) -> None:
    """Check an audit log's chain; exit 1 if it is broken."""
    with _rejections():
        try:
            found = verify(file, head)
        except AuditBroken as error:
            typer.echo(f"broken: {error}", err=True)
            raise typer.Exit(1) from None
    if output is Format.JSON:
        typer.echo(json.dumps(msgspec.to_builtins(found)))
    else:
        typer.echo(f"intact: {found.records} records, head {found.head}")


def _table(cluster: str, issued: list[Issued]) -> Table:
    table = Table("name", "kind", "role", "status", "valid to (UTC)", title=f"certificates of {cluster}")
    table.add_column("serial", overflow="fold")  # complete, since `revoke` accepts it
    for one in issued:
        ends = f"{one.not_after:%Y-%m-%d %H:%M}"
        table.add_row(one.name, one.kind.value, one.role, one.status.value, ends, one.serial)
    return table


@contextmanager
def _rejections() -> Iterator[None]:
    """An error is one line on standard error and exit code 2."""
    try:
        yield
    except TopsError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
