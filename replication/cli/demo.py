"""`tops demo`: see it work, in under a minute."""

import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console
from rich.table import Table

from replication.operations.demo import POLICIES, Report, quiet, run_demo
from tops.model.errors import ConfigError


def demo(
    policy: Annotated[str | None, typer.Option("--policy", help="Only this policy.")] = None,
    replicas: Annotated[int, typer.Option("--replicas", min=2, max=7)] = 3,
    keep: Annotated[
        Path | None, typer.Option("--keep", help="Keep the configuration and the brokers' data here.")
    ] = None,
) -> None:
    """Bank transfers under every policy on real PostgreSQL servers, one of which is killed; exit 1 if data is wrong."""
    if policy is not None and policy not in POLICIES:
        raise ConfigError(f"{policy!r} is no policy: {', '.join(POLICIES)}")
    console, began = Console(soft_wrap=True), time.monotonic()
    quiet()
    folder = keep if keep is not None else Path(tempfile.mkdtemp(prefix="tops-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        reports = uvloop.run(run_demo(folder, (policy,) if policy else POLICIES, replicas, console.print))
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    console.print(_table(reports))
    console.print("one down: acknowledged while a server was dead; write-all then refuses, as it promises")
    if unknown := sum(r.unknown for r in reports):
        console.print(f"{unknown} answers were lost with the server: neither acknowledged nor refused")
    console.print(f"done in {time.monotonic() - began:.0f} s" + (f"; kept in {keep}" if keep else ""))
    if not all(r.equal and r.balance_kept and r.lost == 0 for r in reports):
        sys.exit(1)


def _table(reports: list[Report]) -> Table:
    table = Table("policy", "writes", "one\ndown", "refused", "per s", "catch\nup", "lost", "data")
    table.columns[0].no_wrap = True
    for r in reports:
        data = "equal" if r.equal and r.balance_kept else "WRONG"
        catch_up = f"{r.caught_up_s:.1f} s"
        numbers = (r.acknowledged, r.while_down, r.rejected, f"{r.per_second:.0f}", catch_up, r.lost, data)
        table.add_row(r.policy, *map(str, numbers))
    return table
