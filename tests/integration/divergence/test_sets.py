"""Replica sets as the cluster's file names them."""

from pathlib import Path

import pytest

from adapters.embedded.servers import logins_file
from replication.divergence.read.sets import endpoint_of, load_set
from replication.tables.endpoints import Engine, ReplicaEndpoint
from tops.model.errors import ConfigError

FILE = """
[cluster]
name = "test"
[[broker]]
name = "b1"
listen = "127.0.0.1:7420"
data = "{folder}/b1"
[[replica_set]]
name = "shop"
policy = "primary-site"
primary = "r1"
tables = ["accounts", "transfers"]
[[replica_set.replica]]
name = "r1"
broker = "b1"
dsn = "postgresql://app:${{SHOP_PASSWORD}}@db1/shop"
[[replica_set.replica]]
name = "r10"
broker = "b1"
dsn = "file:r10.secret"
[[replica_set]]
name = "all"
policy = "peer-to-peer"
tables = "*"
[[replica_set.replica]]
name = "e1"
broker = "b1"
[[replica_set.replica]]
name = "e2"
broker = "b1"
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SHOP_PASSWORD", "secret")
    (tmp_path / "r10.secret").write_text("sqlite:///data/r10.db\n")
    (tmp_path / "tops.toml").write_text(FILE.format(folder=tmp_path))
    return str(tmp_path / "tops.toml")


def test_secrets_come_from_the_environment_or_a_file(config: str) -> None:
    shop = load_set(config, "shop")

    assert shop.endpoints == (
        ReplicaEndpoint("r1", "postgresql://app:secret@db1/shop"),
        ReplicaEndpoint("r10", "sqlite:////data/r10.db"),
    )
    assert (shop.policy, shop.primary, shop.tables) == ("primary-site", "r1", ("accounts", "transfers"))
    assert [endpoint.engine for endpoint in shop.endpoints] == [Engine.POSTGRES, Engine.SQLITE]
    assert shop.cluster is not None


def test_names_are_matched_whole(config: str) -> None:
    assert endpoint_of(config, "shop", "r10").path == "/data/r10.db"
    with pytest.raises(ConfigError, match="no replica 'r'; it has r1, r10"):
        endpoint_of(config, "shop", "r")
    with pytest.raises(ConfigError, match="named 'sho'; the file has shop, all"):
        load_set(config, "sho")


def test_an_embedded_server_is_found_where_it_runs_and_otherwise_not_reachable(config: str, tmp_path: Path) -> None:
    data = tmp_path / "b1" / "replicas" / "all" / "e1" / "postgres"
    data.mkdir(parents=True)
    logins_file(data).write_text("agent read write check")
    (data / "postmaster.pid").write_text(f"1\n{data}\n0\n54321\n/tmp\n")

    up, down = load_set(config, "all").endpoints

    assert up.dsn == "postgresql://tops_postgres_all_check:check@127.0.0.1:54321/postgres"
    assert down.dsn.endswith("all/e2/postgres")


def test_a_file_that_is_wrong_is_refused_as_everywhere_else(config: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("[[replica_set")
    with pytest.raises(ConfigError, match=r"broken\.toml"):
        load_set(str(broken), "shop")
    with pytest.raises(ConfigError, match="no such file"):
        load_set(str(tmp_path / "none.toml"), "shop")
