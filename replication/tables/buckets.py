"""How keys are cut into buckets, the same way on every replica.

Integer keys are cut by shifting, so a bucket is a key range that any index can read: it has no upper or lower end to
fall off, no boundary that two buckets could share, and no need to know the smallest or largest key. Every other key is
cut by its hash, so neither sort order nor collation matters.
"""

import zlib
from collections.abc import Iterable, Sequence

import msgspec

BUCKET_ROWS = 1_000
BUCKETS_MAX = 200_000
_CLOSER = 5  # bits: a thirty-second of a bucket
LOWEST, HIGHEST = -(2**63), 2**63 - 1


class KeyRange(msgspec.Struct, frozen=True):
    """Integer keys from `low` to `high`, both included."""

    low: int = LOWEST
    high: int = HIGHEST


class RangeBuckets(msgspec.Struct, frozen=True, tag="range"):
    """Bucket number = key >> shift."""

    shift: int

    def of(self, key: int) -> int:
        return key >> self.shift

    def range_of(self, bucket: int) -> KeyRange:
        return KeyRange(bucket << self.shift, ((bucket + 1) << self.shift) - 1)

    def ranges(self, buckets: Iterable[int]) -> list[KeyRange]:
        """The key ranges of these buckets, neighbours joined."""
        joined: list[KeyRange] = []
        for bucket in sorted(buckets):
            this = self.range_of(bucket)
            if joined and joined[-1].high + 1 == this.low:
                joined[-1] = KeyRange(joined[-1].low, this.high)
            else:
                joined.append(this)
        return joined


class HashBuckets(msgspec.Struct, frozen=True, tag="hash"):
    """Bucket number = some bits of the key's hash; `count` is a power of two."""

    count: int

    def of(self, key: Sequence[str | None]) -> int:
        """For keys as canonical text. A server that hashes natively has another numbering; the two never meet."""
        text = "\x1f".join(part if part is not None else "\x00" for part in key)
        return zlib.crc32(text.encode("utf-8", "surrogatepass")) & (self.count - 1)


Buckets = RangeBuckets | HashBuckets


def integer_buckets(rows: int, low: int, high: int) -> RangeBuckets:
    """Buckets of about BUCKET_ROWS rows where the keys are dense; uneven ones are split again where they differ."""
    wanted = min(max(1, rows // BUCKET_ROWS), BUCKETS_MAX)
    width = max(1, (high - low + 1) // wanted)
    return RangeBuckets(min(63, width.bit_length() - 1))


def hash_buckets(rows: int) -> HashBuckets:
    wanted = min(max(1, rows // BUCKET_ROWS), BUCKETS_MAX)
    return HashBuckets(1 << (wanted - 1).bit_length())


def split_further(buckets: RangeBuckets, rows: int) -> RangeBuckets | None:
    """Finer buckets for a bucket that holds far too many rows; None when it is fine as it is."""
    if rows <= 8 * BUCKET_ROWS or buckets.shift == 0:
        return None
    return RangeBuckets(max(0, buckets.shift - max(1, (rows // BUCKET_ROWS).bit_length())))


def closer(buckets: RangeBuckets) -> RangeBuckets:
    """Buckets of a few rows, for what is known to differ somewhere."""
    return RangeBuckets(max(0, buckets.shift - _CLOSER))
