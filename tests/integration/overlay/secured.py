"""A broker with keys, in this process, and sites with certificates of every kind."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from adapters.embedded.free_ports import free_port
from tests.integration.overlay.cluster import QUICK
from tops import Broker, Site
from tops.runtime.config import parse_config
from tops.security import Authority, Identity, Kind, kind_of_name, utc_now
from tops.security.identity import role_of_kind

CLUSTER = "shop"


@dataclass
class Secured:
    """The broker, its authority, and how to get in."""

    broker: Broker
    authority: Authority

    def keys(self, name: str, role: str = "writer", **options: Any) -> Path:
        return issue(self.authority, name, role, **options)

    @asynccontextmanager
    async def site(
        self, name: str, role: str = "writer", keys: Path | None = None, timeout_s: float = 20.0
    ) -> AsyncIterator[Site]:
        folder = keys or self.keys(name, role)
        async with Site.connect(self.broker.url, name=name, keys=folder, options=QUICK, timeout_s=timeout_s) as site:
            yield site


def issue(
    authority: Authority,
    name: str,
    role: str = "writer",
    *,
    kind: Kind | None = None,
    begins: timedelta = timedelta(minutes=-5),
    ends: timedelta = timedelta(days=1),
    renew: bool = False,
) -> Path:
    """The folder of a certificate; a name with a slash is a replica's."""
    now, kind = utc_now(), kind or kind_of_name(name)
    identity = Identity(authority.cluster, kind, name, role_of_kind(kind, role))
    return authority.issue(identity, ["127.0.0.1"], now + begins, now + ends, now=now, renew=renew)


@asynccontextmanager
async def secured_broker(directory: Path, roles: Sequence[str] = (), limits: str = "") -> AsyncIterator[Secured]:
    authority = Authority.init(directory / "keys", CLUSTER, utc_now(), 30)
    keys = issue(authority, "b1", kind=Kind.BROKER)
    port = free_port()
    text = "\n".join(
        [
            f'[cluster]\nname = "{CLUSTER}"',
            f'[[broker]]\nname = "b1"\nlisten = "127.0.0.1:{port}"\ndata = "data"\nkeys = "{keys}"',
            f"[broker.limits]\nsite_grace_s = 0.5\nconnections_per_s = 1000\n{limits}",
            *roles,
        ]
    )
    async with Broker.run(parse_config(text, directory / "tops.toml"), "b1") as broker:
        yield Secured(broker, authority)
