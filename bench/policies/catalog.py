"""The policies that are measured: how each is written in `tops.toml`, and what its client may rely on."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PolicyCase:
    """One way of replicating. `keys`: its lines in `[[replica_set]]`; `{sync}` stands for all replicas but the last.

    `writers`: how many replicas clients hand their writes to, where the policy lets them choose. `logged_first`,
    `applied_first`: a client is answered once its write is in the log, and once the nearest replica has applied it from
    there.
    """

    name: str
    keys: str
    promise: str
    writers: int = 1
    logged_first: bool = True
    applied_first: bool = False


CASES = (
    PolicyCase("write_all", 'policy = "write-all"', "on disk and visible to reads at every replica"),
    PolicyCase(
        "quorum",
        'policy = "quorum"',
        "on disk and visible to reads at a majority; the others follow, and a quorum read meets it",
    ),
    PolicyCase(
        "combined",
        'policy = "combined"\nsync = {sync}',
        "on disk and visible to reads at all replicas but the last, which follows",
    ),
    PolicyCase(
        "primary",
        'policy = "primary-site"\nprimary = "r1"\nack = "local"',
        "on disk at the primary, as one PostgreSQL promises; the others follow",
        logged_first=False,
    ),
    PolicyCase(
        "primary_logged",
        'policy = "primary-site"\nprimary = "r1"\nack = "logged"',
        "on disk at the primary and in the log: a promotion loses nothing",
    ),
    PolicyCase(
        "p2p",
        'policy = "peer-to-peer"',
        "on disk at the replica that took it; the others follow, and concurrent changes end the same everywhere",
        writers=3,
        logged_first=False,
    ),
    PolicyCase(
        "p2p_ordered",
        'policy = "peer-to-peer"\norder = "ordered"',
        "in the log, and applied at the nearest replica; all replicas apply one order",
        applied_first=True,
    ),
    PolicyCase(
        "serializable",
        'policy = "serializable"',
        "in the log, and applied at the nearest replica; one-copy serializable",
        applied_first=True,
    ),
)


def case_named(name: str) -> PolicyCase:
    return next(case for case in CASES if case.name == name)
