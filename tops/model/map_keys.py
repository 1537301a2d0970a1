"""Rejects encoded maps that take long to decode.

Numbers with equal hashes are easy to find, and a dict with such keys takes quadratic time to build: half a mebibyte
keeps a decoder busy for seconds. Hashes of texts can't be predicted. So a map with many entries must have texts as
keys. This is checked before the data reaches a decoder, in one pass over the encoded values.
"""

import re
from typing import Final

HARMLESS_BYTES: Final = 16 * 2**10  # no map in shorter data takes long, whatever its keys are
HARMLESS_ENTRIES: Final = 512

_MAP_16, _MAP_32 = 0xDE, 0xDF
_LENGTH_BYTES: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_EXTENSIONS: Final = frozenset([0xC7, 0xC8, 0xC9])  # followed by one more byte: their kind
_COUNT_BYTES: Final = {0xDC: 2, 0xDD: 4, _MAP_16: 2, _MAP_32: 4}
_FIXED: Final = {
    **dict.fromkeys((0xCC, 0xD0), 2),
    **dict.fromkeys((0xCD, 0xD1, 0xD4), 3),
    0xD5: 4,
    **dict.fromkeys((0xCA, 0xCE, 0xD2), 5),
    0xD6: 6,
    **dict.fromkeys((0xCB, 0xCF, 0xD3), 9),
    0xD7: 10,
    0xD8: 18,
}


def _size(head: int) -> int:
    """Bytes of the value that begins with this byte, without members of a container; 0 if later bytes state it."""
    if 0xA0 <= head <= 0xBF:
        return 1 + head - 0xA0
    return 0 if head in _LENGTH_BYTES or head in _COUNT_BYTES else _FIXED.get(head, 1)


_SIZES: Final = [_size(head) for head in range(256)]
_MEMBERS: Final = [2 * (h - 0x80) if 0x80 <= h <= 0x8F else h - 0x90 if 0x90 <= h <= 0x9F else 0 for h in range(256)]
_IS_TEXT: Final = [0xA0 <= head <= 0xBF or 0xD9 <= head <= 0xDB for head in range(256)]

# A run of values that need no check: numbers, short texts, and the first bytes of small containers.
_PLAIN: Final = re.compile(
    b"(?s:[\x00-\x9f\xc0\xc2\xc3\xe0-\xff]++|"
    + b"|".join(
        b"[%b].{%d}" % (b"".join(b"\\x%02x" % head for head in range(256) if _SIZES[head] == size), size - 1)
        for size in sorted({size for size in _SIZES if size > 1})
    )
    + b")*+"
)


def check_map_keys(encoded: bytes | memoryview) -> None:
    """Raise ValueError if a map with many entries has a key that is not a text. The decoder rejects data that is not
    MessagePack."""
    if len(encoded) <= HARMLESS_BYTES:
        return
    data = bytes(encoded)
    if b"\xde" not in data and b"\xdf" not in data:
        return
    try:
        _walk(data)
    except IndexError:
        return  # the data ends too early: the decoder rejects it


def _walk(data: bytes) -> None:
    position, end = 0, len(data)
    left: list[int] = []  # members still to come, of the outermost large map and of each container within it
    large: list[bool] = []
    while position < end:
        if not left:
            run = _PLAIN.match(data, position)
            if run is not None and (position := run.end()) >= end:
                return
        head = data[position]
        if left:
            if large[-1] and not left[-1] % 2 and not _IS_TEXT[head]:
                raise ValueError(f"a map of more than {HARMLESS_ENTRIES} entries has keys that are not texts")
            left[-1] -= 1
        members, is_large = _MEMBERS[head], False
        if size := _SIZES[head]:
            position += size
        elif (length_bytes := _LENGTH_BYTES.get(head)) is not None:
            length = int.from_bytes(data[position + 1 : position + 1 + length_bytes], "big")
            position += 1 + length_bytes + length + (head in _EXTENSIONS)
        else:
            count_bytes = _COUNT_BYTES[head]
            members = int.from_bytes(data[position + 1 : position + 1 + count_bytes], "big")
            position += 1 + count_bytes
            if head in (_MAP_16, _MAP_32):
                is_large, members = members > HARMLESS_ENTRIES, 2 * members
        if members and (left or is_large):
            left.append(members)
            large.append(is_large)
        while left and not left[-1]:
            left.pop()
            large.pop()
