"""Databases of test servers with the logins that a replica set would have in production: nothing runs as superuser."""

from adapters import EmbeddedPostgres, Logins, provision
from adapters.postgres.access.grants import Tables

CHECK_PASSWORD = "check-7f3c9a51e2"  # to be looked for where it must not be
PASSWORDS = ("agent", "read", "write", CHECK_PASSWORD)  # of servers that live as long as a test


async def logins_in(
    server: EmbeddedPostgres, database: str, replica_set: str = "shop", tables: Tables = "*", *, harden: bool = True
) -> Logins:
    """The logins of a set in a database; the same ones again if it had some, also after it was made anew."""
    dsn = server.dsn_for(database)
    return await provision(dsn, replica_set, tables, passwords=PASSWORDS, harden=harden)
