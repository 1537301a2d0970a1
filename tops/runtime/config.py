"""`tops.toml`: the cluster and its brokers, checked before anything starts.

Every problem is reported with file, line and key. `${NAME}` in a string is replaced from the environment; a string
`file:PATH` by that file's text, which logs never contain. Tables of other layers are checked by the model that those
layers pass to `load_config`; without a model they are kept unchecked.
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
from tops.model.ordering import Order, OrderingDomain, Placement, Unreliable, check_domains
from tops.security import Permissions, Role, register_secret
from tops.security.listen import check_listen, split_address

# Of another layer: kept as they are when no model is given for them.
FOREIGN_TABLES = frozenset({"replica_set", "gateway"})
_SECRET_KEYS = re.compile(r"dsn|password|secret|token", re.IGNORECASE)
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "s": 1, "min": 60, "h": 3600, "d": 86400}
_QUANTITY = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([a-z]*?)(?:i?b)?\s*$", re.IGNORECASE)


def _quantity(value: object) -> object:
    """`"512 MiB"`, `"7 d"` or a plain number, as bytes or seconds."""
    if not isinstance(value, str):
        return value
    found = _QUANTITY.match(value)
    if found is None or found[2].lower() not in _UNITS:
        raise ValueError(f'{value!r} is no quantity: write "512 MiB" or "7 d", for example')
    return float(found[1]) * _UNITS[found[2].lower()]


Bytes = Annotated[int, BeforeValidator(lambda v: int(q) if isinstance(q := _quantity(v), float) else q), Field(gt=0)]
Seconds = Annotated[float, BeforeValidator(_quantity), Field(gt=0)]
Name = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]


class Table(BaseModel):
    """A table of the file; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RoleTable(Table):
    name: Name
    allow: list[str] = []
    deny: list[str] = []


class Retention(Table):
    """How much of the logs a broker retains: entries older than `age`, or beyond `size`, may be truncated.

    Entries that a durable subscriber has not acknowledged are retained for it. When that makes the journal exceed
    `size`, new durable events are rejected (`refuse`) or accepted with a warning (`warn`). A subscriber for which more
    than `follower_size` of the journal would have to be retained is dropped, unless it is a replica in the list of its
    set.
    """

    size: Bytes = 2**30
    follower_size: Bytes | None = None
    age: Seconds | None = None
    when_full: Literal["refuse", "warn"] = "warn"

    @property
    def follower_bytes(self) -> int:
        """The limit for one subscriber. By default one subscriber alone can't make the broker reject events."""
        if self.follower_size is not None:
            return self.follower_size
        return self.size if self.when_full == "refuse" else 8 * self.size


class Limits(Table):
    heartbeat_s: Seconds = 5.0
    site_grace_s: Seconds = 5.0  # how long a site may be unreachable before its transactions stop waiting for it
    vote_s: Seconds = 2.0  # how long a replica may take to prepare; then its vote counts as a NO
    finish_s: Seconds = 2.0  # how long a writer waits for a replica that has prepared to confirm its commit
    queue_bytes_max: Bytes = 16 * 2**20  # for one site; a reader that is slower is disconnected
    identity_bytes_max: Bytes = 256 * 2**20  # for all sites of one identity; beyond it the slowest are disconnected
    sites_bytes_max: Bytes = 2**30  # for all sites; beyond it sites of the identity with the most are disconnected
    acknowledge_s: Seconds = 60.0  # a site that acknowledges nothing for so long while data waits is disconnected
    link_bytes_max: Bytes = 64 * 2**20  # for one broker; beyond it publishers are slowed down
    messages_per_s: float = Field(default=1_000_000, gt=0)  # of one site, on average
    connections_per_s: float = Field(default=200, gt=0)
    waiting_per_address: int = Field(default=256, gt=0)
    clock_ahead_s: Seconds = 60.0  # by which a site's clock, and so its incarnation, may be ahead of the broker's
    # Of one identity, all its sessions together; a correct application does not reach these.
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
    insecure: str | None = None  # the phrase that allows connections without TLS beyond loopback
    site_role: str = "admin"  # of every site, where no keys distinguish them


class UnreliableTable(Table):
    """How long and how much a subscriber waits for events that may be lost."""

    buffer: int = Field(default=1000, gt=0)
    ttl_s: Seconds = 2.0


class OrderingTable(Table):
    """An ordering domain: all subscribers receive the events of these types in one order."""

    name: Name
    types: list[str] = Field(min_length=1)
    order: Order = Order.TOTAL
    durable: bool = False  # as its types are
    placement: Placement = Placement.TOGETHER
    unreliable: UnreliableTable | None = None

    def domain(self) -> OrderingDomain:
        waits = self.unreliable or UnreliableTable()
        return OrderingDomain(
            self.name,
            tuple(self.types),
            self.order,
            self.durable,
            self.placement,
            None if self.durable and self.unreliable is None else Unreliable(waits.buffer, waits.ttl_s),
        )


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
        """Each `host:port` under which this broker is reached."""
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
    ordering: list[OrderingTable] = []
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
            },
            [table.domain() for table in self.ordering],
        )

    def permissions(self) -> Permissions:
        return Permissions([Role.parse(r.name, r.allow, r.deny) for r in self.role])


def load_config(path: Path, sections: Mapping[str, TypeAdapter[Any]] | None = None) -> Config:
    """Read and check a file. `sections` are the tables of other layers with their models; their values are in
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
                table[key] = path.parent / table[key]  # relative to the file, not to the working directory
    config: Config = _validated(TypeAdapter(Config), {**resolved, "others": others}, path, text, ())
    _check_whole(config, path, text)
    return config


def _check_whole(config: Config, path: Path, text: str) -> None:
    """Problems that concern several keys: duplicate names, links to unknown brokers, listeners without keys."""
    for table, names in (("broker", [b.name for b in config.broker]), ("role", [r.name for r in config.role])):
        for index, name in enumerate(names):
            if name in names[:index]:
                raise error_at(path, text, (table, index, "name"), f"{name!r} occurs twice")
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
        raise error_at(path, text, ("broker", index, "name"), "has no keys while other brokers have keys; set 'keys'")
    for index, ordering in enumerate(config.ordering):
        try:
            check_domains([table.domain() for table in config.ordering[: index + 1]])
        except ConfigError as error:
            raise error_at(path, text, ("ordering", index, "types"), str(error)) from None
        if ordering.order is Order.CAUSAL and not ordering.durable:
            problem = "'causal' needs `durable = true`: a publisher has to learn when its event has its place"
            raise error_at(path, text, ("ordering", index, "order"), problem)
    topology = config.topology()
    first = topology.brokers[0]
    for index, broker in enumerate(config.broker):
        if broker.name != first and topology.next_hop(NodeId(broker.name), first) is None:
            raise error_at(path, text, ("broker", index, "links"), f"no path leads from {broker.name!r} to {first!r}")
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
            problem = "is not a known key"
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
    """The error for a problem with a key of the file, with file, line and key."""
    line = _line_of(text, where)
    key = ".".join(str(part) if isinstance(part, str) else f"[{part + 1}]" for part in where).replace(".[", "[")
    return ConfigError(f"{path}, line {line}: {key}: {problem}")


def _line_of(text: str, where: tuple[str | int, ...]) -> int:
    """The line of the key, or of the nearest table around it, which tomllib does not report."""
    best, best_length = 1, 0
    for number, location in _locations(text):
        shared = 0
        while shared < min(len(location), len(where)) and location[shared] == where[shared]:
            shared += 1
        if shared in (len(location), len(where)) and shared > best_length:
            best, best_length = number, shared
    return best


def _locations(text: str) -> Iterator[tuple[int, tuple[str | int, ...]]]:
    """Each line that names a table or a key, with its path in the document."""
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
