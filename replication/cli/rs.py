"""`tops rs`: replica sets: check the file, compare it with what runs, see how they are, pause and resume."""

from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop

from replication.cli.data import ConfigOption, Format, FormatOption, KeysOption, UrlOption, opened, show
from replication.conflicts.tables import rejection_in
from replication.model.config import Cluster, ReplicaSetConfig
from replication.operations.findings import of_file
from replication.operations.plan import declare_members, plan_for
from tops.model.errors import NotReachable, OutcomeUnknown

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)

NameArgument = Annotated[str, typer.Argument(help="The replica set.")]
ReplicaOption = Annotated[str | None, typer.Option("--replica", help="One replica; without it, all.")]
# What `status` shows, under heads that leave room for long names of replicas on 80 columns.
STATUS_HEADS = {
    "replica": "replica",
    "in_sync": "in\nsync",
    "position": "at\nnumber",
    "lag_s": "lag\nin s",
    "lag_transactions": "lag\nin tx",
    "lag_network": "not\nhere",
    "lag_apply": "not\napplied",
    "conflicts": "con-\nflicts",
    "quarantined": "quaran-\ntined",
}


@app.callback()
def rs() -> None:
    """Replica sets."""


@app.command()
def validate(config: ConfigOption = Path("tops.toml")) -> None:
    """Check the file without starting or asking anything; exit 2 with file, line and key if it is wrong."""
    cluster = Cluster.load(config)
    for replica_set in cluster.replica_sets:
        cluster.schema_of(replica_set)
        typer.echo(f"{replica_set.name}: {replica_set.policy}, replicas {', '.join(replica_set.names)}")
        for found in of_file(replica_set):
            typer.echo(f"{replica_set.name}: {found.level}: {found.text}; {found.remedy}")
    typer.echo(f"{config} is fine")


@app.command()
def apply(
    name: NameArgument,
    config: ConfigOption = Path("tops.toml"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the plan.")] = False,
    keys: KeysOption = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Bring what runs to what the file says; shows the plan first. The set then has the replicas of the file, and no
    others."""
    cluster = Cluster.load(config)
    wanted = cluster.replica_set(name)
    steps = uvloop.run(plan_for(cluster, wanted, keys))
    show([{"step": s.text, "how": s.how} for s in steps] or [{"step": "nothing to do", "how": ""}], format)
    if dry_run:
        return
    uvloop.run(declare_members(cluster, wanted, keys))
    manual = [s for s in steps if not s.automatic]
    for step in steps:
        if step.automatic:
            typer.echo(uvloop.run(_order(config, name, step.replica, step.order, keys)), err=True)
    if manual:
        typer.echo("some steps need a hand: see above", err=True)
        raise typer.Exit(1)


@app.command()
def status(
    name: NameArgument,
    config: ConfigOption = Path("tops.toml"),
    url: UrlOption = None,
    keys: KeysOption = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Every replica: position, lag in seconds and transactions (network and apply), why it stopped; exit 1 if one is
    not in sync."""

    async def run() -> dict[str, Any]:
        async with opened(name, config, url, keys) as replica_set:
            return await replica_set.status()

    found = uvloop.run(run())
    if url is None:
        found["replicas"] += _unknown(Cluster.load(config).replica_set(name), found["replicas"])
    if format is Format.JSON:
        show([found], format)
    else:
        coordinator = found["coordinator"]
        head = f"log at {coordinator['head']}" if coordinator["reachable"] else f"coordinator: {coordinator['problem']}"
        typer.echo(f"{name}: {found['policy']}, {head}")
        figures = [{column: _shown(r.get(column)) for column in STATUS_HEADS} for r in found["replicas"]]
        show(figures, format, STATUS_HEADS)
        for replica in found["replicas"]:
            for last_error in _problems(replica):
                typer.echo(f"{replica['replica']}: {last_error}")
    if not all(r["in_sync"] for r in found["replicas"]):
        raise typer.Exit(1)


def _unknown(wanted: ReplicaSetConfig, running: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replicas that the file names and the running set does not have."""
    known = {replica["replica"] for replica in running}
    cure = f"the agents run with an earlier file; `tops rs apply {wanted.name}` shows the steps that add it"
    return [{"replica": new, "in_sync": False, "unknown": cure} for new in wanted.names if new not in known]


def _shown(value: Any) -> Any:
    return ("yes" if value else "no") if isinstance(value, bool) else value


def _problems(replica: dict[str, Any]) -> list[str]:
    """What an operator has to know about a replica beside its figures."""
    if replica.get("unreachable"):
        return ["its agent does not answer"]
    if replica.get("unknown"):
        return [f"not in the running set: {replica['unknown']}"]
    if replica["not_started"]:
        return [f"not started: {replica['not_started']}"]
    problems = [f"stopped: {replica['stopped']}"] if replica["stopped"] else []
    problems += [f"tried again: {replica['last_error']}"] if replica["last_error"] else []
    problems += [] if replica["linked"] else ["it does not reach the set's coordinator"]
    problems += ["may differ from the others: see conflicts"] if replica["divergent"] else []
    problems += [replica["differences"]] if replica["differences"] else []
    problems += [replica["warning"]] if replica["warning"] else []
    if problems or replica["in_sync"] or replica["lag_transactions"]:
        return problems
    return ["it is at the end of the log, and the coordinator does not count it as in sync yet"]


@app.command()
def outcome(
    name: NameArgument,
    tx: Annotated[str, typer.Argument(help="The id that came with the answer, or instead of it.")],
    key: Annotated[str, typer.Option("--key", help="The idempotency key of the write, if it had one.")] = "",
    config: ConfigOption = Path("tops.toml"),
    url: UrlOption = None,
    keys: KeysOption = None,
) -> None:
    """What became of a write whose answer was lost; exit 1 if it was aborted, 3 if whoever knows can't be asked."""

    async def run() -> str:
        async with opened(name, config, url, keys) as replica_set:
            return await replica_set.outcome(tx, idempotency_key=key)

    try:
        told = uvloop.run(run())
    except OutcomeUnknown as unknown:
        typer.echo(f"unknown: {unknown}", err=True)
        raise typer.Exit(3) from None
    typer.echo(f"{tx}: {told}")
    if told != "committed":
        raise typer.Exit(1)


@app.command()
def pause(
    name: NameArgument,
    replica: ReplicaOption = None,
    config: ConfigOption = Path("tops.toml"),
    keys: KeysOption = None,
) -> None:
    """Stop applying; what was acknowledged stays, and the log waits."""
    _tell_all(config, name, replica, "pause", keys)


@app.command()
def resume(
    name: NameArgument,
    replica: ReplicaOption = None,
    config: ConfigOption = Path("tops.toml"),
    keys: KeysOption = None,
) -> None:
    """Go on after a pause, or after an error was mended."""
    _tell_all(config, name, replica, "resume", keys)


@app.command()
def retry(
    name: NameArgument,
    replica: ReplicaOption = None,
    config: ConfigOption = Path("tops.toml"),
    keys: KeysOption = None,
) -> None:
    """Try transactions that were set aside once more."""
    _tell_all(config, name, replica, "retry", keys)


@app.command()
def quarantine(
    name: NameArgument,
    replica: Annotated[str, typer.Option("--replica", help="The replica whose status asks for it.")],
    config: ConfigOption = Path("tops.toml"),
    keys: KeysOption = None,
) -> None:
    """Take a transaction that is too large to be published out of the outbox, so that those behind it are published.
    It stays at this replica and is kept in tops.quarantined; the others lack its rows until they are repaired."""
    _tell_all(config, name, replica, "quarantine", keys)


@app.command()
def conflicts(
    name: NameArgument,
    limit: Annotated[int, typer.Option("--limit")] = 50,
    config: ConfigOption = Path("tops.toml"),
    url: UrlOption = None,
    keys: KeysOption = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """The conflict log of every replica, newest first: kind, both versions, the winner; and what was set aside.
    Exit 3 if a replica does not answer."""

    async def run() -> tuple[list[dict[str, Any]], list[str]]:
        async with opened(name, config, url, keys) as replica_set:
            told = await replica_set.conflicts(limit)
            rows = [{"replica": replica, **row} for replica, rows in told.items() for row in rows]
            return rows, [replica for replica in replica_set.config.names if replica not in told]

    found, silent = uvloop.run(run())
    if format is Format.JSON:
        show(found, format)
    else:
        for row in found:
            typer.echo(_conflict(row))
        typer.echo(f"{len(found)} conflict{'s' * (len(found) > 1)}" if found else "no conflicts")
    if silent:
        typer.echo(f"{', '.join(silent)}: no answer; what is in their logs is not shown", err=True)
        raise typer.Exit(3)


def _conflict(row: dict[str, Any]) -> str:
    """A conflict as some lines: both versions side by side would not fit."""
    head = f"{row['at']:%Y-%m-%d %H:%M:%S}  {row['replica']}  {row['kind']}"
    if not row["table_name"]:  # a whole transaction that was set aside or refused
        reason = row["reason"] if row["kind"] == "quarantined" else str(rejection_in(row["discarded"]))
        return f"{head}  transaction {row['tx']}, number {row['number']}\n  reason     {reason}"
    lines = [f"{head}  {row['table_name']} {row['key']}".rstrip()]
    lines.append(f"  winner     {row['winner']} ({row['resolver']}), transaction {row['tx']}, number {row['number']}")
    lines += [f"  {version:10} {row[version]}" for version in ("kept", "discarded") if row[version] is not None]
    return "\n".join(lines)


def _tell_all(config: Path, name: str, replica: str | None, what: str, keys: Path | None) -> None:
    wanted = Cluster.load(config).replica_set(name)
    failed = False
    for each in [wanted.replica_named(replica).name] if replica is not None else wanted.names:
        try:
            typer.echo(uvloop.run(_order(config, name, each, what, keys)))
        except NotReachable as error:
            typer.echo(f"{each}: {error}", err=True)
            failed = True
    if failed:
        raise typer.Exit(3)


async def _order(config: Path, name: str, replica: str, what: str, keys: Path | None) -> str:
    async with opened(name, config, None, keys) as replica_set:
        return await replica_set.order(replica, what)
