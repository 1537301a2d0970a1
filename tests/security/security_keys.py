"""Real key material for the tests: every certificate is issued by the library, into a folder of its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from tops.security import Authority, Credentials, Identity, Kind, Trust, utc_now


@dataclass
class Keys:
    """One cluster's authority and the short way to certificates from it."""

    authority: Authority

    def node(
        self,
        name: str,
        kind: Kind = Kind.SITE,
        role: str = "writer",
        *,
        hosts: Sequence[str] = ("127.0.0.1",),
        begins: timedelta = timedelta(minutes=-5),
        ends: timedelta = timedelta(days=1),
        renew: bool = False,
    ) -> Path:
        identity = Identity(self.authority.cluster, kind, name, "broker" if kind is Kind.BROKER else role)
        now = utc_now()
        return self.authority.issue(identity, hosts, now + begins, now + ends, now=now, renew=renew)

    def broker(self, name: str = "b1") -> Path:
        return self.node(name, Kind.BROKER)


MakeKeys = Callable[..., Keys]


@dataclass
class Node:
    """What a running process has loaded."""

    folder: Path
    credentials: Credentials
    trust: Trust


def load(folder: Path) -> Node:
    return Node(folder, Credentials.load(folder), Trust.load(folder))
