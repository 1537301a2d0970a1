"""What a write is, as data: row changes by primary key, and parameterised SQL.

They travel in events and end in a resource, which carries them out in its own way. Values are what a database column
holds: None, bool, int, float, str, bytes, Decimal, UUID, date and time types, lists and dicts; after a journey over
the wire some of these arrive as their text (a Decimal as "12.50"), which means the same to every resource.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeGuard

import msgspec

from tops.model.errors import TopsError
from tops.model.ids import TxId

Value = Any
Row = dict[str, Value]

SUMS = "tops.row_sums"  # where a resource adds up what was added to each row, by column


class Insert(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="insert"):
    """A new row; refused if its key exists. `captured`, here and below: a row as an origin has left it."""

    table: str
    values: Row
    captured: bool = False


class Update(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="update"):
    """New values for, or amounts added to, columns of the row with that primary key.

    No such row: 0 rows and no error, unless it must exist. With `sum_key`, the row's name among the sums, the amounts
    are added to those in `SUMS` as well. `expect_row`: the digest of the row that an origin has found there.
    """

    table: str
    key: Row
    values: Row = {}
    add: Row = {}
    expect_version: int | None = None
    must_exist: bool = False
    sum_key: str = ""
    expect_row: str | None = None
    captured: bool = False


class Upsert(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="upsert"):
    """The row has these values afterwards, whether it existed or not; what is to be added, a new row begins with."""

    table: str
    key: Row
    values: Row = {}
    expect_version: int | None = None
    add: Row = {}
    captured: bool = False


class Delete(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="delete"):
    """The row is gone afterwards; no such row: 0 rows, no error, unless it must be the one that an origin has found."""

    table: str
    key: Row
    expect_version: int | None = None
    expect_row: str | None = None
    captured: bool = False


class Statement(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="statement"):
    """One parameterised SQL statement ($1, $2, …) that does the same on every replica."""

    sql: str
    args: tuple[Value, ...] = ()


RowChange = Insert | Update | Upsert | Delete
Change = RowChange | Statement


class Barrier(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="barrier"):
    """A place in the log that changes nothing; `ident` names who waits for it."""

    ident: str


class Repair(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="repair"):
    """Rows of one replica as they shall be: carried out by the agent `site`, and empty for all others.

    `position`: the rows were looked at as of this log index. `part` numbers the transactions of one repair. `forced`:
    an operator has overruled the log, which does not say any more what the rows should be."""

    site: str
    ident: str
    position: int
    part: int = 0
    forced: bool = False


class Housekeeping(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="housekeeping"):
    """An agent truncates what all replicas have kept long enough in schema `tops`."""


class Settle(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="settle"):
    """An operator settles that another client's transaction never comes, if it has not come yet."""


Control = Barrier | Repair | Housekeeping | Settle


class Member(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One transaction of an epoch or of the log: its changes, in order.

    `origin` and `control` are never taken from what a client has encoded: they travel beside the member, where brokers
    check the right to say them (`replication.model.events`)."""

    tx: TxId
    changes: tuple[Change, ...]
    idempotency_key: str = ""
    key_ttl_s: int = 86_400  # how long the key is remembered
    content: str = ""  # what the key stands for, where the changes are no longer those that the application asked for
    origin: str = ""  # the replica that has executed it and captured these changes
    sequences: tuple[tuple[str, int], ...] = ()  # by name, the last values of sequences that the execution has advanced
    control: Control | None = None  # what it is, if it is no application's write

    @property
    def key(self) -> str:
        """By which it is recognised when it comes again; empty: not at all."""
        return self.idempotency_key or (own_key(self.tx) if self.content == OWN else "")


class _TxAlone(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The beginning of a Member."""

    tx: TxId


SETTLED = "settled"  # what a key stands for under which nothing is to come any more
OWN = "tx"  # what a key stands for that nobody has to write down: the transaction's own id
_encoder = msgspec.msgpack.Encoder(order="deterministic")
_decoder = msgspec.msgpack.Decoder(Member)
_txs = msgspec.msgpack.Decoder(_TxAlone)
_packed = msgspec.msgpack.Decoder(list[bytes])


def own_key(tx: str) -> str:
    """The idempotency key of a transaction that has no other: nothing but itself comes under its own id."""
    return f"tx:{tx}"


def known_by_id(member: Member, tx: TxId) -> Member:
    """The member under this id, which is its key as well: what it consists of need not be told apart."""
    return msgspec.structs.replace(member, tx=tx, idempotency_key="", content=OWN)


def is_known_by_id(member: Member) -> bool:
    return member.content == OWN and not member.idempotency_key


def encode_member(member: Member) -> bytes:
    """Raises InvalidChange where a value can't travel."""
    return _encoded(member)


def decode_member(data: bytes) -> Member:
    return _decoder.decode(data)


def tx_of(encoded: bytes) -> TxId:
    """Whose an encoded member is, without the rest of it."""
    return _txs.decode(encoded).tx


def pack_members(encoded: Sequence[bytes]) -> bytes:
    """Members that were encoded one by one, as one piece."""
    return _encoder.encode(encoded)


def unpack_members(packed: bytes) -> list[bytes]:
    return _packed.decode(packed)


def content_digest(member: Member) -> str:
    """What an idempotency key is tied to: by its own word, or by its changes."""
    return member.content or changes_digest(member)


def changes_digest(member: Member) -> str:
    """The same for the same changes, whatever transaction carries them."""
    return hashlib.sha256(_encoded(member.changes)).hexdigest()[:32]


def members_digest(members: Sequence[Member]) -> str:
    """Names the exact list of members that a vote or a decision is about."""
    return hashlib.sha256(_encoder.encode(members)).hexdigest()[:32]


class InvalidChange(TopsError):
    """The change can't be carried out anywhere: it names what does not exist, or lacks what is needed."""


class NotDeterministic(InvalidChange):
    """Replicas carrying this out might end with different rows.

    `reason` is a code, `detail` says what and what to do."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"not proved deterministic [{reason}]: {detail}")


_CLOCK_WORDS = frozenset(
    {"current_timestamp", "current_date", "current_time", "localtime", "localtimestamp", "tablesample", "ctid"}
    | {"current_user", "session_user", "current_role", "current_catalog", "current_schema"}
)
_VOLATILE_FUNCTIONS = frozenset(
    {"now", "clock_timestamp", "statement_timestamp", "transaction_timestamp", "timeofday", "age", "random"}
    | {"random_normal", "setseed", "gen_random_uuid", "gen_random_bytes", "uuid_generate_v1", "uuid_generate_v1mc"}
    | {"uuid_generate_v4", "uuidv4", "uuidv7", "nextval", "currval", "lastval", "setval", "txid_current"}
    | {"txid_current_if_assigned", "txid_current_snapshot", "pg_current_xact_id", "pg_current_xact_id_if_assigned"}
    | {"pg_current_snapshot", "pg_backend_pid", "pg_current_wal_lsn", "inet_client_addr", "inet_client_port"}
    | {"inet_server_addr", "inet_server_port", "version", "pg_postmaster_start_time", "pg_conf_load_time"}
    | {"randomblob", "last_insert_rowid", "changes", "total_changes", "julianday", "unixepoch", "sqlite_version"}
)
CLOCK_STRINGS = frozenset({"now", "today", "tomorrow", "yesterday"})
_TOKEN = re.compile(
    r"""
      (?P<space>\s+ | --[^\n]* )
    | (?P<comment>/\*)
    | (?P<dollar>\$(?:[A-Za-z_][A-Za-z_0-9]*)?\$)
    | (?P<parameter>\$\d+)
    | (?P<escaped>[eE]'(?:[^'\\]|''|\\.)*')
    | (?P<string>(?:[uU]&|[bBxXnN])?'(?:[^']|'')*')
    | (?P<quoted>"(?:[^"]|"")*")
    | (?P<word>[^\W\d]\w*)
    | (?P<other>::|.)
    """,
    re.VERBOSE | re.DOTALL,
)


def check_not_volatile(sql: str) -> None:
    """Reject a statement that names something volatile; for databases that can't prove what a statement does."""
    culprit = volatile_part(sql)
    if culprit is not None:
        raise NotDeterministic("function", f"{culprit} gives another result on every replica: give the value itself")


def volatile_part(sql: str) -> str | None:
    """The first part of a statement or expression whose value is not the same everywhere; None if none is known."""
    found = list(tokens(sql))
    words = {token for kind, token in found if kind == "word"}
    padded = [("start", ""), ("start", ""), *found, ("end", "")]
    for place, (kind, token) in enumerate(found):
        before, following = [text for _, text in padded[place : place + 2]], padded[place + 3][1]
        if kind == "word" and token in _CLOCK_WORDS:
            return token
        if kind in ("word", "quoted") and token in _VOLATILE_FUNCTIONS and following == "(":
            return f"{token}()"
        if kind == "string" and token in CLOCK_STRINGS:
            is_cast = following == "::" or before == ["cast", "("]
            if is_cast or before[1] in ("date", "time", "timestamp", "timestamptz", "timetz"):
                return f"'{token}'"
    if words & {"limit", "fetch"} and not {"order", "by"} <= words:
        return "LIMIT without ORDER BY"
    return None


def tokens(sql: str) -> Iterator[tuple[str, str]]:
    """Words in lower case, strings and quoted names without their quotes; comments and white space left out."""
    position = 0
    while position < len(sql):
        match = _TOKEN.match(sql, position)
        assert match is not None, "the last alternative matches any character"
        kind, token = str(match.lastgroup), match.group()
        position = match.end()
        if kind == "comment":
            position = _end_of_comment(sql, position)
        elif kind == "dollar":
            end = sql.find(token, position)
            position = len(sql) if end < 0 else end + len(token)
            yield "string", ""
        elif kind in ("string", "escaped"):
            yield "string", token[token.index("'") + 1 : -1].strip().lower()
        elif kind == "quoted":
            yield kind, token[1:-1].replace('""', '"')
        elif kind != "space":
            yield kind, token.lower()


def _end_of_comment(sql: str, position: int) -> int:
    depth = 1  # SQL's comments nest
    while depth and position < len(sql):
        if sql.startswith("/*", position):
            depth, position = depth + 1, position + 2
        elif sql.startswith("*/", position):
            depth, position = depth - 1, position + 2
        else:
            position += 1
    return position


def split_table_name(table: str) -> tuple[str | None, str]:
    """Schema (None: the database's default) and name of `name`, `schema.name`, or with dots inside: `"a.b"."c"`."""
    parts = re.findall(r'"((?:[^"]|"")+)"|([^."]+)', table)
    names = [quoted.replace('""', '"') or plain for quoted, plain in parts]
    rebuilt = ".".join(f'"{quoted}"' if quoted else plain for quoted, plain in parts)
    if rebuilt != table or not 1 <= len(names) <= 2:
        raise InvalidChange(f"table name {table!r}: write name or schema.name, in double quotes if it holds a dot")
    return (None, names[0]) if len(names) == 1 else (names[0], names[1])


def joined_table_name(schema: str, name: str) -> str:
    """The one name of a table, which `split_table_name` takes apart: without `public`, quoted only where it must be."""
    parts = [name] if schema == "public" else [schema, name]
    return ".".join('"' + part.replace('"', '""') + '"' if {".", '"'} & set(part) else part for part in parts)


def is_captured(change: Change) -> TypeGuard[RowChange]:
    """Whether the change is part of an origin's write set: what triggers and defaults made of the row is in it."""
    return not isinstance(change, Statement) and change.captured


def tables_of(changes: Iterable[Change]) -> set[str]:
    return {change.table for change in changes if not isinstance(change, Statement)}


def _encoded(what: Member | Sequence[Change]) -> bytes:
    try:
        return _encoder.encode(what)
    except OverflowError as error:
        raise InvalidChange(f"an integer of more than 64 bits is given as a Decimal: {error}") from error
    except (TypeError, UnicodeEncodeError) as error:
        raise InvalidChange(f"a value can't be part of a change: {error}") from error
