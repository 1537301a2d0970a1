"""The compose file, read and checked as far as the tests need it; further keys are Docker's business."""

from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.compose.stack import COMPOSE

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (it comes with the extra 'dev')")


class HealthCheck(BaseModel):
    model_config = ConfigDict(extra="forbid")
    test: list[str] = Field(default=[], min_length=2)
    interval: str = ""
    timeout: str = ""
    retries: int = 0
    start_period: str = ""
    disable: bool = False


class Service(BaseModel):
    image: str
    user: str
    healthcheck: HealthCheck
    restart: str
    read_only: bool
    init: bool
    cap_drop: list[str]
    security_opt: list[str]
    networks: list[str]
    build: dict[str, str] | None = None
    hostname: str = ""
    command: list[str] = []
    entrypoint: list[str] = []
    environment: dict[str, str] = {}
    volumes: list[str | dict[str, Any]] = []
    ports: list[str] = []
    profiles: list[str] = []
    depends_on: dict[str, dict[str, str]] = {}
    privileged: bool = False
    network_mode: str = ""
    pid: str = ""

    @property
    def mounts(self) -> dict[str, str]:
        """Where each volume or folder of the machine is seen in the container."""
        short = (v.split(":") for v in self.volumes if isinstance(v, str))
        long = ((v["source"], v["target"]) for v in self.volumes if not isinstance(v, str))
        return {source: target for source, target, *_ in (*short, *long)}


class ComposeFile(BaseModel):
    name: str
    services: dict[str, Service]
    networks: dict[str, dict[str, bool]]
    volumes: dict[str, dict[str, Any]]

    def waited_for(self) -> set[str]:
        """Services that others wait for until they have ended."""
        return {
            name
            for service in self.services.values()
            for name, wanted in service.depends_on.items()
            if wanted["condition"] == "service_completed_successfully"
        }

    def one_shot(self) -> set[str]:
        """Services that end: steps of the first start, and what is run on demand."""
        return self.waited_for() | {name for name, service in self.services.items() if service.profiles}

    def running(self) -> dict[str, Service]:
        return {name: service for name, service in self.services.items() if name not in self.one_shot()}


def load() -> ComposeFile:
    return ComposeFile.model_validate(yaml.safe_load((COMPOSE / "compose.yaml").read_text()))
