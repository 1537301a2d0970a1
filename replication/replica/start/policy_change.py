"""A policy changes only while every replica has applied the whole log: entries mean what their policy says."""

from collections.abc import Mapping
from typing import Any

from replication.policies import Policy

DECIDING = frozenset({"policy", "order"})  # the keys of a set that say what an entry of its log means


def crossing(before: str, policy: Policy, position: int, decided: int) -> str:
    """Why a replica at `position` can't follow a log that other policies wrote up to `decided`; empty if it can.

    `before`: the kind of entries that the replica followed last; empty if it followed none."""
    if not before or before == policy.entry_kind.value or position >= decided:
        return ""
    return (
        f"the set's policy is now {policy.config.policy}, and entries {position + 1} to {decided} of the log, which "
        f"this replica lacks, were written under another one ({before}): run the set with the former policy until all "
        "replicas are in sync, or empty this database, then it takes a copy of another replica"
    )


def behind(status: Mapping[str, Any]) -> list[str]:
    """Replicas that must not meet a change of policy now, with the reason."""
    head = status["coordinator"].get("head")
    if head is None:
        return [f"the coordinator does not respond ({status['coordinator'].get('problem', '')})"]
    told = []
    for replica in status["replicas"]:
        name = replica["replica"]
        if replica.get("unreachable"):
            told.append(f"{name} does not respond")
        elif replica["position"] < head:
            told.append(f"{name} is at index {replica['position']} of {head}")
        elif replica["unpublished"]:
            told.append(f"{name} holds {replica['unpublished']} transactions that are not in the log yet")
    return told
