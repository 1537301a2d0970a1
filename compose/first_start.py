"""What the stack needs before its first start: certificates of all nodes, tables and logins of all databases.

`keys` runs before everything else, `databases` when the servers accept connections. Both can run again at every start:
they make what is missing, renew certificates that are about to end, and change nothing else.
"""

import argparse
import asyncio
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import quote, urlsplit

from adapters import provision
from adapters.postgres.copy.scripts import missing_tables, run_script
from replication.model.config import Cluster, ReplicaConfig, ReplicaSetConfig

SITES = {"operator": "admin", "application": "writer"}  # name and role
RENEW = timedelta(days=30)  # before the end
LOGINS = ("dsn", "read_dsn", "write_dsn", "check_dsn")  # as `provision` takes their passwords


@dataclass(frozen=True)
class Node:
    """Who needs a certificate: the name in it, how `tops keys issue` is told, and the folder of its keys."""

    name: str
    arguments: tuple[str, ...]
    folder: Path


def make_keys(cluster: Cluster, authority: Path, keys: Path) -> None:
    """The authority, and for each node a folder that holds its own keys only."""
    if not (authority / "ca.key").exists():
        _tops("keys", "init", "--dir", str(authority), "--cluster", cluster.config.cluster.name)
    newest, nodes = _newest(authority), list(_nodes(cluster, keys))
    for node in nodes:
        if node.name not in newest or newest[node.name].ends_soon:
            _tops("keys", "issue", *node.arguments, "--renew", "--dir", str(authority))
    for node in nodes:
        node.folder.mkdir(parents=True, exist_ok=True)
        for file in (authority / "nodes" / node.name.replace("/", ".")).iterdir():
            _write(node.folder / file.name, file.read_bytes())  # also the list of revoked certificates


def _nodes(cluster: Cluster, keys: Path) -> Iterator[Node]:
    for broker in cluster.config.broker:
        assert broker.keys is not None, f"broker {broker.name} has no keys"
        hosts = [part for address in broker.addresses for part in ("--host", address.rpartition(":")[0])]
        yield Node(broker.name, (broker.name, "--kind", "broker", *hosts), broker.keys)
    for replica_set, replica in _replicas(cluster):
        arguments = ("--kind", "replica", "--set", replica_set.name, "--replica", replica.name)
        folder = cluster.keys_of(replica)
        assert folder is not None, f"replica {replica.name} has no keys"
        yield Node(f"{replica_set.name}/{replica.name}", arguments, folder)
    for name, role in SITES.items():
        yield Node(name, (name, "--role", role), keys / name)


@dataclass(frozen=True)
class Certificate:
    """One certificate, as `tops keys show` lists it."""

    ends: datetime
    revoked: bool

    @property
    def ends_soon(self) -> bool:
        """What was revoked stays revoked: a start must not undo it."""
        return not self.revoked and self.ends < datetime.now(UTC) + RENEW


def _newest(authority: Path) -> Mapping[str, Certificate]:
    """The certificate of each name that ends last."""
    shown = json.loads(_tops("keys", "show", "--dir", str(authority), "--format", "json"))
    listed = [
        (one["name"], Certificate(datetime.fromisoformat(one["not_after"]), one["status"] == "revoked"))
        for one in shown["certificates"]
    ]
    return dict(sorted(listed, key=lambda one: one[1].ends))


def make_passwords(cluster: Cluster, administrators: Path, check: Path) -> None:
    """Passwords of the servers' administrators and of all logins, as files for those who use them."""
    everybody = _passwords(check / "pgpass")
    for _, replica in _replicas(cluster):
        folder = cluster.keys_of(replica)
        assert folder is not None
        admin = administrators / replica.name / "password"
        if not admin.exists():
            _write(admin, secrets.token_urlsafe(24).encode(), mode=0o644)  # the volume is the server's alone
        own = _passwords(folder / "pgpass")
        for key in LOGINS:
            own.setdefault(_entry(replica, key), secrets.token_urlsafe(24))
        _write_passwords(folder / "pgpass", own)
        entry = _entry(replica, "check_dsn")
        everybody[entry] = own[entry]
    _write_passwords(check / "pgpass", everybody)


def make_database(replica_set: ReplicaSetConfig, replica: ReplicaConfig, admin: str, folder: Path, schema: str) -> None:
    """The tables, and the logins with the passwords that their users have."""
    parts = urlsplit(replica.dsn or "")
    dsn = f"postgresql://postgres:{quote(admin, safe='')}@{parts.netloc.rpartition('@')[2]}{parts.path}"
    kept = _passwords(folder / "pgpass")
    passwords = [kept[_entry(replica, key)] for key in LOGINS]

    async def make() -> None:
        assert not isinstance(replica_set.tables, str), "name the tables of the set"
        if await missing_tables(dsn, replica_set.tables):
            await run_script(dsn, schema)
        await provision(dsn, replica_set.name, replica_set.tables, passwords=passwords)

    asyncio.run(make())


def _replicas(cluster: Cluster) -> Iterator[tuple[ReplicaSetConfig, ReplicaConfig]]:
    for replica_set in cluster.replica_sets:
        for replica in replica_set.replica:
            yield replica_set, replica


def _entry(replica: ReplicaConfig, key: str) -> str:
    """What stands before the password in PostgreSQL's password file."""
    parts = urlsplit(str(getattr(replica, key)))
    return f"{parts.hostname}:{parts.port}:{parts.path.removeprefix('/')}:{parts.username}"


def _passwords(file: Path) -> dict[str, str]:
    lines = file.read_text().splitlines() if file.exists() else []
    return {entry: password for entry, _, password in (line.rpartition(":") for line in lines)}


def _write_passwords(file: Path, passwords: Mapping[str, str]) -> None:
    _write(file, "".join(f"{entry}:{password}\n" for entry, password in passwords.items()).encode())


def _write(file: Path, content: bytes, mode: int = 0o600) -> None:
    """Whole or not at all: nodes that run read their keys again when these change."""
    if file.exists() and file.read_bytes() == content:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_name(f".{file.name}.new")
    fresh.unlink(missing_ok=True)
    fresh.touch(mode=mode)
    fresh.chmod(mode)
    fresh.write_bytes(content)
    os.replace(fresh, file)


def _tops(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "tops", *arguments], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=["keys", "databases"])
    parser.add_argument("--config", type=Path, default=Path("/etc/tops/tops.toml"))
    parser.add_argument("--schema", type=Path, default=Path("/etc/tops/schema.sql"))
    parser.add_argument("--authority", type=Path, default=Path("/authority"))
    parser.add_argument("--keys", type=Path, default=Path("/keys"))
    parser.add_argument("--administrators", type=Path, default=Path("/administrators"))
    given = parser.parse_args()
    cluster = Cluster.load(given.config)
    if given.step == "keys":
        make_keys(cluster, given.authority, given.keys)
        make_passwords(cluster, given.administrators, given.keys / "check")
        grafana = given.keys / "grafana" / "password"
        if not grafana.exists():
            _write(grafana, secrets.token_urlsafe(24).encode(), mode=0o644)
        return
    for replica_set, replica in _replicas(cluster):
        admin = (given.administrators / replica.name / "password").read_text()
        folder = cluster.keys_of(replica)
        assert folder is not None
        make_database(replica_set, replica, admin, folder, given.schema.read_text())


if __name__ == "__main__":
    main()
