"""The alert rules and Prometheus's configuration, read by Prometheus's own tool; each rule says what to do."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.compose.compose_file import yaml
from tests.compose.stack import COMPOSE

PROMETHEUS = COMPOSE / "prometheus"
RULES = [rule for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
REPLICA = 'replica_set="shop", replica="r3"'
# Series that make an alert fire: name of the alert, series with values of 15 s each, its labels.
FIRING: list[tuple[str, dict[str, str], dict[str, str]]] = [
    (
        "TopsBrokerDown",
        {'up{job="tops-brokers", instance="b1:9420"}': "0x40", 'up{job="tops-brokers", instance="b2:9420"}': "1x40"},
        {"job": "tops-brokers", "instance": "b1:9420", "severity": "critical"},
    ),
    (
        "TopsMajorityNotInSync",
        {f'tops_replica_in_sync{{replica_set="shop", replica="r{n}"}}': f"{int(n == 1)}x40" for n in (1, 2, 3)},
        {"replica_set": "shop", "severity": "critical"},
    ),
    (
        "TopsReplicaLagging",
        {f"tops_replica_lag_seconds{{{REPLICA}}}": "31+15x40"},
        {"replica_set": "shop", "replica": "r3", "severity": "warning"},
    ),
    (
        "TopsTransactionsQuarantined",
        {f"tops_replica_quarantined_transactions{{{REPLICA}}}": "1x40"},
        {"replica_set": "shop", "replica": "r3", "severity": "critical"},
    ),
]
VALUES = {"TopsReplicaLagging": "8m 31s", "TopsTransactionsQuarantined": "1"}
WELL = {
    'up{job="tops-brokers", instance="b1:9420"}': "1x40",
    'up{job="tops-agents", instance="r1:9421"}': "1x40",
    **{f'tops_replica_in_sync{{replica_set="shop", replica="r{n}"}}': f"{int(n < 3)}x4 1x36" for n in (1, 2, 3)},
    'tops_replica_lag_seconds{replica_set="shop", replica="r1"}': "0x40",
    'tops_certificate_expiry_timestamp_seconds{instance="b1:9420"}': "9000000x40",
    'tops_sender_mismatches_total{instance="b1:9420"}': "7x40",
}


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed: 'apt-get install prometheus'")
    return found


def check(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_accepts_its_configuration_and_the_rules(promtool: str) -> None:
    check(promtool, "check", "config", str(PROMETHEUS / "prometheus.yml"))
    check(promtool, "check", "rules", "--lint=all", "--lint-fatal", str(PROMETHEUS / "alerts.yml"))


@pytest.mark.parametrize(("alert", "series", "labels"), FIRING, ids=[alert for alert, *_ in FIRING])
def test_an_alert_fires(
    promtool: str, tmp_path: Path, alert: str, series: dict[str, str], labels: dict[str, str]
) -> None:
    told = {key: filled(text, labels, VALUES.get(alert, "")) for key, text in rule_named(alert)["annotations"].items()}
    expected = [{"exp_labels": labels, "exp_annotations": told}]

    check_rules(promtool, tmp_path, series, {alert: expected})


def test_nothing_fires_while_all_is_well(promtool: str, tmp_path: Path) -> None:
    check_rules(promtool, tmp_path, WELL, {rule["alert"]: [] for rule in RULES})


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_a_rule_says_what_it_means_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"]["summary"] and "$labels" in rule["annotations"]["summary"]
    assert rule["annotations"]["description"].endswith(".")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_has_a_runbook(rule: dict[str, Any]) -> None:
    assert f"`{rule['alert']}`" in (COMPOSE.parent / "docs" / "operations.md").read_text()


def rule_named(alert: str) -> dict[str, Any]:
    return next(rule for rule in RULES if rule["alert"] == alert)


def filled(text: str, labels: dict[str, str], value: str) -> str:
    """The text of an annotation for one alert."""
    with_labels = re.sub(r"{{ \$labels\.(\w+) }}", lambda found: labels[found[1]], text)
    return re.sub(r"{{ \$value[^}]*}}", value, with_labels)


def check_rules(promtool: str, folder: Path, series: dict[str, str], expected: dict[str, list[Any]]) -> None:
    """Prometheus evaluates the rules over these series, and these alerts fire after eight minutes."""
    tests = {
        "rule_files": [str(PROMETHEUS / "alerts.yml")],
        "tests": [
            {
                "interval": "15s",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "alert_rule_test": [
                    {"eval_time": "8m", "alertname": alert, "exp_alerts": alerts} for alert, alerts in expected.items()
                ],
            }
        ],
    }
    file = folder / "test.yml"
    file.write_text(json.dumps(tests))  # JSON is YAML
    check(promtool, "test", "rules", str(file))
