"""`tops tx`: transactions that a cluster's brokers coordinate, those in doubt first, and ending one by hand."""

import asyncio
import json
import secrets
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import typer
from rich.console import Console
from rich.table import Table

from tops.client.site import Site
from tops.http.client import get_json
from tops.model.errors import NotReachable, UnknownTransaction
from tops.model.ids import TxId
from tops.model.rejections import Rejection, RejectionCode
from tops.model.transactions import Access, Outcome, TxType
from tops.protocol.messages import TxOutcome, TxSpec

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)

TIMEOUT_S = 10.0


class Format(Enum):
    TABLE = "table"
    JSON = "json"


Url = Annotated[list[str], typer.Option("--url", help="A broker's ws:// or wss:// address; repeatable.")]
Keys = Annotated[Path | None, typer.Option("--keys", help="The folder of this operator's keys.")]
Operator = Annotated[str, typer.Option("--as", help="The site name to use.")]
OutputFormat = Annotated[Format, typer.Option("--format", help="How to print.")]
Id = Annotated[str, typer.Argument(metavar="ID")]
LOCAL = ["ws://127.0.0.1:7420"]


@app.command("list")
def list_(
    url: Url = LOCAL,
    keys: Keys = None,
    in_doubt: Annotated[
        bool, typer.Option("--in-doubt", help="Only undecided ones that a participant has prepared.")
    ] = False,
    output: OutputFormat = Format.TABLE,
) -> None:
    """List open transactions."""
    found = [t for t in asyncio.run(_listed(url, keys)) if t["in_doubt"] or not in_doubt]
    if output is Format.JSON:
        typer.echo(json.dumps(found))
        return
    table = Table("id", "event type", "type", "state", "in doubt", "coordinator", title="open transactions")
    for t in found:
        doubt = "yes" if t["in_doubt"] else ""
        table.add_row(t["tx"], t["event_type"], t["type"], t["state"], doubt, t["coordinator"])
    Console().print(table)


@app.command()
def show(tx: Id, url: Url = LOCAL, keys: Keys = None, output: OutputFormat = Format.TABLE) -> None:
    """One transaction, also one that has ended; exit 1 if it was aborted."""
    found = asyncio.run(_shown(url, keys, tx))
    if output is Format.JSON:
        typer.echo(json.dumps(found))
    else:
        table = Table("what", "value", title=tx)
        for what, value in found.items():
            table.add_row(what, str(value))
        Console().print(table)
    if found["state"] == "aborted":
        raise typer.Exit(1)


@app.command()
def abort(
    tx: Id,
    event_type: Annotated[
        str | None, typer.Option("--event-type", help="Needed if no broker knows it any more.")
    ] = None,
    reason: Annotated[str, typer.Option("--reason")] = "aborted by an operator",
    url: Url = LOCAL,
    keys: Keys = None,
    operator: Operator = "tops-operator",
) -> None:
    """Request an abort from the coordinator; exit 1 if it has committed already."""
    outcome = asyncio.run(_aborted(url, keys, operator, tx, event_type, reason))
    typer.echo(f"{tx}: {outcome.outcome.value}" + (f" ({outcome.reason})" if outcome.reason else ""))
    if outcome.outcome is not Outcome.ABORTED:
        raise typer.Exit(1)


@app.command()
def resolve(
    tx: Id,
    event_type: Annotated[str, typer.Option("--event-type", help="The event type of the transaction.")],
    force: Annotated[bool, typer.Option("--force", help="Abort it if it is undecided.")] = False,
    wait_s: Annotated[float, typer.Option("--wait", help="Seconds in which it may still end by itself.")] = 3.0,
    url: Url = LOCAL,
    keys: Keys = None,
    operator: Operator = "tops-operator",
) -> None:
    """Resolve a transaction in doubt; exit 1 if it was aborted, or is undecided.

    One that its coordinator does not know is rejected permanently: messages of it that arrive later have no effect. One
    that is undecided, because a vote is missing, stays so without --force; with it the coordinator aborts it, and
    participants that have prepared roll back. An existing decision stands, also with --force.
    """
    typer.echo("warning: an id that the coordinator does not know is rejected permanently", err=True)
    outcome = asyncio.run(_resolved(url, keys, operator, tx, event_type, force, wait_s))
    typer.echo(f"{tx}: {outcome.outcome.value}" + (f" ({outcome.reason})" if outcome.reason else ""))
    if outcome.outcome is not Outcome.COMMITTED:
        raise typer.Exit(1)


async def _listed(urls: list[str], keys: Path | None) -> list[dict[str, Any]]:
    """The transactions of all brokers that respond; the first of `urls` that responds names the others."""
    found: list[dict[str, Any]] = []
    async with _session() as session:
        topology = await _first(session, urls, keys)
        for broker in topology["brokers"]:
            try:
                listed = await _get(session, broker["url"], "/v1/transactions", keys)
            except NotReachable as error:
                typer.echo(f"warning: {error}", err=True)
                continue
            found += [{**t, "coordinator": broker["name"]} for t in listed]
    return sorted(found, key=lambda t: (not t["in_doubt"], t["tx"]))


async def _shown(urls: list[str], keys: Path | None, tx: str) -> dict[str, Any]:
    async with _session() as session:
        topology = await _first(session, urls, keys)
        for broker in topology["brokers"]:
            try:
                found = await _get(session, broker["url"], f"/v1/transactions/{tx}", keys)
            except (NotReachable, UnknownTransaction):
                continue
            return {**found, "coordinator": broker["name"]}
    raise UnknownTransaction(tx)


async def _aborted(
    urls: list[str], keys: Path | None, operator: str, tx: str, event_type: str | None, reason: str
) -> TxOutcome:
    if event_type is None:
        event_type = str((await _shown(urls, keys, tx)).get("event_type", ""))
    async with Site.connect(urls, name=operator, instance=secrets.token_hex(4), keys=keys, timeout_s=TIMEOUT_S) as site:
        site.know_type(event_type)
        spec = TxSpec(event_type, TxType.DISTRIBUTED, access=Access.PUBLIC)
        return await site.contribute(TxId(tx), spec).abort(reason)


async def _resolved(
    urls: list[str], keys: Path | None, operator: str, tx: str, event_type: str, force: bool, wait_s: float
) -> TxOutcome:
    """The outcome of the transaction; if it is undecided, an error, or with --force the outcome of the abort."""
    async with Site.connect(urls, name=operator, instance=secrets.token_hex(4), keys=keys, timeout_s=TIMEOUT_S) as site:
        site.know_type(event_type)
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                return await site.get_outcome(tx, event_type)
        try:
            undecided = await _shown(urls, keys, tx)
        except UnknownTransaction:
            raise NotReachable(
                f"the coordinator of {event_type!r} does not respond: start its broker again, its journal has the "
                "decision"
            ) from None
        missing = ", ".join(undecided.get("missing", ())) or "none"
        if not force:
            reason = f"{undecided['state']}; votes missing from {missing}; --force aborts it"
            undecided_yet = Rejection(RejectionCode.TIMED_OUT, reason)
            return TxOutcome(tx=TxId(tx), outcome=Outcome.UNKNOWN, rejection=undecided_yet)
        typer.echo(f"warning: {tx} is {undecided['state']}, and aborted by force; missing: {missing}", err=True)
        spec = TxSpec(event_type, TxType.DISTRIBUTED, access=Access.PUBLIC)
        async with asyncio.timeout(TIMEOUT_S):
            return await site.contribute(TxId(tx), spec).abort("ended by an operator, by force")


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))


async def _first(session: aiohttp.ClientSession, urls: list[str], keys: Path | None) -> dict[str, Any]:
    for url in urls:
        try:
            topology: dict[str, Any] = await _get(session, url, "/v1/topology", keys)
        except NotReachable:
            continue
        return topology
    raise NotReachable(f"no broker responds at {', '.join(urls)}")


async def _get(session: aiohttp.ClientSession, url: str, path: str, keys: Path | None) -> Any:
    status, found = await get_json(session, url, path, keys)
    if status == 404:
        raise UnknownTransaction(path.rpartition("/")[2])
    return found
