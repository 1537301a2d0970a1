"""Replica sets as a configuration file names them."""

from pathlib import Path

import pytest

from replication.divergence.ports import Engine, ReplicaEndpoint
from replication.divergence.sets import endpoint_of, load_set
from tops.errors import ConfigError

FILE = """
[[replica_set]]
name = "shop"
policy = "primary-site"
primary = "r1"
tables = ["accounts", "transfers"]
[[replica_set.replica]]
name = "r1"
dsn = "postgresql://app:${SHOP_PASSWORD}@db1/shop"
[[replica_set.replica]]
name = "r10"
dsn = "file:r10.secret"
[[replica_set]]
name = "all"
tables = "*"
[[replica_set.replica]]
name = "r1"
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SHOP_PASSWORD", "secret")
    (tmp_path / "r10.secret").write_text("sqlite:////data/r10.db\n")
    (tmp_path / "tops.toml").write_text(FILE)
    return str(tmp_path / "tops.toml")


def test_secrets_come_from_the_environment_or_a_file(config: str) -> None:
    shop = load_set(config, "shop")

    assert shop.endpoints == (
        ReplicaEndpoint("r1", "postgresql://app:secret@db1/shop"),
        ReplicaEndpoint("r10", "sqlite:////data/r10.db"),
    )
    assert (shop.policy, shop.primary, shop.tables) == ("primary-site", "r1", ("accounts", "transfers"))
    assert [endpoint.engine for endpoint in shop.endpoints] == [Engine.POSTGRES, Engine.SQLITE]


def test_names_are_matched_whole(config: str) -> None:
    assert endpoint_of(config, "shop", "r10").path == "/data/r10.db"
    with pytest.raises(ConfigError, match="no replica 'r'; it has: r1, r10"):
        endpoint_of(config, "shop", "r")
    with pytest.raises(ConfigError, match="no replica set 'sho'; it has: shop, all"):
        load_set(config, "sho")


def test_what_is_missing_is_named(config: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="replica 'r1' has no dsn"):
        load_set(config, "all")
    monkeypatch.delenv("SHOP_PASSWORD")
    with pytest.raises(ConfigError, match="the environment has no SHOP_PASSWORD"):
        load_set(config, "shop")
    broken = tmp_path / "broken.toml"
    broken.write_text("[[replica_set")
    with pytest.raises(ConfigError, match=r"broken\.toml"):
        load_set(str(broken), "shop")
