"""Replica sets as the DBA writes them in `tops.toml`, and the checks that need no running part.

[[replica_set]]
name = "shop"
policy = "quorum"
write_quorum = 2
tables = ["accounts", "transfers"]
[[replica_set.replica]]
name = "r1"
broker = "b1"
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, TypeAdapter, ValidationInfo, field_validator, model_validator

from adapters.postgres.access.grants import TEMP_FILE_LIMIT
from tops.model.errors import ConfigError
from tops.runtime.config import Config, Name, Seconds, Table, error_at, load_config
from tops.security import replica_name

if TYPE_CHECKING:
    from adapters import Logins

PolicyName = Literal["peer-to-peer", "primary-site", "write-all", "quorum", "combined", "serializable"]
ResolverName = Literal["last-writer", "first-writer", "site-priority", "per-column"]
SCHEMES = ("postgresql", "postgres", "sqlite")
POSTGRES_PORT = 5432
_OF_A_REPLICA = {"dsn", "read_dsn", "write_dsn", "check_dsn", "keys", "read_listen"}
WRITE_TOKEN_CHARS_MIN = 16
HIDDEN: Any = {"replica": {"__all__": _OF_A_REPLICA}, "write_token": True, "http_keys": True}  # not for everyone
SUPERUSER_ACCEPTED = "I accept that clients can read and write the server's files"


class ReplicaConfig(Table):
    """One replica: a database, the agent in front of it, and the broker that the agent prefers."""

    name: Name
    broker: Name
    dsn: str | None = None  # the agent's login; None: embedded PostgreSQL under its broker's data
    read_dsn: str | None = None  # the login of clients' queries
    write_dsn: str | None = None  # the role of clients' statements; the agent is a member of it
    check_dsn: str | None = None  # the login of `tops check`; None: the agent's
    listen: str | None = None  # host:port of the agent's own health, readiness and metrics
    read_listen: str | None = None  # host:port for direct connections of clients; None: a port of loopback; "off": none
    keys: Path | None = None  # the folder that `tops keys issue` wrote for this agent


class ReplicaSetConfig(Table):
    """One replica set; a key that it does not know is an error."""

    name: Name
    policy: PolicyName
    replica: list[ReplicaConfig] = Field(min_length=1)
    tables: list[str] | Literal["*"] = "*"
    schema_file: Path | None = Field(default=None, alias="schema")  # SQL for databases that lack the tables
    versioned: list[str] = Field(
        default_factory=list
    )  # tables that keep the number that last changed each row, for `expect_version`

    seed: Name | None = None  # the replica from which empty ones take schema and rows before the set starts
    trust_equal: bool = False  # the databases are clones: schemas and row counts are compared, checksums are not
    direct_writes: Literal["reject", "warn", "allow"] = "reject"  # what becomes of writes past replication

    write_quorum: int | None = Field(default=None, ge=1)
    read_quorum: int | None = Field(default=None, ge=1)
    sync: list[Name] = Field(default_factory=list)  # combined: the replicas that commit together
    primary: Name | None = None
    ack: Literal["local", "logged"] = "logged"
    order: Literal["local-first", "ordered"] = "local-first"

    on_failure: Literal["reject", "block", "degrade"] = "reject"
    block_s: Seconds = 10.0
    min_in_sync: int | None = Field(default=None, ge=1)

    resolver: ResolverName | str = "last-writer"  # or "module:function"
    site_priority: list[Name] = Field(default_factory=list)  # the first one wins
    clock_skew_max_s: Seconds = 1.0
    keep_conflicts_s: Seconds = 30 * 86_400.0  # how long the conflict log is kept, once every replica has come past it
    keep_tombstones_s: Seconds = 7 * 86_400.0  # the same for the records of deleted rows
    on_apply_error: Literal["stop", "skip", "set-aside"] = "stop"

    write_token: str | None = None  # the bearer token for writes over HTTP; none: no writes over HTTP
    http_keys: str | None = None  # the folder of the keys under which a broker's HTTP side writes; {broker} is its name

    allow_superuser: str | None = None  # the plain words that allow client SQL on a superuser's connection
    wait_s: Seconds = 5.0  # how long a read waits for its position unless it says otherwise
    wait_max_s: Seconds = 60.0  # how long a request may wait for a position at most, whatever it says
    read_timeout_s: Seconds = 30.0  # how long a client's query may take
    temp_file_limit: str = TEMP_FILE_LIMIT  # what the files of one query of a client may take of its server's disk
    execute_timeout_s: Seconds = 5.0  # how long a transaction that is executed once may take at its origin
    key_ttl_s: Seconds = 86_400.0

    @property
    def names(self) -> list[str]:
        return [r.name for r in self.replica]

    def replica_named(self, name: str) -> ReplicaConfig:
        for replica in self.replica:
            if replica.name == name:
                return replica
        raise ConfigError(f"replica set {self.name!r} has no replica {name!r}; it has {', '.join(self.names)}")

    def site_of(self, replica: str) -> str:
        """The identity under which a replica's agent is known in the overlay."""
        return replica_name(self.name, replica)

    def sites(self, replicas: list[str] | None = None) -> frozenset[str]:
        return frozenset(self.site_of(name) for name in (self.names if replicas is None else replicas))

    def replica_of(self, site: str) -> str:
        return site.removeprefix(f"{self.name}/")

    @property
    def writes_needed(self) -> int:
        """How many replicas a committed write is at."""
        match self.policy:
            case "write-all":
                return len(self.replica) if self.on_failure != "degrade" else self.least_in_sync
            case "quorum":
                return self.write_quorum or len(self.replica) // 2 + 1
            case "combined":
                return len(self.sync) if self.on_failure != "degrade" else min(self.least_in_sync, len(self.sync))
        return 1

    @property
    def reads_needed(self) -> int:
        """How many replicas a quorum read asks: enough to meet every write."""
        voters = len(self.sync) if self.policy == "combined" else len(self.replica)
        return self.read_quorum or voters - self.writes_needed + 1

    @property
    def least_in_sync(self) -> int:
        return self.min_in_sync or len(self.replica) // 2 + 1

    @model_validator(mode="before")
    @classmethod
    def _former_keys(cls, values: Any) -> Any:
        if isinstance(values, dict) and "allow_volatile" in values:
            raise ValueError(
                "allow_volatile is gone: only statements that are proved deterministic are replicated; remove the key, "
                "and give the values of clocks, sequences and random numbers as parameters"
            )
        return values

    @field_validator("tables", mode="before")
    @classmethod
    def _tables(cls, value: Any) -> Any:
        if isinstance(value, list) and not value:
            raise ValueError('is empty: name the tables, or write "*"')
        return value

    @field_validator("allow_superuser")
    @classmethod
    def _allow_superuser(cls, value: str | None) -> str | None:
        if value not in (None, SUPERUSER_ACCEPTED):
            raise ValueError(f'says what it allows or nothing: "{SUPERUSER_ACCEPTED}"')
        return value

    @field_validator("write_token")
    @classmethod
    def _write_token(cls, value: str | None) -> str | None:
        if value is not None and len(value.strip()) < WRITE_TOKEN_CHARS_MIN:
            raise ValueError(
                f"a token has at least {WRITE_TOKEN_CHARS_MIN} characters, this one has {len(value.strip())}: make one "
                "with `openssl rand -hex 32`, or remove the key if nobody writes with a token"
            )
        return value

    @field_validator("temp_file_limit")
    @classmethod
    def _temp_file_limit(cls, value: str) -> str:
        if not re.fullmatch(r"[1-9][0-9]{0,8}(kB|MB|GB|TB)", value):
            raise ValueError(f'{value!r} is no size: write a number and kB, MB, GB or TB, such as "{TEMP_FILE_LIMIT}"')
        return value

    @field_validator("resolver")
    @classmethod
    def _resolver(cls, value: str, _: ValidationInfo) -> str:
        if value not in ("last-writer", "first-writer", "site-priority", "per-column") and ":" not in value:
            raise ValueError(
                f'{value!r} is no resolver: last-writer, first-writer, site-priority, per-column or "module:function"'
            )
        return value

    @model_validator(mode="after")
    def _check(self) -> "ReplicaSetConfig":
        for index, name in enumerate(self.names):
            if name in self.names[:index]:
                raise ValueError(f"replica {name!r} is there twice")
        self._check_quorums()
        self._check_members()
        self._check_logins()
        return self

    def _check_logins(self) -> None:
        for replica in self.replica:
            more = [key for key in ("read_dsn", "write_dsn", "check_dsn") if getattr(replica, key) is not None]
            if more and (replica.dsn is None or replica.dsn.startswith("sqlite:")):
                raise ValueError(f"replica {replica.name!r}: {more[0]} belongs to a `dsn` of a PostgreSQL server")

    def _check_quorums(self) -> None:
        n = len(self.replica)
        if self.write_quorum is not None and self.policy != "quorum":
            raise ValueError(f"write_quorum belongs to the policy quorum, not to {self.policy}")
        if self.write_quorum is not None and self.write_quorum > n:
            raise ValueError(f"write_quorum is {self.write_quorum}, but there are {n} replicas")
        if self.read_quorum is None:
            return
        if self.policy not in ("quorum", "write-all", "combined"):
            raise ValueError(f"read_quorum belongs to policies with quorum reads, not to {self.policy}")
        voters = len(self.sync) if self.policy == "combined" else n
        if self.read_quorum > voters:
            raise ValueError(f"read_quorum is {self.read_quorum}, but {voters} replicas vote")
        if self.reads_needed + self.writes_needed <= voters:
            raise ValueError(
                f"a read of {self.reads_needed} and a write of {self.writes_needed} of {voters} replicas need not "
                f"meet: make read_quorum at least {voters - self.writes_needed + 1}"
            )

    def _check_members(self) -> None:
        known = set(self.names)
        if self.policy == "combined" and not self.sync:
            raise ValueError("the policy combined needs `sync`: the replicas that commit together")
        if self.policy == "primary-site" and self.primary is None:
            raise ValueError("the policy primary-site needs `primary`")
        if self.resolver == "site-priority" and set(self.site_priority) != known:
            raise ValueError("the resolver site-priority needs `site_priority` to name every replica once")
        for key, names in (("sync", self.sync), ("site_priority", self.site_priority)):
            unknown = [name for name in names if name not in known]
            if unknown:
                raise ValueError(f"{key} names {unknown[0]!r}, which is no replica of the set")
        if self.seed is not None and self.seed not in known:
            raise ValueError(f"seed is {self.seed!r}, which is no replica of the set")
        if self.primary is not None and self.primary not in known:
            raise ValueError(f"primary is {self.primary!r}, which is no replica of the set")
        if self.min_in_sync is not None and self.min_in_sync > len(self.replica):
            raise ValueError(f"min_in_sync is {self.min_in_sync}, but there are {len(self.replica)} replicas")
        self._check_sqlite([r.name for r in self.replica if (r.dsn or "").startswith("sqlite:")])

    def _check_sqlite(self, names: list[str]) -> None:
        """SQLite replicas apply the log and nothing else."""
        if not names:
            return
        follow = "it may follow in a primary-site set, or in a combined set outside of `sync`"
        if self.policy in ("quorum", "write-all") or any(name in self.sync for name in names):
            raise ValueError(
                f"replica {names[0]!r}: SQLite commits early and takes it back, so it can't vote; {follow}"
            )
        if self.policy in ("peer-to-peer", "serializable"):
            raise ValueError(f"replica {names[0]!r}: policy {self.policy} needs PostgreSQL at every replica; {follow}")
        if self.primary in names:
            raise ValueError(f"primary {self.primary!r} is an SQLite file; {follow}")


def login_keys(logins: "Logins") -> str:
    """The lines of a replica in the file that name its logins."""
    named = {"dsn": logins.agent, "read_dsn": logins.read, "write_dsn": logins.write, "check_dsn": logins.check}
    return "\n".join(f'{key} = "{dsn}"' for key, dsn in named.items())


class GatewayUser(Table):
    """Who may connect to a gateway. The name and the role are those of a site of the cluster."""

    name: Name
    password: str = Field(min_length=8)
    role: Name = "writer"


class GatewayConfig(Table):
    """PostgreSQL's protocol in front of a set: `[[gateway]]`."""

    name: Name
    listen: str
    replica_set: Name
    replica: Name | None = None  # whose database responds to reads; None: the first of the set
    pool: int = Field(default=64, ge=1)  # sessions of that database
    clients_max: int = Field(default=2_500, ge=1)
    consistency: Literal["any", "current", "quorum", "primary"] = "any"  # of sessions that do not choose
    keys: Path | None = None  # the folder of its keys, whose role may act for others (`service`)
    tls_certificate: Path | None = None  # PEM files that clients' drivers check
    tls_key: Path | None = None
    user: list[GatewayUser] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> "GatewayConfig":
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key belong together")
        names = [user.name for user in self.user]
        if len(set(names)) < len(names):
            raise ValueError("a user is there twice")
        return self


_SECTION: TypeAdapter[list[ReplicaSetConfig]] = TypeAdapter(list[ReplicaSetConfig])
_GATEWAYS: TypeAdapter[list[GatewayConfig]] = TypeAdapter(list[GatewayConfig])


class Cluster:
    """A whole `tops.toml`: brokers and replica sets."""

    def __init__(self, path: Path, config: Config) -> None:
        self.path, self.config = path, config
        self.replica_sets: list[ReplicaSetConfig] = config.others.get("replica_set", [])
        self.gateways: list[GatewayConfig] = config.others.get("gateway", [])

    @classmethod
    def load(cls, path: Path) -> "Cluster":
        """Read and check the file; every problem is a ConfigError with file, line and key."""
        cluster = cls(path, load_config(path, {"replica_set": _SECTION, "gateway": _GATEWAYS}))
        cluster._check()
        return cluster

    def _check(self) -> None:
        brokers = {b.name for b in self.config.broker}
        seen_sets: set[str] = set()
        tables: dict[tuple[str, str], str] = {}
        for index, replica_set in enumerate(self.replica_sets):
            if replica_set.name in seen_sets:
                raise self._error((index, "name"), f"{replica_set.name!r} is there twice")
            seen_sets.add(replica_set.name)
            for row_key, replica in enumerate(replica_set.replica):
                if replica.broker not in brokers:
                    raise self._error(
                        (index, "replica", row_key, "broker"), f"no [[broker]] is named {replica.broker!r}"
                    )
                if problem := _unusable(replica_set, replica):
                    raise self._error((index, "replica", row_key, "dsn"), problem)
                if problem := _shared(replica_set, replica, tables):
                    raise self._error((index, "replica", row_key, "dsn"), problem)

        self._check_gateways()

    def _check_gateways(self) -> None:
        for index, gateway in enumerate(self.gateways):
            if gateway.name in [other.name for other in self.gateways[:index]]:
                raise self._error((index, "name"), f"{gateway.name!r} is there twice", "gateway")
            found = [s for s in self.replica_sets if s.name == gateway.replica_set]
            if not found:
                problem = f"no [[replica_set]] is named {gateway.replica_set!r}"
                raise self._error((index, "replica_set"), problem, "gateway")
            if gateway.replica is not None and gateway.replica not in found[0].names:
                problem = f"{gateway.replica!r} is no replica of {gateway.replica_set!r}"
                raise self._error((index, "replica"), problem, "gateway")
            replica = found[0].replica_named(gateway.replica or found[0].names[0])
            if (replica.dsn or "").startswith("sqlite:"):
                raise self._error((index, "replica"), f"{replica.name!r} is an SQLite file", "gateway")

    def gateway_named(self, name: str) -> GatewayConfig:
        for found in self.gateways:
            if found.name == name:
                return found
        known = ", ".join(g.name for g in self.gateways) or "none"
        raise ConfigError(f"{self.path}: no [[gateway]] is named {name!r}; the file has {known}")

    def _error(self, where: tuple[str | int, ...], problem: str, table: str = "replica_set") -> ConfigError:
        return error_at(self.path, self.path.read_text(encoding="utf-8"), (table, *where), problem)

    def replica_set(self, name: str) -> ReplicaSetConfig:
        for found in self.replica_sets:
            if found.name == name:
                return found
        known = ", ".join(s.name for s in self.replica_sets) or "none"
        raise ConfigError(f"{self.path}: no [[replica_set]] is named {name!r}; the file has {known}")

    def trust_equal(self) -> None:
        """As if every set of the file said so."""
        self.replica_sets = [s.model_copy(update={"trust_equal": True}) for s in self.replica_sets]

    def urls(self, first: str | None = None) -> list[str]:
        """The brokers' addresses, the preferred one first."""
        return [b.url for b in sorted(self.config.broker, key=lambda b: b.name != first)]

    def data_of(self, replica_set: ReplicaSetConfig, replica: ReplicaConfig) -> Path:
        """Where an agent keeps what is not in its database; an embedded server's data lies there too."""
        return self.config.broker_named(replica.broker).data / "replicas" / replica_set.site_of(replica.name)

    def keys_of(self, replica: ReplicaConfig) -> Path | None:
        """The folder of an agent's keys; a relative one lies beside the file."""
        return self.path.parent / replica.keys if replica.keys is not None else None

    def http_keys_of(self, replica_set: ReplicaSetConfig, broker: str) -> Path | None:
        """The folder of the keys under which a broker's HTTP side writes to the set: each broker needs its own."""
        if replica_set.http_keys is None:
            return None
        return self.path.parent / replica_set.http_keys.replace("{broker}", broker)

    def schema_of(self, replica_set: ReplicaSetConfig) -> str | None:
        if replica_set.schema_file is None:
            return None
        file = self.path.parent / replica_set.schema_file
        try:
            return file.read_text(encoding="utf-8")
        except OSError as error:
            where = (self.replica_sets.index(replica_set), "schema")
            raise self._error(where, f"{file}: {error.strerror}") from None


def _unusable(replica_set: ReplicaSetConfig, replica: ReplicaConfig) -> str:
    """What is wrong with a replica's address: no database of ours, or another replica's."""
    if replica.dsn is None:
        return ""
    scheme = replica.dsn.partition(":")[0]
    if scheme not in SCHEMES:
        return f"{scheme!r} is no database that can be a replica: write postgresql://… or sqlite://…"
    for other in replica_set.replica:
        if other.name == replica.name:
            return ""
        if other.dsn is not None and _database_of(other.dsn) == _database_of(replica.dsn):
            return f"this is the database of replica {other.name!r}: each replica needs its own"
    return ""


def _database_of(dsn: str) -> tuple[str, str, str]:
    """Where a database is, whoever logs in."""
    parts = urlsplit(dsn)
    row_key = parts.netloc.rpartition("@")[2].lower()
    if row_key and ":" not in row_key and parts.scheme != "sqlite":
        row_key += f":{POSTGRES_PORT}"
    return row_key, parts.path or f"/{parts.username}", parts.query  # a socket's folder is in the query


def _shared(replica_set: ReplicaSetConfig, replica: ReplicaConfig, tables: dict[tuple[str, str], str]) -> str:
    """Two sets never share a table in one database: each has a log of its own. `tables` are those of earlier sets."""
    if replica.dsn is None:
        return ""
    for table in ["*"] if replica_set.tables == "*" else replica_set.tables:
        for (dsn, other), name in tables.items():
            if dsn == replica.dsn and name != replica_set.name and (table in ("*", other) or other == "*"):
                return f"table {table} of this database is also in set {name!r}"
        tables[replica.dsn, table] = replica_set.name
    return ""
