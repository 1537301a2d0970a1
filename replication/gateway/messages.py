"""Messages of PostgreSQL's protocol, version 3, between a client and the gateway: bytes to messages and back.

    START   the first message: start-up, or a request for TLS or a cancellation; ends with a start-up
    PLAIN   every message has a kind of one byte; ends with the connection

No I/O. Lengths are checked before a byte of the body is waited for. What is not PostgreSQL's raises `Violation`.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

STARTUP_BYTES_MAX = 10_000
PASSWORD_BYTES_MAX = 8_192
MESSAGE_BYTES_MAX = 16 * 2**20
PROTOCOL_3 = 196_608
_TLS, _CANCEL, _GSS = 80_877_103, 80_877_102, 80_877_104
_INT, _SHORT = struct.Struct(">i"), struct.Struct(">h")
_KINDS = frozenset(b"QPBDECSHXpFdcf")


class Violation(Exception):
    """The client broke the protocol: it gets this error, and the connection ends."""

    def __init__(self, text: str, sqlstate: str = "08P01") -> None:
        self.sqlstate = sqlstate
        super().__init__(text)


class Phase(Enum):
    START = "start"  # ends with a start-up
    PLAIN = "plain"  # ends with the connection


@dataclass(frozen=True, slots=True)
class StartUp:
    parameters: dict[str, str]


@dataclass(frozen=True, slots=True)
class WantsEncryption:
    is_tls: bool  # else GSSAPI


@dataclass(frozen=True, slots=True)
class Cancel:
    pid: int
    secret: int


@dataclass(frozen=True, slots=True)
class Message:
    """`raw` is the whole message, `body` what is behind its length."""

    kind: int
    raw: bytes

    @property
    def body(self) -> bytes:
        return self.raw[5:]


AnyMessage = StartUp | WantsEncryption | Cancel | Message


class Decoder:
    """A client's bytes, in whatever pieces, to messages. `is_authenticated` allows long messages."""

    def __init__(self) -> None:
        self.phase, self.is_authenticated = Phase.START, False
        self._buffer = b""

    def feed(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data

    @property
    def has_more(self) -> bool:
        return bool(self._buffer)

    def next(self) -> AnyMessage | None:
        """The next message if it is there as a whole. Raises Violation."""
        return self._first() if self.phase is Phase.START else self._plain()

    def _first(self) -> AnyMessage | None:
        buffer = self._buffer
        if len(buffer) < 4:
            return None
        (length,) = _INT.unpack_from(buffer)
        if not 8 <= length <= STARTUP_BYTES_MAX:
            raise Violation(f"invalid length of startup packet: {length}")
        if len(buffer) < length:
            return None
        body, self._buffer = buffer[4:length], buffer[length:]
        (code,) = _INT.unpack_from(body)
        match code:
            case 80_877_103 | 80_877_104:
                return WantsEncryption(code == _TLS)
            case 80_877_102:
                if len(body) != 12:
                    raise Violation("invalid length of a cancel request")
                return Cancel(*struct.unpack_from(">ii", body, 4))
            case _ if code >> 16 == 3:
                self.phase = Phase.PLAIN
                return StartUp(_parameters(body[4:]))
        raise Violation(
            f"unsupported frontend protocol {code >> 16}.{code & 0xFFFF}: the gateway supports 3.0", "0A000"
        )

    def _plain(self) -> Message | None:
        buffer = self._buffer
        if not buffer:
            return None
        kind = buffer[0]
        if kind not in _KINDS:
            raise Violation(f"invalid frontend message type {kind}")
        if len(buffer) < 5:
            return None
        (length,) = _INT.unpack_from(buffer, 1)
        longest = MESSAGE_BYTES_MAX if self.is_authenticated else PASSWORD_BYTES_MAX
        if not 4 <= length <= longest:
            raise Violation(f"invalid message length {length}: at most {longest} are read")
        if len(buffer) <= length:
            return None
        raw, self._buffer = buffer[: length + 1], buffer[length + 1 :]
        return Message(kind, raw)


def _parameters(body: bytes) -> dict[str, str]:
    try:
        *words, end, rest = body.decode().split("\0")
    except (UnicodeDecodeError, ValueError):
        raise Violation("invalid startup packet layout") from None
    if end or rest or len(words) % 2:
        raise Violation("invalid startup packet layout: expected terminator as last byte")
    return dict(zip(words[::2], words[1::2], strict=True))


# --------------------------------------------------------------------------------------------- parts of client messages


class Reader:
    """Takes a body apart; Violation where it is too short."""

    def __init__(self, body: bytes) -> None:
        self._body, self._position = body, 0

    def text(self) -> str:
        end = self._body.find(b"\0", self._position)
        if end < 0:
            raise Violation("invalid string in message")
        try:
            found = self._body[self._position : end].decode()
        except UnicodeDecodeError:
            raise Violation("invalid byte sequence for encoding UTF8", "22021") from None
        self._position = end + 1
        return found

    def byte(self) -> int:
        return self.take(1)[0]

    def int16(self) -> int:
        return int(_SHORT.unpack(self.take(2))[0])

    def int32(self) -> int:
        return int(_INT.unpack(self.take(4))[0])

    def take(self, count: int) -> bytes:
        if count < 0 or self._position + count > len(self._body):
            raise Violation("insufficient data left in message")
        self._position += count
        return self._body[self._position - count : self._position]


@dataclass(frozen=True, slots=True)
class Bind:
    portal: str
    statement: str
    formats: tuple[int, ...]
    values: tuple[bytes | None, ...]
    result_formats: tuple[int, ...]

    def format_of(self, index: int) -> int:
        return _format(self.formats, index)

    def result_format_of(self, index: int) -> int:
        return _format(self.result_formats, index)


def _format(formats: Sequence[int], index: int) -> int:
    """None given: text; one: for all."""
    if len(formats) <= 1:
        return formats[0] if formats else 0
    return formats[index] if index < len(formats) else 0


def decode_bind(body: bytes) -> Bind:
    reader = Reader(body)
    portal, statement = reader.text(), reader.text()
    formats = tuple(reader.int16() for _ in range(reader.int16()))
    values: list[bytes | None] = []
    for _ in range(reader.int16()):
        length = reader.int32()
        values.append(None if length == -1 else reader.take(length))
    return Bind(portal, statement, formats, tuple(values), tuple(reader.int16() for _ in range(reader.int16())))


# -------------------------------------------------------------------------------------------------- messages to clients


def message(kind: bytes, body: bytes = b"") -> bytes:
    return kind + _INT.pack(len(body) + 4) + body


def ready(status: bytes = b"I") -> bytes:
    return message(b"Z", status)


def parameter_status(name: str, value: str) -> bytes:
    return message(b"S", f"{name}\0{value}\0".encode())


def complete(tag: str) -> bytes:
    return message(b"C", f"{tag}\0".encode())


def error(
    sqlstate: str, text: str, *, severity: str = "ERROR", detail: str = "", hint: str = "", fields: Iterable[str] = ()
) -> bytes:
    """`fields` are further ones, each with its letter."""
    parts = [f"S{severity}", f"V{severity}", f"C{sqlstate}", f"M{text}"]
    parts += [f"D{detail}"] if detail else []
    parts += [f"H{hint}"] if hint else []
    return message(b"E", "".join(f"{part}\0" for part in [*parts, *fields]).encode(errors="replace") + b"\0")


def notice(text: str) -> bytes:
    return b"N" + error("00000", text, severity="NOTICE")[1:]


def row_description(columns: Sequence[tuple[str, int]], formats: Sequence[int] = ()) -> bytes:
    """Columns by name and type; of no table, since the rows were written on all replicas."""
    parts = [_SHORT.pack(len(columns))]
    for index, (name, oid) in enumerate(columns):
        parts.append(name.encode() + b"\0" + struct.pack(">ihIhih", 0, 0, oid, -1, -1, _format(formats, index)))
    return message(b"T", b"".join(parts))


def data_row(values: Sequence[bytes | None]) -> bytes:
    parts = [_SHORT.pack(len(values))]
    for value in values:
        parts.append(_INT.pack(-1) if value is None else _INT.pack(len(value)) + value)
    return message(b"D", b"".join(parts))
