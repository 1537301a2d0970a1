"""PostgreSQL as a transactional resource, spoken to with asyncpg.

An epoch travels through the files in this order: `promises` (prepared transactions) asks `transactions` to carry out
its members, which has `steps` gather the row changes that may run together and `statements` turn them into calls of
prepared statements; `session` sends them in one message over the only connection that writes. `log` applies what is
committed elsewhere, `outbox` commits what is published later, `reading` reads.
"""

from adapters.postgres.access.grants import provision
from adapters.postgres.adapter import PostgresAdapter
from adapters.postgres.sql.logins import Logins

__all__ = ["Logins", "PostgresAdapter", "provision"]
