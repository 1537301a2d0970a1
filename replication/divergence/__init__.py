"""Spark jobs that find, explain and repair what differs between replicas.

A check goes `check.py` (who, which tables, one barrier) → `table_check.py` (checksums in the databases:
`checksums.py`, `buckets.py`; rows of the differing buckets in Spark: `source.py`, `rows.py`, `diff.py`) →
`second_look.py` → `explain.py` (what it is, and why) → `folder.py` (results on disk) → `report/`, `repair.py`.
`ports.py` says what a running replica set brings: its barrier (`set_barrier.py`), its log (`set_log.py`, `leads.py`)
and its repairs (`set_repair.py`); `at_replica.py` is the agent's side of them.

Importing this package imports neither Spark nor a database driver.
"""
