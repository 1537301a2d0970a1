"""What SQL of the user's must leave alone: the session that runs it, and the adapter's own memory in schema `tops`.

A setting, a lock of the session or a signal to a process would outlive the transaction, even one that is rolled back,
and change what later transactions do; a hand on the applied numbers would make one of them happen twice or never.
"""

import re

from adapters.postgres.schema import OWN_TABLES
from tops.changes import InvalidChange

_CULPRIT = re.compile(
    r"""
      --[^\n]* | /\*.*?\*/ | '(?:[^']|'')*' | \$(\w*)\$.*?\$\1\$   # comments and strings mean nothing
    | \b(?P<function> set_config | pg_\w*advisory\w* | pg_terminate_backend | pg_cancel_backend
                    | pg_reload_conf | pg_rotate_logfile | pg_switch_wal | pg_promote ) "? \s* \(
    | \btops"? \s* \. \s* "? (?P<table> {own} ) \b
    """.replace("{own}", "|".join(OWN_TABLES)),
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)


def check_harmless(sql: str, *, only_reads: bool = False) -> None:
    """Refuse SQL whose effect would not end with its transaction, or that writes where only the adapter may."""
    for found in _CULPRIT.finditer(sql):
        if found["function"]:
            raise InvalidChange(
                f"{found['function']}() acts on the session or server, which no transaction takes back: {sql[:200]}"
            )
        if found["table"] and not only_reads:
            raise InvalidChange(f"tops.{found['table']} is the adapter's own memory: leave it alone: {sql[:200]}")


def check_table(sql_name: str) -> None:
    """Refuse row changes of tables that are the adapter's alone, named as the catalogue quotes them."""
    schema, _, name = sql_name.partition(".")
    if schema == '"tops"' and name.strip('"') in OWN_TABLES:
        raise InvalidChange(f"{sql_name} is the adapter's own memory: leave it alone")
