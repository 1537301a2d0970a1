"""Asynchronous, one writer."""

from dataclasses import dataclass

from replication.policies.base import LocalFirst, Route


@dataclass(frozen=True, slots=True)
class PrimarySite(LocalFirst):
    """Writes go to the primary, which commits and publishes them; the others follow in its order.

    With `ack = "logged"` an acknowledged write is in the log as well; with `"local"` it is at the primary alone."""

    route = Route.PRIMARY

    @property
    def acknowledges_from_log(self) -> bool:
        return self.config.ack == "logged"

    def consistencies(self) -> frozenset[str]:
        return frozenset({"any", "primary"})
