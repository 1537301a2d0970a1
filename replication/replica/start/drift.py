"""Schemas that differ while a set runs: every replica compares the definitions of its tables with the others' again
and again.

A definition is changed on one database after the other, so a difference is reported when two looks in a row have found
it, and no longer when a look finds none. Writes go on meanwhile.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence

import asyncpg

from replication.replica.start import comparing, fingerprint
from replication.replica.start.fingerprint import NO_CHECKSUM, Fingerprint, TableDigest
from replication.rpc.calls import GetSchemaDigests, SchemaDigests
from replication.rpc.conversation import Caller
from tops.model.errors import TopsError

LOOK_S = 10.0  # between two comparisons
RESPONSE_WITHIN_S = 3.0
SHOWN_MAX = 5

Digests = Mapping[str, str]  # of schemas, by table

log = logging.getLogger("tops.replication")


class SchemaDrift:
    """One replica's comparison. `warning` names tables and replicas; `is_outlier`: most of the others agree on another
    definition than this replica's, or no definition has a majority."""

    def __init__(
        self, replica: str, replicas: Sequence[str], dsn: str, tables: Callable[[], Awaitable[Sequence[str]]]
    ) -> None:
        self._replica, self._replicas, self._dsn, self._tables = replica, replicas, dsn, tables
        self._digests: Digests = {}
        self._read_at = -LOOK_S
        self._last: dict[str, str] = {}  # what the last look has found, by table
        self.warning = ""
        self.is_outlier = False

    async def respond(self) -> SchemaDigests:
        return SchemaDigests(replica=self._replica, tables=dict(await self._read()))

    async def run(self, caller: Caller) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look(caller)
            except (TopsError, OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
                log.debug("schemas were not compared", extra={"replica": self._replica, "reason": str(error)})

    async def look(self, caller: Caller) -> None:
        """Compare with those that respond; what a replica that does not respond has is not known."""
        responses = await caller.request_all(GetSchemaDigests(), RESPONSE_WITHIN_S, len(self._replicas))
        found: dict[str, Digests] = {a.replica: a.tables for a in responses if isinstance(a, SchemaDigests)}
        found = {name: digests for name, digests in found.items() if name in self._replicas}
        found[self._replica] = await self._read()
        differing = differences(found)
        lasting = {table: text for table, text in differing.items() if table in self._last}
        self._last = differing
        self.is_outlier = any(self._replica in outliers(table, found) for table in lasting)
        self._tell(list(lasting.values()))

    def _tell(self, texts: Sequence[str]) -> None:
        more = f"; and {len(texts) - SHOWN_MAX} more" if len(texts) > SHOWN_MAX else ""
        told = f"the schemas differ: {'; '.join(texts[:SHOWN_MAX])}{more}: make them equal" if texts else ""
        if told != self.warning:
            level = logging.ERROR if told else logging.INFO
            log.log(level, told or "the schemas are equal again", extra={"replica": self._replica})
        self.warning = told

    async def _read(self) -> Digests:
        """Not older than half of the time between two looks, so that each look of each replica finds something new."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._read_at > LOOK_S / 2:
            self._digests = await fingerprint.schemas(self._dsn, self._replica, await self._tables())
            self._read_at = loop.time()
        return self._digests


def differences(found: Mapping[str, Digests]) -> dict[str, str]:
    """The tables that are defined differently, by name, and a sentence about each."""
    prints = {
        name: Fingerprint({}, {}, {table: TableDigest(digest, 0, NO_CHECKSUM) for table, digest in digests.items()})
        for name, digests in found.items()
    }
    return {difference.table: difference.text for difference in comparing.differences(prints)}


def outliers(table: str, found: Mapping[str, Digests]) -> set[str]:
    """The replicas whose table is not that of the majority; all if there is none."""
    counts = Counter(digests.get(table) for digests in found.values())
    digest, most = counts.most_common(1)[0]
    if most * 2 <= len(found):
        return set(found)
    return {name for name, digests in found.items() if digests.get(table) != digest}
