"""`tops.toml`: what is accepted, and that every refusal names file, line and key."""

from pathlib import Path

import pytest
from pydantic import BaseModel, TypeAdapter

from tops.model.errors import ConfigError
from tops.runtime.config import load_config, parse_config
from tops.security import PLAIN_WORDS, redact

GOOD = """\
[cluster]
name = "shop"

[[broker]]
name = "b1"
listen = "127.0.0.1:7420"
data = "./data/b1"
links = ["b2"]

[[broker]]
name = "b2"
listen = "127.0.0.1:7421"
data = "./data/b2"
links = []

[broker.retention]
size = "512 MiB"
age = "7 d"

[[replica_set]]
name = "shop"
policy = "quorum"
"""
FILE = Path("/etc/tops/tops.toml")


def test_a_whole_file_becomes_a_topology_with_paths_as_the_file_sees_them() -> None:
    config = parse_config(GOOD, FILE)

    assert config.topology().neighbours == {"b1": ("b2",), "b2": ("b1",)}
    assert config.broker_named("b1").data == Path("/etc/tops/data/b1")
    assert config.broker_named("b2").retention.size == 512 * 2**20
    assert config.broker_named("b2").retention.age == 7 * 86400
    assert config.broker_named("b1").url == "ws://127.0.0.1:7420"
    assert config.others["replica_set"] == [{"name": "shop", "policy": "quorum"}]


def test_without_links_every_broker_is_linked_to_all() -> None:
    config = parse_config(GOOD.replace('links = ["b2"]\n', "").replace("links = []\n", ""), FILE)

    assert config.topology().neighbours == {"b1": ("b2",), "b2": ("b1",)}


@pytest.mark.parametrize(
    ("change", "line", "words"),
    [
        (('links = ["b2"]', 'links = ["b9"]'), 8, "'b9' is no [[broker]]"),
        (('name = "b2"', 'name = "b1"'), 11, "'b1' occurs twice"),
        (('links = ["b2"]', 'lnks = ["b2"]'), 8, "lnks: is not a known key"),
        (('listen = "127.0.0.1:7421"', 'listen = "127.0.0.1"'), 10, "write host:port"),
        (('listen = "127.0.0.1:7421"', 'listen = "0.0.0.0:7421"'), 12, "without TLS"),
        (('size = "512 MiB"', 'size = "plenty"'), 17, "no quantity"),
        (('links = ["b2"]', "links = []"), 14, "no path leads"),
        (("[[replica_set]]", "[[replica_sets]]"), 20, "replica_sets"),
        (('name = "shop"\n\n', 'name = "sh op"\n\n'), 2, "pattern"),
    ],
)
def test_a_mistake_is_refused_with_file_line_and_key(change: tuple[str, str], line: int, words: str) -> None:
    with pytest.raises(ConfigError) as rejection:
        parse_config(GOOD.replace(*change, 1), FILE)

    assert words in str(rejection.value)
    assert str(rejection.value).startswith(f"{FILE}, line {line}: ")


def test_broken_toml_and_missing_files_are_refused_with_the_file() -> None:
    with pytest.raises(ConfigError, match=r"tops\.toml: .*line 1"):
        parse_config("[cluster\n", FILE)
    with pytest.raises(ConfigError, match="No such file"):
        load_config(Path("/nowhere/tops.toml"))


def test_references_to_the_environment_and_to_files_keep_secrets_out_of_file_and_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dsn").write_text("postgresql://u:from-a-file@h/d\n")
    monkeypatch.setenv("SHOP_DSN", "postgresql://u:from-the-environment@h/d")
    text = GOOD + 'dsn = "${SHOP_DSN}"\nother = "file:dsn"\n'

    replica_set = parse_config(text, tmp_path / "tops.toml").others["replica_set"][0]

    assert replica_set["dsn"].endswith("from-the-environment@h/d")
    assert replica_set["other"].endswith("from-a-file@h/d")
    assert "from-a-file" not in redact(f"connecting to {replica_set['other']}")
    with pytest.raises(ConfigError, match=r"line 23: replica_set\[1\].dsn: the environment has no variable MISSING"):
        parse_config(text.replace("SHOP_DSN", "MISSING"), tmp_path / "tops.toml")


def test_another_layers_table_is_checked_by_its_own_model() -> None:
    class Set(BaseModel):
        name: str
        policy: str
        write_quorum: int

    sections = {"replica_set": TypeAdapter(list[Set])}

    with pytest.raises(ConfigError, match=r"line 20: replica_set\[1\].write_quorum: Field required"):
        parse_config(GOOD, FILE, sections)
    good = parse_config(GOOD + "write_quorum = 2\n", FILE, sections)
    assert good.others["replica_set"][0].write_quorum == 2


def test_without_tls_beyond_loopback_the_file_must_say_so_in_plain_words() -> None:
    wide = GOOD.replace("127.0.0.1:7421", "0.0.0.0:7421")

    config = parse_config(wide.replace('name = "shop"', f'name = "shop"\ninsecure = "{PLAIN_WORDS}"', 1), FILE)

    assert config.broker_named("b2").host == "0.0.0.0"


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("hosts", '["http://proxy"]', "no host or host:port"),
        ("hosts", '["user@proxy"]', "no host or host:port"),
        ("origins", '["proxy.example.org"]', "no origin"),
        ("origins", '["https://proxy.example.org/path"]', "no origin"),
        ("health_listen", '"9100"', "no address"),
    ],
)
def test_names_of_proxies_and_the_health_address_are_checked(key: str, value: str, problem: str) -> None:
    text = GOOD.replace('data = "./data/b1"', f'data = "./data/b1"\n{key} = {value}')

    with pytest.raises(ConfigError, match=problem):
        parse_config(text, FILE)


def test_names_of_proxies_and_the_health_address_are_read() -> None:
    more = (
        'hosts = ["proxy", "proxy:8080", "[2001:db8::1]:80"]\norigins = ["https://proxy"]\nhealth_listen = "[::1]:9100"'
    )
    broker = parse_config(GOOD.replace('data = "./data/b1"', f'data = "./data/b1"\n{more}'), FILE).broker_named("b1")

    assert (len(broker.hosts), broker.origins, broker.health_listen) == (3, ["https://proxy"], "[::1]:9100")
