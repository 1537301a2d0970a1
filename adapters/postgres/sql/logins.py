"""The logins of one replica set in one database, and the names of their roles.

Client SQL is held by the database's own privileges: whatever a query says, it runs as a role that may do no more than
that. Roles belong to a whole server and privileges to one database, so the database is a part of the default names.
"""

import hashlib
from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from tops.model.errors import ConfigError

_NAME_MAX = 63  # PostgreSQL's, in bytes


@dataclass(frozen=True, slots=True)
class Roles:
    """`owner` can't log in: it owns schema `tops`, and every agent of the database is a member of it."""

    owner: str
    agent: str
    read: str
    write: str
    check: str

    @classmethod
    def named_for(cls, database: str, replica_set: str) -> "Roles":
        kinds = ("agent", "read", "write", "check")
        return cls(_short(f"tops_{database}"), *(_short(f"tops_{database}_{replica_set}_{kind}") for kind in kinds))


@dataclass(frozen=True, slots=True, repr=False)
class Logins:
    """The addresses under which a replica's database is used, each with a login of its own.

    `agent` applies and keeps schema `tops`, `read` runs clients' queries, `check` compares replicas. Clients'
    statements run inside the agent's transactions with the rights of the role in `write`.
    """

    agent: str
    read: str
    write: str
    check: str

    @classmethod
    def alone(cls, dsn: str) -> "Logins":
        """One login for everything: client SQL may do whatever that login may."""
        return cls(dsn, dsn, dsn, dsn)

    @property
    def write_role(self) -> str | None:
        """Whose rights a client's statement has; None: the agent's own."""
        return None if self.write == self.agent else user_of(self.write)

    @property
    def read_role(self) -> str | None:
        """Who must be able to tell a query's position; None: the agent, who can."""
        return None if self.read == self.agent else user_of(self.read)

    def __repr__(self) -> str:
        return f"Logins({', '.join(user_of(dsn) for dsn in (self.agent, self.read, self.write, self.check))})"


def user_of(dsn: str) -> str:
    user = urlsplit(dsn).username
    if not user:
        raise ConfigError("a dsn of a replica's login names its user: write postgresql://USER:PASSWORD@HOST/DATABASE")
    return unquote(user)


def database_of(dsn: str) -> str:
    """The database that a DSN names; one that names none means that of the user's name."""
    return unquote(urlsplit(dsn).path.removeprefix("/")) or user_of(dsn)


def with_login(dsn: str, user: str, password: str) -> str:
    """The same address for somebody else."""
    parts = urlsplit(dsn)
    place = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{quote(user, safe='')}:{quote(password, safe='')}@{place}"))


def _short(name: str) -> str:
    """The name, or its beginning and a digest where PostgreSQL would cut it off."""
    if len(name.encode()) <= _NAME_MAX:
        return name
    kind = name.rpartition("_")[2]
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"{name[: _NAME_MAX - len(kind) - len(digest) - 2]}_{digest}_{kind}"
