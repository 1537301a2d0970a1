"""How ids are made and printed.

Ids are plain strings on the wire and in journals, so that a person can search for them; their makers live here and
nowhere else.
"""

import hashlib
import hmac
from functools import lru_cache
from typing import NewType

NodeId = NewType("NodeId", str)  # the configured name of a broker or a site
TxId = NewType("TxId", str)  # origin.incarnation.counter
Pseudonym = NewType("Pseudonym", str)  # a participant's name within one transaction


def tx_id(origin: NodeId, incarnation: int, counter: int) -> TxId:
    """The id of the `counter`-th transaction of one life of `origin`; unique for ever, since incarnations only grow."""
    return TxId(f"{origin}.{incarnation}.{counter}")


def standing_pseudonym(secret: bytes, tx: TxId) -> Pseudonym:
    """The pseudonym of a standing answer: nobody without the secret can link two of them."""
    return Pseudonym(hmac.digest(secret, tx.encode(), "sha256")[:16].hex())


@lru_cache(maxsize=8192)
def hashed(pseudonym: str) -> str:
    """One way: a published membership list shows a member its own entry and tells others nothing."""
    return hashlib.sha256(pseudonym.encode()).hexdigest()[:32]
