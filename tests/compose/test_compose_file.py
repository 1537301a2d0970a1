"""The compose file describes the stack that it promises, and nothing in it has more power than it needs."""

import re
from urllib.parse import urlsplit

import pytest

from replication.model.config import Cluster
from tests.compose.compose_file import ComposeFile, Service, load, yaml
from tests.compose.stack import BROKERS, COMPOSE, REPLICAS, ROOT
from tops.cli.main import COMMANDS

FILE = load()
PINNED = re.compile(r"[\w./-]+:v?\d+\.\d+[\w.-]*")
DATABASES = ("pg1", "pg2", "pg3")
PAGES = {"prometheus": 9090, "grafana": 3000}
SPARK = {"spark-master", "spark-worker-1", "spark-worker-2"}


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return Cluster.load(COMPOSE / "tops.toml")


def every(services: dict[str, Service]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("service", services.values(), ids=services)


def test_the_stack_has_the_shape_of_a_production_cluster() -> None:
    assert set(FILE.running()) == {*BROKERS, *REPLICAS, *DATABASES, *SPARK, *PAGES}


@every(FILE.running())
def test_what_runs_has_a_health_check_and_is_started_again(service: Service) -> None:
    assert service.healthcheck.test[0] in ("CMD", "CMD-SHELL")
    assert not service.healthcheck.disable
    assert service.healthcheck.retries > 0
    assert service.restart == "unless-stopped"


@every(FILE.services)
def test_an_image_has_a_version(service: Service) -> None:
    assert PINNED.fullmatch(service.image), service.image


@every(FILE.services)
def test_nothing_runs_as_root_or_with_a_capability(service: Service) -> None:
    assert re.fullmatch(r"[1-9]\d*:\d+", service.user), service.user
    assert service.cap_drop == ["ALL"]
    assert service.security_opt == ["no-new-privileges:true"]
    assert service.read_only
    assert not service.privileged and not service.network_mode and not service.pid
    assert not any("docker.sock" in source for source in service.mounts)


@every(FILE.services)
def test_a_port_is_open_on_this_machine_only(service: Service) -> None:
    assert all(port.startswith("127.0.0.1:") for port in service.ports)


def test_only_the_pages_are_reachable_from_outside() -> None:
    assert {name for name, service in FILE.services.items() if service.ports} == set(PAGES)
    assert FILE.networks["cluster"] == {"internal": True}
    assert all(service.networks == ["cluster"] for name, service in FILE.services.items() if name not in PAGES)


@pytest.mark.parametrize("node", [*BROKERS, *REPLICAS])
def test_a_node_sees_its_own_keys_and_the_authority_is_with_nobody(node: str) -> None:
    secret = {source for source in FILE.services[node].mounts if source.startswith(("keys-", "administrator-"))}

    assert secret == {f"keys-{node}"}
    assert {name for name, service in FILE.services.items() if "authority" in service.mounts} == {"keys"}


@every({name: service for name, service in FILE.services.items() if name != "keys"})
def test_keys_are_read_by_all_and_written_by_the_first_step_alone(service: Service) -> None:
    for volume in service.volumes:
        read_only = volume.endswith(":ro") if isinstance(volume, str) else volume["read_only"]
        source = volume.split(":")[0] if isinstance(volume, str) else volume["source"]
        assert read_only or not source.startswith(("keys-", "administrator-"))


def test_steps_of_the_first_start_are_waited_for_by_what_runs() -> None:
    """Otherwise `docker compose up --wait` takes their end for a failure."""
    waited_for = {name for service in FILE.running().values() for name in service.depends_on}

    assert FILE.waited_for() == {"keys", "databases"} <= waited_for
    assert all(FILE.services[name].restart == "no" for name in FILE.one_shot())


def test_every_name_and_file_that_is_mentioned_exists() -> None:
    for service in FILE.services.values():
        assert set(service.depends_on) <= set(FILE.services)
        for source in service.mounts:
            assert (COMPOSE / source).exists() if source.startswith(".") else source in FILE.volumes
    assert set(FILE.volumes) == {s for v in FILE.services.values() for s in v.mounts if not s.startswith(".")}


@pytest.mark.parametrize("broker", BROKERS)
def test_a_broker_s_service_is_the_broker_of_the_file(cluster: Cluster, broker: str) -> None:
    service, table = FILE.services[broker], cluster.config.broker_named(broker)

    assert service.command[:4] == ["broker", "run", "--name", broker]
    assert (service.hostname, table.host) == (broker, broker)
    assert urlsplit(service.environment["TOPS_HEALTH_URL"]).netloc == table.health_listen
    assert service.mounts[f"keys-{broker}"] == str(table.keys)
    assert service.mounts[f"broker-{broker}"] == str(table.data.parent)


@pytest.mark.parametrize("replica", REPLICAS)
def test_an_agent_s_service_is_the_replica_of_the_file(cluster: Cluster, replica: str) -> None:
    service, config = FILE.services[replica], cluster.replica_set("shop").replica_named(replica)

    assert service.command[:4] == ["replica", "run", "--name", f"shop/{replica}"]
    assert urlsplit(service.environment["TOPS_HEALTH_URL"]).netloc == config.listen
    assert service.mounts[f"keys-{replica}"] == str(config.keys)
    assert urlsplit(config.dsn or "").hostname in FILE.services
    assert urlsplit(config.dsn or "").password is None


def test_prometheus_asks_every_broker_and_agent(cluster: Cluster) -> None:
    jobs = yaml.safe_load((COMPOSE / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in jobs}

    assert targets == {
        "tops-brokers": [broker.health_listen for broker in cluster.config.broker],
        "tops-agents": [replica.listen for replica in cluster.replica_set("shop").replica],
    }


def test_the_product_s_image_is_slim_pinned_not_root_and_healthy() -> None:
    text = (COMPOSE / "Dockerfile").read_text()
    stages = re.split(r"(?m)^FROM ", text)[1:]
    image = re.search(r"(?m)^ARG PYTHON_IMAGE=(.+)$", text)

    assert image is not None and PINNED.fullmatch(image[1]) and "slim" in image[1]
    final = {re.search(r" AS (\S+)", stage)[1]: stage for stage in stages}  # type: ignore[index]
    assert {service.build["target"] for service in FILE.services.values() if service.build} == {"product", "divergence"}
    for name in ("base", "divergence"):
        assert re.findall(r"(?m)^USER (\S+)", final[name])[-1] == "10001:10001"
    assert final["product"].startswith("base ") and "USER" not in final["product"]
    assert "HEALTHCHECK" in final["base"]


def test_what_the_image_copies_exists_and_is_not_ignored() -> None:
    allowed = re.findall(r"(?m)^!(\S+)", (COMPOSE / "Dockerfile.dockerignore").read_text())
    for line in re.findall(r"(?m)^COPY (?!--from)(.+)$", (COMPOSE / "Dockerfile").read_text()):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists()
            assert source.split("/")[0] in allowed


@every({name: service for name, service in FILE.services.items() if service.build and not service.entrypoint})
def test_a_command_of_the_product_exists(service: Service) -> None:
    assert service.command[0] in COMMANDS


def test_a_service_without_a_user_is_found() -> None:
    text = (COMPOSE / "compose.yaml").read_text().replace('    user: "472:0"\n', "")

    with pytest.raises(ValueError, match=r"services\.grafana\.user"):
        ComposeFile.model_validate(yaml.safe_load(text))
