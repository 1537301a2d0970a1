"""Executing a transaction once and capturing the rows that it changed: triggers, sessions, completeness, images.

`capture` puts triggers on tables that note the keys of changed rows; `session` is a connection of the write login in
which transactions are executed; `completeness` tells whether everything that changed was noted; `images` reads rows by
key; `slots` shares sequences out among replicas; `write_set` turns old and new images into row changes; `chain`
executes requests and gives back what each did; `resolve` computes the values of inserts ahead, so that those need no
execution, and `insert_text` takes them apart.
This package imports the rest of `adapters.postgres`, which does not import it. Nothing here decides whether a write set
commits: the caller submits it through the policy of its set.
"""

from adapters.postgres.origin.chain import Origin
from adapters.postgres.origin.outcomes import Captured, Executed, Interrupted, Rejected
from adapters.postgres.origin.slots import Slots

__all__ = ["Captured", "Executed", "Interrupted", "Origin", "Rejected", "Slots"]
