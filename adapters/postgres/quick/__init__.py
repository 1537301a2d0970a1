"""Quick reads: clients' queries that one prepared statement answers, many of them on the way at once.

Owns sessions that speak PostgreSQL's protocol by themselves, so that rows pass through as bytes and queries follow each
other without waiting; and shares them fairly among identities. What is not quick is left to `adapters.postgres.apply`.
"""

from adapters.postgres.quick.readers import QuickReads
from adapters.postgres.quick.session import QuickRead
from adapters.postgres.quick.statements import QuickStatement

__all__ = ["QuickRead", "QuickReads", "QuickStatement"]
