"""Has the server print how it understands a statement: analysed and rewritten, with functions, casts and defaults."""

from typing import Any

import asyncpg

from adapters.postgres.proof.tree import Unreadable

_ON = "SET client_min_messages = log; SET debug_pretty_print = off; SET debug_print_rewritten = on"
_OFF = "SET debug_print_rewritten = off; SET client_min_messages = notice"
_TREE = "({QUERY"


async def rewritten_tree(connection: "asyncpg.Connection[asyncpg.Record]", sql: str) -> str:
    """The printed list of queries that the statement becomes; nothing of it is run.

    The driver may look up types behind the statement, and those queries are printed as well: ours is the first.
    """
    printed: list[str] = []

    def listen(_: Any, message: Any) -> None:
        if message.detail is not None and message.detail.startswith(_TREE):
            printed.append(message.detail)

    await connection.execute(_ON)
    try:
        connection.add_log_listener(listen)
        await connection.prepare(sql)
    except asyncpg.InternalClientError as error:  # a type that the driver can't look up, such as anyarray
        raise Unreadable(f"the driver does not understand the statement: {error}") from error
    finally:
        connection.remove_log_listener(listen)
        await connection.execute(_OFF)
    if not printed:
        raise Unreadable("the server printed no tree")
    return printed[0]
