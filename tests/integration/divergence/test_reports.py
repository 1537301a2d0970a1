"""What a finished check leaves for people and programs, and what the history of checks tells."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from replication.divergence.explain.logs import ParquetLog, write_log
from replication.divergence.report.files import write_report
from replication.divergence.report.terminal import summary
from replication.divergence.results.folder import load_result, write_parquet
from replication.divergence.results.history import Trends, history_table
from replication.divergence.results.model import CheckResult, Limit, LimitKind, Verdict
from replication.tables.endpoints import LogRecord
from tests.integration.divergence.conftest import Databases
from tests.integration.divergence.test_failures import nowhere
from tops.model.errors import ConfigError

ROWS = (
    "CREATE TABLE accounts (id int PRIMARY KEY, owner text, balance numeric)",
    "INSERT INTO accounts SELECT i, 'owner ' || i, i FROM generate_series(1, 3000) i",
)


def terminal(result: CheckResult) -> str:
    out = StringIO()
    Console(width=200, file=out).print(summary(result))
    return out.getvalue()


async def test_the_page_shows_rows_columns_and_causes(databases: Databases, tmp_path: Path) -> None:
    await databases.everywhere(*ROWS)
    await databases.on("r2", "UPDATE accounts SET owner = '<b>Mallory</b>' WHERE id = 7")
    at = datetime(2024, 6, 1, 12, tzinfo=UTC)
    write_log(
        tmp_path / "log.parquet", [LogRecord(31, "tx-31", "berlin", at, "accounts", ("7",), None, {"owner": "owner 7"})]
    )

    result = await databases.compare("accounts", log=ParquetLog(str(tmp_path / "log.parquet")))
    files = write_report(databases.out / result.id, tmp_path / "report")
    page = files[0].read_text()

    assert [file.name for file in files] == ["report.html", "report.json", "differences.parquet"]
    assert "&lt;b&gt;Mallory&lt;/b&gt;" in page
    assert "<b>Mallory</b>" not in page
    assert 'class="off"><code>&lt;b&gt;' in page
    assert "changed outside replication" in page
    assert "tx-31" in page
    assert "http" not in page.replace("http-equiv", "")
    document = json.loads(files[1].read_text())
    assert (document["verdict"], document["differences"]) == ("DIFFERENT", 1)
    assert pq.read_table(files[2]).column("cause_tx").to_pylist() == ["tx-31"]


async def test_a_partial_run_says_so_everywhere_and_nowhere_equal(databases: Databases, tmp_path: Path) -> None:
    await databases.everywhere(*ROWS)

    result = await databases.compare("accounts", endpoints=[*databases.endpoints, nowhere()])
    page, document, _ = (file for file in write_report(databases.out / result.id, tmp_path / "report"))
    history = pq.read_table(databases.out / "history" / f"{result.id}.parquet")

    for text in (page.read_text(), document.read_text(), terminal(result), result.headline):
        assert "PARTIAL" in text
        assert "EQUAL" not in text.replace(".EQUAL {", "")
    assert set(history.column("verdict").to_pylist()) == {"PARTIAL"}


@pytest.mark.parametrize("kind", list(LimitKind))
async def test_no_limit_leaves_room_for_equal(databases: Databases, kind: LimitKind) -> None:
    await databases.everywhere(*ROWS)
    result = await databases.compare("accounts")
    assert (result.verdict, result.exit_code) == (Verdict.EQUAL, 0)

    result.limits.append(Limit(kind, "x", "for some reason"))

    assert result.verdict is Verdict.PARTIAL
    assert result.exit_code != 0
    assert not result.headline.startswith("EQUAL")


async def test_a_result_is_read_back_as_it_was_written(databases: Databases) -> None:
    await databases.everywhere(*ROWS)
    await databases.on("r1", "DELETE FROM accounts WHERE id < 4")

    result = await databases.compare("accounts")

    assert load_result(databases.out / result.id) == result
    with pytest.raises(ConfigError, match="no result there"):
        load_result(databases.out)


async def test_the_page_adds_up_a_replicas_rows_over_all_tables(databases: Databases, tmp_path: Path) -> None:
    await databases.everywhere("CREATE TABLE a (id int PRIMARY KEY)", "CREATE TABLE b (id int PRIMARY KEY)")
    await databases.on("r2", "INSERT INTO a VALUES (1), (2), (3)", "INSERT INTO b VALUES (1), (2), (3), (4)")

    result = await databases.compare("a", "b")
    page = write_report(databases.out / result.id, tmp_path / "report")[0].read_text()

    row = page[page.index("<b>r2</b>") :].partition("</tr>")[0]
    assert row.rstrip().endswith('<td class="num">7</td>')


async def test_the_summary_names_rows_and_columns(databases: Databases) -> None:
    await databases.everywhere(*ROWS)
    await databases.on("r3", "UPDATE accounts SET balance = 0, owner = 'x' WHERE id = 9")

    text = terminal(await databases.compare("accounts"))

    assert "DIFFERENT: 1 differing row(s)" in text
    assert "accounts [9] on r3: changed (owner, balance)" in text
    assert "peak memory" in text


async def test_trends_tell_rates_times_to_converge_and_hot_spots(databases: Databases) -> None:
    await databases.everywhere(*ROWS)
    began = datetime(2024, 6, 1, tzinfo=UTC)
    here = databases.endpoints
    away = [here[0], replace(here[1], dsn=nowhere().dsn), here[2]]
    planted, mended = "UPDATE accounts SET balance = -1 WHERE id = 3000", "UPDATE accounts SET balance = id"
    # A check that does not reach the replica in question does not find it clean.
    checks = [("SELECT 1", here), (planted, here), ("SELECT 1", here), ("SELECT 1", away), (mended, here)]
    for minute, (change, endpoints) in enumerate(checks):
        await databases.on("r2", change)
        result = await databases.compare("accounts", set_name="shop", policy="quorum", endpoints=endpoints)
        result.started_at = began + timedelta(minutes=minute)
        write_parquet(databases.out / "history" / f"{result.id}.parquet", history_table(result))

    trends = Trends(databases.spark, databases.out)
    rate = trends.divergence_rate().collect()[0]
    spell = trends.time_to_converge().collect()
    spots = trends.hot_spots().collect()

    assert (rate.policy, rate.checks, rate.with_differences) == ("quorum", 5, 2)
    assert [(row.table, row.replica, row.seconds, row.worst) for row in spell] == [("accounts", "r2", 180, 1)]
    assert [(row.table, row.checks) for row in spots] == [("accounts", 2)]
    assert trends.causes().collect() == []
    with pytest.raises(ConfigError, match="no history"):
        Trends(databases.spark, databases.out / "elsewhere")
