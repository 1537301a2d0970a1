"""The stack in real containers, where a Docker engine answers; everywhere else these tests are skipped."""

import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from typing import Any

import pytest

from adapters.embedded.free_ports import free_port
from compose import demo
from tests.compose.compose_file import load
from tests.compose.stack import COMPOSE, ROOT

docker = pytest.importorskip("docker", reason="the package 'docker' is not installed (it comes with the extra 'dev')")

PROJECT = "tops-test"
IMAGE = "tops-replication:test"
BUILD_CONTEXT = (
    "pyproject.toml",
    "requirements.lock",
    "README.md",
    "LICENSE",
    "tops",
    "adapters",
    "replication",
    "compose",
)
pytestmark = pytest.mark.timeout(1800)  # images are pulled and built


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    try:
        client = docker.from_env(timeout=60)
        client.ping()
    except docker.errors.DockerException as error:
        pytest.skip(f"no Docker engine answers: {error}")
    yield client
    client.close()


@pytest.fixture(scope="module")
def compose(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The command line of `docker compose` for a stack that runs; it is removed in the end, with its data."""
    command = ["docker", "compose", "-p", PROJECT, "-f", str(COMPOSE / "compose.yaml")]
    if shutil.which("docker") is None or subprocess.run([*command, "version"], capture_output=True).returncode != 0:
        pytest.skip("the command 'docker compose' is not installed")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TOPS_PROMETHEUS_PORT", str(free_port()))
        environment.setenv("TOPS_GRAFANA_PORT", str(free_port()))
        try:
            subprocess.run([*command, "build"], check=True)
            subprocess.run([*command, "up", "--detach", "--wait"], check=True)
            yield command
        finally:
            profiles = ["--profile", "demo", "--profile", "check", "--profile", "operator"]
            subprocess.run([*command, *profiles, "down", "--volumes", "--timeout", "10"], check=False)


def build_context() -> io.BytesIO:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in BUILD_CONTEXT:
            archive.add(ROOT / name, name, filter=lambda entry: None if "__pycache__" in entry.name else entry)
    packed.seek(0)
    return packed


def test_the_product_s_image_is_built_and_runs_as_an_unprivileged_user(engine: Any) -> None:
    image, _ = engine.images.build(
        fileobj=build_context(),
        custom_context=True,
        dockerfile="compose/Dockerfile",
        target="product",
        tag=IMAGE,
        rm=True,
    )

    assert image.attrs["Config"]["User"] == "10001:10001"
    assert image.attrs["Config"]["Healthcheck"]["Test"][0] == "CMD"
    shown = engine.containers.run(IMAGE, ["--help"], remove=True, read_only=True, cap_drop=["ALL"])
    assert b"broker" in shown and b"replica" in shown


def test_every_service_of_the_stack_is_healthy(engine: Any, compose: list[str]) -> None:
    containers = engine.containers.list(filters={"label": f"com.docker.compose.project={PROJECT}"})

    healthy = {c.labels["com.docker.compose.service"]: c.attrs["State"]["Health"]["Status"] for c in containers}
    assert healthy == dict.fromkeys(load().running(), "healthy")


def test_prometheus_reaches_every_broker_and_agent(engine: Any, compose: list[str]) -> None:
    query = ["wget", "-q", "-O", "-", "http://127.0.0.1:9090/api/v1/query?query=up"]
    shown = subprocess.run([*compose, "exec", "-T", "prometheus", *query], capture_output=True, check=True).stdout

    series = json.loads(shown)["data"]["result"]
    assert len(series) == 6
    assert {one["value"][1] for one in series} == {"1"}


def test_a_check_on_the_stack_s_spark_finds_equal_replicas(compose: list[str]) -> None:
    ended = subprocess.run(
        [*compose, "--profile", "check", "run", "--rm", "-T", "check"], capture_output=True, text=True
    )

    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_demo_keeps_every_promise(compose: list[str]) -> None:
    said: list[str] = []

    assert demo.demonstrate(demo.ComposeStack(PROJECT), said.append), "\n".join(said)
