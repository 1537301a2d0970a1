"""Functions whose result depends on their arguments alone, on every machine; operators and casts are functions, too.

`functions.txt` names them by signature. It was generated from `pg_proc` (immutable, built in) and then reviewed: what
depends on the operating system's locale or mathematics, on time zone data, dictionaries, libxml or settings is not on
it.
Each line says whether the function may fail and what it asks of a collation. Some of them take a time that grows with
the product of their arguments' lengths, and a time-out does not end them (`SLOW`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

import asyncpg

# By name: they do not look whether their statement was cancelled.
SLOW = frozenset(
    {"like", "notlike", "textlike", "textnlike", "bpcharlike", "bpcharnlike", "bytealike", "byteanlike"}
    | {"position", "strpos", "replace", "translate", "split_part", "btrim", "ltrim", "rtrim"}
    | {"jsonb_contains", "jsonb_contained", "jsonb_exists_any", "jsonb_exists_all", "jsonb_delete"}
)

_LIST = Path(__file__).with_name("functions.txt")
BUILT_IN_BELOW = 10_000  # ids of what comes with every server; users' objects begin at 16384
_RESOLVE = """
select oid, signature from (
  select p.oid, format('%s(%s)', p.proname, array_to_string(array(
           select format_type(a.type, null) from unnest(p.proargtypes) with ordinality as a(type, place) order by place
         ), ',')) as signature
    from pg_proc p where p.pronamespace = 'pg_catalog'::regnamespace and p.proname = any($2::text[])) as named
 where signature = any($1::text[]) and oid < $3
"""
_NAMES = "select oid, oid::regprocedure::text as name from unnest($1::oid[]) as oid"


class Collation(StrEnum):
    """What a function asks of the collation under which it is called."""

    ANY = "any"  # it does not look at it
    EQUALITY = "equality"  # deterministic: equal means the same bytes
    BYTES = "bytes"  # "C": the order and the classes of characters are those of their bytes


@dataclass(frozen=True, slots=True)
class Allowed:
    total: bool  # it can't fail, whatever its arguments
    collation: Collation
    slow: bool = False


@cache
def listed() -> dict[str, Allowed]:
    """The functions of `functions.txt` by signature."""
    found = {}
    for line in _LIST.read_text().splitlines():
        if line and not line.startswith("#"):
            fails, collation, signature = line.split(" ", 2)
            slow = signature.partition("(")[0] in SLOW
            found[signature] = Allowed(fails == "total", Collation(collation), slow)
    return found


class Functions:
    """The list as one server knows it, and names for messages of functions that are not on it."""

    def __init__(self, allowed: dict[int, Allowed]) -> None:
        self._allowed = allowed
        self._names: dict[int, str] = {}

    @classmethod
    async def resolve(cls, connection: "asyncpg.Connection[asyncpg.Record]") -> "Functions":
        signatures = listed()
        names = {signature.partition("(")[0] for signature in signatures}
        rows = await connection.fetch(_RESOLVE, list(signatures), list(names), BUILT_IN_BELOW)
        return cls({row["oid"]: signatures[row["signature"]] for row in rows})

    def allowed(self, oid: int) -> Allowed | None:
        return self._allowed.get(oid)

    def name(self, oid: int) -> str:
        return self._names.get(oid, f"function {oid}")

    async def load_names(self, connection: "asyncpg.Connection[asyncpg.Record]", oids: Iterable[int]) -> None:
        """So that a function that is not on the list can be named."""
        unknown = set(oids) - self._allowed.keys() - self._names.keys()
        if unknown:
            rows = await connection.fetch(_NAMES, list(unknown))
            self._names.update({row["oid"]: row["name"] for row in rows})
