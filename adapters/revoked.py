"""Functions that every login of a server may call and that privileges on tables do not hold.

Found by going through those of PostgreSQL 16 that PUBLIC may execute and that are volatile or tell about other
sessions. What is not listed reads no more than its caller may read, changes only what its caller may change, or checks
its caller's rights by itself (replication slots, files, statistics, binary upgrade). Names stand for all functions of
that name in `pg_catalog`; those that a version does not have are passed over.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["agent", "read", "check"]


@dataclass(frozen=True, slots=True)
class Group:
    reason: str
    names: tuple[str, ...]
    kept_by: tuple[Kind, ...] = ()


GROUPS = (
    Group(
        "leave a transaction's role and time-outs, or change the session that the next client gets",
        ("set_config", "setseed"),
        ("agent", "check"),  # the driver calls set_config when it meets a type that it does not know
    ),
    Group(
        "outlive the transaction, and can keep an agent from its database",
        (
            "pg_advisory_lock", "pg_advisory_lock_shared", "pg_advisory_unlock", "pg_advisory_unlock_shared",
            "pg_advisory_xact_lock", "pg_advisory_xact_lock_shared", "pg_try_advisory_lock",
            "pg_try_advisory_lock_shared", "pg_try_advisory_xact_lock", "pg_try_advisory_xact_lock_shared",
        ),
        ("agent",),
    ),
    Group(
        "lets go of the agent's lock; a session for reads ends every read with it",
        ("pg_advisory_unlock_all",),
        ("agent", "read"),
    ),
    Group(
        "end what other clients of the same login do",
        ("pg_cancel_backend", "pg_terminate_backend"),
        ("agent",),
    ),
    Group(
        "write to the server's log of changes, also in a transaction that is rolled back or read-only",
        ("pg_logical_emit_message",),
    ),
    Group(
        "keep old rows from being vacuumed for as long as a transaction lasts",
        ("pg_export_snapshot",),
        ("agent", "check"),
    ),
    Group(
        "write large objects, which belong to no table and are not replicated",
        (
            "lo_close", "lo_creat", "lo_create", "lo_export", "lo_from_bytea", "lo_get", "lo_import", "lo_lseek",
            "lo_lseek64", "lo_open", "lo_put", "lo_tell", "lo_tell64", "lo_truncate", "lo_truncate64", "lo_unlink",
            "loread", "lowrite",
        ),
    ),
    Group("speak to other sessions", ("pg_notify",)),
    Group(
        "show what other sessions do: queries of the same login, locks, prepared transactions, statements of earlier "
        "clients of a pooled session",
        (
            "current_query", "pg_blocking_pids", "pg_cursor", "pg_get_replication_slots",
            "pg_isolation_test_session_is_blocked", "pg_lock_status", "pg_prepared_statement", "pg_prepared_xact",
            "pg_safe_snapshot_blocking_pids",
            "pg_stat_get_activity", "pg_stat_get_backend_activity", "pg_stat_get_backend_activity_start",
            "pg_stat_get_backend_client_addr", "pg_stat_get_backend_client_port", "pg_stat_get_backend_dbid",
            "pg_stat_get_backend_idset", "pg_stat_get_backend_pid", "pg_stat_get_backend_start",
            "pg_stat_get_backend_subxact", "pg_stat_get_backend_userid", "pg_stat_get_backend_wait_event",
            "pg_stat_get_backend_wait_event_type", "pg_stat_get_backend_xact_start", "pg_stat_get_progress_info",
            "pg_stat_get_subscription", "pg_stat_get_wal_receiver", "pg_stat_get_wal_senders",
        ),
        ("agent",),
    ),
)  # fmt: skip

REVOKED = frozenset(name for group in GROUPS for name in group.names)

# Their functions reach other servers, files or pages; a database that has them keeps them from clients.
EXTENSIONS = ("adminpack", "amcheck", "dblink", "file_fdw", "pageinspect", "pg_prewarm", "pg_surgery", "pg_walinspect")
