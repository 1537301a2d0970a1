"""What a DBA may choose of a check."""

from dataclasses import dataclass
from enum import Enum


class Method(Enum):
    """Where checksums are computed."""

    AUTO = "auto"  # in the databases if they hash alike, else in Spark
    NATIVE = "native"
    CANONICAL = "canonical"


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """The defaults suit a set of quiet or replicated databases on one machine."""

    tables: tuple[str, ...] = ()  # empty: all that every replica has
    master: str = "local[*]"
    method: Method = Method.AUTO
    primary: str = ""
    common_columns: bool = False
    cap: int = 1_000_000  # differing rows per table
    settle_s: float = 1.0  # between two looks at a row, at least, where replicas have no log position
    looks_max: int = 5
    shard_rows: int = 25_000_000  # a bigger table with an integer key is checked, and resumed, in parts
