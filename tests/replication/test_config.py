"""A wrong file is refused with file, line and key; nothing has been started then."""

import ast
from pathlib import Path
from typing import get_args

import pytest

import replication
from replication.model.config import Cluster, PolicyName
from replication.operations.plan import steps_between
from replication.policies import policy_of
from tops.model.constraints import AtLeast
from tops.model.errors import ConfigError
from tops.model.transactions import Scope, TxType

NAMES = frozenset(get_args(PolicyName))
HEAD = '[cluster]\nname = "c"\n[[broker]]\nname = "b1"\nlisten = "127.0.0.1:7420"\ndata = "./b1"\n'


def load(tmp_path: Path, keys: str, replicas: int = 3) -> Cluster:
    lines = [HEAD, f'[[replica_set]]\nname = "shop"\n{keys}']
    lines += [f'[[replica_set.replica]]\nname = "r{n}"\nbroker = "b1"' for n in range(1, replicas + 1)]
    path = tmp_path / "tops.toml"
    path.write_text("\n".join(lines))
    return Cluster.load(path)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ('policy = "quorom"', "policy"),
        ('policy = "quorum"\nwrite_quorum = 4', "4, but there are 3"),
        ('policy = "quorum"\nwrite_quorum = 2\nread_quorum = 1', "need not meet"),
        ('policy = "quorum"\nwrite_qorum = 2', "write_qorum: is not a known key"),
        ('policy = "write-all"\nwrite_quorum = 2', "belongs to the policy quorum"),
        ('policy = "write-all"\non_failure = "degrade"\nread_quorum = 1', "need not meet"),
        ('policy = "combined"\nsync = ["r1", "r2"]\nread_quorum = 3', "3, but 2 replicas vote"),
        ('policy = "primary-site"\nprimary = "r1"\nread_quorum = 1', "not to primary-site"),
        ('policy = "combined"', "needs `sync`"),
        ('policy = "combined"\nsync = ["r9"]', "'r9'"),
        ('policy = "primary-site"', "needs `primary`"),
        ('policy = "primary-site"\nprimary = "r7"', "'r7'"),
        ('policy = "peer-to-peer"\nresolver = "coin"', "no resolver"),
        ('policy = "peer-to-peer"\nresolver = "site-priority"', "site_priority"),
        ('policy = "quorum"\ntables = []', "is empty"),
        ('policy = "quorum"\nallow_volatile = true', "allow_volatile is gone"),
        ('policy = "quorum"\ntemp_file_limit = "-1"', "a number and kB, MB, GB or TB"),
    ],
)
def test_a_wrong_set_is_refused_with_its_line(tmp_path: Path, keys: str, problem: str) -> None:
    with pytest.raises(ConfigError, match="line") as rejected:
        load(tmp_path, keys)

    assert problem in str(rejected.value)
    assert "tops.toml" in str(rejected.value)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ('policy = "quorum"', "can't vote"),
        ('policy = "write-all"', "can't vote"),
        ('policy = "combined"\nsync = ["r1", "r2"]', "can't vote"),
        ('policy = "peer-to-peer"', "needs PostgreSQL at every replica"),
        ('policy = "serializable"', "needs PostgreSQL at every replica"),
        ('policy = "primary-site"\nprimary = "r2"', "is an SQLite file"),
        ('policy = "primary-site"\nprimary = "r1"', ""),
        ('policy = "combined"\nsync = ["r1", "r3"]', ""),
    ],
)
def test_an_sqlite_replica_can_only_follow(tmp_path: Path, keys: str, problem: str) -> None:
    path = tmp_path / "tops.toml"
    replicas = [f'[[replica_set.replica]]\nname = "r{n}"\nbroker = "b1"' for n in (1, 2, 3)]
    replicas[1] += f'\ndsn = "sqlite:///{tmp_path}/r2.db"'
    path.write_text("\n".join([HEAD, f'[[replica_set]]\nname = "shop"\n{keys}', *replicas]))

    if not problem:
        assert [r.name for r in Cluster.load(path).replica_set("shop").replica] == ["r1", "r2", "r3"]
        return
    with pytest.raises(ConfigError, match="'r2'") as rejected:
        Cluster.load(path)
    assert problem in str(rejected.value)


def test_a_replica_at_no_broker_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tops.toml"
    path.write_text(
        HEAD + '[[replica_set]]\nname = "s"\npolicy = "quorum"\n[[replica_set.replica]]\nname = "r"\nbroker = "b9"'
    )

    with pytest.raises(ConfigError, match=r"line 12: replica_set\[1\].replica\[1\].broker: .*'b9'"):
        Cluster.load(path)


def test_a_schema_that_is_not_there_is_told_with_its_line(tmp_path: Path) -> None:
    cluster = load(tmp_path, 'policy = "quorum"\nschema = "gone.sql"')

    with pytest.raises(ConfigError, match=r"line 11: replica_set\[1\].schema: .*gone.sql"):
        cluster.schema_of(cluster.replica_set("shop"))


def test_two_sets_never_share_a_table_of_one_database(tmp_path: Path) -> None:
    path = tmp_path / "tops.toml"
    one = '[[replica_set]]\nname = "{}"\npolicy = "quorum"\ntables = ["t"]\n[[replica_set.replica]]\nname = "r"\n'
    one += 'broker = "b1"\ndsn = "postgresql://h/d"\n'
    path.write_text(HEAD + one.format("a") + one.format("b"))

    with pytest.raises(ConfigError, match="also in set"):
        Cluster.load(path)


@pytest.mark.parametrize("n", range(1, 6))
def test_read_and_write_quorums_always_meet(tmp_path: Path, n: int) -> None:
    for m in range(1, n + 1):
        config = load(tmp_path, f'policy = "quorum"\nwrite_quorum = {m}', n).replica_set("shop")

        assert config.writes_needed == m
        assert config.reads_needed == n - m + 1


@pytest.mark.parametrize("n", range(1, 6))
def test_quorums_that_need_not_meet_are_refused_and_all_others_are_not(tmp_path: Path, n: int) -> None:
    for write in range(1, n + 1):
        for read in range(1, n + 1):
            keys = f'policy = "quorum"\nwrite_quorum = {write}\nread_quorum = {read}'
            if write + read > n:
                assert load(tmp_path, keys, n).replica_set("shop").reads_needed == read
            else:
                with pytest.raises(ConfigError, match=f"make read_quorum at least {n - write + 1}"):
                    load(tmp_path, keys, n)


def test_a_policy_maps_to_transaction_properties(tmp_path: Path) -> None:
    quorum = policy_of(load(tmp_path, 'policy = "quorum"\nwrite_quorum = 2').replica_set("shop")).plan()
    combined = policy_of(load(tmp_path, 'policy = "combined"\nsync = ["r1"]').replica_set("shop"))
    peers = policy_of(load(tmp_path, 'policy = "peer-to-peer"').replica_set("shop")).plan()

    assert quorum.tx_type is TxType.DISTRIBUTED
    assert AtLeast(2, frozenset({"shop/r1", "shop/r2", "shop/r3"})) in quorum.constraints
    assert (combined.scope_of("r1"), combined.scope_of("r2")) == (Scope.DISTRIBUTED, Scope.LOCAL)
    assert (peers.tx_type, peers.constraints) == (TxType.LOCAL, ())


def test_a_plan_names_what_has_to_be_started_changed_and_stopped(tmp_path: Path) -> None:
    wanted = load(tmp_path, 'policy = "quorum"\nwrite_quorum = 2').replica_set("shop")
    running = load(tmp_path, 'policy = "quorum"\nwrite_quorum = 3', 4).replica_set("shop")
    waits = load(tmp_path, 'policy = "quorum"\nwrite_quorum = 2\nwait_s = 9').replica_set("shop")

    steps = steps_between(wanted, {"r1": running, "r2": waits, "r4": running})

    assert [step.text.split(":")[0] for step in steps] == ["r1", "r2", "stop replica r4", "start replica r3"]
    assert [step.automatic for step in steps] == [False, True, False, False]
    assert "once all are stopped" in steps[-1].how


@pytest.mark.parametrize("token", ["", "   ", "${EMPTY_TOKEN}", "file:empty", "fifteen-letters"])
def test_a_write_token_that_is_empty_or_short_is_refused_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("EMPTY_TOKEN", "")
    (tmp_path / "empty").write_text("\n")

    with pytest.raises(ConfigError, match=r"tops\.toml, line \d+: .*write_token: .*at least 16 characters"):
        load(tmp_path, f'policy = "quorum"\nwrite_token = "{token}"')


def test_a_write_token_of_sixteen_characters_is_accepted(tmp_path: Path) -> None:
    assert load(tmp_path, 'policy = "quorum"\nwrite_token = "sixteen-letters-"').replica_sets[0].write_token


def test_no_code_but_the_policies_asks_for_a_policy_by_its_name() -> None:
    """What policies differ in is a method of theirs; the file's own keys are checked where they are read."""
    root = Path(replication.__file__).parent
    allowed = {root / "policies" / "__init__.py", root / "model" / "config.py"}
    found = [
        f"{path.relative_to(root)}:{node.lineno}"
        for path in sorted(root.rglob("*.py"))
        if path not in allowed
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare) and _names_a_policy(node)
    ]

    assert found == []


def _names_a_policy(node: ast.Compare) -> bool:
    return any(isinstance(side, ast.Constant) and side.value in NAMES for side in (node.left, *node.comparators))


def test_a_comparison_with_the_name_of_a_policy_is_found() -> None:
    (found,) = [node for node in ast.walk(ast.parse('config.policy == "quorum"')) if isinstance(node, ast.Compare)]

    assert _names_a_policy(found)
