"""The stack's own configuration and programs, run without containers: first start, metrics, the demo."""

import asyncio
import json
import os
import re
import signal
import stat
import subprocess
import threading
import urllib.request
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from compose import demo
from tests.compose.compose_file import yaml
from tests.compose.stack import BROKERS, COMPOSE, REPLICAS, LocalStack, local_stack, new_stack
from tests.support.metric_names import bad_help, bad_name
from tops.security import Authority, utc_now

METRIC = re.compile(r"\btops_[a-z0-9_]+")
SERVERS = ("pg1", "pg2", "pg3")
SHORT_S = 4.5  # a part is down
# Counters that have no sample before the first rejection or write.
LABELLED = {"tops_replica_requests_rejected_total", "tops_replica_over_quota_total", "tops_replica_writes_total"}


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[LocalStack]:
    async with local_stack(tmp_path) as running:
        yield running


class ProcessStack:
    """The demo's view of a stack of processes."""

    def __init__(self, stack: LocalStack, loop: asyncio.AbstractEventLoop) -> None:
        self._stack, self._loop = stack, loop
        self._keys = ("--keys", str(stack.keys / "application"))
        self._told = {"acknowledged": 0, "rejected": 0, "unknown": 0}
        self._load: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self.killed: list[str] = []

    def kill(self, part: str) -> None:
        self.killed.append(part)
        self._carry_out(self._server(part).crash() if part in SERVERS else self._stack.processes.kill(_process(part)))

    def start(self, part: str) -> None:
        self._carry_out(self._server(part).start() if part in SERVERS else self._stack.processes.start(_process(part)))

    def owner(self) -> str:
        return self._stack.ended("load", "owner").strip()

    def compare(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = json.loads(self._stack.ended("load", "compare", *self._keys))
        return found

    def begin_load(self) -> None:
        self._load = self._stack.program("load", "run", *self._keys)
        self._reader = threading.Thread(target=self._read, args=(self._load,))
        self._reader.start()

    def tally(self) -> dict[str, int]:
        return self._told

    def end_load(self) -> None:
        assert self._load is not None and self._reader is not None
        self._load.send_signal(signal.SIGTERM)
        self._reader.join()
        self._load.communicate()

    def _read(self, load: "subprocess.Popen[str]") -> None:
        assert load.stdout is not None
        for line in load.stdout:
            told = json.loads(line)
            self._told = {key: told[key] for key in self._told}

    def _server(self, part: str) -> Any:
        return self._stack.servers[SERVERS.index(part)]

    def _carry_out(self, work: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _process(part: str) -> str:
    return f"broker/{part}" if part in BROKERS else f"shop/{part}"


def names_in(text: str) -> set[str]:
    return set(METRIC.findall(text))


def alert_expressions() -> Iterator[str]:
    for group in yaml.safe_load((COMPOSE / "prometheus" / "alerts.yml").read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


def dashboard_expressions() -> Iterator[str]:
    dashboard = json.loads((COMPOSE / "grafana" / "dashboard.json").read_text())
    yield from (target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ()))
    yield from (variable["query"]["query"] for variable in dashboard["templating"]["list"] if "datasource" in variable)


def families(address: str | None) -> list[Metric]:
    with urllib.request.urlopen(f"http://{address}/metrics") as response:
        return list(text_string_to_metric_families(response.read().decode()))


def series(exported: Iterable[Metric]) -> set[str]:
    """The names of samples, also of those that there are none of yet."""
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
    return {f"{family.name}{suffix}" for family in exported for suffix in suffixes.get(family.type, ("",))}


async def test_alerts_and_dashboard_use_what_brokers_and_agents_export(stack: LocalStack) -> None:
    brokers = [broker.health_listen for broker in stack.cluster.config.broker]
    agents = [replica.listen for replica in stack.cluster.replica_set("shop").replica]
    exported = [await asyncio.to_thread(families, address) for address in (*brokers, *agents)]

    found = [series(one) for one in exported]
    known = set.union(*found)
    assert names_in(" ".join(alert_expressions())) - known == set()
    assert names_in(" ".join(dashboard_expressions())) - known == set()
    assert all(names >= LABELLED for names in found[len(brokers) :])
    documented = names_in((COMPOSE.parent / "docs" / "metrics.md").read_text())
    ours = [family for one in exported for family in one if family.name.startswith("tops_")]
    shown = {f"{family.name}_total" if family.type == "counter" else family.name for family in ours}
    assert shown - documented == set()
    assert [bad for family in ours if (bad := bad_name(family.name, family.type))] == []
    assert [bad for family in ours if (bad := bad_help(family.name, family.documentation))] == []


def test_a_second_start_changes_no_secret_and_each_node_has_its_own(tmp_path: Path) -> None:
    stack = new_stack(tmp_path, servers=())
    stack.first_start("keys")
    former = secrets_of(stack)

    stack.first_start("keys")

    assert secrets_of(stack) == former
    private = {file for file in former if file.name in ("node.key", "pgpass")}
    assert {stat.S_IMODE(file.stat().st_mode) for file in private} == {0o600}
    passwords = {name: (stack.keys / name / "pgpass").read_text().splitlines() for name in REPLICAS}
    assert [len(lines) for lines in passwords.values()] == [4, 4, 4]
    assert len({line.rpartition(":")[2] for lines in passwords.values() for line in lines}) == 12
    check = (stack.keys / "check" / "pgpass").read_text().splitlines()
    assert {line.split(":")[3] for line in check} == {"tops_shop_shop_check"}
    assert len({stack.password_of(name) for name in REPLICAS}) == 3


def test_what_was_revoked_stays_revoked_at_the_next_start(tmp_path: Path) -> None:
    stack = new_stack(tmp_path, servers=())
    stack.first_start("keys")
    former = secrets_of(stack)
    Authority(tmp_path / "authority").revoke("application", utc_now())

    stack.first_start("keys")

    changed = {file for file, content in secrets_of(stack).items() if former[file] != content}
    assert {file.name for file in changed} == {"crl.pem"}
    assert {file.parent.name for file in changed} == {*BROKERS, *REPLICAS, "operator", "application"}


def secrets_of(stack: LocalStack) -> dict[Path, bytes]:
    folders = (stack.keys, stack.folder / "administrators")
    return {file: file.read_bytes() for folder in folders for file in folder.rglob("*") if file.is_file()}


async def test_the_demo_kills_parts_and_every_promise_is_kept(stack: LocalStack) -> None:
    await asyncio.to_thread(stack.first_start, "databases")  # as a second start does, while everything runs
    said: list[str] = []
    processes = ProcessStack(stack, asyncio.get_running_loop())

    went_well = await asyncio.to_thread(demo.demonstrate, processes, said.append, SHORT_S)

    assert went_well, "\n".join(said)
    assert processes.killed[:2] == ["r3", "pg2"]
    assert processes.killed[2] in BROKERS and processes.killed[2] != processes.killed[3] == processes.owner()
    assert any("replicas are equal" in line for line in said), "\n".join(said)


def test_a_health_check_fails_without_an_answer() -> None:
    environment = {**os.environ, "TOPS_HEALTH_URL": "http://127.0.0.1:9/healthz"}
    ended = subprocess.run(["python3", str(COMPOSE / "healthy.py")], env=environment, capture_output=True, text=True)

    assert ended.returncode == 1
    assert "127.0.0.1:9" in ended.stderr


def test_a_metric_that_nobody_exports_is_found() -> None:
    assert names_in("sum(rate(tops_no_such_thing_total[5m])) > up") == {"tops_no_such_thing_total"}
