"""How a replica comes to take part in its set: only with equal data, and guarded against direct writes.

`table_schema.py` and `fingerprint.py` describe one database; `comparing.py` says how several differ; `decisions.py` is
the protocol without I/O; `record.py` keeps its state in the database; `starter.py` drives it inside an agent.
`guarding.py` keeps the guard's triggers in place, `holder.py` tells which agent holds a replica, `copy_record.py` keeps
how far a copy has come, `findings.py` is the part of `tops doctor` that looks at tables.

May import adapters, divergence's checksums and catalogue, and the messages between agents; nothing of Spark.
"""
