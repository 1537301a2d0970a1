"""Whether the values of an INSERT can be computed ahead of it, by a query: nothing else would happen in the INSERT.

Unlike the proof, this allows clocks, random numbers and sequences: the values are computed once, and rows are shipped.
Functions must be built in, since a user's function may write or look at what the statement itself has written. What is
volatile must be on a short list, since others lock, notify or change settings.
"""

from collections.abc import Iterable

import asyncpg

from adapters.postgres.proof.expressions import Expressions, Literal
from adapters.postgres.proof.facts import Facts
from adapters.postgres.proof.functions import BUILT_IN_BELOW
from adapters.postgres.proof.tree import Node
from adapters.postgres.proof.verdict import NotProved, Reason
from adapters.postgres.sql.fixed_times import is_fixed_time

NEXTVAL = 1574  # nextval(regclass)
_REGCLASS = 2205
_VOLATILE = frozenset(
    {"nextval", "random", "random_normal", "clock_timestamp", "timeofday", "gen_random_uuid", "uuidv4", "uuidv7"}
)
_KINDS = frozenset(
    {"TARGETENTRY", "VAR", "CONST", "PARAM", "FUNCEXPR", "OPEXPR", "DISTINCTEXPR", "NULLIFEXPR", "SCALARARRAYOPEXPR"}
    | {"MINMAXEXPR", "COERCETODOMAIN", "SQLVALUEFUNCTION", "NEXTVALUEEXPR", "COERCEVIAIO", "ARRAYCOERCEEXPR"}
    | {"BOOLEXPR", "NULLTEST", "BOOLEANTEST", "RELABELTYPE", "COLLATEEXPR", "COALESCEEXPR", "CASEEXPR", "CASEWHEN"}
    | {"CASETESTEXPR", "ARRAYEXPR"}
)
_FUNCTION_FIELDS = ("funcid", "opfuncid")
_TYPE_FIELDS = ("consttype", "paramtype", "resulttype", "vartype", "funcresulttype", "opresulttype")
_UNFIT = """
select exists (select from unnest($1::oid[]) as asked(oid) left join pg_catalog.pg_proc p on p.oid = asked.oid
    where p.oid is null or p.oid >= $2 or p.provolatile = 'v' and p.proname <> all ($3::text[]))
"""


async def sequences_of(
    connection: "asyncpg.Connection[asyncpg.Record]", facts: Facts, values: Iterable[Node], literal: Literal
) -> frozenset[int] | None:
    """The sequences that computing the values draws from; None if they can't be computed ahead.

    `facts` has what the values mention; `literal` finds a constant's text in the statement."""
    nodes = [node for value in values for node in value.walk()]
    if any(node.kind not in _KINDS or node.fields.get("funcretset") == "true" for node in nodes):
        return None
    types = {node.number(field) for node in nodes for field in _TYPE_FIELDS if field in node.fields}
    expressions = Expressions(facts, literal)
    for oid in types:
        verdict = expressions.check_type(oid)
        if isinstance(verdict, NotProved) and verdict.reason is not Reason.TYPE:
            return None  # a domain's check may be a user's function
    for node in nodes:
        if node.kind != "CONST" or node.text("constisnull") == "true" or node.number("location") < 0:
            continue  # what the statement's text does not hold is a constant of the schema
        if expressions.holds_time(node.number("consttype")):
            text = literal(node)
            if text is None or not is_fixed_time(text):
                return None  # 'now' would be the time at which the query was prepared
    functions = {node.number(field) for node in nodes for field in _FUNCTION_FIELDS if field in node.fields}
    if await connection.fetchval(_UNFIT, list(functions), BUILT_IN_BELOW, list(_VOLATILE)):
        return None
    drawn: set[int] = set()
    for node in nodes:
        if node.kind == "NEXTVALUEEXPR":
            drawn.add(node.number("seqid"))
        elif node.kind == "FUNCEXPR" and node.number("funcid") == NEXTVAL:
            sequence = _constant(node.nodes("args")[0])
            if sequence is None:
                return None  # which one is known when it is computed
            drawn.add(sequence)
    return frozenset(drawn)


def _constant(node: Node) -> int | None:
    """The object id of a constant of type regclass."""
    value = node.fields.get("constvalue")
    if node.kind != "CONST" or node.number("consttype") != _REGCLASS or not isinstance(value, list):
        return None
    return int.from_bytes([int(str(byte)) % 256 for byte in value[:4]], "little")
