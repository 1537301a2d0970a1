"""The command `tops` with clocks around its parts: `python -m bench.policies.traced broker run …`.

What is wrapped are the ports between the parts, so that their insides may change: the adapter, a replica's
participant, the broker's machine and its node, the journal's disk.
"""

import os
from pathlib import Path

from adapters.postgres import PostgresAdapter
from bench.policies.tracing import VARIABLE, Clock, Trace
from replication.replica.apply.participant import ReplicaParticipant
from tops.cli.main import main
from tops.core.broker.broker import BrokerCore
from tops.journal.disk import Disk
from tops.runtime.broker_node import BrokerNode


def install(trace: Trace) -> None:
    trace.around_async(PostgresAdapter, "prepare", Clock.PREPARE, lambda _, epoch: len(epoch.members))
    trace.around_async(PostgresAdapter, "commit", Clock.COMMIT)
    trace.around_async(PostgresAdapter, "write_all_local", Clock.WRITE, lambda _, members: len(members))
    trace.around_async(
        PostgresAdapter, "apply", Clock.APPLY, lambda _, entries: sum(len(entry.members) for entry in entries)
    )
    trace.around_async(ReplicaParticipant, "prepare_batch", Clock.PARTICIPANT)
    trace.around_async(ReplicaParticipant, "finish_batch", Clock.PARTICIPANT)
    trace.around(BrokerCore, "receive", Clock.COORDINATOR)
    trace.around(BrokerNode, "take", Clock.BROKER)
    trace.around(Disk, "datasync", Clock.DISK)


if __name__ == "__main__":
    install(Trace(Path(os.environ[VARIABLE]) / str(os.getpid())))
    main()
