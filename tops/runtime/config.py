"""`tops.toml`: the cluster and its brokers, checked before anything starts.

Every problem is reported with file, line and key. `${NAME}` in a string is replaced from the environment; a string
`file:PATH` by that file's text, whose value is then kept out of logs. Tables that belong to other layers are checked by
the model that those layers give to `load_config`, and are left alone by whoever does not know them.
"""

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from tops.core.overlay.topology import Topology
from tops.model.errors import ConfigError
from tops.model.ids import NodeId
from tops.security import Permissions, Role, register_secret
from tops.security.listen import check_listen, split_address

FOREIGN_TABLES = frozenset({"replica_set"})  # another layer's: kept as they are when no model is given for them
_SECRET_KEYS = re.compile(r"dsn|password|secret|token", re.IGNORECASE)
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "s": 1, "min": 60, "h": 3600, "d": 86400}
_QUANTITY = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([a-z]*?)(?:i?b)?\s*$", re.IGNORECASE)


def _quantity(value: object) -> object:
    """`"512 MiB"`, `"7 d"` or a plain number, as bytes or seconds."""
    if not isinstance(value, str):
        return value
    found = _QUANTITY.match(value)
    if found is None or found[2].lower() not in _UNITS:
        raise ValueError(f'{value!r} is no quantity: write for example "512 MiB" or "7 d"')
    return float(found[1]) * _UNITS[found[2].lower()]


Bytes = Annotated[int, BeforeValidator(lambda v: int(q) if isinstance(q := _quantity(v), float) else q), Field(gt=0)]
Seconds = Annotated[float, BeforeValidator(_quantity), Field(gt=0)]
Name = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]


class Table(BaseModel):
    """A table of the file; a key that it does not know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RoleTable(Table):
    name: Name
    allow: list[str] = []
    deny: list[str] = []


class Retention(Table):
    """How much of the logs a broker keeps: entries older than `age`, or beyond `size`, may go.

    What a durable subscriber has not taken is kept for it. When that makes the journal outgrow `size`, new durable
    events are refused (`refuse`) or taken with a warning (`warn`). A subscriber for whom more than `follower_size` of
    the journal would have to be kept is dropped, unless it is a replica in the list of its set.
    """

    size: Bytes = 2**30
    follower_size: Bytes | None = None
    age: Seconds | None = None
    when_full: Literal["refuse", "warn"] = "warn"

    @property
    def follower_bytes(self) -> int:
        """Where the file does not say: one subscriber alone never makes the broker refuse what others publish."""
        if self.follower_size is not None:
            return self.follower_size
        return self.size if self.when_full == "refuse" else 8 * self.size


class Limits(Table):
    heartbeat_s: Seconds = 5.0
    site_grace_s: Seconds = 5.0  # how long a site may be away before its transactions stop waiting for it
    vote_s: Seconds = 2.0  # how long a replica may take to prepare; then it is done without, or refused
    finish_s: Seconds = 2.0  # how long a writer waits for a replica that has promised and does not say that it is done
    queue_bytes_max: Bytes = 16 * 2**20  # for one site; a reader that is slower is disconnected
    identity_bytes_max: Bytes = 256 * 2**20  # for all sites of one identity; beyond it the slowest are disconnected
    sites_bytes_max: Bytes = 2**30  # for all sites; likewise, those of the identity with most
    acknowledge_s: Seconds = 60.0  # a site that acknowledges nothing for so long while data waits is disconnected
    link_bytes_max: Bytes = 64 * 2**20  # for one broker; beyond it publishers are slowed down
    messages_per_s: float = Field(default=1_000_000, gt=0)  # of one site, on average
    connections_per_s: float = Field(default=200, gt=0)
    waiting_per_address: int = Field(default=256, gt=0)
    clock_ahead_s: Seconds = 60.0  # by which a site's clock, and so its incarnation, may be ahead of the broker's
    # Of one identity, all its sessions together; an application that works as intended never meets these.
    sessions_max: int = Field(default=1_000, gt=0)  # connections to one broker, those over HTTP included
    subscriptions_max: int = Field(default=10_000, gt=0)  # at one broker
    filter_bytes_max: Bytes = 4 * 2**20  # of the filters of its subscriptions at one broker, or in one log
    types_max: int = Field(default=10_000, gt=0)  # that it has defined, at one rendezvous
    type_bytes_max: Bytes = 16 * 2**20  # of the definitions of these types
    followers_max: int = Field(default=1_000, gt=0)  # durable subscriptions and readers of one log
    transactions_max: int = Field(default=50_000, gt=0)  # open at one rendezvous
    participants_max: int = Field(default=1_000, gt=0)  # standing registrations for one family of types


class Cluster(Table):
    name: Name
    insecure: str | None = None  # the plain words that allow to go without TLS beyond loopback
    site_role: str = "admin"  # of every site, where there are no keys to tell them apart


class BrokerTable(Table):
    name: Name
    listen: str
    data: Path
    links: list[Name] | None = None  # None: to all others
    advertise: str | None = None  # the host:port that others use, where it differs from `listen`
    hosts: list[str] = []  # further names that `Host` may have: of proxies and tunnels, with or without port
    origins: list[str] = []  # further servers whose web pages may use this one, as in `Origin`: "https://host:port"
    health_listen: str | None = None  # host:port of a listener without TLS for health, readiness and metrics only
    keys: Path | None = None  # the folder that `tops keys issue` wrote
    retention: Retention = Retention()
    limits: Limits = Limits()

    @property
    def host(self) -> str:
        return self.listen.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.listen.rpartition(":")[2])

    @property
    def addresses(self) -> list[str]:
        """The `host:port` by which this broker is known."""
        return [self.listen] if self.advertise is None else [self.listen, self.advertise]

    @property
    def url(self) -> str:
        return f"{'wss' if self.keys else 'ws'}://{self.advertise or self.listen}"

    @model_validator(mode="after")
    def _check(self) -> "BrokerTable":
        for address in (self.listen, self.advertise, self.health_listen):
            if address is not None and not re.fullmatch(r".+:\d{1,5}", address):
                raise ValueError(f"{address!r} is no address: write host:port")
        for host in (self.listen, *(a for a in (self.advertise, self.health_listen) if a), *self.hosts):
            split_address(host)
        for origin in self.origins:
            if not re.fullmatch(r"https?://[^/\s]+", origin):
                raise ValueError(f'{origin!r} is no origin: write "https://host" or "http://host:port"')
        return self


class Config(Table):
    """The whole file."""

    cluster: Cluster
    broker: list[BrokerTable] = Field(min_length=1)
    role: list[RoleTable] = []
    others: dict[str, Any] = {}

    def broker_named(self, name: str) -> BrokerTable:
        for table in self.broker:
            if table.name == name:
                return table
        known = ", ".join(b.name for b in self.broker)
        raise ConfigError(f"no [[broker]] is named {name!r}; the file has {known}")

    def topology(self) -> Topology:
        names = [b.name for b in self.broker]
        return Topology(
            {
                NodeId(b.name): [NodeId(n) for n in (names if b.links is None else b.links) if n != b.name]
                for b in self.broker
            }
        )

    def permissions(self) -> Permissions:
        return Permissions([Role.parse(r.name, r.allow, r.deny) for r in self.role])


def load_config(path: Path, sections: Mapping[str, TypeAdapter[Any]] | None = None) -> Config:
    """Read and check a file. `sections` are the tables of other layers with what checks them; their values are in
    `others`."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error}") from None
    return parse_config(text, path, sections)


def parse_config(text: str, path: Path, sections: Mapping[str, TypeAdapter[Any]] | None = None) -> Config:
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from None
    resolved = {key: _resolved(value, (key,), path, text) for key, value in tables.items()}
    others: dict[str, Any] = {}
    for name in [n for n in resolved if n in FOREIGN_TABLES or n in (sections or {})]:
        raw = resolved.pop(name)
        model = (sections or {}).get(name)
        others[name] = raw if model is None else _validated(model, raw, path, text, (name,))
    for table in resolved["broker"] if isinstance(resolved.get("broker"), list) else []:
        for key in ("data", "keys"):
            if isinstance(table, dict) and isinstance(table.get(key), str):
                table[key] = path.parent / table[key]  # as the file sees it, wherever the process runs
    config: Config = _validated(TypeAdapter(Config), {**resolved, "others": others}, path, text, ())
    _check_whole(config, path, text)
    return config


def _check_whole(config: Config, path: Path, text: str) -> None:
    """What no single key can tell: names that occur twice, links to nobody, listeners that let strangers in."""
    for table, names in (("broker", [b.name for b in config.broker]), ("role", [r.name for r in config.role])):
        for index, name in enumerate(names):
            if name in names[:index]:
                raise error_at(path, text, (table, index, "name"), f"{name!r} is there twice")
    names = [b.name for b in config.broker]
    for index, broker in enumerate(config.broker):
        for other in broker.links or []:
            if other not in names:
                raise error_at(path, text, ("broker", index, "links"), f"{other!r} is no [[broker]] of this file")
        try:
            check_listen(broker.host, tls=broker.keys is not None, plain_words=config.cluster.insecure)
        except ConfigError as error:
            raise error_at(path, text, ("broker", index, "listen"), str(error)) from None
    if len({broker.keys is None for broker in config.broker}) > 1:
        index = next(i for i, b in enumerate(config.broker) if b.keys is None)
        raise error_at(path, text, ("broker", index, "name"), "has no keys while other brokers have; give it some")
    topology = config.topology()
    first = topology.brokers[0]
    for index, broker in enumerate(config.broker):
        if broker.name != first and topology.next_hop(NodeId(broker.name), first) is None:
            raise error_at(path, text, ("broker", index, "links"), f"no way leads from {broker.name!r} to {first!r}")
    for index, role in enumerate(config.role):
        try:
            Permissions([Role.parse(role.name, role.allow, role.deny)])
        except ConfigError as error:
            raise error_at(path, text, ("role", index, "name"), str(error)) from None


def _validated(model: TypeAdapter[Any], raw: Any, path: Path, text: str, prefix: tuple[str | int, ...]) -> Any:
    try:
        return model.validate_python(raw)
    except ValidationError as error:
        first = error.errors()[0]
        problem = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            problem = "is not a key that is known here"
        raise error_at(path, text, (*prefix, *first["loc"]), problem) from None


def _resolved(value: Any, where: tuple[str | int, ...], path: Path, text: str) -> Any:
    if isinstance(value, dict):
        return {key: _resolved(inner, (*where, key), path, text) for key, inner in value.items()}
    if isinstance(value, list):
        return [_resolved(inner, (*where, index), path, text) for index, inner in enumerate(value)]
    if not isinstance(value, str):
        return value
    if value.startswith("file:"):
        return _from_file(value, where, path, text)
    secret = any(isinstance(part, str) and _SECRET_KEYS.search(part) for part in where)

    def from_environment(found: re.Match[str]) -> str:
        replacement = os.environ.get(found[1])
        if replacement is None:
            raise error_at(path, text, where, f"the environment has no variable {found[1]}")
        if secret and replacement:
            register_secret(replacement)
        return replacement

    return re.sub(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}", from_environment, value)


def _from_file(value: str, where: tuple[str | int, ...], path: Path, text: str) -> str:
    file = path.parent / value.removeprefix("file:")
    try:
        content = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise error_at(path, text, where, f"{file} can't be read: {error}") from None
    if content:
        register_secret(content)
    return content


def error_at(path: Path, text: str, where: tuple[str | int, ...], problem: str) -> ConfigError:
    """A problem with a key of the file, told with file, line and key."""
    line = _line_of(text, where)
    key = ".".join(str(part) if isinstance(part, str) else f"[{part + 1}]" for part in where).replace(".[", "[")
    return ConfigError(f"{path}, line {line}: {key}: {problem}")


def _line_of(text: str, where: tuple[str | int, ...]) -> int:
    """The line of the key, or of the nearest table around it; tomllib does not tell."""
    best, best_length = 1, 0
    for number, location in _locations(text):
        shared = 0
        while shared < min(len(location), len(where)) and location[shared] == where[shared]:
            shared += 1
        if shared in (len(location), len(where)) and shared > best_length:
            best, best_length = number, shared
    return best


def _locations(text: str) -> Iterator[tuple[int, tuple[str | int, ...]]]:
    """Each line that names a table or a key, and where in the document that is."""
    table: tuple[str | int, ...] = ()
    counts: dict[tuple[str | int, ...], int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if header := re.match(r"^\[\[?\s*([^\[\]]+?)\s*\]\]?", stripped):
            table = ()
            parts = [part.strip().strip("\"'") for part in header[1].split(".")]
            for index, part in enumerate(parts):
                table = (*table, part)
                if stripped.startswith("[[") and index == len(parts) - 1:
                    counts[table] = counts.get(table, -1) + 1
                if table in counts:
                    table = (*table, counts[table])
            yield number, table
        elif key := re.match(r"^([A-Za-z0-9_\"'.-]+)\s*=", stripped):
            yield number, (*table, *(part.strip("\"'") for part in key[1].split(".")))
