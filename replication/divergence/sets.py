"""Replica sets as a configuration file names them: the endpoints, the policy, the tables."""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replication.divergence.ports import ReplicaEndpoint
from tops.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SetDescription:
    """What a check needs to know of a replica set."""

    name: str
    policy: str
    tables: tuple[str, ...]  # empty: all
    endpoints: tuple[ReplicaEndpoint, ...]
    primary: str = ""


def load_set(path: str, name: str) -> SetDescription:
    """One replica set of a `tops.toml`; names are matched whole, never by a part of them."""
    file = Path(path)
    if not file.exists():
        raise ConfigError(f"{path}: no such file; name it with -c, or give the databases with --dsn name=…")
    try:
        document = tomllib.loads(file.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from error
    sets: list[Mapping[str, Any]] = document.get("replica_set", [])
    found = next((entry for entry in sets if entry.get("name") == name), None)
    if found is None:
        known = ", ".join(str(entry.get("name")) for entry in sets) or "none"
        raise ConfigError(f"{path}: no replica set {name!r}; it has: {known}")
    tables = found.get("tables", "*")
    return SetDescription(
        name,
        str(found.get("policy", "")),
        () if tables in ("*", ["*"]) else tuple(tables),
        tuple(_endpoint(path, replica) for replica in found.get("replica", [])),
        str(found.get("primary", "")),
    )


def endpoint_of(path: str, set_name: str, replica: str) -> ReplicaEndpoint:
    described = load_set(path, set_name)
    for endpoint in described.endpoints:
        if endpoint.name == replica:
            return endpoint
    known = ", ".join(endpoint.name for endpoint in described.endpoints)
    raise ConfigError(f"{path}: replica set {set_name!r} has no replica {replica!r}; it has: {known}")


def _endpoint(path: str, replica: Mapping[str, Any]) -> ReplicaEndpoint:
    name = str(replica.get("name", ""))
    if "dsn" not in replica:
        raise ConfigError(
            f"{path}: replica {name!r} has no dsn; give the embedded server's address with --dsn {name}=…"
        )
    return ReplicaEndpoint(name, _resolved(path, str(replica["dsn"])))


def _resolved(path: str, text: str) -> str:
    """`${NAME}` from the environment and `file:` references, which keep secrets out of the file."""
    if text.startswith("file:"):
        return (Path(path).parent / text.removeprefix("file:")).read_text().strip()

    def value(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise ConfigError(f"{path}: the environment has no {match[1]}")
        return os.environ[match[1]]

    return re.sub(r"\$\{(\w+)\}", value, text)
