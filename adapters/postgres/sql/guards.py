"""Which tables row changes must leave alone: the adapter's own memory in schema `tops`.

A hand on the applied numbers would make one of them happen twice or never. SQL is held by the rights of its login.
"""

from adapters.changes import InvalidChange
from adapters.postgres.sql.schema import OWN_TABLES


def check_table(sql_name: str) -> None:
    """Reject row changes of tables that are the adapter's alone, named as the catalogue quotes them."""
    schema, _, name = sql_name.partition(".")
    if schema == '"tops"' and name.strip('"') in OWN_TABLES:
        raise InvalidChange(f"{sql_name} is the adapter's own memory: leave it alone")
