"""`tops divergence`: find, explain and repair what differs between replicas. Spark is imported by what needs it."""

import asyncio
import functools
import os
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from replication.divergence.check.options import CheckOptions, Method
from replication.divergence.repair.repair import Strategy
from replication.rpc.calls import CheckDone, ReplicaFailed
from replication.tables.endpoints import ReplicaEndpoint
from tops.model.errors import ConfigError, NotReachable, TopsError

if TYPE_CHECKING:
    from replication.divergence.explain.set_link import SetLink
    from replication.divergence.read.sets import SetDescription
    from replication.divergence.repair.repair import Plan, Planner, Repaired
    from replication.divergence.results.model import CheckResult, Difference

app = typer.Typer(no_args_is_help=True, help="Find, explain and repair what differs between replicas.")

P = ParamSpec("P")
T = TypeVar("T")


class Format(Enum):
    TABLE = "table"
    JSON = "json"


Name = Annotated[str, typer.Argument(help="the replica set; with --dsn, a name for the databases compared")]
Config = Annotated[str, typer.Option("--config", "-c", help="the file that describes the replica set")]
Dsn = Annotated[list[str] | None, typer.Option("--dsn", help="name=postgresql://… or name=sqlite:///path; repeat")]
Tables = Annotated[list[str] | None, typer.Option("--table", "-t", help="only these tables; repeat")]
Out = Annotated[Path, typer.Option("--out", help="the folder of runs and their history")]
Master = Annotated[str, typer.Option("--master", help="Spark's master URL")]
Primary = Annotated[str, typer.Option("--primary", help="the replica whose rows count as right")]
Run = Annotated[str, typer.Option("--run", help="the run to use; default: the newest of the set")]
Output = Annotated[Format, typer.Option("--format", help="how the result is printed")]
Keys = Annotated[Path | None, typer.Option("--keys", help="the folder of this operator's keys, where there are keys")]
Operator = Annotated[str, typer.Option("--operator", help="whom the keys are of")]
LogFile = Annotated[str, typer.Option("--log", help="log records as Parquet, to explain differences with")]


@dataclass(frozen=True, slots=True)
class _Where:
    """What is checked, and where its results go."""

    described: "SetDescription"
    out: Path
    keys: Path | None = None
    operator: str = ""
    wait_s: float = 60.0


def rejections(command: Callable[P, None]) -> Callable[P, None]:
    """What TOPS refuses becomes one line and exit code 2; what can't be reached, 3."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except TopsError as error:
            typer.echo(f"tops divergence: {error}", err=True)
            raise typer.Exit(3 if isinstance(error, NotReachable) else 2) from error

    return run


@app.command()
@rejections
def check(
    name: Name = "databases",
    config: Config = "tops.toml",
    dsn: Dsn = None,
    table: Tables = None,
    out: Out = Path("divergence"),
    master: Master = "local[*]",
    method: Annotated[Method, typer.Option(help="where checksums are computed")] = Method.AUTO,
    primary: Primary = "",
    common_columns: Annotated[bool, typer.Option("--common-columns", help="compare the columns all have")] = False,
    max_differences: Annotated[int, typer.Option(min=1, help="per table; beyond it the run is PARTIAL")] = 1_000_000,
    settle: Annotated[float, typer.Option(min=0, help="seconds between two looks at a row, at least")] = 1.0,
    shard_rows: Annotated[int, typer.Option(min=1, help="rows per part of a table, done or not")] = 25_000_000,
    log: LogFile = "",
    resume: Annotated[str, typer.Option(help="a run that was stopped")] = "",
    wait: Annotated[float, typer.Option(min=1, help="seconds that a replica has to reach the barrier")] = 60.0,
    keys: Keys = None,
    operator: Operator = "",
    output: Output = Format.TABLE,
) -> None:
    """Compare the replicas of a set. Exit code 0: equal; 1: differences; 2: refused or limited; 3: not reachable."""
    described = _describe(name, config, dsn)
    options = CheckOptions(
        tables=tuple(table or described.tables),
        master=master,
        method=method,
        primary=primary or described.primary,
        common_columns=common_columns,
        cap=max_differences,
        settle_s=settle,
        shard_rows=shard_rows,
    )
    result = _checked(_Where(described, out, keys, operator, wait), options, log, resume)
    _print(result, output)
    typer.echo(f"run {result.id} in {out / result.id}", err=True)
    raise typer.Exit(result.exit_code)


@app.command()
@rejections
def report(
    name: Name = "",
    out: Out = Path("divergence"),
    run: Run = "",
    to: Annotated[Path | None, typer.Option(help="where the report goes; default: the run's own folder")] = None,
) -> None:
    """Write the report of a finished run: one HTML page, JSON and Parquet."""
    from replication.divergence.report.files import write_report

    folder = _run_folder(out, run, name)
    for file in write_report(folder, to or folder):
        typer.echo(str(file))


@app.command()
@rejections
def repair(
    name: Name = "databases",
    config: Config = "tops.toml",
    dsn: Dsn = None,
    out: Out = Path("divergence"),
    run: Run = "",
    by: Annotated[
        Strategy,
        typer.Option(
            help="whose version of a row wins; log: what acknowledged transactions wrote; where the log says nothing, "
            "the primary, the newest version, a majority, in this order"
        ),
    ] = Strategy.LOG,
    primary: Primary = "",
    newest_by: Annotated[str, typer.Option(help="a column that grows, for --by newest without a log")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run/--execute", help="only show the plan, or carry it out")] = True,
    force: Annotated[
        bool, typer.Option("--force", help="also delete or overwrite what acknowledged transactions wrote")
    ] = False,
    master: Master = "local[*]",
    wait: Annotated[float, typer.Option(min=1, help="seconds that a replica has to reach a barrier")] = 60.0,
    keys: Keys = None,
    operator: Operator = "",
    output: Output = Format.TABLE,
) -> None:
    """Plan how the replicas become equal again; with --execute, do it and check once more.

    The log is right, then the primary, the newest version, a majority. A plan that would delete or overwrite what an
    acknowledged transaction wrote names the row, the transaction and its log index, and needs --force; without it
    nothing is written. Exit code 0: all rows are planned, or repaired; 1: rows are undecided, or still differ; 2: the
    plan needs --force, or the request is invalid; 3: not reachable."""
    from replication.divergence.repair.repair import Planner, carry_out
    from replication.divergence.repair.writer import DirectWriter
    from replication.divergence.results.folder import load_result, read_differences
    from replication.divergence.results.model import Verdict
    from replication.tables.errors import NeedsForce

    described = _describe(name, config, dsn)
    folder = _run_folder(out, run, described.name)
    found = load_result(folder)
    if found.verdict is Verdict.PARTIAL:
        typer.echo(f"note: {found.headline}", err=True)
    replicas = [replica.name for replica in found.replicas if replica.reachable]
    endpoints = [endpoint for endpoint in described.endpoints if endpoint.name in replicas]
    if len(endpoints) < len(replicas):
        raise ConfigError(f"run {found.id} compared {', '.join(replicas)}; give the address of each")
    new_planner = functools.partial(
        Planner,
        replicas,
        by,
        primary=primary or described.primary,
        newest_by=newest_by,
        force=force,
        of_set=described.cluster is not None,
    )
    plan = new_planner().whole(read_differences(folder))
    if plan.acknowledged_rows:
        _print_plan(plan, output)
        raise NeedsForce(plan.acknowledged_rows, plan.acknowledged[0].told)
    if dry_run:
        _print_plan(plan, output)
        typer.echo("nothing was written; carry it out with --execute", err=True)
        raise typer.Exit(1 if plan.undecided_rows else 0)
    where = _Where(described, out, keys, operator, wait)
    if described.cluster is None:
        done = asyncio.run(carry_out(new_planner().changes(read_differences(folder)), DirectWriter(endpoints)))
    else:
        done = asyncio.run(_repaired_set(where, endpoints, new_planner(), read_differences(folder)))
    typer.echo(f"{done.written:,} row(s) repaired, {done.moved:,} had changed meanwhile and were left alone", err=True)
    tables = tuple(table.table for table in found.tables)
    again = _checked(where, CheckOptions(tables=tables, master=master), "", "")
    if output is Format.JSON:
        verdict = {"verdict": again.verdict.value, "headline": again.headline, "run": again.id}
        _print_json({"plan": plan, "repaired": done, "check": verdict})
    else:
        _print_plan(plan, output)
        _print(again, output)
    raise typer.Exit(again.exit_code)


async def _repaired_set(
    where: _Where, endpoints: "Sequence[ReplicaEndpoint]", planner: "Planner", differences: "Iterable[Difference]"
) -> "Repaired":
    """Repairs as transactions of the set's own log."""
    from replication.divergence.explain.set_link import linked
    from replication.divergence.repair.set_repair import SetRepair

    assert where.described.cluster is not None
    async with linked(where.described.cluster, where.described.name, keys=where.keys, operator=where.operator) as link:
        return await SetRepair(link, endpoints, planner, where.wait_s).run(differences)


@app.command()
@rejections
def trends(out: Out = Path("divergence"), master: Master = "local[*]", rows: int = 20) -> None:
    """Show what the history of checks tells: divergence by policy, time to converge, hot spots, causes."""
    from replication.divergence.read import session
    from replication.divergence.results.history import Trends

    with _quiet_spark(out / "spark.log"):
        told = Trends(session.start(master), out)
        frames = {
            "divergence by policy": told.divergence_rate(),
            "time to converge": told.time_to_converge(),
            "hot spots": told.hot_spots(),
            "causes": told.causes(),
        }
        for title, frame in frames.items():
            _print_rows(title, frame.columns, [tuple(row) for row in frame.limit(rows).collect()])


@app.command()
@rejections
def watch(
    log: Annotated[Path, typer.Option(help="the folder to which committed log records are exported as Parquet")],
    name: Name = "databases",
    config: Config = "tops.toml",
    dsn: Dsn = None,
    out: Out = Path("divergence"),
    master: Master = "local[*]",
    patience: Annotated[float, typer.Option(min=0, help="seconds that a replica may differ")] = 60.0,
    port: Annotated[int, typer.Option(help="where metrics are served, on loopback")] = 9464,
) -> None:
    """Compare every row that is written, soon after, until stopped; a replica that stays different raises a metric."""
    from prometheus_client import start_http_server

    from replication.divergence.check.continuous import Watch
    from replication.divergence.read import session

    described = _describe(name, config, dsn)
    with _quiet_spark(out / "spark.log") as console:
        one = Watch(session.start(master), described.endpoints, log, set_name=described.name, grace_s=patience)
        start_http_server(port, "127.0.0.1", one.metrics.registry)
        console.print(f"watching {described.name}; metrics at http://127.0.0.1:{port}/metrics; Ctrl-C stops")
        query = one.start(out / "watch" / described.name)
        try:
            query.awaitTermination()
        except KeyboardInterrupt:
            query.stop()


def _describe(name: str, config: str, dsn: Sequence[str] | None) -> "SetDescription":
    from replication.divergence.read.sets import SetDescription, load_set

    if not dsn:
        return load_set(config, name)
    endpoints = []
    for given in dsn:
        replica, separator, address = given.partition("=")
        if not separator or not replica or "://" not in address:
            raise ConfigError(f"--dsn {given.split('://')[0]}…: write it as name=postgresql://… or name=sqlite:///path")
        endpoints.append(ReplicaEndpoint(replica, address))
    return SetDescription(name, "", (), tuple(endpoints))


def _checked(where: _Where, options: CheckOptions, log: str, resume: str) -> "CheckResult":
    with _quiet_spark(where.out / "spark.log") as console, _progress(console) as progress:
        return _interruptible(_check(where, options, log, resume, progress))


async def _check(where: _Where, options: CheckOptions, log: str, resume: str, progress: "_Bars") -> "CheckResult":
    """A check of plain databases, or of a running set: at a barrier in its log, explained by its log."""
    from replication.divergence.check.check import Check
    from replication.divergence.explain.logs import ParquetLog

    described = where.described
    common: dict[str, Any] = {"set_name": described.name, "policy": described.policy, "progress": progress}
    given = ParquetLog(log) if log else None
    if described.cluster is None:
        one = Check(described.endpoints, options, where.out, log=given, **common)
        return await (one.resume(resume) if resume else one.run())

    from replication.divergence.explain.leads import SetKnowledge
    from replication.divergence.explain.set_barrier import SetBarrier
    from replication.divergence.explain.set_link import linked
    from replication.divergence.explain.set_log import SetLog

    async with linked(described.cluster, described.name, keys=where.keys, operator=where.operator) as link:
        one = Check(
            described.endpoints,
            options,
            where.out,
            log=given or SetLog(link),
            knowledge=SetKnowledge(link),
            new_barrier=lambda: SetBarrier(link, where.wait_s),
            **common,
        )
        result = await (one.resume(resume) if resume else one.run())
        await _tell_replicas(link, result)
        return result


async def _tell_replicas(link: "SetLink", result: "CheckResult") -> None:
    """Each replica remembers how it differs; what could not be compared wholly says nothing about equal tables."""
    tables = () if result.limits else tuple(table.table for table in result.tables)
    for replica in result.replicas:
        found = {table.table: text for table in result.tables if (text := table.found_at(replica.name))}
        try:
            await link.request(replica.name, CheckDone(tables=tables, found=found))
        except (NotReachable, ReplicaFailed) as error:
            typer.echo(f"note: {replica.name} does not know the result of this check: {error}", err=True)


def _interruptible(work: Coroutine[Any, Any, T]) -> T:
    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        typer.echo("stopped; go on with --resume and the newest run in the folder", err=True)
        raise typer.Exit(130) from None


@contextmanager
def _quiet_spark(log: Path) -> Iterator[Console]:
    """What the JVM says on standard error goes to a file; the console keeps the real one."""
    log.parent.mkdir(parents=True, exist_ok=True)
    kept = os.dup(2)
    with log.open("ab") as file, os.fdopen(os.dup(kept), "w") as terminal:
        os.dup2(file.fileno(), 2)
        try:
            yield Console(file=terminal)
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)


class _Bars:
    """Progress as one bar per table."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, Any] = {}

    def step(self, table: str, phase: str, done: int, total: int) -> None:
        if table not in self._tasks:
            self._tasks[table] = self._bars.add_task(table, total=total, phase=phase)
        self._bars.update(self._tasks[table], completed=done, phase=phase)


@contextmanager
def _progress(console: Console) -> Iterator[_Bars]:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[phase]}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:
        yield _Bars(bars)


def _run_folder(out: Path, run: str, set_name: str) -> Path:
    from replication.divergence.results.folder import load_result

    if run:
        return out / run
    finished = sorted((file.parent for file in out.glob("*/check.json")), key=lambda folder: folder.name, reverse=True)
    for folder in finished:
        if not set_name or load_result(folder).set_name == set_name:
            return folder
    raise ConfigError(f"{out}: no finished check{f' of {set_name}' if set_name else ''} there; run a check first")


def _print(result: "CheckResult", output: Format) -> None:
    from replication.divergence.report.files import document
    from replication.divergence.report.terminal import summary

    if output is Format.JSON:
        typer.echo(document(result).decode())
    else:
        Console().print(summary(result))


def _print_plan(plan: "Plan", output: Format) -> None:
    from replication.divergence.results.model import BASES, Basis

    if output is Format.JSON:
        _print_json(plan)
        return
    actions = [(replica, action, f"{n:,}") for replica, counts in plan.actions.items() for action, n in counts.items()]
    _print_rows(f"{plan.rows:,} row(s) to write", ("replica", "action", "rows"), actions)
    if plan.sources:
        sources = [(BASES[Basis(source)], f"{n:,}") for source, n in plan.sources.most_common()]
        _print_rows("which source decides", ("source", "rows"), sources)
    if plan.acknowledged_rows:
        risky = [(one.table, ", ".join(one.key), ", ".join(one.replicas), one.risk) for one in plan.acknowledged]
        title = f"{plan.acknowledged_rows:,} row(s) that acknowledged transactions wrote, or may have written"
        _print_rows(f"{title}: not without --force", ("table", "key", "on", "the plan"), risky)
    if plan.undecided_rows:
        left = [(u.table, ", ".join(u.key), u.reason) for u in plan.undecided]
        _print_rows(f"{plan.undecided_rows:,} row(s) undecided", ("table", "key", "why"), left)


def _print_json(document: object) -> None:
    import msgspec

    typer.echo(msgspec.json.encode(document).decode())


def _print_rows(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    from rich.table import Table

    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row))
    Console().print(table)
